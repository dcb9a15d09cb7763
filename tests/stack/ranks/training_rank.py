"""One ZeRO rank of the gang test, started by `tests.stack.ranks.ranks`.

Trains every case and writes gradients before each optimizer step, final weights and the records.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from flowrl.messages import Batch
from flowrl.training import layouts
from flowrl.training.engine.gang import Gang
from flowrl.training.engine.zero import ZeroEngine
from flowrl.training.learner import Learner
from flowrl.training.loss.objective import loss_masks
from flowrl.training.loss.policy_objective import PolicyObjective
from flowrl.training.model import products
from flowrl.training.model.sequence_attention import make_sequence_group
from flowrl.training.model.tensors import gather_whole
from flowrl.training.settings import SequenceKind, ZeroSettings
from tests.rigs.run_process import listening
from tests.stack.ranks.ranks import as_rank
from tests.training.pieces import train_in_pieces
from tests.training.training_cases import BATCHES, CASES, FIRST, LR, TEMPERATURE, Case, make_batch

DENSE_PLACES = layouts.DENSE_PLACES
PRODUCTS = products.LEAST, products.prefers_onednn
RESUMED = ("ppo_tis", "stage_2", "sequence_rows", "tensor_stage_0", "tensor_stage_1")
EVERYTHING_SHARDED = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}


class Recording(ZeroEngine):
    """Keeps the whole accumulated gradient of every optimizer step."""

    gradients: list[dict[str, torch.Tensor]]

    def step_optimizer(self, *, divide_by: float = 1.0) -> Any:
        from deepspeed.utils import safe_get_full_grad

        named = {name: p for name, p in self.model.network.named_parameters() if p.requires_grad}
        mine = {name: p.grad if self._stage == 0 else safe_get_full_grad(p) for name, p in named.items()}
        self.gradients.append({name: gather_whole(mine[name], named[name]) / divide_by for name in named})
        return super().step_optimizer(divide_by=divide_by)


def sharing(gang: Gang, size: int, kind: SequenceKind = "ulysses") -> Gang:
    """The same gang, with `size` ranks to each part of a batch."""
    return replace(gang, sequence=make_sequence_group(gang.rank, gang.size, size, kind))


def part_of(gang: Gang, batch: Batch) -> Batch:
    """What this rank trains of it."""
    return batch.split(gang.size // gang.ranks_per_part)[gang.rank // gang.ranks_per_part]


def digest(weights: dict[str, torch.Tensor]) -> str:
    """The same for weights that are equal bit by bit."""
    numbers = [tensor.float().numpy().tobytes() for tensor in weights.values()]
    return hashlib.sha256(b"".join(numbers)).hexdigest()


def train(case: Case, gang: Gang, directory: Path) -> None:
    settings = ZeroSettings(
        stage=case.stage,
        optimizer="sgd",
        clip_grad_norm=case.clip,
        attention="sdpa",
        deepspeed=EVERYTHING_SHARDED,
        layout=case.layout,
        **case.settings,
    )
    gang = replace(sharing(gang, case.sequence, case.kind), tensor_size=case.tensor)
    layouts.DENSE_PLACES = DENSE_PLACES if case.dense_places is None else case.dense_places
    products.LEAST, products.prefers_onednn = (0, lambda: True) if case.onednn else PRODUCTS
    engine = Recording(
        directory / case.model, settings, gang, trust_remote_code=case.experts, balanced=case.balance > 0
    )
    engine.gradients = []
    learner = Learner(
        engine,
        PolicyObjective(**case.objective),
        epochs=case.epochs,
        temperature=TEMPERATURE,
        max_staleness=2,
        router_aux_loss_coef=case.balance,
    )
    updates = []
    for number in range(BATCHES):
        batch, version = make_batch(number, case, first=FIRST), FIRST + number
        if case.pieces:
            updates.append(train_in_pieces(learner, batch, case.pieces[number], version, LR))
            continue
        part = part_of(gang, batch)
        assert part.layout == case.layout
        updates.append(learner.train_piece(part, loss_masks(part.samples, part.mask_staleness, version), version, LR))
    weights = {n: t.clone() for names, ts in engine.buckets(2000) for n, t in zip(names, ts, strict=True)}
    probe = engine.score([[1, 2, 3, 4], [5, 6]])
    alike = len(set(gang.gather_objects(digest(weights)))) == 1
    if gang.rank == 0:
        torch.save({"gradients": engine.gradients, "weights": weights}, directory / f"{case.name}.pt")
        told = [
            {"stats": dict(u.stats), "grad_norm": u.grad_norm, "gap": u.behavior_gap, "computed": u.tokens_computed}
            for u in updates
        ]
        (directory / f"{case.name}.json").write_text(json.dumps({"updates": told, "probe": probe, "alike": alike}))
    engine.export_model(directory / f"{case.name}-export")
    _checkpoint(case, engine, learner, gang, directory)


def _checkpoint(case: Case, engine: Recording, learner: Learner, gang: Gang, directory: Path) -> None:
    """Save, train on, load the saved state again, train on: the same weights both times."""
    if case.name not in RESUMED:
        return
    settings = ZeroSettings(stage=case.stage, attention="sdpa", deepspeed=EVERYTHING_SHARDED)
    outcomes = []
    for resumed in (False, True):
        source = directory / (f"{case.name}-saved" if resumed else f"{case.name}-export")
        fresh = ZeroEngine(source, settings, gang)
        learner = Learner(fresh, PolicyObjective(), temperature=TEMPERATURE)
        if resumed:
            fresh.load_state(directory / f"{case.name}-state")
        for version in range(1 if resumed else 0, 2):
            if version == 1 and not resumed:
                fresh.export_model(directory / f"{case.name}-saved")
                fresh.save_state(directory / f"{case.name}-state")
            part = part_of(gang, make_batch(version, case))
            masks = loss_masks(part.samples, part.mask_staleness, version)
            learner.train_piece(part, masks, version, 1e-2)
        outcomes.append({n: t.clone() for ns, ts in fresh.buckets(9999) for n, t in zip(ns, ts, strict=True)})
    if gang.rank == 0:
        torch.save(outcomes, directory / f"{case.name}-resumed.pt")


def train_all(gang: Gang, directory: Path, names: Sequence[str]) -> None:
    (directory / f"listening-{gang.rank}.json").write_text(json.dumps(list(listening([os.getpid()]))))
    for case in CASES:
        if case.name in names:
            train(case, gang, directory)


if __name__ == "__main__":
    as_rank(train_all)
