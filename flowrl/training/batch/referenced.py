"""Reference logprobs from the trainer itself: with the adapter off, its model is the reference.

Collective and in lockstep, like training: every rank processes its micro-batches, empty ones on padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from flowrl.messages import Batch, Bool, Float32, Int32, Trainable
from flowrl.training.batch.micro_batch import PADDING
from flowrl.training.engine.zero import ZeroEngine
from flowrl.training.layouts import Placing
from flowrl.training.model.row_layout import lay_out, policy_places


def with_reference(engine: ZeroEngine, part: Batch, layout: Placing, *, mismatched: bool, temperature: float) -> Batch:
    """`part` with `ref_logprobs` in every sample, and in its mismatched completion if the objective reads those.

    Returned unchanged if no rank has a sample that lacks them.
    """
    lacking = any(sample.ref_logprobs is None for sample in part.samples)
    if not any(engine.gang.gather(lacking)):
        return part
    samples = list(part.samples)
    for indices in part.micro_batches:
        chosen = [part.samples[i] for i in indices] or [PADDING]
        found = _reference(engine, layout, [s.token_ids for s in chosen], [s.policy_mask for s in chosen], temperature)
        referenced = [replace(s, ref_logprobs=ref) for s, ref in zip(chosen, found, strict=True)]
        if mismatched:
            referenced = _mismatched(engine, layout, referenced, temperature)
        for index, sample in zip(indices, referenced, strict=False):
            samples[index] = sample
    return replace(part, samples=tuple(samples))


def _mismatched(
    engine: ZeroEngine, layout: Placing, samples: Sequence[Trainable], temperature: float
) -> list[Trainable]:
    """Add reference logprobs to mismatched completions. A sample without one uses its own tokens in the pass."""
    others = [sample.mismatched for sample in samples]
    tokens = [s.token_ids if m is None else m.token_ids for s, m in zip(samples, others, strict=True)]
    masks = [s.policy_mask if m is None else m.mask for s, m in zip(samples, others, strict=True)]
    found = _reference(engine, layout, tokens, masks, temperature)
    return [
        sample if other is None else replace(sample, mismatched=replace(other, ref_logprobs=ref))
        for sample, other, ref in zip(samples, others, found, strict=True)
    ]


def _reference(
    engine: ZeroEngine, layout: Placing, token_ids: Sequence[Int32], masks: Sequence[Bool], temperature: float
) -> list[Float32]:
    """log p of the marked tokens of each sequence without the adapter, at their positions; 0 elsewhere."""
    rows = lay_out(token_ids, masks, layout=layout, device=engine.device)
    with torch.no_grad(), engine.adapter_off():
        logprobs_N, _ = engine.forward(rows, temperature=temperature)
    places = [policy_places(mask) for mask in masks]
    parts = np.split(logprobs_N.float().cpu().numpy(), np.cumsum([len(where) for where in places])[:-1])
    found = [np.zeros(len(tokens), np.float32) for tokens in token_ids]
    for ref_logprobs, where, part in zip(found, places, parts, strict=True):
        ref_logprobs[where] = part
    return found
