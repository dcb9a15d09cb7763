"""One ZeRO-3 rank of the oracle: python -m tests.oracle.rank RANK SIZE PORT DIRECTORY

Takes the recorded rollouts through advantage node, batcher, gang split and learner, for each case named
in DIRECTORY/cases.json, and leaves gradients, weights and stats of every optimizer step.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from flowrl.graph.ports import Members
from flowrl.messages import Batch, Group, Scored, Tombstone
from flowrl.nodes import GroupAdvantage, TokenBatch
from flowrl.training.estimate import Estimate
from flowrl.training.gang import Gang
from flowrl.training.learner import Learner
from flowrl.training.packing import loss_masks
from flowrl.training.recipes import PolicyObjective
from flowrl.training.settings import ZeroSettings
from flowrl.training.zero import ZeroEngine
from tests.node_rig import InMemoryIn, InMemoryOut, attach, run
from tests.oracle.cases import CASES, GROUP_SIZE, GROUPS, LAM, LR, MAX_STALENESS, TEMPERATURE, OracleCase
from tests.oracle.rollouts import Recorded, load

MATRICES_SHARDED = {"zero_optimization": {"stage3_param_persistence_threshold": 100}}
TOKEN_BUDGET = 80


class Recording(ZeroEngine):
    """Keeps the whole accumulated gradient of every optimizer step, and can start over."""

    def __init__(self, path: Path, settings: ZeroSettings, gang: Gang) -> None:
        super().__init__(path, settings, gang)
        self.gradients: list[dict[str, torch.Tensor]] = []
        self._first = [shard.detach().clone() for shard in self._shards()]

    def step(self) -> Any:
        from deepspeed.utils import safe_get_full_grad

        named = self.model.causal_lm.named_parameters()
        self.gradients.append({name: safe_get_full_grad(parameter).clone() for name, parameter in named})
        return super().step()

    def start_over(self) -> None:
        """The weights of the beginning; plain SGD has no other state."""
        self.gradients = []
        for shard, first in zip(self._shards(), self._first, strict=True):
            shard.data.copy_(first)

    def _shards(self) -> list[torch.Tensor]:
        optimizer = self._engine.optimizer
        return [*optimizer.fp32_partitioned_groups_flat, *optimizer.fp16_partitioned_groups_flat]


def batches_of(case: OracleCase, recorded: Recorded) -> list[Batch]:
    """The recorded groups through the graph's own advantage node and batcher."""
    coefficient, estimator = case.kl_in_reward
    estimate = Estimate(
        case.estimator,  # type: ignore[arg-type]
        gamma=case.gamma,
        lam=LAM if case.estimator == "gae" else 1.0,
        kl_coef=coefficient,
        kl_estimator=estimator,  # type: ignore[arg-type]
    )
    advantage, advantaged = GroupAdvantage(estimate, size=GROUP_SIZE), InMemoryOut()
    assert advantage.check(None) == []
    run(advantage, scored=InMemoryIn([_members(group) for group in recorded]), groups=advantaged)
    batcher, batches = (
        TokenBatch(
            GROUPS,
            token_budget=TOKEN_BUDGET,
            optimizer_steps=case.optimizer_steps,
            whiten=case.whiten,  # type: ignore[arg-type]
        ),
        InMemoryOut(),
    )
    context = attach(batcher)
    context.window, context.max_staleness = (1, MAX_STALENESS) if case.mask_staleness < 0 else (0, case.mask_staleness)
    arrivals = _arrivals(advantaged.sent, ordered=case.mask_staleness >= 0)
    run(batcher, groups=InMemoryIn(arrivals), batches=batches)
    return batches.sent


def _members(group: tuple[Scored, ...]) -> Members[Scored]:
    lost = tuple(
        Tombstone(group[0].group_id, member, "failed", "test", "reward/0") for member in range(len(group), GROUP_SIZE)
    )
    return Members(group[0].group_id, 0, GROUP_SIZE, group, lost)


def _arrivals(groups: list[Group], *, ordered: bool) -> list[tuple[int, Group]]:
    """(ticket, group) as groups finish: in any order where the batcher waits for the oldest."""
    numbered = list(enumerate(groups))
    return numbered if ordered else numbered[1::2] + numbered[::2]


def train(case: OracleCase, engine: Recording, recorded: Recorded, directory: Path) -> None:
    engine.start_over()
    learner = Learner(
        engine,
        PolicyObjective(**case.objective),
        epochs=case.epochs,
        temperature=TEMPERATURE,
        max_staleness=MAX_STALENESS if case.mask_staleness < 0 else case.mask_staleness,
    )
    clip_fractions = []
    for version, batch in enumerate(batches_of(case, recorded)):
        part = batch.split(engine.gang.size)[engine.rank]
        masks = loss_masks(part.samples, part.mask_staleness, version)
        clip_fractions.append(learner.update(part, masks, version, LR).stats["clip_fraction"])
    weights = {n: t.clone() for names, ts in engine.buckets(2000) for n, t in zip(names, ts, strict=True)}
    if engine.rank == 0:
        found = {"gradients": engine.gradients, "weights": weights, "clip_fractions": clip_fractions}
        torch.save(found, directory / f"{case.name}.pt")


def main() -> None:
    rank, size, port, directory = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    torch.set_num_threads(1)
    gang = Gang.meet(rank, size, f"127.0.0.1:{port}", torch.device("cpu"))
    settings = ZeroSettings(stage=3, optimizer="sgd", clip_grad_norm=0.0, attention="sdpa", deepspeed=MATRICES_SHARDED)
    engine = Recording(directory / "model", settings, gang)
    chosen = set(json.loads((directory / "cases.json").read_text()))
    recorded = load(directory / "rollouts")
    for case in CASES:
        if case.name in chosen:
            train(case, engine, recorded, directory)
    gang.leave()
    # gloo's threads that DeepSpeed still refers to now and then abort the interpreter's own way out.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
