"""Episodes under load on Ray and vLLM, and the generator alone on their requests: `episodes --case real`.

Both are runs of benchmarks/agents/episodes_graph.py. In the first, `load` cooperative episodes at a time sleep 0.5 to 5
s in each step. In the second a node asks the same generator the same requests, as many at a time as it takes. Turns are
counted while all places of episodes are taken: from two of the longest sleeps after the first answer to the answer of
the last episode's first turn. Of the second run the middle eight tenths of the requests count.
"""

from __future__ import annotations

import bisect
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.agents.episodes_graph import ENVIRONMENT, GENERATOR, Answered
from flowrl.errors import FlowrlError
from flowrl.runtime.audit.audit import audit

ROOT = Path(__file__).parents[2]
GRAPH = ROOT / "benchmarks" / "agents" / "episodes_graph.py"
LEAST_S, MOST_S = 0.5, 5.0
LEAST_WINDOW_S = 2.0


@dataclass(frozen=True)
class LoadedRun:
    """How many episodes there are, and what they say."""

    episodes: int
    """So many at a time."""
    total: int
    turns: int
    """So many has each episode."""
    max_tokens: int
    """So many has a reply at most."""


@dataclass(frozen=True)
class Window:
    """A part of a run, in seconds of the machine's clock."""

    start_s: float
    end_s: float

    def turns(self, answered: Sequence[Answered]) -> int:
        return sum(self.start_s < at_s <= self.end_s for _, at_s in answered)

    def rate(self, answered: Sequence[Answered]) -> float:
        """Turns a second."""
        return self.turns(answered) / (self.end_s - self.start_s)

    def cpu_s(self, used: Sequence[tuple[float, float]]) -> float:
        """Processor seconds, from a process's (time, processor seconds so far) in order."""
        times = [at_s for at_s, _ in used]
        first, last = (used[max(0, bisect.bisect(times, at) - 1)] for at in (self.start_s, self.end_s))
        return (last[1] - first[1]) * (self.end_s - self.start_s) / (last[0] - first[0])


def busy(answered: Sequence[Answered]) -> Window:
    """While all places of episodes are taken. Raises FlowrlError if that is too short."""
    start_s = min(at_s for _, at_s in answered) + 2 * MOST_S
    end_s = max(at_s for turn, at_s in answered if turn.turn == 0)
    if end_s - start_s < LEAST_WINDOW_S:
        raise FlowrlError(f"all places were taken for {end_s - start_s:.1f} s alone; raise --total")
    return Window(start_s, end_s)


def middle(answered: Sequence[Answered]) -> Window:
    """Without the first and the last tenth."""
    times = sorted(at_s for _, at_s in answered)
    tenth = len(times) // 10
    return Window(times[tenth], times[-1 - tenth])


def once(run: LoadedRun) -> dict[str, float]:
    """The figures of one repetition: a run, and its requests once more."""
    with tempfile.TemporaryDirectory() as directory:
        playing, alone = Path(directory) / "playing", Path(directory) / "alone"
        _run(run, playing, "")
        answered: list[Answered] = pickle.loads((playing / GENERATOR).read_bytes())
        used: list[tuple[float, float]] = pickle.loads((playing / ENVIRONMENT).read_bytes())
        _run(run, alone, str(playing / GENERATOR))
        again: list[Answered] = pickle.loads((alone / GENERATOR).read_bytes())
    return figures(run, answered, used, again)


def figures(
    run: LoadedRun, answered: Sequence[Answered], used: Sequence[tuple[float, float]], again: Sequence[Answered]
) -> dict[str, float]:
    if {turn.request_id for turn, _ in again} != {turn.request_id for turn, _ in answered}:
        raise FlowrlError(f"{len(again)} requests were asked again, of {len(answered)}")
    window = busy(answered)
    ideal, alone = run.episodes / ((LEAST_S + MOST_S) / 2), middle(again).rate(again)
    rate = window.rate(answered)
    return {
        "turns/s": rate,
        "episodes / mean sleep": ideal,
        "the generator alone": alone,
        "of the smaller": rate / min(ideal, alone),
        "ms a turn": window.cpu_s(used) / window.turns(answered) * 1000,
    }


def options_of(run: LoadedRun, out: Path, requests: str) -> list[str]:
    """Options of benchmarks/agents/episodes_graph.py for one run."""
    sizes = ("--episodes", run.episodes, "--total", run.total, "--num-turns", run.turns, "--max-tokens", run.max_tokens)
    sleeps = ("--least-s", LEAST_S, "--most-s", MOST_S)
    return [*map(str, (*sizes, *sleeps)), "--out", str(out), "--requests", requests]


def _run(run: LoadedRun, out: Path, requests: str) -> None:
    """One `flowrl run`. Raises FlowrlError if it fails or does not audit well."""
    out.mkdir()
    options = [*options_of(run, out, requests), "--run-dir", str(out / "run"), "--plain"]
    command = [sys.executable, "-m", "flowrl.cli", "run", str(GRAPH), *options]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    if done.returncode:
        raise FlowrlError(f"{done.stdout}{done.stderr}")
    if not (report := audit(out / "run")).ok:
        raise FlowrlError(str(report))
