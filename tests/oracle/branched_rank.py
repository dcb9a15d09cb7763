"""One ZeRO-3 rank of the oracle of branched episodes, started by `tests.stack.ranks.ranks`.

Takes them through advantage node, batcher, gang split and learner, and leaves gradients, weights and losses.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from flowrl.messages import Batch, Message
from flowrl.nodes import GroupAdvantage, TokenBatch
from flowrl.testing import lost, run_node
from flowrl.training.advantages import Estimate
from flowrl.training.engine.gang import Gang
from flowrl.training.learner import Learner
from flowrl.training.loss.objective import loss_masks
from flowrl.training.loss.policy_objective import PolicyObjective
from flowrl.training.settings import ZeroSettings
from tests.oracle.branched import BRANCHED_CASES, GAMMA, SHAPES, VERSIONS, BranchedCase, recorded
from tests.oracle.cases import LR, MAX_STALENESS, TEMPERATURE
from tests.oracle.rank import SHARDED, Recording, weights_of
from tests.stack.ranks.ranks import as_rank

GROUP_SIZE = 4
TOKEN_BUDGET = 45
"""Less than the tokens of the longest episode, whose sequences are in several micro-batches."""


def batches_of(case: BranchedCase) -> list[Batch]:
    """The recorded groups through the graph's own advantage node and batcher."""
    gamma = GAMMA if case.credit == "turn" else 1.0
    advantage = GroupAdvantage(Estimate(credit=case.credit, gamma=gamma), size=GROUP_SIZE)  # type: ignore[arg-type]
    arriving: list[Message] = []
    for group in (group for version in VERSIONS for group in recorded(version)):
        arriving += group
        arriving += [lost(member, group=group[0].group_id) for member in range(len(group), GROUP_SIZE)]
    groups = run_node(advantage, {"scored": arriving}).sent("groups")
    batcher = TokenBatch(
        len(SHAPES), token_budget=TOKEN_BUDGET, layout=case.layout, optimizer_steps=case.optimizer_steps
    )
    window, limit = (1, MAX_STALENESS) if case.mask_staleness < 0 else (0, case.mask_staleness)
    return run_node(batcher, {"groups": list(enumerate(groups))}, window=window, max_staleness=limit).sent("batches")


def train(case: BranchedCase, engine: Recording, directory: Path) -> None:
    engine.start_over()
    engine.layout = "tree" if case.layout == "tree" else "padded"
    learner = Learner(
        engine,
        PolicyObjective(**case.objective),
        temperature=TEMPERATURE,
        max_staleness=MAX_STALENESS if case.mask_staleness < 0 else case.mask_staleness,
    )
    losses = []
    for version, batch in zip(VERSIONS, batches_of(case), strict=True):
        part = batch.split(engine.gang.size)[engine.gang.rank]
        assert part.layout == case.layout
        rows = sum(len(sample.sequences) for sample in part.samples)
        assert sorted(i for one in part.micro_batches for i in one) == list(range(rows))
        masks = loss_masks(part.samples, part.mask_staleness, version)
        losses.append(learner.train_piece(part, masks, version, LR).stats["loss"])
    weights = weights_of(engine)
    if engine.rank == 0:
        left = {"gradients": engine.gradients, "weights": weights, "losses": losses}
        torch.save(left, directory / f"{case.name}.pt")


def run_all(gang: Gang, directory: Path, names: Sequence[str]) -> None:
    settings = ZeroSettings(stage=3, optimizer="sgd", clip_grad_norm=0.0, attention="sdpa", deepspeed=SHARDED)
    engine = Recording(directory / "model", settings, gang, head="lm")
    for case in BRANCHED_CASES:
        if case.name in names:
            train(case, engine, directory)


if __name__ == "__main__":
    as_rank(run_all)
