"""What a node replica knows about its place in the run, and the services that the engine offers to it."""

from __future__ import annotations

import asyncio
import functools
import itertools
import math
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from flowrl.errors import FlowrlError
from flowrl.graph.routes import WeightRoute
from flowrl.messages import Prompt, Sample
from flowrl.runtime.ledger.accounting import LedgerClient
from flowrl.runtime.samples.sample_notes import SampleNotes, SampleShare
from flowrl.runtime.telemetry.trace import TraceBuffer
from flowrl.wire.activity import OUTSIDE, ActiveWait, Activity, Lease, as_failure, in_invocation
from flowrl.wire.derived_samples import DerivedSamples
from flowrl.wire.endpoint import Endpoint

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
    max_reused_age: int | None = None
    window: int | None = None
    longest_asked: int | None = None
    """Length, in tokens, of the longest prompt or context that is sent to the node."""
    own_clock: bool = False
    has_leftovers: bool = False
    in_pieces: bool = False
    lease: str = ""
    """The lock that a process with shared devices must hold while it works."""
    stand_ins: tuple[str, ...] = ()
    """The nodes that continue if they lose a replica."""
    weight_routes: tuple[WeightRoute, ...] = ()
    keep_episodes: bool = True
    """Whether the run keeps episodes."""
    keep_samples: SampleShare = field(default_factory=SampleShare)
    """Which samples the run keeps."""
    keep_token_ids: bool = False
    """Whether the run also keeps the token ids of these samples."""

    @property
    def replica_id(self) -> str:
        return f"{self.node}/{self.replica}"


class NodeContext:
    """Implements `flowrl.graph.node.Context`. `blocking` uses one thread per node replica, so its calls queue up."""

    def __init__(
        self, place: ReplicaPlace, endpoint: Endpoint, activity: Activity, trace: TraceBuffer, lease: Lease
    ) -> None:
        self.place = place
        self._lease = lease
        self.replica, self.num_replicas = place.replica, place.num_replicas
        self.run_dir, self.seed, self.steps = place.run_dir, place.seed, place.steps
        self.cores, self.gpus, self.time_shared = place.cores, place.gpus, bool(place.lease)
        self.resume_dir, self.start_version = place.resume_dir, place.start_version
        self.max_staleness, self.window = place.max_staleness, place.window
        self.max_reused_age = place.max_reused_age
        self.longest_asked = place.longest_asked
        self.own_clock, self.in_pieces = place.own_clock, place.in_pieces
        self.has_leftovers = place.has_leftovers
        self.others_stand_in = place.node in place.stand_ins
        self.weight_routes = place.weight_routes
        self.keep_episodes = place.keep_episodes
        self.gang_address = ""
        self.run_id = place.run_id
        self.ledger = LedgerClient(endpoint, place.replica_id, stand_ins=place.stand_ins)
        self.samples = SampleNotes(
            lambda records: endpoint.notify(DRIVER, "samples", records),
            place.keep_samples,
            token_ids=place.keep_token_ids,
        )
        self.derived: DerivedSamples | None = None
        """None if the node declares no samples to derive."""
        self.endpoint = endpoint
        self.trace = trace
        self.activity = activity
        self.meters = Meters()
        self._claims = itertools.count(1)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=place.replica_id)

    async def derive(self, sample: Prompt | Sample, number: int, label: str = "") -> list[Prompt]:
        """See `flowrl.graph.node.Context`."""
        if self.derived is None:
            raise FlowrlError(
                f"node {self.place.node!r} derives samples, but declares none; return "
                f"Facts(derives={{{label or 'branch'!r}: {number}}}) from its facts()"
            )
        caller = sys._getframe(1)
        where = f"{Path(caller.f_code.co_filename).name}:{caller.f_lineno}"
        return await self.derived.derive(sample, number, label, where)

    async def blocking(self, fn: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run `fn` in this node's thread. Cancelling the caller does not stop a call that has begun.

        Raises what `fn` raises; StopIteration, and anything that is not an Exception, becomes a RuntimeError that names
        it.
        """
        loop = asyncio.get_running_loop()
        outside = in_invocation.get() is None
        if outside:
            self.activity.count_working(+1)
        try:
            return await loop.run_in_executor(self._thread, functools.partial(_call_in_thread, fn, *args, **kwargs))
        finally:
            if outside:
                self.activity.count_working(-1)

    def metric(self, name: str, value: float) -> None:
        """Add to a counter of this replica; counters are read once per step and once per second."""
        self.meters.add_to_counter(name, value)

    def gauge(self, name: str, value: float) -> None:
        """Record one observation; the mean and maximum since the last step are reported."""
        self.meters.add_observation(name, value)

    def progress(self, text: str) -> None:
        """Report one line about a long step of set-up."""
        self.endpoint.notify(DRIVER, "progress", {"node": self.place.replica_id, "text": text})

    def episode(self, sample_id: str, line: str, *, failed: bool) -> None:
        """Send an attempt at an episode, as a line of JSON, to the run's records."""
        body = {"sample_id": sample_id, "line": line.encode(), "failed": failed}  # bytes may be longer than text
        self.endpoint.notify(DRIVER, "episode", body)

    def judged(self, version: int, figures: Mapping[str, Any]) -> None:
        """Send a trainer's figures on held-out rows for `version`, whose line of metrics is booked already."""
        self.endpoint.notify(DRIVER, "judged", {"version": version, "figures": dict(figures)})

    @contextmanager
    def busy(self, name: str) -> Iterator[None]:
        """Counts the time inside as this replica's work; overlapping spans count once."""
        start = time.time_ns()
        self.meters.begin_work()
        try:
            yield
        finally:
            self.meters.end_work()
            self.trace.record_slice(self.place.replica_id, name, start, time.time_ns())

    def waiting(self, what: str) -> ActiveWait:
        """Inside, this code waits for another item of this node, or for a message from the driver.

        The invocation does not count as working meanwhile, so checkpoints proceed. The stall watch assumes that only
        the graph ends the wait; if something else ends it (a service, a person, a thread of the node), use `outside`.
        """
        return self.activity.waiting("waiting", what, inside=in_invocation.get())

    def outside(self, what: str) -> ActiveWait:
        """Inside, this code waits for something outside the graph: checkpoints proceed, and the node counts as alive.

        An example is a wait for an environment.
        """
        return self.activity.waiting(OUTSIDE, what, inside=in_invocation.get())

    @asynccontextmanager
    async def exclusive(self, name: str) -> AsyncIterator[None]:
        """Inside, hold the run-wide lock `name`: one holder at a time, in order of request."""
        body = {"name": name, "claimant": self.place.replica_id, "claim": next(self._claims)}
        try:
            with self.activity.waiting("lock", name, inside=None):
                await self.endpoint.request(DRIVER, "lock", body)
            yield
        finally:  # also when the wait was cancelled: the driver may have granted the lock already
            self.endpoint.notify(DRIVER, "unlock", body)

    @asynccontextmanager
    async def on_devices(self) -> AsyncIterator[None]:
        """Inside, this node may use its time-shared devices, for work outside of invocations."""
        with self.activity.waiting("lock", self._lease.name, inside=in_invocation.get()):
            await self._lease.begin()
        try:
            yield
        finally:
            await self._lease.end()

    async def step_done(self, version: int) -> None:
        """Report a batch's end. Returns at once, or after the work that is due here, such as a checkpoint."""
        with self.activity.waiting("barrier", "the end of a checkpoint", inside=in_invocation.get()):
            await self.endpoint.request(DRIVER, "step_done", {"replica_id": self.place.replica_id, "version": version})

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


def _call_in_thread(fn: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call `fn` in the thread. Converts exceptions that a future cannot hold: its awaiter would wait forever."""
    try:
        return fn(*args, **kwargs)
    except StopIteration as error:
        raise RuntimeError(f"{getattr(fn, '__qualname__', fn)} raised StopIteration") from error
    except BaseException as error:  # a thread's boundary: a future cannot hold every exception
        failure = as_failure(error, cancelled=False)
        raise failure from failure.__cause__


@dataclass
class Meters:
    """Counters, observations and busy time of one node replica."""

    counters: dict[str, float] = field(default_factory=dict)
    observed: dict[str, tuple[int, float, float]] = field(default_factory=dict)
    """Number, sum and largest of the observations since the last read, by name."""
    busy_s: float = 0.0
    _depth: int = 0
    _since: float = 0.0

    def add_to_counter(self, name: str, value: float) -> None:
        self.counters[name] = self.counters.get(name, 0.0) + value

    def add_observation(self, name: str, value: float) -> None:
        number, total, largest = self.observed.get(name, (0, 0.0, -math.inf))
        value = float(value)  # a sum in a narrow numpy type would overflow
        self.observed[name] = number + 1, total + value, max(largest, value)

    def begin_work(self) -> None:
        if self._depth == 0:
            self._since = time.monotonic()
        self._depth += 1

    def end_work(self) -> None:
        self._depth -= 1
        if self._depth == 0:
            self.busy_s += time.monotonic() - self._since

    def read_totals(self) -> dict[str, object]:
        """Totals so far, and number, sum and largest of the observations since the last read."""
        running = time.monotonic() - self._since if self._depth else 0.0
        observed, self.observed = self.observed, {}
        return {"busy_s": self.busy_s + running, "counters": dict(self.counters), "observed": observed}
