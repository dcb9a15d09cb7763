"""A batch cut into pieces, as a batcher sends it while its groups are on their way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from flowrl.messages import Batch
from flowrl.training.learner import Learner, Update
from flowrl.training.loss.objective import loss_masks


def pieces_of(batch: Batch, sizes: Sequence[int]) -> list[Batch]:
    """`batch` in pieces of so many samples; the last has what is left, which may be nothing."""
    starts = [sum(sizes[:number]) for number in range(len(sizes) + 1)]
    return [
        replace(
            batch,
            samples=(samples := batch.samples[start : start + size if size else None]),
            num_sequences=len(samples),
            num_groups=len({sample.group_id for sample in samples}),
            piece=number,
            last=number == len(sizes),
            metrics=batch.metrics if number == len(sizes) else {},
        )
        for number, (start, size) in enumerate(zip(starts, (*sizes, 0), strict=True))
    ]


def train_in_pieces(learner: Learner, batch: Batch, sizes: Sequence[int], version: int, lr: float) -> Update:
    """This rank's share of a step with `batch` in pieces of so many samples."""
    update = None
    for piece in pieces_of(batch, sizes):
        assert update is None
        gang = learner.engine.gang
        part = piece.split(gang.size // gang.ranks_per_part)[gang.rank // gang.ranks_per_part]
        update = learner.train_piece(part, loss_masks(part.samples, part.mask_staleness, version), version, lr)
    assert update is not None
    return update
