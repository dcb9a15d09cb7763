"""The objective of the policy gradient family, as plain data; the formulas are in `flowrl.training.loss.loss_formulas`.

Axes: B samples, T policy tokens of the longest one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flowrl.errors import ConfigError, FlowrlError
from flowrl.messages import Bool, Trainable
from flowrl.training.loss.objective import LossInputs, MeanOver, Objective, SampleColumns

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class PolicyObjective(Objective):
    """The policy gradient family; see `flowrl.training.loss.loss_formulas.policy_loss` for the formulas."""

    kind: str = "ppo"
    """ppo | gspo | cispo | reinforce"""
    clip_low: float | None = None
    """None: 0.2, or 0 for cispo, whose bounds are absolute."""
    clip_high: float | None = None
    """None: 0.2; cispo has no default."""
    dual_clip: float | None = None
    """c, above 1: where the advantage is negative, the loss of a token is at most −c·A (1912.09729; ppo and gspo).
    None: no limit."""
    old: str = "proximal"
    """Denominator of the ratio: "proximal", the policy at the batch's start, or "behavior", the one that sampled."""
    correction: str | None = "tis"
    """Weights that correct the gap between proximal and behavior policy: tis | icepop | sequence_mask | decoupled."""
    correction_range: tuple[float, float] = (0.0, 2.0)
    """Bounds of the correction's ratio; `correction` decides whether ratios outside are clamped or weighted 0."""
    correction_level: str = "token"
    """token | sequence: whether tis clamps the ratio of each token, or the product over a sequence."""
    aggregation: str = "token"
    """token | sequence | constant"""
    length: int | None = None
    """L of the constant aggregation; None in a graph's options: the largest number of tokens of a response."""
    kl_coef: float = 0.0
    """Weight of the KL to the reference as a loss; needs a Reference node."""
    kl_estimator: str = "k3"
    """k2 | k3 | k3_unbiased"""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""

    def __post_init__(self) -> None:
        problem = _problem_of(self)
        if problem:
            raise ConfigError(problem)

    @property
    def needs_proximal(self) -> bool:
        return self.old == "proximal" and (self.kind != "reinforce" or self.correction is not None)

    @property
    def correction_name(self) -> str:
        if self.old == "behavior":
            return "its ratio to the behavior policy (old='behavior')"
        default = " (the default)" if self.correction == PolicyObjective.correction else ""
        return f"{self.correction}{default}" if self.correction else ""

    @property
    def needs_reference(self) -> bool:
        return self.kl_coef != 0.0

    @property
    def needs_entropy_gradient(self) -> bool:
        return self.entropy_coef != 0.0

    @property
    def mean_over(self) -> MeanOver:
        return "tokens" if self.aggregation == "token" else "sequences"

    @property
    def stats(self) -> tuple[str, ...]:
        return ("clip_fraction", "ratio_mean", "correction_mean", "entropy", "kl", "policy_loss")

    def problems(self) -> list[str]:
        if self.aggregation == "constant" and self.length is None:
            return ["aggregation='constant' needs length, the constant L of Σ/(sequences × L)"]
        return []

    def has_gradient(self, sample: Trainable, mask: Bool) -> bool:
        return bool(self.kl_coef or self.entropy_coef or sample.advantages[mask].any())

    def columns(self, sample: Trainable) -> SampleColumns:
        if self.kl_coef and sample.ref_logprobs is None:
            raise FlowrlError(
                f"sample {sample.sample_id!r} has no reference logprobs, and kl_coef = {self.kl_coef} needs them: "
                "connect a Reference node between generator and trainer, train with LoRA, or set kl_coef=0"
            )
        return {
            "advantages": sample.advantages,
            "behavior_logprobs": sample.behavior_logprobs,
            "ref_logprobs": sample.ref_logprobs,
        }

    def loss(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        from flowrl.training.loss import loss_formulas

        behavior_BT = inputs.columns["behavior_logprobs"]
        shares: dict[str, Any] = {
            "aggregation": self.aggregation,
            "num_tokens": inputs.totals.num_tokens,
            "num_sequences": inputs.totals.num_sequences,
            "length": self.length,
            "sample_tokens_B": inputs.sample_tokens_B,
        }
        loss, stats = loss_formulas.policy_loss(
            inputs.logprobs_BT,
            inputs.old_logprobs_BT if self.old == "proximal" else behavior_BT,
            inputs.columns["advantages"],
            inputs.mask_BT,
            kind=self.kind,  # type: ignore[arg-type]
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            dual_clip=self.dual_clip,
            behavior_logprobs_BT=behavior_BT,
            correction=self.correction,  # type: ignore[arg-type]
            correction_range=self.correction_range,
            correction_level=self.correction_level,  # type: ignore[arg-type]
            **shares,
        )
        stats["policy_loss"] = loss.detach()
        num_tokens = inputs.totals.num_tokens
        stats["entropy"] = loss_formulas.aggregate_terms(
            inputs.entropies_BT.detach(), inputs.mask_BT, num_tokens=num_tokens
        )
        if self.entropy_coef:
            loss = loss - self.entropy_coef * loss_formulas.aggregate_terms(
                inputs.entropies_BT, inputs.mask_BT, **shares
            )
        if "ref_logprobs" in inputs.columns:
            kl_BT = loss_formulas.kl_estimate(
                inputs.logprobs_BT,
                inputs.columns["ref_logprobs"],
                estimator=self.kl_estimator,  # type: ignore[arg-type]
                behavior_logprobs_BT=behavior_BT,
            )
            stats["kl"] = loss_formulas.aggregate_terms(kl_BT.detach(), inputs.mask_BT, num_tokens=num_tokens)
            if self.kl_coef:
                loss = loss + self.kl_coef * loss_formulas.aggregate_terms(kl_BT, inputs.mask_BT, **shares)
        return loss, stats


def _problem_of(chosen: PolicyObjective) -> str | None:
    names = {
        "kind": ("ppo", "gspo", "cispo", "reinforce"),
        "old": ("proximal", "behavior"),
        "correction": (None, "tis", "icepop", "sequence_mask", "decoupled"),
        "correction_level": ("token", "sequence"),
        "aggregation": ("token", "sequence", "constant"),
    }
    for name, choices in names.items():
        if getattr(chosen, name) not in choices:
            return f"{name} is {getattr(chosen, name)!r}; choose one of {', '.join(map(str, choices))}"
    if not chosen.kl_coef >= 0:
        return f"kl_coef is {chosen.kl_coef}; it has to be 0 or more"
    if chosen.kl_estimator not in ("k2", "k3", "k3_unbiased"):
        return (
            f"kl_estimator is {chosen.kl_estimator!r}; as a loss choose k2, k3 or k3_unbiased "
            "(the expected gradient of k1 is zero)"
        )
    if chosen.old == "behavior" and chosen.correction is not None:
        return "old='behavior' already puts the behavior policy into the ratio; set correction=None with it"
    if chosen.kind == "cispo" and chosen.clip_high is None:
        return "kind='cispo' needs clip_high, the absolute upper bound of its weight, such as 2.0"
    if chosen.length is not None and chosen.length < 1:
        return f"length is {chosen.length}; it has to be 1 or more"
    if chosen.length is not None and chosen.aggregation != "constant":
        return f"length is for aggregation='constant'; it is {chosen.aggregation!r}; leave length out"
    if chosen.kind == "reinforce" and (chosen.clip_low is not None or chosen.clip_high is not None):
        return "kind='reinforce' has no ratio to clip; leave clip_low and clip_high out, or choose ppo"
    if chosen.dual_clip is not None and chosen.kind not in ("ppo", "gspo"):
        return f"dual_clip is for kind='ppo' and 'gspo'; {chosen.kind!r} has no clipped ratio; leave it out"
    if chosen.dual_clip is not None and chosen.dual_clip <= 1.0:
        return f"dual_clip is {chosen.dual_clip}; it has to be above 1"
    low, high = chosen.correction_range
    if not 0.0 <= low < high:
        return f"correction_range is {chosen.correction_range}; it has to be 0 <= low < high"
    return None
