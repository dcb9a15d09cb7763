"""What a node replica is told of its place in the run, and the engine's services to it."""

from __future__ import annotations

import asyncio
import functools
import itertools
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

from flowrl.channel.endpoint import Endpoint
from flowrl.graph.routes import WeightRoute
from flowrl.runtime.activity.activity import OUTSIDE, Activity, in_invocation
from flowrl.runtime.activity.ending import as_failure
from flowrl.runtime.ledger.accounting import LedgerClient
from flowrl.runtime.telemetry.trace import TraceBuffer

P = ParamSpec("P")
R = TypeVar("R")
DRIVER = "driver"


@dataclass(frozen=True)
class ReplicaPlace:
    """The constants of one node replica."""

    node: str
    replica: int
    num_replicas: int
    run_dir: str
    seed: int
    steps: int | None
    cores: tuple[int, ...]
    gpus: tuple[int, ...]
    resume_dir: str | None
    start_version: int
    run_id: str
    max_staleness: int | None = None
    window: int | None = None
    own_clock: bool = False
    lease: str = ""
    """Lock that a host with shared devices needs for its work."""
    weight_routes: tuple[WeightRoute, ...] = ()

    @property
    def replica_id(self) -> str:
        return f"{self.node}/{self.replica}"


class NodeContext:
    """Implements `flowrl.graph.node.Context`. `blocking` has one thread a node replica: calls queue up."""

    def __init__(self, place: ReplicaPlace, endpoint: Endpoint, activity: Activity, trace: TraceBuffer) -> None:
        self.place = place
        self.replica, self.num_replicas = place.replica, place.num_replicas
        self.run_dir, self.seed, self.steps = place.run_dir, place.seed, place.steps
        self.cores, self.gpus = place.cores, place.gpus
        self.resume_dir, self.start_version = place.resume_dir, place.start_version
        self.max_staleness, self.window = place.max_staleness, place.window
        self.own_clock = place.own_clock
        self.weight_routes = place.weight_routes
        self.gang_address = ""
        self.run_id = place.run_id
        self.ledger = LedgerClient(endpoint, place.replica_id)
        self.endpoint = endpoint
        self.trace = trace
        self.activity = activity
        self.meters = Meters()
        self._claims = itertools.count(1)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=place.replica_id)

    async def blocking(self, fn: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run `fn` in this node's thread. A cancelled caller does not stop a call that has begun.

        What `fn` raises is raised here; what is no Exception, or ends an iteration, as a RuntimeError that says so.
        """
        loop = asyncio.get_running_loop()
        outside = in_invocation.get() is None
        if outside:
            self.activity.work(+1)
        try:
            return await loop.run_in_executor(self._thread, functools.partial(_called, fn, *args, **kwargs))
        finally:
            if outside:
                self.activity.work(-1)

    def metric(self, name: str, value: float) -> None:
        """Add to a counter of this replica; counters are read once a step and once a second."""
        self.meters.add(name, value)

    def gauge(self, name: str, value: float) -> None:
        """One observation: its mean and maximum since the last step are reported."""
        self.meters.observe(name, value)

    def progress(self, text: str) -> None:
        """One line about a long step of set-up."""
        self.endpoint.notify(DRIVER, "progress", {"node": self.place.replica_id, "text": text})

    @contextmanager
    def busy(self, name: str) -> Iterator[None]:
        """Counts the time inside as this replica's work; overlapping spans count once."""
        start = time.time_ns()
        self.meters.enter()
        try:
            yield
        finally:
            self.meters.leave()
            self.trace.slice(self.place.replica_id, name, start, time.time_ns())

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """A wait for another item of this node, or for a word of the driver's.

        An invocation does not count as working meanwhile: checkpoints go on. For the stall watch the wait is one
        that only the graph ends; where something else ends it (a service, a person, a thread of the node), use
        `outside`.
        """
        with self.activity.waiting("waiting", what, inside=in_invocation.get()):
            yield

    @contextmanager
    def outside(self, what: str) -> Iterator[None]:
        """A wait for something beyond the graph, an environment say: checkpoints go on, and the node is alive."""
        with self.activity.waiting(OUTSIDE, what, inside=in_invocation.get()):
            yield

    @asynccontextmanager
    async def exclusive(self, name: str) -> AsyncIterator[None]:
        """The run-wide lock called `name`: one holder at a time, in order of asking."""
        body = {"name": name, "node": self.place.replica_id, "claim": next(self._claims)}
        try:
            with self.activity.waiting("lock", name, inside=None):
                await self.endpoint.request(DRIVER, "lock", body)
            yield
        finally:  # also when the wait was cancelled: the driver's word may have been under way
            self.endpoint.notify(DRIVER, "unlock", body)

    async def step_done(self, version: int) -> None:
        """A batch's end: returns at once, or after the checkpoint that is due here."""
        with self.activity.waiting("barrier", "the end of a checkpoint", inside=in_invocation.get()):
            await self.endpoint.request(DRIVER, "step_done", {"node": self.place.replica_id, "version": version})

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


def _called(fn: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """`fn(...)`, in the thread. A future cannot end with all that `fn` may raise: who awaits it would wait for ever."""
    try:
        return fn(*args, **kwargs)
    except StopIteration as error:
        raise RuntimeError(f"{getattr(fn, '__qualname__', fn)} raised StopIteration") from error
    except BaseException as error:
        failure = as_failure(error, cancelled=False)
        raise failure from failure.__cause__


@dataclass
class Meters:
    """Counters, observations and busy time of one node replica."""

    counters: dict[str, float] = field(default_factory=dict)
    observed: dict[str, list[float]] = field(default_factory=dict)
    busy_s: float = 0.0
    _depth: int = 0
    _since: float = 0.0

    def add(self, name: str, value: float) -> None:
        self.counters[name] = self.counters.get(name, 0.0) + value

    def observe(self, name: str, value: float) -> None:
        self.observed.setdefault(name, []).append(value)

    def enter(self) -> None:
        if self._depth == 0:
            self._since = time.monotonic()
        self._depth += 1

    def leave(self) -> None:
        self._depth -= 1
        if self._depth == 0:
            self.busy_s += time.monotonic() - self._since

    def read(self) -> dict[str, object]:
        """Totals so far; observations are handed over and forgotten."""
        running = time.monotonic() - self._since if self._depth else 0.0
        observed, self.observed = self.observed, {}
        return {"busy_s": self.busy_s + running, "counters": dict(self.counters), "observed": observed}
