"""The objectives of DPO's variants, of KTO and of a reward model, as plain data; the formulas are in
`flowrl.training.loss.loss_formulas`.

DPO and KTO compare the policy with reference logprobs stored in the samples, and they need the logprob of
a whole completion, so a pair stays in one micro-batch and a sample is never split.

Axes: B samples, T policy tokens of the longest one, P pairs of the micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from flowrl.errors import ConfigError, FlowrlError
from flowrl.messages import Trainable
from flowrl.training.loss.objective import LossInputs, MeanOver, Objective, SampleColumns, Totals
from flowrl.training.settings import Head

if TYPE_CHECKING:
    from torch import Tensor


KINDS = ("dpo", "ipo", "cdpo")


@dataclass(frozen=True)
class DPOObjective(Objective):
    """Direct preference optimization (2305.18290) on neighbouring samples of one `pair`, labelled 1 and -1."""

    beta: float = 0.1
    """How strongly the policy is kept near the reference; for IPO, the regularisation τ."""
    kind: str = "dpo"
    """dpo | ipo (uses means per token, 2310.12036) | cdpo (with label_smoothing)"""
    label_smoothing: float = 0.0
    """For cdpo: the share of pairs assumed to have chosen and rejected swapped, below 0.5."""
    nll_coef: float = 0.0
    """Weight of the negative log likelihood of the chosen completions, a mean per token (2404.19733)."""
    online: bool = False
    """The pairs are rollouts: the graph's staleness limit applies to them, and their staleness is reported."""

    needs_proximal = False
    needs_reference = True
    mean_over: ClassVar[MeanOver] = "pairs"
    stats = (
        "entropy",
        "preference_accuracy",
        "reward_margin",
        "chosen_reward",
        "rejected_reward",
        "chosen_logprob_change",
        "rejected_logprob_change",
        "chosen_nll",
    )

    def __post_init__(self) -> None:
        _check_positive("beta", self.beta)
        if self.kind not in KINDS:
            raise ConfigError(f"kind is {self.kind!r}; choose one of {', '.join(KINDS)}")
        if not 0 <= self.label_smoothing < 0.5:
            raise ConfigError(f"label_smoothing is {self.label_smoothing}; it has to be from 0 to below 0.5")
        if (self.kind == "cdpo") != (self.label_smoothing > 0):
            raise ConfigError(
                f"kind is {self.kind!r} and label_smoothing {self.label_smoothing}; kind='cdpo' needs a "
                "label_smoothing above 0, such as 0.1, and the other kinds need 0"
            )
        if not self.nll_coef >= 0:
            raise ConfigError(f"nll_coef is {self.nll_coef}; it has to be 0 or more")

    @property
    def offline(self) -> bool:
        return not self.online

    def enough(self, totals: Totals) -> bool:
        return totals.num_pairs > 0

    def columns(self, sample: Trainable) -> SampleColumns:
        return _reference_column(sample)

    def loss(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        from flowrl.training.loss.loss_formulas import dpo_losses

        change_B, logprob_B, length_B = sum_by_sequence(inputs)
        chosen, rejected = inputs.pairs_P2.unbind(dim=1)
        compared_B = change_B / length_B if self.kind == "ipo" else change_B
        h_P = compared_B[chosen] - compared_B[rejected]
        num_pairs = inputs.totals.num_pairs
        losses_P = dpo_losses(h_P, beta=self.beta, kind=self.kind, label_smoothing=self.label_smoothing)  # type: ignore[arg-type]
        nll_P = -(logprob_B / length_B)[chosen]
        loss = (losses_P + self.nll_coef * nll_P).sum() / num_pairs
        h_P, compared_B, change_B = h_P.detach(), compared_B.detach(), change_B.detach()
        means = {
            "preference_accuracy": (h_P > 0).to(h_P.dtype),
            "reward_margin": self.beta * h_P,
            "chosen_reward": self.beta * compared_B[chosen],
            "rejected_reward": self.beta * compared_B[rejected],
            "chosen_logprob_change": change_B[chosen],
            "rejected_logprob_change": change_B[rejected],
            "chosen_nll": nll_P.detach(),
        }
        return loss, mean_entropy(inputs) | {name: values_P.sum() / num_pairs for name, values_P in means.items()}


@dataclass(frozen=True)
class KTOObjective(Objective):
    """Kahneman–Tversky optimization (2402.01306) on single completions, labelled 1 or -1.

    The baseline z0 is one number for each optimizer step, from the mismatched completions, without gradient.
    """

    beta: float = 0.1
    desirable_weight: float = 1.0
    """λ_D"""
    undesirable_weight: float = 1.0
    """λ_U"""

    offline = True
    needs_reference = True
    needs_mismatched = True
    stats = (
        "entropy",
        "z0",
        "desirable_reward",
        "undesirable_reward",
        "desirable_logprob_change",
        "undesirable_logprob_change",
        "desirable_share",
        "label_accuracy",
        "preference_accuracy",
        "reward_margin",
    )

    def __post_init__(self) -> None:
        for name in ("beta", "desirable_weight", "undesirable_weight"):
            _check_positive(name, getattr(self, name))

    def enough(self, totals: Totals) -> bool:
        """False for a single sequence: it has no mismatched completion."""
        return totals.num_sequences >= 2

    def columns(self, sample: Trainable) -> SampleColumns:
        return _reference_column(sample)

    def loss(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        from flowrl.training.loss.loss_formulas import kto_losses

        change_B, _, _ = sum_by_sequence(inputs)
        trained_B = inputs.mask_BT.any(dim=1)
        desirable_B = inputs.labels_B > 0
        z0 = change_B.new_tensor(max(0.0, inputs.mismatched_kl))
        losses_B = kto_losses(
            change_B,
            desirable_B,
            z0,
            beta=self.beta,
            desirable_weight=self.desirable_weight,
            undesirable_weight=self.undesirable_weight,
        )
        num = inputs.totals.num_sequences
        loss = (losses_B * trained_B).sum() / num

        change_B, totals = change_B.detach(), inputs.totals
        stats = mean_entropy(inputs) | {
            "z0": z0 * trained_B.sum() / num,
            "desirable_share": (desirable_B & trained_B).sum() / num,
            "label_accuracy": (((change_B > z0) == desirable_B) & trained_B).sum() / num,
        }
        if totals.num_pairs:
            chosen, rejected = inputs.pairs_P2.unbind(dim=1)
            h_P = change_B[chosen] - change_B[rejected]
            stats["preference_accuracy"] = (h_P > 0).sum() / totals.num_pairs
            stats["reward_margin"] = self.beta * h_P.sum() / totals.num_pairs
        sides = {
            "desirable": (desirable_B & trained_B, totals.num_desirable),
            "undesirable": (~desirable_B & trained_B, num - totals.num_desirable),
        }
        for side, (rows_B, number) in sides.items():
            if number:
                change = (change_B * rows_B).sum() / number
                stats |= {f"{side}_reward": self.beta * change, f"{side}_logprob_change": change}
        return loss, stats


def _check_positive(name: str, value: float) -> None:
    if not 0 < value < float("inf"):
        raise ConfigError(f"{name} is {value}; it has to be a number above 0")


def _reference_column(sample: Trainable) -> SampleColumns:
    if sample.ref_logprobs is None:
        raise FlowrlError(
            f"sample {sample.sample_id!r} has no reference logprobs, which the objective compares with the policy's: "
            "connect a PreferenceReference node (for rollouts: a Reference) before the batcher, or train with LoRA, "
            "whose base is the reference"
        )
    return {"ref_logprobs": sample.ref_logprobs}


def sum_by_sequence(inputs: LossInputs) -> tuple[Tensor, Tensor, Tensor]:
    """(log π/ref, log π, number of tokens) of each completion, end token included; [B] each."""
    kept_BT = inputs.logprobs_BT.where(inputs.mask_BT, 0.0)
    ref_BT = inputs.columns["ref_logprobs"].where(inputs.mask_BT, 0.0)
    return (kept_BT - ref_BT).sum(dim=1), kept_BT.sum(dim=1), inputs.mask_BT.sum(dim=1).clamp(min=1)


def mean_entropy(inputs: LossInputs) -> dict[str, Tensor]:
    from flowrl.training.loss.loss_formulas import aggregate_terms

    return {
        "entropy": aggregate_terms(inputs.entropies_BT.detach(), inputs.mask_BT, num_tokens=inputs.totals.num_tokens)
    }


@dataclass(frozen=True)
class BradleyTerry(Objective):
    """−log σ(chosen − rejected − margin) on neighbouring samples of one `pair`, scored at their last token."""

    margin: bool = False
    """Use each pair's margin (2307.09288) from the column `margin` of its row."""
    centring: float = 0.0
    """Weight of the mean of (chosen + rejected)², which keeps scores around 0."""

    head: ClassVar[Head] = "scalar"
    at_end = True
    offline = True
    mean_over: ClassVar[MeanOver] = "pairs"
    stats = ("preference_accuracy", "score_margin", "chosen_score", "rejected_score", "score_mean", "score_square")

    def __post_init__(self) -> None:
        if not 0 <= self.centring < float("inf"):
            raise ConfigError(f"centring is {self.centring}; it has to be 0 or more")

    def enough(self, totals: Totals) -> bool:
        return totals.num_pairs > 0

    def columns(self, sample: Trainable) -> SampleColumns:
        if not self.margin:
            return {}
        margin = sample.columns.get("margin", None if sample.label else 0.0)  # label 0: not in a pair, needs none
        if not isinstance(margin, int | float):
            raise FlowrlError(
                f"sample {sample.sample_id!r} has the margin {margin!r}; with margin=True every row of the pairs "
                "needs a column margin that holds a number"
            )
        return {"margin": np.full(len(sample.token_ids), margin, np.float32)}

    def loss(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        from flowrl.training.loss.loss_formulas import reward_model_loss

        chosen, rejected = inputs.pairs_P2.unbind(dim=1)
        scores_B, num_pairs = inputs.values_BT[:, 0], inputs.totals.num_pairs  # `at_end`: one value for each sequence
        margin_P = inputs.columns["margin"][chosen, 0] if self.margin else None
        loss, stats = reward_model_loss(
            scores_B[chosen], scores_B[rejected], margin_B=margin_P, centring=self.centring, num_pairs=num_pairs
        )
        both_P2 = scores_B.detach()[inputs.pairs_P2]
        return loss, {
            "preference_accuracy": stats["accuracy"],
            "score_margin": stats["margin"],
            "chosen_score": both_P2[:, 0].sum() / num_pairs,
            "rejected_score": both_P2[:, 1].sum() / num_pairs,
            "score_mean": both_P2.sum() / (2 * num_pairs),
            "score_square": both_P2.square().sum() / (2 * num_pairs),
        }
