"""The driver's requests to running hosts and node replicas, over the control link.

Requests to several hosts or replicas skip those that the run has lost, even if they are lost before they answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from typing import Any

from flowrl.channel.endpoint import Endpoint
from flowrl.errors import LaneFailed
from flowrl.graph.analysis.plan import Plan
from flowrl.runtime.driver.processes.lookout import Lookout

LOST = object()
"""Takes the place of the answer of a lost host."""


class Orders:
    """Requests to the hosts of one run. Each request raises the error if the host answers with one.

    `hosts` are the hosts that are not lost; `lost` are those that have died, and without which the run continues.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        plan: Plan,
        hosts: Iterable[str],
        lookout: Lookout,
        *,
        lost: Collection[str] = (),
    ) -> None:
        self.plan = plan
        self.hosts = hosts
        self._lost = lost
        self._endpoint = endpoint
        self._lookout = lookout

    @property
    def num_lost(self) -> int:
        """How many hosts are lost."""
        return len(self._lost)

    async def ask(self, host: str, kind: str, body: Any = None) -> Any:
        """The answer of one host to `kind`."""
        return await self._endpoint.request(host, kind, body if body is not None else {})

    async def ask_all(self, kind: str, body: Callable[[str], Any] = lambda host: {}) -> list[Any]:
        """The answers of all hosts to `kind`, asked with `body(host)`."""
        asked = {host: self._unless_lost(host, self.ask(host, kind, body(host))) for host in self.hosts}
        return _given(await self._lookout.answers(kind, asked))

    async def page(self, host: str, kind: str) -> list[Any]:
        """The page that the host answers with; an empty page if the host is lost."""
        page = await self._unless_lost(host, self.ask(host, kind))
        return [] if page is LOST else list(page)

    async def on_nodes(self, replica_ids: Iterable[str], method: str, **arguments: Any) -> list[Any]:
        """`on_node` of these node replicas at once."""
        found = [
            self._unless_lost(host, self.on_node(replica_id, method, **arguments))
            for replica_id in replica_ids
            if (host := self.host_of(replica_id)) not in self._lost
        ]
        return _given(await asyncio.gather(*found))

    async def _unless_lost(self, host: str, answer: Awaitable[Any]) -> Any:
        """The answer, or LOST if the host is lost."""
        try:
            return await answer
        except LaneFailed:
            if host not in self._lost:
                raise
            return LOST

    def replicas(self, node: str) -> list[str]:
        """The replica ids of a node, in order, for example ["trainer/0", "trainer/1"]."""
        found = [one for host in self.plan.hosts for one in host.nodes if one.rpartition("/")[0] == node]
        return sorted(found, key=lambda one: int(one.rpartition("/")[2]))

    def host_of(self, replica_id: str) -> str:
        """The name of the host in which a node replica runs."""
        return self.plan.host_of(replica_id).name

    def replicas_in(self, host: str) -> tuple[str, ...]:
        """The node replicas that run in a host."""
        return next(one.nodes for one in self.plan.hosts if one.name == host)

    async def on_node(self, replica_id: str, method: str, **arguments: Any) -> Any:
        """Call a coroutine method of one node replica in its host."""
        body = {"replica_id": replica_id, "method": method, "arguments": arguments}
        return await self.ask(self.host_of(replica_id), "node", body)

    async def gate(self, replica_id: str, by: str, *, open_: bool) -> dict[str, int]:
        """Open or close the gate of one node replica for `by`. Returns how many items each of its ports has taken."""
        body = {"replica_id": replica_id, "by": by, "open": open_}
        taken: dict[str, int] = await self.ask(self.host_of(replica_id), "gate", body)
        return taken

    async def reach(self, replica_id: str, taken: Mapping[str, int]) -> None:
        """Let each port of a node replica take items up to these numbers, and wait until the ports have taken them."""
        await self.ask(self.host_of(replica_id), "reach", {"replica_id": replica_id, "taken": taken})


def _given(answers: Iterable[Any]) -> list[Any]:
    return [answer for answer in answers if answer is not LOST]
