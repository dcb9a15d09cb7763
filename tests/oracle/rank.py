"""One ZeRO-3 rank of the oracle, started by `tests.stack.ranks.ranks`.

Takes the recorded rollouts through advantage node, batcher, gang split and learner, for each case named
in DIRECTORY/cases.json, and leaves gradients, weights and stats of every optimizer step.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from flowrl.messages import Batch, Group, Message, Scored
from flowrl.nodes import GroupAdvantage, TokenBatch
from flowrl.testing import lost, run_node
from flowrl.training.advantages import Estimate
from flowrl.training.engine.gang import Gang
from flowrl.training.engine.zero import ZeroEngine
from flowrl.training.learner import Learner
from flowrl.training.loss.objective import loss_masks
from flowrl.training.loss.policy_objective import PolicyObjective
from flowrl.training.settings import ZeroSettings
from tests.oracle import offline
from tests.oracle.cases import (
    BATCHES,
    CASES,
    FIRST,
    GROUP_SIZE,
    GROUPS,
    IN_PIECES,
    LAM,
    LATER_CASES,
    LR,
    MAX_STALENESS,
    OTHER_CASES,
    PART_WEIGHTS,
    PASSES,
    PIECES,
    TEMPERATURE,
    OracleCase,
)
from tests.oracle.offline import OFFLINE_CASES, OfflineCase, make_batch
from tests.oracle.rollouts import Recorded, load
from tests.stack.ranks.ranks import as_rank
from tests.training.pieces import train_in_pieces

LAYERS_GATHERED = {"leaf_module": {"classes": ["LlamaDecoderLayer", "Qwen2DecoderLayer"]}}
SHARDED = {"zero_optimization": {"stage3_param_persistence_threshold": 100, **LAYERS_GATHERED}}
"""Every matrix is divided, and those of a layer are gathered together: the oracle is about losses. In
tests/stack/ranks/test_training_gang.py each is gathered alone, as by default."""
TOKEN_BUDGETS = {("rows", 1): 64, ("rows", 2): 32, ("tree", 1): 36, ("tree", 2): 22}
"""By layout and optimizer steps: two micro-batches of a rank or a few more."""


class Recording(ZeroEngine):
    """Keeps the whole accumulated gradient of every optimizer step, and can start over."""

    def __init__(self, path: Path, settings: ZeroSettings, gang: Gang, *, head: Any) -> None:
        super().__init__(path, settings, gang, head=head)
        self.gradients: list[dict[str, torch.Tensor]] = []
        self._first = [shard.detach().clone() for shard in self._shards()]

    def step_optimizer(self, *, divide_by: float = 1.0) -> Any:
        from deepspeed.utils import safe_get_full_grad

        named = self.model.network.named_parameters()
        self.gradients.append({name: safe_get_full_grad(parameter) / divide_by for name, parameter in named})
        return super().step_optimizer(divide_by=divide_by)

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
        **(PASSES if case.estimator == "pass_at_k" else {}),
        part_weights=PART_WEIGHTS if case.estimator == "gdpo" else (),
        kl_coef=coefficient,
        kl_estimator=estimator,  # type: ignore[arg-type]
    )
    if case.estimator == "gdpo":  # which refuses rewards that are in no part
        recorded = [tuple(replace(sample, turn_rewards=()) for sample in group) for group in recorded]
    advantage = GroupAdvantage(estimate, size=GROUP_SIZE)
    groups = run_node(advantage, {"scored": [one for group in recorded for one in _members(group)]}).sent("groups")
    batcher = TokenBatch(
        GROUPS,
        token_budget=TOKEN_BUDGETS[case.layout, case.optimizer_steps],
        layout=case.layout,
        optimizer_steps=case.optimizer_steps,
        whiten=case.whiten,  # type: ignore[arg-type]
    )
    window, max_staleness = (1, MAX_STALENESS) if case.mask_staleness < 0 else (0, case.mask_staleness)
    arrivals = _arrivals(groups, ordered=case.mask_staleness >= 0)
    record = run_node(batcher, {"groups": arrivals}, window=window, max_staleness=max_staleness, start_version=FIRST)
    return record.sent("batches")


def _members(group: tuple[Scored, ...]) -> list[Message]:
    return [*group, *(lost(member, group=group[0].group_id) for member in range(len(group), GROUP_SIZE))]


def _arrivals(groups: list[Group], *, ordered: bool) -> list[tuple[int, Group]]:
    """(ticket, group) as groups finish: in any order where the batcher waits for the oldest."""
    numbered = list(enumerate(groups))
    return numbered if ordered else numbered[1::2] + numbered[::2]


def train(case: OracleCase, engine: Recording, recorded: Recorded, path: Path, *, in_pieces: bool = False) -> None:
    engine.start_over()
    engine.layout = "tree" if case.layout == "tree" else "padded"
    learner = Learner(
        engine,
        PolicyObjective(**case.objective),
        epochs=case.epochs,
        temperature=TEMPERATURE,
        max_staleness=MAX_STALENESS if case.mask_staleness < 0 else case.mask_staleness,
    )
    clip_fractions = []
    for version, batch in enumerate(batches_of(case, recorded), FIRST):
        if in_pieces:
            update = train_in_pieces(learner, batch, PIECES[version - FIRST], version, LR)
        else:
            part = split(batch, engine.gang)
            update = learner.train_piece(part, loss_masks(part.samples, part.mask_staleness, version), version, LR)
        clip_fractions.append(update.stats["clip_fraction"])
    leave(engine, path, clip_fractions)


def split(batch: Batch, gang: Gang) -> Batch:
    """This rank's part, of which gradients have to be accumulated."""
    part = batch.split(gang.size)[gang.rank]
    assert len(part.micro_batches) > len(part.step_ends)
    return part


def train_offline(case: OfflineCase, engine: Recording, path: Path, *, in_pieces: bool = False) -> None:
    engine.start_over()
    learner = Learner(engine, case.made(), epochs=case.epochs, temperature=TEMPERATURE)
    for number in range(BATCHES):
        batch, version = make_batch(case, number), FIRST + number
        if in_pieces:
            train_in_pieces(learner, batch, offline.PIECES[number], version, LR)
            continue
        part = batch.split(engine.gang.size)[engine.rank]
        learner.train_piece(part, loss_masks(part.samples, part.mask_staleness, version), version, LR)
    leave(engine, path, [])


def weights_of(engine: Recording) -> dict[str, torch.Tensor]:
    return {n: t.clone() for names, ts in engine.buckets(2000) for n, t in zip(names, ts, strict=True)}


def leave(engine: Recording, path: Path, clip_fractions: list[Any]) -> None:
    weights = weights_of(engine)
    if engine.rank == 0:
        torch.save({"gradients": engine.gradients, "weights": weights, "clip_fractions": clip_fractions}, path)


def run_all(gang: Gang, directory: Path, _: Sequence[str]) -> None:
    settings = ZeroSettings(stage=3, optimizer="sgd", clip_grad_norm=0.0, attention="sdpa", deepspeed=SHARDED)
    chosen = set(json.loads((directory / "cases.json").read_text()))
    recorded = load(directory / "rollouts")
    engine = Recording(directory / "model", settings, gang, head="lm")
    for case in (*CASES, *OTHER_CASES, *LATER_CASES):
        if case.name in chosen:
            train(case, engine, recorded, directory / f"{case.name}.pt")
        if f"{case.name}{IN_PIECES}" in chosen:
            train(case, engine, recorded, directory / f"{case.name}{IN_PIECES}.pt", in_pieces=True)
    for head in ("lm", "scalar"):
        cases = [case for case in OFFLINE_CASES if case.head == head and {case.name, case.in_pieces.name} & chosen]
        if head == "scalar" and cases:
            engine = Recording(directory / "model", settings, gang, head="scalar")
            torch.save(weights_of(engine), directory / f"scalar_start_{gang.rank}.pt")
        for case in cases:
            if case.name in chosen:
                train_offline(case, engine, directory / f"{case.name}.pt")
            if case.in_pieces.name in chosen:
                train_offline(case.in_pieces, engine, directory / f"{case.in_pieces.name}.pt", in_pieces=True)


if __name__ == "__main__":
    as_rank(run_all)
