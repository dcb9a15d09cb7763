"""A trial of a graph before its run: two batches through the whole graph with stand-ins, a resume, and the audit.

A trial has a process of its own (`run_trial`), because the code of a user's node may keep memory, change the process,
or never return. In it the graph runs as `run_graph` runs it: the real engine, tickets and ledger,
and the real nodes but for what is heavy in flowrl's own (`flowrl.testing.stand_ins`). The first life makes two batches
with a checkpoint after each. The second one continues from the first checkpoint, as after a crash in the second batch.
Each ends with the audit.

Beyond what a run would find, a trial
- compares the tokens of a sample at each send with those that were sent first, and refuses a change at its line;
- encodes each message of a user's node, which a run does only between processes;
- names code that blocks the event loop, and a node in which nothing moves.

Waits: every wait ends with the trial's time, after which the process tells what it has seen and ends. If it cannot even
do that, because a library does not release the GIL, the caller ends it.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

import numpy as np

import flowrl
from flowrl.errors import FlowrlError, NodeFailed, Stalled
from flowrl.graph.analysis.branches import find_trainers
from flowrl.graph.analysis.check import check
from flowrl.graph.graph import Graph
from flowrl.graph.load import GraphFile, dump_options, load_file, restore_options
from flowrl.graph.node import Node
from flowrl.messages import Message, Sample
from flowrl.runtime.checkpoints import checkpoint
from flowrl.runtime.driver.job import RunOptions
from flowrl.runtime.driver.launch import Launch
from flowrl.runtime.driver.local_cluster import LocalCluster
from flowrl.runtime.driver.lookout import Topology, describe_reports
from flowrl.runtime.process.actor import find_culprit
from flowrl.runtime.process.context import ReplicaPlace
from flowrl.runtime.process.engine import ProcessSpec
from flowrl.runtime.process.replica import Replica
from flowrl.testing.graph_run import EIGHT_CORES, GraphRun, StandInProcess, run_in_process
from flowrl.testing.stand_ins import STAND_INS, stand_in
from flowrl.wire.activity import OUTSIDE, Lease, place_of
from flowrl.wire.encoding.codec import dump_value
from flowrl.wire.encoding.schema import Envelope
from flowrl.wire.items import samples_of

NUM_BATCHES = 2
TIME_S = 60.0
HANG_S = 10.0
"""Time without a move in the whole graph after which the trial ends."""
TICK_S = 0.02
BLOCKED_S = 2.0
"""Time for which one line of code may block the event loop in all; more ends the trial."""
TOLD_BLOCKED_S = 0.25
START_S = 20.0
"""Time that the process of a trial has to begin and to end, beside the trial's own."""
ENDED_WITHIN_S = 2.0
"""Time in which it ends when it is told to."""
STOP = "stop"
"""The file whose presence asks the process of a trial to tell where it stands, and to end."""
VIOLATIONS = 3
"""Violations of the audit that a result quotes."""
OURS = str(Path(flowrl.__file__).parent)
LIBRARIES = (sysconfig.get_path("stdlib"), "/site-packages/", "<frozen")


@dataclass(frozen=True)
class TrialResult:
    """What a trial has found."""

    problem: str = ""
    """A mistake, with its node and line; "" if there is none."""
    unfinished: str = ""
    """Why the trial has not come to its end, although it has found no mistake: its time, or code that is slow."""
    warnings: tuple[str, ...] = ()
    num_batches: int = 0
    resumed: bool = False
    audited: bool = False
    """Whether there is a ledger, which passed the audit. A graph without admission has none."""
    seconds: float = 0.0

    def __str__(self) -> str:
        if self.problem:
            return self.problem
        if self.unfinished:
            return f"{self.unfinished}; {self.num_batches} of {NUM_BATCHES} batches were made, and nothing is wrong yet"
        made = f"{self.num_batches} batch{'es' if self.num_batches != 1 else ''}" if self.num_batches else "some rows"
        others = [*(["a resume"] if self.resumed else []), *(["the audit"] if self.audited else [])]
        return f"{', '.join([f'{made} with stand-ins', *others])}: ok ({self.seconds:.1f} s)"


@dataclass
class RunningTrial:
    """A trial in its process. `wait_for_result` or `end` has to be called."""

    process: subprocess.Popen[bytes]
    directory: TemporaryDirectory[str]
    time_s: float

    def wait_for_result(self, within_s: float | None = None) -> TrialResult:
        """The result. After `within_s` seconds, by default all of the trial's time, the process is ended."""
        limit_s = self.time_s + START_S if within_s is None else within_s
        try:
            self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            (Path(self.directory.name) / STOP).touch()  # it tells where it stands
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(ENDED_WITHIN_S)
        try:
            found = json.loads((Path(self.directory.name) / "result.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            status = self.process.poll()
            ended = "did not answer" if status is None else f"ended with status {status}"
            found = {"unfinished": f"its process {ended}"}
        finally:
            self.end()
        return TrialResult(**{**found, "warnings": tuple(found.get("warnings", ()))})

    def end(self) -> None:
        """End the process, and remove its files."""
        self.process.kill()
        self.process.wait()
        self.directory.cleanup()


def start_trial(
    file: GraphFile, config: Mapping[str, Any], *, time_s: float = TIME_S, hang_s: float = HANG_S
) -> RunningTrial:
    """Start the trial of a graph that `flowrl check` has found nothing wrong with; `config` is from `dump_options`."""
    directory = TemporaryDirectory(prefix="flowrl-trial-")
    asked: dict[str, Any] = {"file": str(file.path.resolve()), "config": config, "path": sys.path}
    asked |= {"time_s": time_s, "hang_s": hang_s}
    (Path(directory.name) / "trial.json").write_text(json.dumps(asked), encoding="utf-8")
    begin = f"from flowrl.testing.trial import run_trial; run_trial({directory.name!r})"
    command = [sys.executable, "-P", "-c", begin]
    return RunningTrial(subprocess.Popen(command, stdin=subprocess.DEVNULL), directory, time_s)


def try_graph(
    file: str | Path, config: Mapping[str, Any] | None = None, *, time_s: float = TIME_S, hang_s: float = HANG_S
) -> TrialResult:
    """Try a graph, given by file or name; `config` overrides fields of its configuration, as in `run_graph`. After
    `hang_s` seconds in which nothing moves, or `time_s` in all, the trial ends.

        assert not try_graph("graphs/my_graph.py", {"group_size": 4}).problem

    Raises GraphError where `flowrl check` finds problems.
    """
    loaded = load_file(file)
    cfg = loaded.config_type(**(config or {}))
    check(loaded.build(cfg), EIGHT_CORES).raise_for_problems()
    return start_trial(loaded, dump_options(cfg), time_s=time_s, hang_s=hang_s).wait_for_result()


def untried_nodes(graph: Graph) -> list[str]:
    """The nodes that need a GPU and have no stand-in: the process of a trial has no GPU for them."""
    kinds = tuple(kind for kind, _ in STAND_INS)
    return [name for name, node in graph.nodes.items() if graph.placed[name].gpus_each and not isinstance(node, kinds)]


# In the process of the trial


class ChangedTokens(ValueError):
    """A node has sent a sample with other tokens than it had."""


class SentSamples:
    """What the nodes of one life send; used on its loop."""

    def __init__(self) -> None:
        self._first: dict[str, Sample] = {}
        """Sample -> how it was sent first."""

    def check_message(self, node: Node, body: Message) -> None:
        """Raise an exception for what a run would find later, or not at this line."""
        for sample in samples_of(body):
            if isinstance(sample, Sample):
                self._compare_tokens(sample)
        if _is_users(type(node)):
            dump_value(body)

    def _compare_tokens(self, sample: Sample) -> None:
        first = self._first.setdefault(sample.sample_id, sample)
        if first is sample:
            return
        mask = first.whole_mask
        for name in ("policy_mask", "token_ids", "behavior_logprobs", "versions"):
            was, now = np.asarray(first.column(name)), np.asarray(sample.column(name))
            if np.array_equal(was, now):
                continue
            if len(was) != len(now):
                found = f"{len(now)} tokens instead of {len(was)}"
            else:
                where = np.flatnonzero(was != now)
                if name in ("behavior_logprobs", "versions"):  # they matter where the policy has sampled
                    where = where[mask[where]]
                if not where.size:
                    continue
                place = int(where[0])
                found = f"{name} {now[place]} instead of {was[place]} at token {place}"
            raise ChangedTokens(
                f"sample {sample.sample_id!r} has {found}. Only tokens that the policy has sampled can be trained, as "
                "they were sampled, with their logprobs and versions; send them unchanged, and what you make of them "
                "in other fields"
            )


class TriedReplica(Replica):
    """A replica whose messages are checked as they are sent."""

    sent: SentSamples

    def trace_sent(self, envelope: Envelope) -> None:
        if not envelope.lost:
            self.sent.check_message(self.node, envelope.body)
        super().trace_sent(envelope)


class TriedProcess(StandInProcess):
    """A process of a trial."""

    def __init__(self, spec: ProcessSpec, sent: SentSamples) -> None:
        super().__init__(spec)
        self._sent = sent
        self.runs = False
        """Whether its nodes are set up, and their bodies run."""

    def make_replica(self, node: Node, place: ReplicaPlace, lease: Lease) -> Replica:
        replica = TriedReplica(node, place, self.endpoint, self.trace, lease)
        replica.sent = self._sent
        return replica

    async def run(self) -> None:
        self.runs = True
        await super().run()


@dataclass
class GraphTrial:
    """The trial in this process, whose main thread runs the graph; `watch` has a thread of its own."""

    file: GraphFile
    config: Any
    directory: Path
    time_s: float = TIME_S
    hang_s: float = HANG_S
    began_s: float = field(default_factory=time.monotonic)
    hosts: LocalCluster | None = None
    """Those of the current life."""
    loop: asyncio.AbstractEventLoop | None = None
    plan: Any = None
    num_batches: int = 0
    resumed: bool = False
    audited: bool = False
    blocked_s: dict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))
    """(node, line) -> for how long it has blocked the event loop."""
    _written: threading.Lock = field(default_factory=threading.Lock)

    def run(self) -> TrialResult:
        """Both lives. Only the first problem is told: what comes later may be its consequence."""
        trains = bool(find_trainers(self.file.build(self.config)))
        with refuse_breakpoints():
            problem = self._live(trains, resume=False)
            steps = checkpoint.steps_of(self.directory / "run" / "checkpoints")
            if not problem and trains and len(steps) > 1:
                shutil.rmtree(steps[-1][1])
                self.resumed = True
                if problem := self._live(trains, resume=True):
                    problem = f"after a resume, {problem}"
        return self.result(problem)

    def _live(self, trains: bool, *, resume: bool) -> str:
        """One life of the run, and its audit. Returns the problem, "" if there is none."""
        sent = SentSamples()
        run_dir = self.directory / "run"
        graph = stand_in(self.file.build(self.config), run_dir)
        options = RunOptions(
            steps=NUM_BATCHES if trains else None,
            run_dir=run_dir,
            resume=resume,
            save_every=int(trains),
            keep=0,
            trace="off",
            keep_samples="off",
        )
        self.hosts = LocalCluster(lambda spec: TriedProcess(spec, sent))
        launch = Launch(self.file.path, graph, self.config, options)
        ran = run_in_process(launch, EIGHT_CORES, self.hosts, timeout_s=2 * self.time_s, began=self._note_begin)
        self.num_batches = max([self.num_batches, *ran.steps])
        if ran.error is not None:
            return describe_failure(ran.error, graph)
        self.audited = graph.admission is not None
        return _describe_audit(ran) if self.audited else ""

    def _note_begin(self, plan: Any) -> None:
        self.loop, self.plan = asyncio.get_running_loop(), plan

    def result(self, problem: str = "", unfinished: str = "") -> TrialResult:
        slow = [one for one, for_s in self.blocked_s.items() if for_s >= TOLD_BLOCKED_S]
        warnings = tuple(self._describe_block(*one) for one in slow if self._describe_block(*one) not in unfinished)
        spent_s = time.monotonic() - self.began_s
        return TrialResult(problem, unfinished, warnings, self.num_batches, self.resumed, self.audited, spent_s)

    def _describe_block(self, node: str, where: str) -> str:
        for_s = self.blocked_s[node, where]
        return (
            f"node {node}: {where} has blocked the event loop, which its process has for all nodes, for {for_s:.1f} "
            "s in all; call what takes time as `await self.blocking(function, ...)`"
        )

    # The watch, in a thread of its own

    def watch(self, main: int) -> None:
        """End the process when nothing more will come of it; `main` is the id of the thread that runs the graph."""
        moved_s, last = time.monotonic(), -1
        while True:
            time.sleep(TICK_S)
            self._watch_loop(main)
            moves, now_s = self._count_moves(), time.monotonic()
            if moves != last:
                moved_s, last = now_s, moves
            if now_s - moved_s > self.hang_s:
                self.write_and_exit(
                    self.result(f"nothing has moved for {self.hang_s:.0f} s: {self.describe_stand(main)}")
                )
            if now_s - self.began_s > self.time_s or (self.directory / STOP).exists():
                spent = f"stopped after {now_s - self.began_s:.1f} s"
                self.write_and_exit(self.result(unfinished=f"{spent}, when {self.describe_stand(main)}"))

    def _watch_loop(self, main: int) -> None:
        """If the loop is blocked, note which line of a user's node blocks it, until it is free."""
        loop, began_s = self.loop, time.monotonic()
        if loop is None or loop.is_closed():
            return
        free = threading.Event()
        try:
            loop.call_soon_threadsafe(free.set)
        except RuntimeError:  # it has been closed
            return
        while not free.wait(TICK_S) and not loop.is_closed():
            culprit, now_s = self._find_users(main), time.monotonic()
            if culprit[0]:
                self.blocked_s[culprit] += now_s - began_s
                if self.blocked_s[culprit] > BLOCKED_S:
                    self.write_and_exit(self.result(unfinished=self._describe_block(*culprit)))
            if now_s - self.began_s > self.time_s or (self.directory / STOP).exists():
                return
            began_s = now_s

    def _find_users(self, main: int) -> tuple[str, str]:
        """The user's node that runs now, and its line; "" for each if none does, or if it is being set up."""
        name, where = find_culprit(sys._current_frames().get(main))
        node = next((one.node for one in self._replicas() if one.node.name == name), None)
        if node is None or not _is_users(type(node)) or where.endswith((" in setup", " in close")):
            return "", ""
        return name, where.rpartition("/")[2]

    def _replicas(self) -> Iterator[Any]:
        for host in [] if self.hosts is None else [*self.hosts.actors.values()]:
            yield from [*host.engine.replicas.values()]

    def _count_moves(self) -> int:
        """Changes with each event of the run; while nodes are set up, always."""
        hosts = [] if self.hosts is None else [*self.hosts.actors.values()]
        if not hosts or not all(getattr(host.engine, "runs", False) for host in hosts):
            return time.monotonic_ns()
        outside = any(wait.kind == OUTSIDE for one in self._replicas() for wait in [*one.activity.waits.values()])
        return time.monotonic_ns() if outside else sum(replica.activity.moves for replica in self._replicas())

    def describe_stand(self, main: int) -> str:
        """Where the graph stands: the nodes inside of their code, with the line; else what each node waits for."""
        name, where = self._find_users(main)
        if name:
            return f"node {name} was at {where}"
        found: dict[str, None] = {}
        for replica in self._replicas():
            activity = replica.activity
            waits = [*activity.waits.values()]
            tasks = [wait.task for wait in waits if wait.what == "its set-up" and wait.task is not None]
            if activity.working and not replica.ended:
                waiting = {wait.task for wait in waits}
                tasks += [task for task in [*activity.pending.tasks] if task not in waiting and not task.done()]
            if tasks:
                found[f"node {replica.node.name} is inside {place_of(tasks[-1])}"] = None
        if found:
            hint = "if it waits for something outside of the graph, say so with `with self.context.outside('what'):`"
            return f"{'; '.join(found)}; {hint}"
        if self.plan is None:
            return "the graph was being loaded"
        reports = [replica.report() for replica in self._replicas()]
        return "no node is inside its own code\n" + describe_reports(reports, Topology.of(self.plan))

    def write_and_exit(self, result: TrialResult) -> NoReturn:
        """Write the result, unless another thread does, and end the process, whatever its threads do."""
        self._written.acquire()  # never released: the first result is the one that counts
        partial = self.directory / ".result"
        partial.write_text(json.dumps(asdict(result)), encoding="utf-8")
        partial.rename(self.directory / "result.json")
        sys.stdout.flush()
        os._exit(0)


def describe_failure(error: Exception, graph: Graph) -> str:
    """The failure of a run in one message, with the user's line where there is one."""
    if isinstance(error, Stalled):
        return f"it is deadlocked: {error}"
    if not isinstance(error, NodeFailed):
        return str(error) if isinstance(error, FlowrlError) else f"{type(error).__name__}: {error}"
    place = _users_line(error.remote_traceback)
    node = graph.nodes.get(error.node)
    if not place and node is not None and _is_users(type(node)):
        code = type(node).run.__code__
        place = f"{Path(code.co_filename).name}:{code.co_firstlineno}, {code.co_qualname}"
    return f"node {error.node}: {error.reason}" + (f"\n  {place}" if place else "")


FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<name>\S+)\n(?P<text>[^\n]*)', re.MULTILINE)


def _users_line(traceback: str) -> str:
    """The innermost line of a user's file in a traceback; "" if there is none."""
    found = [one for one in FRAME.finditer(traceback) if _is_users_file(one["file"])]
    if not found:
        return ""
    at = found[-1]
    return f"{Path(at['file']).name}:{at['line']}, in {at['name']}: {at['text'].strip()}"


def _is_users_file(file: str) -> bool:
    return not file.startswith(OURS) and not any(part in file for part in LIBRARIES)


def _is_users(kind: type[Any]) -> bool:
    """Whether a class is not flowrl's. A stand-in has the module of what it stands in for."""
    return kind.__module__.partition(".")[0] != "flowrl"


def _describe_audit(ran: GraphRun) -> str:
    report = ran.audit()
    if report.ok:
        return ""
    more = f"\n  and {len(report.violations) - VIOLATIONS} more" if len(report.violations) > VIOLATIONS else ""
    quoted = "".join(f"\n  {text}" for text in report.violations[:VIOLATIONS])
    return f"its books do not pass the audit:{quoted}{more}"


@contextmanager
def refuse_breakpoints() -> Iterator[None]:
    """Inside, `breakpoint()` is an error: nobody is there to debug."""

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError("it calls breakpoint(), which a run in processes cannot serve; use flowrl run --here")

    before, sys.breakpointhook = sys.breakpointhook, refuse
    try:
        yield
    finally:
        sys.breakpointhook = before


def run_trial(directory: str) -> NoReturn:
    """Run the trial that `start_trial` has described in `directory`, and end the process."""
    asked = json.loads((Path(directory) / "trial.json").read_text(encoding="utf-8"))
    sys.path[:] = asked["path"]
    loaded = load_file(asked["file"])
    config = restore_options(loaded, asked["config"])
    trial = GraphTrial(loaded, config, Path(directory), asked["time_s"], asked["hang_s"])
    threading.Thread(target=trial.watch, args=(threading.get_ident(),), name="flowrl-trial", daemon=True).start()
    try:
        result = trial.run()
    except Exception as error:  # whatever the graph's code raises is told by the caller
        result = trial.result(str(error) if isinstance(error, FlowrlError) else f"{type(error).__name__}: {error}")
    trial.write_and_exit(result)
