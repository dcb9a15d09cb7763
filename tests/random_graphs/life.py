"""A run of a random graph from its first life to its last, in virtual time.

A life that crashes leaves its directory as it was on the disk at that moment: it is copied, and the next life goes on
in the copy. What the dead one does afterwards (its sockets are closed, its tasks cancelled) is of no account.
"""

from __future__ import annotations

import asyncio
import functools
import shutil
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

from flowrl.graph import node
from flowrl.graph.annotations import declared_types
from flowrl.runtime.audit.audit import AuditReport, audit
from flowrl.runtime.driver import launch
from flowrl.runtime.driver.driver import Driver
from flowrl.runtime.ledger.accounting import LEDGER
from flowrl.runtime.process import engine
from flowrl.testing import GraphRun, VirtualClock, run_graph
from flowrl.wire import run_files
from tests.random_graphs import record
from tests.random_graphs.graph import Config
from tests.random_graphs.record import Record
from tests.random_graphs.shape import Life, Shape
from tests.rigs.in_process import looking_every, seeing_the_driver

R = TypeVar("R")
FILE = Path(__file__).with_name("graph.py")
WITHIN_S = 1000.0
"""Of virtual time: far more than any of these runs takes."""
BUSY_S = 60.0
REPORT_EVERY_S = LOOK_EVERY_S = 10.0
LAST = Life("", 0, 0.0)


@dataclass
class Ending:
    """How one life ended, and what it left."""

    life: Life
    ran: GraphRun
    record: Record
    open: dict[str, str] = field(default_factory=dict)
    """Replicas that were left with something open at an orderly end."""
    audit: AuditReport | None = None
    """Of what a crash left, where there was a ledger yet."""

    @property
    def crashed(self) -> bool:
        return isinstance(self.ran.error, Crashed)


class Crashed(Exception):
    """The process is no more."""


def live(config: Config, directory: Path) -> list[Ending]:
    """All lives of the graph of `config`, below `directory`. A life that fails is the last."""
    shape = config.shape
    endings: list[Ending] = []
    here = directory / "life0"
    for life in [*shape.lives, LAST]:
        ending = _live(config, shape, life, here)
        endings.append(ending)
        if ending.ran.error is not None and not ending.crashed:
            break
        if ending.ran.outcome is not None and not ending.ran.outcome.interrupted:
            break
        if shape.steps is not None and ending.ran.outcome is not None and ending.ran.outcome.steps >= shape.steps:
            break
        if not ending.crashed:
            shutil.copytree(here, _next(here))
        here = _next(here)
    return endings


def _live(config: Config, shape: Shape, life: Life, here: Path) -> Ending:
    kept = _newest(here)
    if here.exists() and kept is None:
        shutil.rmtree(here)  # it crashed before its first checkpoint: nothing to go on from
    mine = record.begin(here)
    if kept is not None:
        mine.load(kept)
    end = _End(life, here, mine)
    try:
        with _spared(), looking_every(LOOK_EVERY_S), seeing_the_driver(end.prepare):
            ran = run_graph(
                FILE,
                here,
                asdict(config),
                steps=shape.steps,
                resume=kept is not None,
                timeout_s=WITHIN_S,
                clock=CrashClock(busy_s=BUSY_S),
                preflight=False,
                must_succeed=False,
                save_every=shape.save_every,
                keep=0,
                plain=True,
            )
    finally:
        record.forget(here)
    opened = end.left_open() if ran.outcome is not None else {}
    return Ending(life, ran, mine, opened, end.audit())


@contextmanager
def _spared() -> Iterator[None]:
    """What takes much of the time of a short run, and is the same in all of them; and the sweeping up after others."""
    with (
        mock.patch.object(launch, "describe_origin", lambda file: {}),
        mock.patch.object(run_files, "sweep", lambda: None),
        mock.patch.object(engine, "REPORT_EVERY_S", REPORT_EVERY_S),
        mock.patch.object(node, "declared_types", _hints),
    ):
        yield


_hints = functools.cache(declared_types)


def _newest(here: Path) -> Path | None:
    """The checkpoint that a resume would take."""
    steps = sorted((here / "checkpoints").glob("step_*")) if here.exists() else []
    return steps[-1] if steps else None


def _next(here: Path) -> Path:
    """Where the life after the one in `here` goes on."""
    return here.with_name(f"life{int(here.name.removeprefix('life')) + 1}")


class CrashClock(VirtualClock):
    """What cancels a whole run is its crash."""

    def run(self, main: Coroutine[Any, Any, R]) -> R:
        try:
            return super().run(main)
        except asyncio.CancelledError:
            raise Crashed from None


class _End:
    """Ends a life as its schedule says."""

    def __init__(self, life: Life, here: Path, mine: Record) -> None:
        self._life, self._here, self._record = life, here, mine
        self._driver: Driver
        self._main: asyncio.Task[Any] | None = None
        self._crashed = False

    def prepare(self, driver: Driver) -> None:
        self._driver, self._main = driver, asyncio.current_task()
        if self._life.end and self._life.version == 0:
            self._later()
        self._record.on_version = self._made

    def _made(self, trainer: str, version: int) -> None:
        if trainer == self._driver.job.plan.consumers[0][1] and version == self._life.version and self._life.end:
            self._later()

    def _later(self) -> None:
        asyncio.get_running_loop().call_later(self._life.delay_s, self._turn, self._life.turns)

    def _turn(self, turns: int) -> None:
        if turns:
            asyncio.get_running_loop().call_soon(self._turn, turns - 1)
        else:
            self._end()

    def _end(self) -> None:
        if self._life.end == "interrupt":
            self._driver.interrupt()
            return
        assert self._main is not None
        if self._main.done() or self._main.cancelling():
            return
        shutil.copytree(self._here, _next(self._here))
        self._crashed = True
        self._main.cancel()

    def audit(self) -> AuditReport | None:
        left = _next(self._here)
        return audit(left) if self._crashed and (left / LEDGER).exists() else None

    def left_open(self) -> dict[str, str]:
        """What the hosts still have in hand after an orderly end, by node replica."""
        found = {}
        for actor in self._driver.processes._cluster.actors.values():  # type: ignore[attr-defined]
            for replica_id, replica in actor.engine.replicas.items():
                if text := _left_open(replica):
                    found[replica_id] = text
        return found


def _left_open(replica: Any) -> str:
    counts = {
        "items": len(replica.open_items),
        "unacked": len(replica.open_items._by_place),
        "groups": sum(len(port._groups) for port in replica.inbound.values()),
        "messages on the way": sum(len(out.unacked()) for out in replica.outbound.values()),
    }
    return ", ".join(f"{count} {what}" for what, count in counts.items() if count)
