"""The probe: four fixed sequences whose logprobs the trainer publishes and every generator checks.

A generator that loaded a version wrongly (a stale head, a swapped tensor, another tokenizer's padding)
still produces fluent text and plausible logprobs. Only the comparison with the trainer shows the error.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from flowrl.errors import FlowrlError
from flowrl.messages import Weights

TOLERANCE = {"float32": 0.001, "float16": 0.05, "bfloat16": 0.25}
"""Largest permitted mean |difference| of the probe's logprobs, by the generator's dtype.

Measured: 2e-6 for a small model in float32; 0.1 for SmolLM2 between bfloat16 and float32, with 0.5 at
single tokens. That is why the mean is compared, and not the largest difference.
"""
_LENGTHS = (5, 11, 17, 24)


class ProbeMismatch(FlowrlError):
    """A generator's logprobs of the probe differ from the trainer's by more than the tolerance."""


@lru_cache
def probe_sequences(vocab_size: int) -> tuple[tuple[int, ...], ...]:
    """Four sequences of token ids, always the same for one vocabulary size."""
    draw = np.random.default_rng(20240229)
    return tuple(tuple(int(t) for t in draw.integers(0, vocab_size, length)) for length in _LENGTHS)


def mismatch(manifest: Weights, found: Sequence[Sequence[float]]) -> float:
    """Mean absolute difference between the manifest's probe logprobs and `found`, over all tokens."""
    rows = zip(manifest.probe_logprobs, found, strict=True)
    return float(np.mean(np.abs(np.concatenate([np.subtract(expected, scored) for expected, scored in rows]))))


def check(manifest: Weights, found: Sequence[Sequence[float]], *, dtype: str, replica: str) -> float:
    """Return the mismatch. Raises ProbeMismatch if it is above the tolerance of `dtype`, or NaN."""
    difference = mismatch(manifest, found)
    if difference <= TOLERANCE[dtype]:
        return difference
    raise ProbeMismatch(
        f"{replica} loaded version {manifest.version} of {manifest.policy!r}, but its logprobs of the probe "
        f"sequences differ from the trainer's by {difference:.4g} on average; with {dtype}, rounding "
        f"explains up to {TOLERANCE[dtype]:g}. The generator does not hold the trainer's weights: further sampling "
        "would train on wrong behavior logprobs. Usual causes: a layer that vLLM keeps in a packed copy was "
        "not refreshed, trainer and generator were given different models, or a quantized or LoRA engine "
        "option is set."
    )
