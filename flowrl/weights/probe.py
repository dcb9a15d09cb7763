"""The probe: four fixed sequences whose logprobs the trainer publishes and every generator checks.

A generator that loaded a version wrongly (a stale head, a swapped tensor, another tokenizer's padding)
still produces fluent text and plausible logprobs. Only the comparison with the trainer shows the error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from flowrl.errors import FlowrlError
from flowrl.messages import Weights

TOLERANCE = {"float32": 0.001, "float16": 0.05, "bfloat16": 0.25}
"""Largest permitted mean |difference| of the probe's logprobs, by the coarser dtype of trainer and generator.

Measured: 2e-6 for a small model in float32; 0.1 for SmolLM2 between bfloat16 and float32, with 0.5 at
single tokens. That is why the mean is compared, and not the largest difference.
"""
TF32_TOLERANCE = 0.01
"""The same for float32 on a GPU, where Triton's attention multiplies in TF32: 0.0018 measured for a small model."""
FP8_TOLERANCE = 2.0
"""The same for the first probe of an engine whose matrices are in fp8: three times SmolLM2's 0.66 (vLLM's CPU build,
fp8_per_channel, bfloat16 otherwise; 0.18 on text). That finds only gross mismatches, such as another model. Later
probes may differ by DRIFT times the first difference or by TOLERANCE, if that is more; a stale scale may stay below
that."""
DRIFT = 3.0
"""Multiple of the first probe's difference that later probes may have: sharper distributions round more coarsely."""
_LENGTHS = (5, 11, 17, 24)
PROBE_TOKENS = max(_LENGTHS)
"""Tokens of the probe's longest sequence."""


class ProbeMismatch(FlowrlError):
    """A generator's logprobs of the probe differ from the trainer's by more than the tolerance."""


@lru_cache
def probe_sequences(vocab_size: int) -> tuple[tuple[int, ...], ...]:
    """Four sequences of token ids, always the same for one vocabulary size."""
    draw = np.random.default_rng(20240229)
    return tuple(tuple(int(t) for t in draw.integers(0, vocab_size, length)) for length in _LENGTHS)


def mean_mismatch(manifest: Weights, found: Sequence[Sequence[float]]) -> float:
    """Mean absolute difference between the manifest's probe logprobs and `found`, over all tokens."""
    rows = zip(manifest.probe_logprobs, found, strict=True)
    return float(np.mean(np.abs(np.concatenate([np.subtract(expected, scored) for expected, scored in rows]))))


def coarser_dtype(manifest: Weights, dtype: str) -> str:
    """The coarser of `dtype` and those of the published tensors."""
    known = {dtype, *manifest.tensors.dtypes} & TOLERANCE.keys()
    return max(known, key=lambda name: TOLERANCE[name])


@dataclass
class ProbeCheck:
    """Compares the probes of one replica. `tolerance` replaces the one that follows from dtype and quantization."""

    replica: str
    dtype: str
    on_gpu: bool = False
    tolerance: float | None = None
    quantization: str = ""
    first: float | None = None
    """The difference at the first probe, when trainer and replica have just loaded the same weights."""

    def check(self, manifest: Weights, found: Sequence[Sequence[float]]) -> float:
        """Return the mismatch. Raises ProbeMismatch if it is above the tolerance, or NaN."""
        difference = mean_mismatch(manifest, found)
        limit, why = self._find_limit(coarser_dtype(manifest, self.dtype))
        if not difference <= limit:
            if self.first is None:
                cause = (
                    "It is the first probe, so usual causes are: trainer and generator were given different models, or "
                    "an engine option (--engine.extra) changes what is computed"
                )
            else:
                cause = (
                    f"The first probe differed by {self.first:.2g}, so the usual cause is a layer that the updates "
                    "since then did not refresh, such as a layer of which vLLM keeps a packed copy"
                )
            raise ProbeMismatch(
                f"{self.replica} loaded version {manifest.version} of {manifest.policy!r}, but its logprobs of the "
                f"probe sequences differ from the trainer's by {difference:.4g} on average; {why} up to {limit:g}. "
                "The generator does not hold the trainer's weights: further sampling would train on wrong behavior "
                f"logprobs. {cause}; if the difference is known and harmless, raise probe_tolerance"
            )
        if self.first is None:
            self.first = difference
        return difference

    def _find_limit(self, dtype: str) -> tuple[float, str]:
        """(largest difference, what allows it)"""
        if self.tolerance is not None:
            return self.tolerance, "probe_tolerance allows"
        limit, why = TOLERANCE[dtype], f"with {dtype}, rounding explains"
        if dtype == "float32" and self.on_gpu:
            limit, why = TF32_TOLERANCE, "with float32 on a GPU, attention in TF32 explains"
        if self.quantization and self.first is None:
            limit, why = FP8_TOLERANCE, f"with weights in {self.quantization}, rounding explains"
        if self.first is not None and DRIFT * self.first > limit:
            limit, why = DRIFT * self.first, f"the first probe differed by {self.first:.2g}, which explains"
        return limit, why
