"""A training loop in which a generator adds columns to its samples, and the trainer reads them token by token."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.runs.stages import Numbers, SleepingGenerator, sampled
from flowrl import Batch, Column, Facts, Graph, In, Node, Out, Prompt, Sample, Scored
from flowrl.messages import Branch
from flowrl.nodes.groups.advantage import GroupAdvantage
from flowrl.nodes.groups.batch import TokenBatch
from flowrl.training.loss.function_objective import FunctionObjective
from flowrl.training.loss.objective import LossInputs, loss_masks
from flowrl.training.micro_batches import make_micro_batch, split_in_rows
from tests.runtime.checkpoints.graphs_branches import ways

EXPERTS = Column("experts", "uint8", (4,), in_digest=True)
ENTROPY = Column("entropy")
IMAGE = Column("image", "int64", (2,), per="sample", in_digest=True)
CHANGED = "group2:1"
SPAN = 1000
"""Token ids of a sample begin at a multiple of this, but for the prompt's."""


def experts_of(token_ids: npt.NDArray[np.int32]) -> npt.NDArray[np.uint8]:
    """The made-up experts of each token: other ones for every token of a run."""
    return np.stack([token_ids % 251, token_ids // 251 % 256, token_ids % 7, token_ids * 0 + 9], axis=1).astype(
        np.uint8
    )


def entropy_of(token_ids: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
    return (token_ids / 8).astype(np.float32)


def image_of(sample_id: str) -> npt.NDArray[np.int64]:
    group, member = sample_id.removeprefix("group").split(":")
    return np.array([[int(group), -int(member)]], np.int64)


@dataclass(frozen=True)
class Added:
    change: str = "nothing"
    layout: str = "rows"
    declared: bool = True
    """Whether the generator declares all that it adds."""


class Generator(SleepingGenerator):
    """Its second members are episodes of two sequences, the second of which continues the prompt in another way."""

    cpus = 0

    def __init__(self, declared: tuple[Column, ...]) -> None:
        super().__init__(0.001, 8)
        self.declared = declared

    def facts(self) -> Facts:
        return replace(super().facts(), columns=self.declared)

    async def generate(self, prompt: Prompt) -> None:
        sample = sampled(prompt, self.version, f"{self.name}/{self.context.replica}")
        first = (prompt.seed * 2 + prompt.member + 1) * SPAN
        ids = np.where(sample.policy_mask, first + np.arange(len(sample.token_ids)), prompt.seed + 1).astype(np.int32)
        sample = replace(sample, token_ids=ids)
        if prompt.member == 1:
            other = np.where(sample.policy_mask, ids + SPAN // 2, ids).astype(np.int32)
            branch = Branch(other, sample.policy_mask, sample.behavior_logprobs, sample.versions)
            sample = replace(sample, branches=(branch,))
        whole = sample.column("token_ids")
        assert whole is not None
        sample = sample.with_column(EXPERTS, experts_of(whole)).with_column(ENTROPY, entropy_of(whole))
        sample = sample.with_column(IMAGE, image_of(sample.sample_id))
        self.context.ledger.generated(sample)
        await self.samples.send(sample)


class Score(Node):
    """Rewards the samples, and changes one of them."""

    samples: In[Sample]
    scored: Out[Scored]

    def __init__(self, change: str) -> None:
        self.change = change

    async def run(self) -> None:
        async for sample in self.samples:
            values = {field.name: getattr(sample, field.name) for field in fields(Sample)}
            if sample.sample_id == CHANGED and self.change != "nothing":
                added = sample.added_columns or {}
                flat = added[self.change].flat.copy()
                flat[-1] += 1
                values["added_columns"] = {**added, self.change: replace(added[self.change], flat=flat)}
            await self.scored.send(Scored(**values, reward=float(sample.member)))


def read_experts(inputs: LossInputs) -> torch.Tensor:
    chosen_BT = inputs.columns["experts"][..., 0] + inputs.columns["entropy"] + inputs.columns["image"][..., 0]
    return (inputs.logprobs_BT * chosen_BT)[inputs.mask_BT].sum() / inputs.totals.num_tokens


OBJECTIVE = FunctionObjective(read_experts, columns=("advantages", EXPERTS, ENTROPY, IMAGE))
Fed = tuple[int, int, str, list[int], float, list[int], float]
"""(rank, id of a policy token, layout of its pass, its experts, entropy, image, advantage)"""
FED: dict[str, list[Fed]] = {}
"""Directory of a run -> what the ranks' losses would read, token by token."""


class Trainer(ways.Trainer):
    def facts(self) -> Facts:
        return replace(super().facts(), needed_columns=OBJECTIVE.needed_columns)

    def _booked(self, parts: list[Batch], batch: Batch) -> list[Batch]:
        version, fed = self.context.start_version, FED.setdefault(self.context.run_dir, [])
        part, masks, shares = split_in_rows(batch, loss_masks(batch.samples, -1, version))
        for indices in part.micro_batches:
            made = make_micro_batch(
                [part.samples[i] for i in indices],
                [masks[i] for i in indices],
                OBJECTIVE,
                version=version,
                layout="tree" if part.layout == "tree" else "padded",
                device=torch.device("cpu"),
                shares=[shares[i] for i in indices],
            )
            flat = {name: values.flatten(0, 1)[made.rows.cells_N] for name, values in made.columns.items()}
            assert flat["experts"].dtype == torch.uint8 and flat["image"].dtype == torch.int64
            for place, token in enumerate(made.rows.targets_N.tolist() if indices else ()):
                columns = [flat[name][place].tolist() for name in ("experts", "entropy", "image", "advantages")]
                fed.append((self.context.replica, token, part.layout, *columns))
        return parts


def graph(cfg: Added) -> Graph:
    g = Graph("added")
    source = g.add("prompts", Numbers(2))
    generator = g.add("generator", Generator((EXPERTS, ENTROPY, IMAGE) if cfg.declared else (EXPERTS,)))
    score, advantage = g.add("score", Score(cfg.change)), g.add("advantage", GroupAdvantage("group_norm", size=2))
    batcher = g.add("batcher", TokenBatch(2, token_budget=64, layout=cfg.layout))  # type: ignore[arg-type]
    trainer = g.add("trainer", Trainer(0.001), replicas=2)
    g.connect(source.prompts, generator.prompts)
    g.connect(generator.samples, score.samples)
    g.connect(score.scored, advantage.scored)
    g.connect(advantage.groups, batcher.groups)
    g.connect(batcher.batches, trainer.batches, dispatch="gang")
    g.latest(trainer.weights, generator.weights)
    g.admit(source.prompts, until=generator.weights, staleness=1)
    return g
