"""Runs with many half-done episodes, on Ray, vLLM and ZeRO: SIGKILL after a checkpoint, and what a resume makes of it.

    python -m tests.faults.agent_resume [--only NAME ...]

`driver` kills the driver, `environment` the host of the environment node; their episodes run in that host, and those of
`processes` in a process each. `programs` kills the driver of agents' programs. All are killed right after a checkpoint
with at least HALF_DONE half-done episodes. The share is of the policy tokens that the checkpoint has of them: trained,
and not sampled again. `pause` takes checkpoints while 1,000 cooperative episodes and more are inside of steps of a
minute; quick ones make up the batches. The exit status is 1 if anything is not as it has to be.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sqlite3
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowrl.messages import Prompt
from flowrl.messages.episode import EpisodeRecord
from flowrl.runtime.checkpoints.checkpoint import steps_of
from flowrl.runtime.checkpoints.snapshots import read_state
from tests.faults.kills import Find, driver, host
from tests.rigs.run_process import ROOT, Run, audit

GRAPH = ROOT / "graphs" / "agent_game.py"
PROGRAMS = ROOT / "graphs" / "agent_openai.py"
ENVS = ROOT / "tests" / "faults" / "paced_envs.py"
AGENT = ROOT / "tests" / "agents" / "agent_programs.py"
GROUPS, MEMBERS = 8, 8
HALF_DONE = 50
LEAST_SHARE = 0.95
PAUSE_S = 2.0
CHECKPOINTS = 4
"""Of the run whose pauses are measured; the figures of one are in the line after it."""
STEPS_AFTER = 6
"""Steps of the resumed run; all that was half done is trained in them."""
ENDS_WITHIN_S = 15.0
POLICY = ("--policy", "tiny_agent", "--task.name", "arithmetic:min_value=30")
OPTIONS = (*POLICY, "--evaluate", "0", "--save-every", "1", "--keep", "4", "--keep-episodes", "0")
SIZES = ("--groups-per-step", str(GROUPS), "--group-size", str(MEMBERS), "--look-ahead", str(GROUPS))


def environment(run: Run) -> int | None:
    """The host that has the environment node."""
    return host("core", run)


@dataclass(frozen=True)
class Kill:
    """A run that is killed and resumed."""

    find: Find
    plays: tuple[str, ...]
    """The options that say what is played."""
    graph: Path = GRAPH


KILLS = {
    "driver": Kill(driver, ("--environment", f"{ENVS}:Paced")),
    "environment": Kill(environment, ("--environment", f"{ENVS}:Paced")),
    "processes": Kill(driver, ("--environment", f"{ENVS}:PacedProcess:step_s=0.5")),
    "programs": Kill(driver, ("--agent", f"{AGENT}:paces"), PROGRAMS),
}


@dataclass(frozen=True)
class Kept:
    """What became of the half-done episodes of a checkpoint."""

    episodes: int
    tokens: int
    """Of the policy, in the checkpoint."""
    trained: int
    """Of them, those that were trained and not sampled again."""
    problems: tuple[str, ...]

    def __str__(self) -> str:
        share = f"{self.trained / self.tokens:.4f} trained as they were"
        return f"{self.episodes} half done, {self.tokens} policy tokens in the checkpoint, {share}"


def records_of(run_dir: Path, step: int) -> dict[str, EpisodeRecord]:
    """The records of half-done episodes with something sampled, by sample."""
    state = read_state(run_dir / "checkpoints" / f"step_{step:06d}")
    prompts = [envelope.body for *_, envelope in state["messages"] if isinstance(envelope.body, Prompt)]
    found = {prompt.sample_id: prompt.record for prompt in prompts}
    return {
        name: record
        for name, record in found.items()
        if isinstance(record, EpisodeRecord) and (record.replies or record.prefix_token_ids.size)
    }


def rows(run_dir: Path, query: str, *values: Any) -> list[Any]:
    with closing(sqlite3.connect(run_dir / "ledger.sqlite")) as db:
        return db.execute(query, values).fetchall()


def kill_and_resume(kill: Kill, run_dir: Path) -> Kept:
    options = (*OPTIONS, *SIZES, *kill.plays)
    run = Run(kill.graph, run_dir, *options, "--steps", "1000", timeout_s=900)
    try:
        pid, step = None, 0
        while pid is None or step < 2 or len(records_of(run_dir, step)) < HALF_DONE:
            line = run.until(r"checkpoint step_\d+ in")
            step, pid = int(line.partition("step_")[2][:6]), kill.find(run)
        problems = list(_end(run, pid, by_driver=kill.find is driver))
        step = steps_of(run_dir / "checkpoints")[-1][0]
        records = records_of(run_dir, step)
    finally:
        run.process.kill()
    again = Run(kill.graph, run_dir, *options, "--resume", "--steps", str(step + STEPS_AFTER), timeout_s=900)
    if again.wait():
        problems.append(f"the resumed run failed: {again.stderr}")
    problems += _unlike(run_dir, step + STEPS_AFTER, len(records))
    tokens, trained = _tokens(run_dir, records)
    if trained < LEAST_SHARE * tokens:
        problems.append(f"only {trained} of {tokens} policy tokens were trained as they were")
    return Kept(len(records), tokens, trained, tuple(problems))


def _end(run: Run, pid: int, *, by_driver: bool) -> Iterator[str]:
    """Kill that process; what is wrong with how the run ends."""
    os.kill(pid, signal.SIGKILL)
    left = run.left_after(ENDS_WITHIN_S)
    run.wait()
    if left:
        yield f"left running: {left}"
    if not by_driver and (len(run.stderr.splitlines()) != 1 or not run.stderr.startswith("flowrl: ")):
        yield f"stderr: {run.stderr!r}"


def _unlike(run_dir: Path, steps: int, half_done: int) -> Iterator[str]:
    """What is wrong with the books of the resumed run."""
    if half_done < HALF_DONE:
        yield f"only {half_done} episodes were half done"
    if "audit: ok" not in (report := audit(run_dir)):
        yield f"audit: {report}"
    states = rows(run_dir, "SELECT state, COUNT(*) FROM samples GROUP BY 1")
    if states != [("trained", steps * GROUPS * MEMBERS)]:
        yield f"samples: {states}"
    twice = rows(run_dir, "SELECT COUNT(*) FROM (SELECT 1 FROM uses GROUP BY sample_id HAVING COUNT(*) > 1)")[0][0]
    if twice:
        yield f"{twice} samples were trained twice"


def _tokens(run_dir: Path, records: dict[str, EpisodeRecord]) -> tuple[int, int]:
    """Policy tokens in the records, and those of them that were trained and not sampled again.

    A reply counts if its request was booked once and is used. The beginning of an unfinished reply counts if its
    request was booked once, and the resumed run has sampled no more tokens than were missing.
    """
    booked = {}
    for name, *fate in rows(run_dir, "SELECT request_id, tokens, abandoned, incarnation FROM requests"):
        booked.setdefault(name, []).append(fate)
    used = {name for name, fates in booked.items() if len(fates) == 1 and fates[0][1] is None}
    replies = {reply.request_id: reply.token_ids.size for one in records.values() for reply in one.replies}
    begun = {one.asked: one.prefix_token_ids.size for one in records.values() if one.prefix_token_ids.size}
    booked_again = sum(tokens for fates in booked.values() for tokens, _, life in fates if life)
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    first = len(lines) - STEPS_AFTER
    again = sum(line["tokens_generated"] for line in lines[first:]) - (booked_again - sum(begun.values()))
    trained = sum(size for name, size in (replies | begun).items() if name in used) - max(0, int(again))
    return sum((replies | begun).values()), trained


def pause(run_dir: Path) -> tuple[float, int, int]:
    """The longest pause, the largest number of episodes that were in a step in one, and the number of pauses."""
    slow = f"{ENVS}:Paced:turns=2,step_s=60,quick=4"
    sizes = ("--groups-per-step", "2", "--group-size", "32", "--look-ahead", "8", "--staleness", "31")
    limits = ("--limits.step-s", "600", "--limits.episodes", "2000", "--steps", "1000")
    run = Run(GRAPH, run_dir, *OPTIONS, *sizes, *limits, "--environment", slow, timeout_s=1200)
    for _ in range(CHECKPOINTS):
        run.until(r"checkpoint step_\d+ in")
    run.process.kill()
    run.wait()
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    pauses = [line["checkpoint_pause_s_max"] for line in lines if "checkpoint_pause_s_max" in line]
    waiting = []
    for step, _ in steps_of(run_dir / "checkpoints"):
        records = records_of(run_dir, step).values()
        waiting.append(sum(len(record.replies) > len(record.steps) for record in records))
    print(f"pause: {pauses} s, episodes in a step {waiting}")
    return max(pauses), max(waiting[: len(pauses)]), len(pauses)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="*", default=[*KILLS, "pause"], choices=[*KILLS, "pause"])
    failed = False
    for name in parser.parse_args().only:
        began_s = time.monotonic()
        with tempfile.TemporaryDirectory() as directory:
            if name == "pause":
                longest_s, waiting, number = pause(Path(directory) / "run")
                problems: tuple[str, ...] = ()
                if longest_s > PAUSE_S or waiting < 1000:
                    problems = (f"it has to be at most {PAUSE_S} s with 1000 episodes in a step",)
                text = f"longest of {number} pauses {longest_s:.3f} s, with {waiting} episodes in a step of 60 s"
            else:
                kept = kill_and_resume(KILLS[name], Path(directory) / "run")
                text, problems = str(kept), kept.problems
        print(f"{name:<12} {text}; {'; '.join(problems) or 'ok'} ({time.monotonic() - began_s:.0f} s)", flush=True)
        failed = failed or bool(problems)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
