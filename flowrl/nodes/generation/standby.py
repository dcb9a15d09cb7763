"""What a generator does when its vLLM process dies: it ends the run, or leaves its work to the other replicas.

The replicas of a node that only answers requests stand in for each other (`flowrl.graph.analysis.stand_ins` says when).
A replica whose engine has died answers all requests, running and later ones, with OutOfService, and its callers ask
another replica under the same request id. The replica stays out of service until the run ends. Its own process
continues: it follows checkpoints, and reports the versions that it leaves out as held. The run ends when a caller has
no replica left to ask. If the replica's own process dies, before or after its engine, the driver handles that
(`flowrl.runtime.driver.losses`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from flowrl.errors import OutOfService
from flowrl.graph.node import Context
from flowrl.nodes.vllm_engine.vllm_processes import EngineDied

Req = TypeVar("Req")
Rep = TypeVar("Rep")


class Standby:
    """Whether one replica is in service."""

    def __init__(self, context: Context, replica: str) -> None:
        self._context = context
        self._replica = replica
        self.can_leave = context.others_stand_in
        """Whether the other replicas may do the work of this one."""
        self._death: EngineDied | None = None

    @property
    def has_left(self) -> bool:
        return self._death is not None

    def serving(self, body: Callable[[Req], Awaitable[Rep]]) -> Callable[[Req], Awaitable[Rep]]:
        """`body` for a Serve port: raises OutOfService once the engine has died, if other replicas can be asked."""

        async def answer(request: Req) -> Rep:
            if self._death is None:
                try:
                    return await body(request)
                except EngineDied as death:
                    self._leave(death)
            raise OutOfService(f"{self._replica}: {self._death}")

        return answer

    async def goes_on(self, work: Awaitable[Any]) -> bool:
        """Await `work`, which uses the engine; False if the engine has died and other replicas do its work."""
        try:
            await work
        except EngineDied as death:
            self._leave(death)
            return False
        return True

    def _leave(self, death: EngineDied) -> None:
        if not self.can_leave:
            raise death
        if self._death is None:
            self._death = death
            self._context.metric("generators_lost", 1)
            self._context.progress(f"out of service, its requests go to the other replicas: {death}")
