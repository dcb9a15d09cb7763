"""Objectives with one term for each token, as plain data: supervised finetuning, exact distillation, a critic's values,
and the steps of a process reward model.

Exact distillation compares the student's whole next-token distribution with a teacher's.

A sample carries the teacher's last hidden state of each token, and every trainer rank has the teacher's output
layer. The method that uses only the sampled token is `flowrl.training.advantages.distillation_advantages`.

Axes: B samples, T policy tokens of the longest one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from flowrl.errors import ConfigError, FlowrlError
from flowrl.messages import Trainable
from flowrl.training.loss.objective import LossInputs, MeanOver, Objective, SampleColumns
from flowrl.training.settings import Head

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class SFTObjective(Objective):
    """Maximum likelihood of the tokens in the loss mask."""

    aggregation: str = "token"
    """token | sequence"""

    def __post_init__(self) -> None:
        if self.aggregation not in ("token", "sequence"):
            raise ConfigError(f"aggregation is {self.aggregation!r}; choose token or sequence")

    offline = True
    stats = ("entropy",)

    @property
    def mean_over(self) -> MeanOver:
        return "tokens" if self.aggregation == "token" else "sequences"

    def loss(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        from flowrl.training.loss.loss_formulas import aggregate_terms

        loss = aggregate_terms(
            -inputs.logprobs_BT,
            inputs.mask_BT,
            self.aggregation,  # type: ignore[arg-type]
            num_tokens=inputs.totals.num_tokens,
            num_sequences=inputs.totals.num_sequences,
        )
        entropy = aggregate_terms(inputs.entropies_BT.detach(), inputs.mask_BT, num_tokens=inputs.totals.num_tokens)
        return loss, {"entropy": entropy}


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

    def columns(self, sample: Trainable) -> SampleColumns:
        if sample.sample_id and sample.teacher_hidden is None:
            raise FlowrlError(
                f"sample {sample.sample_id!r} has no hidden states of a teacher: comparing whole distributions needs "
                "a Teacher node with exact=True between generator and trainer"
            )
        return {}

    def loss(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        from flowrl.training.loss.loss_formulas import aggregate_terms

        kl_BT, num_tokens = -inputs.entropies_BT, inputs.totals.num_tokens
        loss = aggregate_terms(
            kl_BT,
            inputs.mask_BT,
            self.aggregation,  # type: ignore[arg-type]
            num_tokens=num_tokens,
            num_sequences=inputs.totals.num_sequences,
            sample_tokens_B=inputs.sample_tokens_B,
        )
        stats = {self.figure: aggregate_terms(kl_BT.detach(), inputs.mask_BT, num_tokens=num_tokens)}
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


@dataclass(frozen=True)
class ValueObjective(Objective):
    """0.5·(V − R)², clipped around the values from which the batch's advantages were made (2017, PPO's `vf_clip`)."""

    clip: float | None = 0.2
    """How far V may move from the old value before the loss stops rewarding it; None does not clip."""

    def __post_init__(self) -> None:
        if self.clip is not None and not self.clip > 0:
            raise ConfigError(f"the value clip is {self.clip}; it has to be above 0, or None for no clip")

    @property
    def head(self) -> Head:
        return "scalar"

    mean_over: ClassVar[MeanOver] = "tokens"
    stats = ("clip_fraction", "value_mean", "value_error")

    def columns(self, sample: Trainable) -> SampleColumns:
        if sample.values is None or sample.returns is None:
            raise FlowrlError(
                f"sample {sample.sample_id!r} has no old values and returns, on which a critic is trained: use the "
                "estimator 'gae' and connect the batcher to a Critic node"
            )
        return {"old_values": sample.values, "returns": sample.returns}

    def loss(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        from flowrl.training.loss.loss_formulas import value_loss

        return value_loss(
            inputs.values_BT,
            inputs.columns["old_values"],
            inputs.columns["returns"],
            inputs.mask_BT,
            clip=self.clip,
            num_tokens=inputs.totals.num_tokens,
        )


@dataclass(frozen=True)
class StepCorrectness(Objective):
    """Binary cross-entropy of σ(score) with each step's label, the mean over steps (arXiv 2305.20050)."""

    head: ClassVar[Head] = "scalar"
    offline = True
    mean_over: ClassVar[MeanOver] = "tokens"
    stats = ("step_accuracy", "step_score", "right_steps")

    def columns(self, sample: Trainable) -> SampleColumns:
        if sample.returns is None:
            raise FlowrlError(f"sample {sample.sample_id!r} has no labels of its steps in `returns`; use StepDataset")
        return {"labels": sample.returns}

    def loss(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        from torch.nn.functional import binary_cross_entropy_with_logits

        labels_BT, mask_BT = inputs.columns["labels"], inputs.mask_BT
        scores_BT, num_steps = inputs.values_BT, inputs.totals.num_tokens
        terms_BT = binary_cross_entropy_with_logits(scores_BT, labels_BT, reduction="none")
        right_BT = (scores_BT.detach() > 0) == (labels_BT > 0.5)
        return (terms_BT * mask_BT).sum() / num_steps, {
            "step_accuracy": (right_BT & mask_BT).sum() / num_steps,
            "step_score": (scores_BT.detach().sigmoid() * mask_BT).sum() / num_steps,
            "right_steps": (labels_BT * mask_BT).sum() / num_steps,
        }
