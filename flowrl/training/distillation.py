"""On-policy distillation: a teacher scores each of the student's own tokens.

There are two methods. The first uses only the sampled token: advantages for a `PolicyObjective`, at the cost of
one logprob per token. The second is exact and uses the whole next-token distribution: for `ReverseKL` a sample
carries the teacher's last hidden state of each token, and every trainer rank has the teacher's output layer.

Axes: B samples, T tokens: of one sample with its prompt, or policy tokens of the longest sample.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from flowrl.errors import ConfigError, FlowrlError
from flowrl.messages import Bool, Float32, Trainable
from flowrl.training.advantages import Array
from flowrl.training.objectives import Column, LossInputs, Totals
from flowrl.training.settings import Head

if TYPE_CHECKING:
    from torch import Tensor


def distillation_advantages(teacher_logprobs_T: Float32, behavior_logprobs_T: Float32, policy_mask_T: Bool) -> Array:
    """A_t = log π_teacher − log π_b at each policy token, 0 elsewhere.

    Each token is treated separately, without a return-to-go: the expected policy gradient is that of the
    reverse KL of each next token, KL(π‖π_teacher), at the prefixes that the student visits (2306.13649).
    """
    gap_T = teacher_logprobs_T.astype(np.float64) - behavior_logprobs_T
    return np.where(policy_mask_T, gap_T, 0.0)


@dataclass(frozen=True)
class ReverseKL:
    """Σ_v π(v) (log π(v) − log π_teacher(v)) at every policy token, over the full vocabulary.

    The gradient is exact for the sampled prefixes; the distribution of the prefixes is not differentiated.
    """

    aggregation: str = "token"
    """token | sequence"""
    negate: bool = False
    """A control: the student is driven away from the teacher."""

    def __post_init__(self) -> None:
        if self.aggregation not in ("token", "sequence"):
            raise ConfigError(f"aggregation is {self.aggregation!r}; choose token or sequence")

    @property
    def head(self) -> Head:
        return "lm"

    at_end = False
    offline = False
    needs_proximal = False
    needs_reference = False
    needs_mismatched = False
    needs_entropy_gradient = True
    """The entropy it sees is relative to the teacher: −KL."""
    stats = ("reverse_kl",)

    def enough(self, totals: Totals) -> bool:
        return totals.num_tokens > 0

    def columns(self, sample: Trainable) -> Column:
        if sample.sample_id and sample.teacher_hidden is None:
            raise FlowrlError(
                f"sample {sample.sample_id!r} carries no hidden states of a teacher: the exact reverse KL needs a "
                "Teacher node with exact=True between generator and trainer"
            )
        return {}

    def loss(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        from flowrl.training.policy_losses import aggregate

        kl_BT, num_tokens = -inputs.entropies_BT, inputs.totals.num_tokens
        loss = aggregate(
            kl_BT,
            inputs.mask_BT,
            self.aggregation,  # type: ignore[arg-type]
            num_tokens=num_tokens,
            num_sequences=inputs.totals.num_sequences,
        )
        stats = {"reverse_kl": aggregate(kl_BT.detach(), inputs.mask_BT, num_tokens=num_tokens)}
        return (-loss if self.negate else loss), stats
