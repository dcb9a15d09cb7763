"""What the environment node costs itself: memory and processor time of episodes that wait, and of turns.

    python -m benchmarks.agents.episodes [--case idle|load|real]

The environment is cooperative and only waits. `idle`: all episodes wait in a step. `load`: episodes whose steps take
seconds, played for a while; a turn is one reply and one step. In both a function in the same process stands for the
generator, so its time is in the figures too. `real`: `load` on Ray and vLLM, and the generator alone on the same
requests (benchmarks/agents/episodes_stack.py), so the rate can be held against the smaller of what the waiting and what
the generator allows.

Wanted are at most 64 KiB an episode and 0.02 cores (`idle`), at least 0.85 of what is possible, and at most 1.5 ms of
processor time a turn. The exit status is 1 if a median is on the other side.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import tyro

from benchmarks.agents import episodes_stack, waiting_env
from benchmarks.agents.episodes_stack import LoadedRun
from flowrl.environments import EnvironmentRow
from flowrl.errors import FlowrlError
from flowrl.messages import Prompt
from flowrl.messages.episode import Reply, Turn
from flowrl.models import Policy
from flowrl.models.tokens.characters import character_tokenizer
from flowrl.nodes import Environment, Limits
from flowrl.nodes.sources.row_source import prompt_fields
from flowrl.testing import NodeRig

CASES = ("idle", "load", "real")
TOKENS = 400
"""Most tokens of an episode; the sequences of the benchmark are shorter."""


@dataclass(frozen=True)
class Options:
    case: Literal["idle", "load", "real", "all"] = "all"
    idle: int = 10_000
    """Episodes that wait."""
    load: int = 1_000
    """Episodes at a time under load."""
    turns: int = 4
    """Turns of each of them."""
    seconds: float = 20.0
    """For which processor time and turns are measured; of `real` it is as long as `total` episodes take."""
    total: int = 5000
    """Episodes of a repetition of `real`."""
    max_tokens: int = 8
    """So many has a reply of `real` at most."""
    repeats: int = 3


WANTED = {
    ("idle", "KiB an episode"): (0.0, 64.0),
    ("idle", "cores"): (0.0, 0.02),
    ("load", "of the ideal"): (0.85, float("inf")),
    ("load", "ms a turn"): (0.0, 1.5),
    ("real", "of the smaller"): (0.85, float("inf")),
    ("real", "ms a turn"): (0.0, 1.5),
}
"""(case, figure) -> least and most of its median."""


class Letters:
    """Stands for the generator: answers at once. `reached` is set with answer number `wanted`."""

    def __init__(self, wanted: int = 0) -> None:
        self.wanted, self.reached = wanted, asyncio.Event()
        self.ids = np.array(character_tokenizer()("ok<|end|>")["input_ids"], np.int32)
        self.num_turns = 0

    def __call__(self, turn: Turn) -> Reply:
        self.num_turns += 1
        if self.num_turns == self.wanted:
            self.reached.set()
        size = self.ids.size
        return Reply(
            request_id=turn.request_id,
            token_ids=self.ids,
            behavior_logprobs=np.full(size, -0.5, np.float32),
            versions=np.zeros(size, np.int32),
            finish_reason="stop",
            message={"role": "assistant", "content": "ok"},
            malformed="",
            cached_tokens=0,
            queued_s=0.0,
            generated_s=0.0,
            generator="generator/0",
        )


def prompt(number: int) -> Prompt:
    fields = prompt_fields(EnvironmentRow("waiting", seed=number))
    row = f"p{number}"
    return Prompt(
        sample_id=f"{row}:0", group_id=row, prompt_id=row, epoch=0, member=0, group_size=1, seed=number, **fields
    )


def memory_bytes() -> int:
    """Private memory of this process."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) * 1024


def node(episodes: int, **options: float) -> Environment:
    listed = ",".join(f"{name}={value}" for name, value in options.items())
    name = f"{waiting_env.__file__}:Waiting:{listed}"
    limits = Limits(tokens=TOKENS, episodes=episodes, step_s=3600.0)
    return Environment(name, Policy("tiny"), limits=limits)


async def idle(number: int, seconds: float) -> dict[str, float]:
    """Bytes an episode, and the share of a core, while `number` episodes wait."""
    letters = Letters(number)
    async with NodeRig(node(number, least_s=3000, most_s=3000), answers={"generate": letters}, timeout_s=600) as rig:
        before = memory_bytes()
        rig.feed("prompts", *map(prompt, range(number)))
        await letters.reached.wait()
        await asyncio.sleep(1.0)  # what follows the last one
        held = memory_bytes() - before
        began, wall = time.process_time(), time.monotonic()
        await asyncio.sleep(seconds)  # the time that is measured
        share = (time.process_time() - began) / (time.monotonic() - wall)
    return {"KiB an episode": held / number / 1024, "cores": share}


async def load(number: int, turns: int, seconds: float) -> dict[str, float]:
    """Turns a second against those that the waiting alone allows, and ms of processor time a turn."""
    least_s, most_s = 0.5, 5.0
    letters = Letters()
    waiting = node(number, least_s=least_s, most_s=most_s, steps=turns)
    async with NodeRig(waiting, answers={"generate": letters}, timeout_s=600) as rig:
        rounds = 2 + int((seconds + most_s) / least_s / turns)
        rig.feed("prompts", *map(prompt, range(rounds * number)))
        await asyncio.sleep(2 * most_s)  # until the episodes are at different turns
        began, wall, before = time.process_time(), time.monotonic(), letters.num_turns
        await asyncio.sleep(seconds)  # the time that is measured
        cpu_s, wall_s = time.process_time() - began, time.monotonic() - wall
        num_turns = letters.num_turns - before
    ideal = number / ((least_s + most_s) / 2)
    return {
        "turns/s": num_turns / wall_s,
        "of the ideal": num_turns / wall_s / ideal,
        "ms a turn": cpu_s / num_turns * 1000,
    }


def once(case: str, options: Options) -> dict[str, float]:
    """One repetition, in a process of its own; of `real` in those of its runs."""
    if case == "real":
        return episodes_stack.once(LoadedRun(options.load, options.total, options.turns, options.max_tokens))
    listed = [f"--{name}={getattr(options, name)}" for name in ("idle", "load", "turns", "seconds")]
    command = [sys.executable, "-m", "benchmarks.agents.episodes", "--case", case, "--repeats", "0", *listed]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise FlowrlError(done.stderr)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(case: str, options: Options) -> bool:
    """Print the figures of a case; whether all are as wanted."""
    runs = [once(case, options) for _ in range(options.repeats)]
    reached = True
    for name in runs[0]:
        values = [run[name] for run in runs]
        middle = statistics.median(values)
        least, most = WANTED.get((case, name), (0.0, float("inf")))
        missed = "" if least <= middle <= most else f"  MISSED: wanted {least:g} to {most:g}"
        print(f"{case:<6}{name:<24}{middle:10.3f}  ({min(values):.3f} to {max(values):.3f}){missed}", flush=True)
        print(json.dumps({"benchmark": "episodes", "case": case, "figure": name, "value": middle, "runs": values}))
        reached = reached and not missed
    return reached


def main(options: Options) -> int:
    if not options.repeats:
        work = (
            idle(options.idle, options.seconds)
            if options.case == "idle"
            else load(options.load, options.turns, options.seconds)
        )
        print(json.dumps(asyncio.run(work)), flush=True)
        os._exit(0)  # the episodes that wait need no end
    try:
        reached = [measure(case, options) for case in (CASES if options.case == "all" else (options.case,))]
    except FlowrlError as problem:
        print(f"episodes: {problem}", file=sys.stderr)
        return 2
    return 0 if all(reached) else 1


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options, description=__doc__)))
