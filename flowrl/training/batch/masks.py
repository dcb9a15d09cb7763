"""Which tokens of a sample enter the loss: masks over all its sequences, one after the other."""

from __future__ import annotations

from collections.abc import Sequence

from flowrl.messages import Bool, Trainable


def trained_mask(sample: Trainable) -> Bool:
    """The tokens of `sample` that enter the loss, before staleness masking by the trainer."""
    return sample.whole_mask if sample.loss_mask is None else sample.loss_mask


def loss_masks(samples: Sequence[Trainable], mask_staleness: int, version: int) -> list[Bool]:
    """The tokens of each sample that enter the loss in an update of `version`; -1 masks no token by age.

    Tokens of data, which no version has sampled, have no age.
    """
    masks = [trained_mask(sample) for sample in samples]
    if mask_staleness < 0:
        return masks
    return [
        mask & ((version - s.whole_versions <= mask_staleness) | (s.whole_versions < 0))
        for s, mask in zip(samples, masks, strict=True)
    ]
