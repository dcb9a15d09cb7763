"""The probe: four fixed sequences whose logprobs the trainer publishes and every generator checks.

A generator that loaded a version wrongly (a stale head, a swapped tensor, another tokenizer's padding)
goes on producing fluent text and plausible logprobs. Only the comparison with the trainer shows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from flowrl.errors import FlowrlError
from flowrl.messages import Weights

TOLERANCE = {"float32": 0.002, "float16": 0.1, "bfloat16": 0.75}
"""Largest |difference| of a probe logprob by the generator's dtype."""
_LENGTHS = (5, 11, 17, 24)


class ProbeMismatch(FlowrlError):
    """A generator's logprobs of the probe are not the trainer's."""


@lru_cache
def probe_sequences(vocab_size: int) -> tuple[tuple[int, ...], ...]:
    """Four sequences of token ids, the same for a vocabulary size for ever."""
    draw = np.random.default_rng(20240229)
    return tuple(tuple(int(t) for t in draw.integers(0, vocab_size, length)) for length in _LENGTHS)


def mismatch(manifest: Weights, found: Sequence[Sequence[float]]) -> float:
    """Largest absolute difference between the manifest's probe logprobs and `found`; NaN if one is."""
    rows = zip(manifest.probe_logprobs, found, strict=True)
    return float(np.max(np.abs(np.concatenate([np.subtract(expected, scored) for expected, scored in rows]))))


def check(manifest: Weights, found: Sequence[Sequence[float]], *, dtype: str, replica: str) -> float:
    """The mismatch, or ProbeMismatch if it is above the tolerance of `dtype` or no number at all."""
    worst = mismatch(manifest, found)
    if worst <= TOLERANCE[dtype]:
        return worst
    raise ProbeMismatch(
        f"{replica} loaded version {manifest.version} of {manifest.policy!r}, but its logprobs of the probe "
        f"sequences differ from the trainer's by up to {worst:.4g}; with {dtype} at most {TOLERANCE[dtype]:g} is "
        "rounding. The generator does not hold the trainer's weights: sampling on would train on wrong "
        "behavior logprobs. Usual causes: a layer that vLLM keeps in a packed copy was not refreshed, "
        "trainer and generator were given different models, or a quantized or LoRA engine option is set."
    )
