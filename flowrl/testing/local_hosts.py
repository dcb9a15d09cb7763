"""The hosts of a run as objects on the driver's own event loop, in place of Ray's actors in processes of their own."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

from flowrl.runtime.process.engine import ProcessEngine, ProcessSpec
from flowrl.runtime.telemetry.statistics import Statistics


class LocalCluster:
    """A stand-in for `RayCluster`: it starts hosts in this process, and has no processes that could die."""

    started = True
    lost = ""
    addresses: tuple[str, ...] = ()
    limit_s = 60.0

    def __init__(self, engine: Callable[[ProcessSpec], ProcessEngine] = ProcessEngine) -> None:
        self.actors: dict[str, LocalHost] = {}
        self._engine = engine

    def place(self, slots: Any) -> None:
        """There are no devices to reserve."""

    def own_devices(self) -> None:
        """Nothing to do: the device names of every host are made up."""

    def processes(self) -> dict[str, int]:
        return {}

    def head(self) -> None:
        return None

    def spawn(self, actor_class: type, index: int, slot: Any, spec: ProcessSpec) -> LocalHost:
        self.actors[slot.process] = LocalHost(self._engine(spec), slot.gpus)
        return self.actors[slot.process]

    def kill(self, host: str) -> None:
        """A host has no process; `stop` has cancelled its tasks."""

    def stop(self) -> None:
        """There is no Ray to stop."""


class LocalHost:
    """One host's engine with the methods of `ProcessActor`."""

    def __init__(self, engine: ProcessEngine, num_gpus: int) -> None:
        self.engine = engine
        self._gpus = [f"{engine.spec.process}/{index}" for index in range(num_gpus)]
        """Names of the GPUs that Ray would reserve."""
        self.open = LocalMethod(self._opened)
        self.wire = LocalMethod(lambda addresses, gangs, devices: engine.guarded(engine.wire(addresses, gangs)))
        self.setup = LocalMethod(lambda: engine.guarded(engine.setup()))
        self.run = LocalMethod(lambda: engine.guarded(engine.run()))
        self.waits = LocalMethod(engine.waits)
        self.stop = LocalMethod(engine.stop)

    async def _opened(self) -> dict[str, Any]:
        return {**await self.engine.open(), "gpus": self._gpus}


class LocalMethod:
    """A coroutine function that is called as a method of a Ray actor: `await wrap_future(m.remote(...).future())`."""

    def __init__(self, body: Callable[..., Coroutine[Any, Any, Any]]) -> None:
        self._body = body

    def remote(self, *args: Any) -> LocalReference:
        answer: concurrent.futures.Future[Any] = concurrent.futures.Future()
        task = asyncio.get_running_loop().create_task(self._body(*args))
        task.add_done_callback(lambda _: _settle(task, answer))
        return LocalReference(answer)


@dataclass(frozen=True)
class LocalReference:
    """What `remote` returns."""

    answer: concurrent.futures.Future[Any]

    def future(self) -> concurrent.futures.Future[Any]:
        return self.answer


def _settle(task: asyncio.Task[Any], answer: concurrent.futures.Future[Any]) -> None:
    if not answer.set_running_or_notify_cancel():
        return
    if task.cancelled():
        answer.set_exception(RuntimeError("the call was cancelled"))
    elif (error := task.exception()) is not None:
        answer.set_exception(error)
    else:
        answer.set_result(task.result())


@dataclass
class KeptView:
    """A view that keeps what a terminal would have shown."""

    lines: list[str] = field(default_factory=list)
    records: list[Mapping[str, Any]] = field(default_factory=list)
    """The metrics lines of this life of the run."""
    sample_ids: list[str] = field(default_factory=list)
    """Samples kept, in the order in which their states became known."""

    def progress(self, replica_id: str, text: str) -> None:
        self.lines.append(f"{replica_id}: {text}")

    def warning(self, text: str) -> None:
        self.lines.append(f"warning: {text}")

    def evaluation(self, phase: str, step: int, figures: Mapping[str, float], task: str = "") -> None:
        first = figures["exact_match" if "exact_match" in figures else "score"]
        self.lines.append(f"evaluation {phase} at {step}: {first} of {figures['num_answers']:.0f} {task}")

    def held_out(self, record: Mapping[str, Any]) -> None:
        self.lines.append(f"held-out rows at {record['step']}")

    def sample(self, row: Mapping[str, Any]) -> None:
        self.sample_ids.append(row["sample_id"])

    def step(self, record: Mapping[str, Any]) -> None:
        self.records.append(record)

    def statistics(self, statistics: Statistics, admission: Callable[[], str]) -> None:
        """Kept nowhere: it changes every second."""

    def close(self) -> None:
        """There is no terminal to restore."""

    @property
    def warnings(self) -> list[str]:
        return [line for line in self.lines if line.startswith("warning: ")]
