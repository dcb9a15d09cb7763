"""Hosts of a run in one process that die at a chosen moment, as by SIGKILL: from then on nothing comes from them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from flowrl.runtime.driver import run_processes
from flowrl.runtime.driver.local_cluster import LocalCluster, LocalHost, LocalMethod
from flowrl.runtime.process.engine import ProcessEngine
from flowrl.testing import graph_run


class Died(Exception):
    """What Ray raises of an actor whose process has died."""


@dataclass(frozen=True)
class Death:
    """When a host dies: `at_s` seconds after its nodes began, or in the `nth` request of this `kind`."""

    at_s: float | None = None
    kind: str = ""
    nth: int = 1
    answered: bool = False
    """After the answer to that request has been made, and not before."""
    known_after_s: float = 0.0
    """Between the death and its report to the driver."""


class MortalHost(LocalHost):
    def __init__(self, engine: Any, num_gpus: int, death: Death) -> None:
        super().__init__(engine, num_gpus)
        self._death = death
        self._over = asyncio.get_running_loop().create_future()
        self._times = 0
        self.run = LocalMethod(self._run)

    async def _opened(self) -> dict[str, Any]:
        opened = await super()._opened()
        if self._death.kind:
            control = self.engine.endpoint._control
            answer = control._answers[self._death.kind]
            control.on(self._death.kind, lambda host, body: self._answered(answer, host, body))
        return opened

    async def _answered(self, answer: Any, host: str, body: Any) -> Any:
        self._times += 1
        dies = self._times == self._death.nth
        if dies and not self._death.answered:
            self.die()
        found = await answer(host, body)
        if dies and self._death.answered:
            self.die()
        return found

    async def _run(self) -> Any:
        if self._death.at_s is not None:
            asyncio.get_running_loop().call_later(self._death.at_s, self.die)
        body = asyncio.ensure_future(self.engine.guarded(self.engine.run()))
        await asyncio.wait((body, self._over), return_when=asyncio.FIRST_COMPLETED)
        if not self._over.done():
            return body.result()
        await asyncio.sleep(self._death.known_after_s)  # in virtual time
        raise Died

    def die(self) -> None:
        """Now. What its code still does on the loop that it shares reaches nobody."""
        flusher = self.engine.endpoint._flusher
        if flusher.closed or self._over.done():
            return
        flusher.closed = True
        for task in (self.engine._reporting, self.engine._running):
            if task is not None:
                task.cancel()
        self._over.set_result(None)


CLUSTERS: list[MortalCluster] = []
"""Those of the runs so far."""


class MortalCluster(LocalCluster):
    """`deaths`: host -> when it dies; `killed` are the hosts that Ray was told to end."""

    deaths: Mapping[str, Death] = {}

    def __init__(self, engine: Any = ProcessEngine) -> None:
        super().__init__(engine)
        self.killed: list[str] = []
        CLUSTERS.append(self)

    def spawn(self, actor_class: type, index: int, slot: Any, spec: Any) -> LocalHost:
        if (death := self.deaths.get(slot.process)) is None:
            return super().spawn(actor_class, index, slot, spec)
        self.actors[slot.process] = MortalHost(self.engine(spec), slot.gpus, death)
        return self.actors[slot.process]

    def kill(self, host: str) -> None:
        self.killed.append(host)

    def head_answers(self) -> bool:
        return True


def let_die(monkeypatch: pytest.MonkeyPatch, deaths: Mapping[str, Death]) -> None:
    """Let these hosts die in the runs of `run_graph`."""
    monkeypatch.setattr(MortalCluster, "deaths", deaths)
    monkeypatch.setattr(graph_run, "LocalCluster", MortalCluster)
    monkeypatch.setattr(run_processes, "death_errors", lambda: (Died,))
