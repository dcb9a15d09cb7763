"""A training loop without models that is evaluated, ends at a chosen place, and writes weights.

What happens is written to `events` of the run directory, in its order.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

from benchmarks.runs.stages import Collect, Numbers, SleepingGenerator, SleepingTrainer
from flowrl import Graph, Node, Out, Sample
from flowrl.nodes.groups.batch import TokenBatch
from flowrl.runtime.ledger.ledger_client import EvaluationRow


@dataclass(frozen=True)
class Measured:
    every: int = 0
    evaluations: int = 1
    fails_at: str = ""
    """PHASE STEP of the evaluation that ends the run by an error."""
    stays_at: str = ""
    """PHASE STEP of the evaluation that does not end."""
    hangs_at: str = ""
    """What does not end: "batch N", the trainer's; "checkpoint", a trainer's; "finish", the evaluation's last."""
    judges: bool = False
    """Whether the trainer has figures on held-out rows when its batches have ended."""


class Generating(SleepingGenerator):
    cpus = 0


async def hang_outside(node: Node) -> None:
    """Waits for something outside of the graph that never comes: no deadlock is proven."""
    with node.context.outside("what never comes"):
        await asyncio.get_running_loop().create_future()


def happened(node: Node, event: str) -> None:
    with (Path(node.context.run_dir) / "events").open("a") as file:
        file.write(f"{event}\n")


class Training(SleepingTrainer):
    cpus = 0

    def __init__(self, cfg: Measured) -> None:
        super().__init__(0.0)
        self.judges, self.hangs_at = cfg.judges, cfg.hangs_at
        self.version = 0

    async def run(self) -> None:
        await super().run()
        if self.judges:
            self.context.judged(self.version, {"held_out/loss": 0.5, "held_out/margin": None})

    async def publish(self, version: int) -> None:
        self.version = version
        happened(self, f"version {version}")
        if f"batch {version}" == self.hangs_at:
            await hang_outside(self)
        await super().publish(version)

    async def checkpoint(self, path: str) -> None:
        if self.hangs_at == "checkpoint" and list(Path(path).parent.glob("step_*")):
            await hang_outside(self)
        (Path(path) / "part").mkdir()
        (Path(path) / "part" / "weights").write_text(Path(path).name)
        happened(self, f"writes {Path(path).name}")


class Evaluating(Node):
    """One answer for each evaluation."""

    cpus = 0
    unused: Out[Sample]

    def __init__(self, cfg: Measured) -> None:
        self.every, self.fails_at, self.stays_at = cfg.every, cfg.fails_at, cfg.stays_at
        self.hangs_at = cfg.hangs_at
        self.finished = asyncio.Event()

    async def run(self) -> None:
        with self.context.waiting("the end of training"):
            await self.finished.wait()

    async def finish(self) -> None:
        if self.hangs_at == "finish":
            await hang_outside(self)
        self.finished.set()

    async def evaluate(self, *, phase: str, step: int) -> dict[str, float]:
        happened(self, f"asks {phase} {step}")
        if f"{phase} {step}" == self.fails_at:
            raise RuntimeError("the evaluation is lost")
        if f"{phase} {step}" == self.stays_at:
            await hang_outside(self)
        await asyncio.sleep(0.02)  # a trainer that does not wait makes a version meanwhile
        happened(self, f"answers {phase} {step}")
        row = EvaluationRow(
            phase=phase,
            step=step,
            prompt_id="p",
            member=0,
            score=step / 10,
            correct=False,
            response_tokens=1,
            oldest_version=step,
            newest_version=step,
            task=self.name,
        )
        self.context.ledger.evaluation([row])
        return {"exact_match": 0.0, "score": step / 10, "num_answers": 1}


def graph(cfg: Measured) -> Graph:
    g = Graph("measured")
    source, generator = g.add("prompts", Numbers(2)), g.add("generator", Generating(0.001, 8))
    collect, batcher = g.add("collect", Collect(2)), g.add("batcher", TokenBatch(2, token_budget=4096))
    trainer = g.add("trainer", Training(cfg))
    for number in range(cfg.evaluations):
        g.ignore(g.add(f"evaluation{number}", Evaluating(cfg)).unused)
    g.connect(source.prompts, generator.prompts)
    g.connect(generator.samples, collect.samples)
    g.connect(collect.groups, batcher.groups)
    g.connect(batcher.batches, trainer.batches, dispatch="gang")
    g.latest(trainer.weights, generator.weights)
    g.admit(source.prompts, until=generator.weights, staleness=1)
    return g
