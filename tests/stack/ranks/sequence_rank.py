"""One of four ZeRO ranks of the tests of ranks that share micro-batches, started by `tests.stack.ranks.ranks`.

Trains the cases of four ranks as `tests.stack.ranks.training_rank` does, and writes the gradients of one step of other
objectives: each rank with micro-batches of its own, and two or four with the same ones. One of them trains an adapter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flowrl.messages import Batch, Mismatched, Trainable
from flowrl.training.engine.gang import Gang
from flowrl.training.learner import Learner
from flowrl.training.loss.objective import Objective, loss_masks
from flowrl.training.loss.policy_objective import PolicyObjective
from flowrl.training.loss.preference_objectives import BradleyTerry, DPOObjective, KTOObjective
from flowrl.training.loss.token_objectives import ReverseKL, SFTObjective, ValueObjective
from flowrl.training.model.policy_model import OutputLayer
from flowrl.training.settings import LoRA, SequenceKind, ZeroSettings
from tests.oracle.rank import SHARDED
from tests.stack.ranks.ranks import as_rank
from tests.stack.ranks.training_rank import EVERYTHING_SHARDED, Recording, part_of, sharing, train
from tests.training.training_cases import FOUR, FOUR_DIVIDED, VOCABULARY, Case, make_batch

TEACHER = 6
"""Hidden size of the teacher."""


@dataclass(frozen=True)
class Learnt:
    """An objective, and whether its samples are pairs."""

    objective: Objective
    pairs: bool = False
    layout: Any = "rows"
    lora: LoRA = LoRA()


OBJECTIVES = {
    "gspo": Learnt(PolicyObjective("gspo", aggregation="sequence", correction=None)),
    "sft": Learnt(SFTObjective(), layout="tree"),
    "dpo": Learnt(DPOObjective(), pairs=True),
    "kto": Learnt(KTOObjective(), pairs=True),
    "teacher": Learnt(ReverseKL(aggregation="sequence")),
    "values": Learnt(ValueObjective()),
    "scores": Learnt(BradleyTerry(), pairs=True, layout="tree"),
    "adapter": Learnt(PolicyObjective(kl_coef=0.3), lora=LoRA(rank=4)),
}


def batch_of(learnt: Learnt) -> Batch:
    """The first two samples have no token in the loss. Without pairs, most micro-batches are a single sequence."""
    batch = make_batch(1, Case("", layout=learnt.layout, token_budget=50 if learnt.pairs else 24))
    samples = [_prepared(sample, number, learnt) for number, sample in enumerate(batch.samples)]
    if learnt.objective.needs_mismatched:
        others = [Mismatched(s.token_ids, s.policy_mask, s.ref_logprobs) for s in samples]
        samples = [replace(s, mismatched=other) for s, other in zip(samples, others[1:] + others[:1], strict=True)]
    return replace(batch, samples=tuple(samples))


def _prepared(sample: Trainable, number: int, learnt: Learnt) -> Trainable:
    draw, size = np.random.default_rng(number), sample.token_ids.size
    column = np.where(sample.policy_mask, draw.normal(size=size), 0).astype(np.float32)
    hidden = draw.normal(size=(int(sample.policy_mask.sum()), TEACHER)).astype(np.float32)
    marks = {"pair": str(number // 2), "label": 1 - 2 * (number % 2)} if learnt.pairs else {}
    masked = sample.policy_mask & (number >= 2)
    marks |= {"ref_logprobs": None} if learnt.lora.rank else {}
    return replace(sample, values=column, returns=column[::-1].copy(), teacher_hidden=hidden, loss_mask=masked, **marks)


def gradients(learnt: Learnt, engine: Recording, gang: Gang) -> list[dict[str, Any]]:
    """Of the same step without sharing, by groups of two and four, and as a ring of four; with the metrics of each."""
    ways: list[tuple[int, SequenceKind]] = [(1, "ulysses"), (2, "ulysses"), (4, "ulysses"), (4, "ring")]
    layout = engine.layout
    taught = OutputLayer(torch.randn(VOCABULARY, TEACHER, generator=torch.Generator().manual_seed(0)), None)
    found = []
    for size, kind in ways:
        engine.gang, engine.gradients = sharing(gang, size, kind), []
        engine.layout = "padded" if kind == "ring" else layout
        teacher = taught if isinstance(learnt.objective, ReverseKL) else None
        batch = batch_of(learnt)
        part = part_of(engine.gang, replace(batch, layout="rows") if kind == "ring" else batch)
        learner, masks = Learner(engine, learnt.objective, teacher=teacher), loss_masks(part.samples, -1, 1)
        if learnt.lora.rank and size == 1:  # one matrix of an adapter is 0 at first, and the other has no gradient
            learner.train_piece(part, masks, 0, 1.0)
            engine.gradients = []
        update = learner.train_piece(part, masks, 1, 0.0)
        found.append({"gradients": engine.gradients[0], "stats": dict(update.stats), "passes": update.token_passes})
    engine.layout = layout
    return found


def work(gang: Gang, directory: Path, names: Sequence[str]) -> None:
    for case in FOUR:
        if case.name in names:
            train(case, gang, directory)
    for head, model, lora in (("lm", "untied", LoRA()), ("lm", "untied", LoRA(rank=4)), ("scalar", "scored", LoRA())):
        asked = {name: OBJECTIVES[name] for name in OBJECTIVES if name in names}
        asked = {name: one for name, one in asked.items() if (one.objective.head, one.lora) == (head, lora)}
        if not asked:
            continue
        torch.manual_seed(5)
        # The matrices of a layer are gathered together, which is quicker. DeepSpeed cannot with an adapter.
        sharded = EVERYTHING_SHARDED if lora.rank else SHARDED
        zero = ZeroSettings(optimizer="sgd", clip_grad_norm=0.0, attention="sdpa", deepspeed=sharded)
        engine = Recording(directory / model, zero, sharing(gang, 4), head=head, lora=lora)
        for name, learnt in asked.items():
            found = gradients(learnt, engine, gang)
            if gang.rank == 0:
                torch.save(found, directory / f"{name}.pt")
    for case in FOUR_DIVIDED:  # last, as in CASES
        if case.name in names:
            train(case, gang, directory)


if __name__ == "__main__":
    as_rank(work)
