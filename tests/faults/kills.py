"""SIGKILL of every kind of process of a run, at random moments: how soon the run has ended, and what it says.

    python -m tests.faults.kills [--times 10] [--seed 0] [--only NAME ...]

Prints a line for each kind. A run that takes longer than WITHIN_S to end, says nothing or more than one message,
leaves a process or a file in shared memory, or an audit that fails, counts as a fault; the exit status is 1 then. The
driver itself speaks, with status 2, but where Ray's library has stopped it while Ray started: then its guard does.
Two graphs: a loop without models, and grpo on `tiny` with vLLM and two ZeRO-3 ranks.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from pathlib import Path
from statistics import median

from flowrl.runtime.driver.ray_guard import MUTE
from tests.rigs.run_process import GRAPHS, ROOT, Run, audit, pids_of

WITHIN_S = 10.0
APPEARS_WITHIN_S = 120.0
SHM = Path("/dev/shm")
LOOP = (GRAPHS / "faults.py", "--processes", "--generators", "2", "--ranks", "2")
STACK = (ROOT / "graphs" / "grpo.py", "--trainer.replicas", "2", "--evaluate", "64", "--groups-per-step", "8")
Find = Callable[[Run], int | None]


def named(name: str, run: Run) -> int | None:
    """The run's process of this name."""
    return next((pid for pid in pids_of(run.mark) if _name(pid) == name), None)


def host(name: str, run: Run) -> int | None:
    """The process that listens at the socket of this host, in a Ray of the run's own or not."""
    file = f"-{run.process.pid}/{blake2b(name.encode(), digest_size=5).hexdigest()}-0"
    sockets = [line.split() for line in Path("/proc/net/unix").read_text().splitlines() if line.endswith(file)]
    inodes = {f"socket:[{fields[6]}]" for fields in sockets}
    pids = (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit())
    return next((pid for pid in pids if inodes & {*_descriptors(pid)}), None)


def driver(run: Run) -> int | None:
    return run.process.pid


@dataclass(frozen=True)
class Kind:
    """One kind of process, in one graph."""

    name: str
    graph: tuple[Path | str, ...]
    find: Find
    moments_s: float
    """It is killed at a random moment within this time of its appearance."""


KINDS = (
    Kind("loop: driver", LOOP, driver, 25),
    Kind("loop: gcs_server", LOOP, partial(named, "gcs_server"), 20),
    Kind("loop: raylet", LOOP, partial(named, "raylet"), 20),
    Kind("loop: core", LOOP, partial(host, "core"), 8),
    Kind("loop: generator/1", LOOP, partial(host, "generator/1"), 8),
    Kind("loop: trainer/0", LOOP, partial(host, "trainer/0"), 8),
    Kind("loop: trainer/1", LOOP, partial(host, "trainer/1"), 8),
    Kind("stack: driver", STACK, driver, 70),
    Kind("stack: generator/0", STACK, partial(host, "generator/0"), 50),
    Kind("stack: VLLM::EngineCore", STACK, partial(named, "VLLM::EngineCor"), 30),
    Kind("stack: trainer/0", STACK, partial(host, "trainer/0"), 50),
    Kind("stack: trainer/1", STACK, partial(host, "trainer/1"), 50),
    Kind("stack: gcs_server", STACK, partial(named, "gcs_server"), 60),
    Kind("stack: raylet", STACK, partial(named, "raylet"), 60),
    Kind("stack: core", STACK, partial(host, "core"), 50),
    Kind("stack: reference/0", (*STACK, "--reward-kl-coef", "0.01"), partial(host, "reference/0"), 50),
)


@dataclass
class SeenDeaths:
    """What was seen of one kind."""

    ended_s: list[float] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def line(self, kind: Kind) -> str:
        if not self.ended_s:
            return f"{kind.name:<26} nothing killed"
        low, middle, high = min(self.ended_s), median(self.ended_s), max(self.ended_s)
        times = f"ended after {low:4.1f} {middle:4.1f} {high:4.1f} s (least, median, most)"
        return f"{kind.name:<26} {len(self.ended_s):>3} killed  {times}  faults {len(self.faults)}"


def kill_once(kind: Kind, rng: random.Random, directory: Path, seen: SeenDeaths) -> None:
    graph, *options = kind.graph
    run = Run(Path(graph), directory, *map(str, options), "--save-every", "1", "--steps", "100000", timeout_s=300)
    pid = _appeared(kind, run)
    moment_s = rng.uniform(0, kind.moments_s)
    time.sleep(moment_s)  # the moment of the kill is what is random here
    alive = run.process.poll() is None
    children = pids_of(run.mark)
    start_s = time.monotonic()
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    status = run.wait()
    while (names := _running(run)) and time.monotonic() - start_s < WITHIN_S:
        time.sleep(0.05)  # the processes are somebody else's: only the kernel's tables say when they have ended
    seen.ended_s.append(time.monotonic() - start_s)
    faults = list(_faults(kind, run, status, sorted(names), directory, seen.ended_s[-1], alive))
    for fault in faults:
        seen.faults.append(fault)
        print(f"{kind.name}, killed {moment_s:.1f} s after it appeared: {fault}", flush=True)
    for child in children:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


def _appeared(kind: Kind, run: Run) -> int:
    end_s = time.monotonic() + APPEARS_WITHIN_S
    while time.monotonic() < end_s and run.process.poll() is None:
        if (pid := kind.find(run)) is not None:
            return pid
        time.sleep(0.05)  # the process is somebody else's: only the kernel's tables say when it is there
    run.process.kill()
    run.wait()
    raise SystemExit(f"{kind.name} has not appeared within {APPEARS_WITHIN_S:g} s:\n{run.stdout}\n{run.stderr}")


def _faults(
    kind: Kind, run: Run, status: int, left: list[str], directory: Path, ended_s: float, alive: bool
) -> Iterator[str]:
    if not alive:
        yield "the run had ended before"
    if ended_s > WITHIN_S:
        yield f"it took {ended_s:.1f} s to end"
    if left:
        yield f"left running: {left}"
    if found := [path.name for path in SHM.glob(f"flowrl-*-{run.process.pid}-*")]:
        yield f"left in shared memory: {found}"
    if kind.find is not driver:
        lines = run.stderr.splitlines()
        spoken_for = lines == [MUTE.format(kind.name.partition(": ")[2])] and status == -signal.SIGKILL
        if not spoken_for and (status != 2 or len(lines) != 1 or not lines[0].startswith("flowrl: ")):
            yield f"status {status}, stderr: {run.stderr!r}"
    if (directory / "ledger.sqlite").exists() and "audit: ok" not in (report := audit(directory)):
        yield f"audit: {report}"


def _running(run: Run) -> set[str]:
    """Names of the processes of the run that have not ended."""
    return {_name(pid) for pid in pids_of(run.mark)} - {""}


def _name(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def _descriptors(pid: int) -> Iterator[str]:
    with suppress(OSError):  # it has ended meanwhile
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                yield os.readlink(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", default=[], help="parts of the names of kinds")
    args = parser.parse_args()
    kinds = [kind for kind in KINDS if not args.only or any(part in kind.name for part in args.only)]
    if not kinds:
        parser.error(f"no kind has {args.only} in its name; there are {', '.join(kind.name for kind in KINDS)}")
    faults = 0
    for kind in kinds:
        seen, rng = SeenDeaths(), random.Random(f"{args.seed} {kind.name}")
        for _ in range(args.times):
            with tempfile.TemporaryDirectory() as directory:
                kill_once(kind, rng, Path(directory) / "run", seen)
        print(seen.line(kind), flush=True)
        faults += len(seen.faults)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
