"""Runs a graph file with the real driver, hosts, ledger and nodes in this process: no Ray, no child processes.

`run` gives the run's directory, outcome (or what it raised) and what a terminal would have shown. With `link="ipc"`
messages pass through the codec and zmq sockets as between processes; by default hosts hand objects over.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import sqlite3
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from unittest import mock

from flowrl.channel import endpoint as endpoints
from flowrl.errors import GraphError
from flowrl.graph.analysis.check import check
from flowrl.graph.analysis.plan import make_plan
from flowrl.graph.load import load_file
from flowrl.graph.machine import Cluster, Machine
from flowrl.runtime.activity.hostloop import HostLoop
from flowrl.runtime.audit.audit import AuditReport, audit
from flowrl.runtime.checkpoints.resume import require
from flowrl.runtime.checkpoints.rundir import RunDir
from flowrl.runtime.driver import driver as drivers
from flowrl.runtime.driver.driver import Driver, Outcome
from flowrl.runtime.driver.launch import Launch, _Prepared
from flowrl.runtime.driver.options import RunOptions
from flowrl.runtime.host import host_engine as engines
from flowrl.runtime.host.host_engine import HostEngine, HostSpec

CLUSTER = Cluster((Machine(tuple(range(8)), memory_bytes=64 << 30),))


class Method:
    """A coroutine function behind the face of a Ray actor's method."""

    def __init__(self, body: Callable[..., Coroutine[Any, Any, Any]]) -> None:
        self._body = body

    def remote(self, *args: Any) -> Method.Reference:
        answer: concurrent.futures.Future[Any] = concurrent.futures.Future()
        task = asyncio.get_running_loop().create_task(self._body(*args))
        task.add_done_callback(lambda _: self._settle(task, answer))
        return self.Reference(answer)

    @staticmethod
    def _settle(task: asyncio.Task[Any], answer: concurrent.futures.Future[Any]) -> None:
        if not answer.set_running_or_notify_cancel():
            return
        if task.cancelled():
            answer.set_exception(RuntimeError("the call was cancelled"))
        elif (error := task.exception()) is not None:
            answer.set_exception(error)
        else:
            answer.set_result(task.result())

    class Reference:
        """What `remote` returns."""

        def __init__(self, answer: concurrent.futures.Future[Any]) -> None:
            self._answer = answer

        def future(self) -> concurrent.futures.Future[Any]:
            return self._answer


class Host:
    """One host's engine on the driver's own loop, behind the face of `HostActor`."""

    def __init__(self, spec: HostSpec) -> None:
        engine = self.engine = HostEngine(spec)
        self.open = Method(engine.open)
        self.wire = Method(lambda addresses, gangs: engine.guarded(engine.wire(addresses, gangs)))
        self.setup = Method(lambda: engine.guarded(engine.setup()))
        self.run = Method(lambda: engine.guarded(engine.run()))
        self.waits = Method(engine.waits)
        self.stop = Method(engine.stop)


class Hosts:
    """Stands for `RayCluster`."""

    started = True
    lost = ""

    def __init__(self) -> None:
        self.actors: dict[str, Host] = {}

    def place(self, slots: Any) -> None:
        pass

    def processes(self) -> dict[str, int]:
        return {}

    def head(self) -> None:
        return None

    def spawn(self, actor_class: type, index: int, slot: Any, spec: HostSpec) -> Host:
        self.actors[slot.host] = Host(spec)
        return self.actors[slot.host]

    def kill(self, host: str) -> None:
        pass

    def stop(self) -> None:
        pass


@dataclass
class Screen:
    """Stands for the view: keeps what it is told."""

    lines: list[str] = field(default_factory=list)
    records: list[Mapping[str, Any]] = field(default_factory=list)

    def progress(self, replica_id: str, text: str) -> None:
        self.lines.append(f"{replica_id}: {text}")

    def warning(self, text: str) -> None:
        self.lines.append(f"warning: {text}")

    def evaluation(self, phase: str, step: int, score: float, count: int, task: str) -> None:
        self.lines.append(f"evaluation {phase} at {step}: {score} of {count} {task}")

    def step(self, record: Mapping[str, Any]) -> None:
        self.records.append(record)

    def statistics(self, statistics: Any, admission: str) -> None:
        pass

    def close(self) -> None:
        pass

    @property
    def warnings(self) -> list[str]:
        return [line for line in self.lines if line.startswith("warning: ")]


@dataclass(frozen=True)
class Ran:
    """A run that has ended."""

    directory: Path
    outcome: Outcome | None
    error: BaseException | None
    """What it raised, None after an orderly end."""
    screen: Screen

    @property
    def steps(self) -> list[int]:
        """The numbers of the metrics lines that this life of the run showed."""
        return [record["step"] for record in self.screen.records]

    def audit(self) -> AuditReport:
        return audit(self.directory)

    def rows(self, query: str, *arguments: Any) -> list[tuple[Any, ...]]:
        """Rows of the ledger."""
        with closing(sqlite3.connect(self.directory / "ledger.sqlite")) as db:
            return db.execute(query, arguments).fetchall()

    def states(self) -> dict[str, int]:
        """Samples by "state" or "state: reason"."""
        counted = self.rows("SELECT state, reason, COUNT(*) FROM samples GROUP BY 1, 2")
        return {f"{state}: {reason}" if reason else state: count for state, reason, count in counted}

    def raise_for_error(self) -> Ran:
        """This run, if it ended in order."""
        if self.error is not None:
            raise self.error
        return self


def on_a_host_loop(main: Coroutine[Any, Any, Any]) -> Any:
    with asyncio.Runner(loop_factory=HostLoop) as runner:
        return runner.run(main)


def run(
    file: Path,
    directory: Path,
    config: Mapping[str, Any] | None = None,
    *,
    steps: int | None = None,
    resume: bool = False,
    within_s: float = 60.0,
    look_every_s: float = 1.0,
    link: Literal["objects", "ipc"] = "objects",
    prepare: Callable[[Driver], None] | None = None,
    go: Callable[[Coroutine[Any, Any, Any]], Any] = on_a_host_loop,
    **options: Any,
) -> Ran:
    """Check and run the graph of `file`. Raises GraphError for one that the check refuses.

    `prepare` sees the driver before it starts; `go` runs a coroutine on a loop; `options` are RunOptions. A run
    that takes longer than `within_s` ends with TimeoutError as its error.
    """
    loaded = load_file(file)
    cfg = loaded.config_type(**(config or {}))
    graph = loaded.build(cfg)
    if problems := check(graph, CLUSTER).problems:
        raise GraphError(problems)
    screen = Screen()
    claimed = RunDir(directory)
    claimed.claim(resume=resume)
    try:
        version, resume_from = claimed.newest_checkpoint() if resume else (0, None)
        plan = make_plan(graph, CLUSTER)
        launch = Launch(file, graph, cfg, RunOptions(steps=steps, run_dir=directory, resume=resume, **options))
        versions: dict[str, int] = {}
        if resume_from is None:
            launch.describe(claimed, plan)
        else:
            versions = require(resume_from, graph, plan, launch.options.seed)
        prepared = _Prepared(launch, claimed, plan, version, resume_from, versions)

        async def drive() -> Outcome:
            async with asyncio.timeout(within_s):
                return await prepared.drive(Hosts(), screen)  # type: ignore[arg-type]

        with _stand_ins(look_every_s, link, prepare):
            try:
                return Ran(directory, go(drive()), None, screen)
            except Exception as error:  # what a run raises is what tests look at
                return Ran(directory, None, error, screen)
    finally:
        claimed.release()


@contextmanager
def _stand_ins(look_every_s: float, link: str, prepare: Callable[[Driver], None] | None) -> Iterator[None]:
    """What asks Ray, or waits for people, is replaced; sockets on request."""

    class Prepared(Driver):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            if prepare is not None:
                prepare(self)

    local: Any = endpoints._local if link == "objects" else _Nobody()
    with (
        mock.patch.object(engines, "meeting_place", lambda *, alone: "127.0.0.1:0"),
        mock.patch.object(drivers, "LOOK_EVERY_S", look_every_s),
        mock.patch.object(drivers, "Driver", Prepared),
        mock.patch.object(endpoints, "_local", local),
    ):
        yield


class _Nobody(dict[str, Any]):
    """Knows no endpoint of this process: each is reached by its socket."""

    def get(self, *_: Any) -> None:
        return None

    def pop(self, *_: Any) -> None:
        return None

    def __setitem__(self, *_: Any) -> None:
        pass
