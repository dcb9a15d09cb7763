"""Exact distillation: the loss compares the student's whole next-token distribution with a teacher's.

A sample carries the teacher's last hidden state of each token, and every trainer rank has the teacher's output
layer. The method that uses only the sampled token is `flowrl.training.advantage.advantages.distillation_advantages`.

Axes: B samples, T policy tokens of the longest one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from flowrl.errors import ConfigError, FlowrlError
from flowrl.messages import Trainable
from flowrl.training.loss.objective import Column, LossInputs, MeanOver, Objective

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class ReverseKL(Objective):
    """Σ_v π(v) (log π(v) − log π_teacher(v)) at every policy token, over the full vocabulary.

    The gradient is exact for the sampled prefixes; the distribution of the prefixes is not differentiated.
    """

    aggregation: str = "token"
    """token | sequence"""
    negate: bool = False
    """For a control experiment: the student moves away from the teacher."""

    def __post_init__(self) -> None:
        if self.aggregation not in ("token", "sequence"):
            raise ConfigError(f"aggregation is {self.aggregation!r}; choose token or sequence")

    needs_proximal = False
    needs_entropy_gradient = True
    """`entropies_BT` are relative to the teacher: minus the divergence."""
    figure: ClassVar[str] = "reverse_kl"
    beta: ClassVar[float] = 1.0
    """The β for which `GeneralizedJSD` is this divergence."""

    @property
    def mean_over(self) -> MeanOver:
        return "tokens" if self.aggregation == "token" else "sequences"

    @property
    def stats(self) -> tuple[str, ...]:
        return (self.figure,)

    def columns(self, sample: Trainable) -> Column:
        if sample.sample_id and sample.teacher_hidden is None:
            raise FlowrlError(
                f"sample {sample.sample_id!r} has no hidden states of a teacher: comparing whole distributions needs "
                "a Teacher node with exact=True between generator and trainer"
            )
        return {}

    def loss(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        from flowrl.training.loss.policy_losses import aggregate

        kl_BT, num_tokens = -inputs.entropies_BT, inputs.totals.num_tokens
        loss = aggregate(
            kl_BT,
            inputs.mask_BT,
            self.aggregation,  # type: ignore[arg-type]
            num_tokens=num_tokens,
            num_sequences=inputs.totals.num_sequences,
            sample_tokens_B=inputs.sample_tokens_B,
        )
        stats = {self.figure: aggregate(kl_BT.detach(), inputs.mask_BT, num_tokens=num_tokens)}
        return (-loss if self.negate else loss), stats


@dataclass(frozen=True)
class GeneralizedJSD(ReverseKL):
    """The generalized Jensen-Shannon divergence of GKD (arXiv 2306.13649) at every policy token.

    β·KL(π_teacher‖m) + (1 − β)·KL(π‖m) with m = β·π_teacher + (1 − β)·π; for β = 0 the forward KL, for 1 the reverse.
    """

    beta: float = 0.5  # type: ignore[misc]
    """0: the forward KL KL(π_teacher‖π); 1: the reverse KL."""

    figure: ClassVar[str] = "jsd"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.beta <= 1:
            raise ConfigError(f"beta is {self.beta}; it has to be from 0 to 1")
