"""A training loop without models that is evaluated, ends at a chosen place, and writes weights."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

from benchmarks.stages import Collect, Numbers, SleepingGenerator, SleepingTrainer
from flowrl import Graph, Node, Out, Sample
from flowrl.nodes.batching.batch import TokenBatch
from flowrl.runtime.ledger.ledger_client import EvaluationRow


@dataclass(frozen=True)
class Measured:
    every: int = 0
    evaluations: int = 1
    fails_at: str = ""
    """PHASE STEP of the evaluation that ends the run by an error."""
    stays_at: str = ""
    """PHASE STEP of the evaluation that does not end."""


class Generating(SleepingGenerator):
    cpus = 0


class Training(SleepingTrainer):
    """Counts how often it writes its weights, in `writes` of the run directory."""

    cpus = 0

    async def checkpoint(self, path: str) -> None:
        (Path(path) / "part").mkdir()
        (Path(path) / "part" / "weights").write_text(Path(path).name)
        with (Path(self.context.run_dir) / "writes").open("a") as file:
            file.write(f"{Path(path).name}\n")


class Evaluating(Node):
    """One answer for each evaluation; each is a line in `asked` of the run directory when it begins."""

    cpus = 0
    unused: Out[Sample]

    def __init__(self, cfg: Measured) -> None:
        self.every, self.fails_at, self.stays_at = cfg.every, cfg.fails_at, cfg.stays_at
        self.finished = asyncio.Event()

    async def run(self) -> None:
        with self.context.waiting("the end of training"):
            await self.finished.wait()

    async def finish(self) -> None:
        self.finished.set()

    async def evaluate(self, *, phase: str, step: int) -> dict[str, float]:
        with (Path(self.context.run_dir) / "asked").open("a") as file:
            file.write(f"{phase} {step}\n")
        if f"{phase} {step}" == self.fails_at:
            raise RuntimeError("the evaluation is lost")
        if f"{phase} {step}" == self.stays_at:
            await asyncio.get_running_loop().create_future()
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
    trainer = g.add("trainer", Training(0.0))
    for number in range(cfg.evaluations):
        g.ignore(g.add(f"evaluation{number}", Evaluating(cfg)).unused)
    g.connect(source.prompts, generator.prompts)
    g.connect(generator.samples, collect.samples)
    g.connect(collect.groups, batcher.groups)
    g.connect(batcher.batches, trainer.batches, dispatch="gang")
    g.latest(trainer.weights, generator.weights)
    g.admit(source.prompts, until=generator.weights, staleness=1)
    return g
