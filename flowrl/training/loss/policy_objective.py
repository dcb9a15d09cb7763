"""The objective of the policy gradient family, as plain data; the formulas are in `flowrl.training.loss.loss_formulas`.

Axes: B samples, T policy tokens of the longest one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flowrl.errors import ConfigError, FlowrlError
from flowrl.messages import Bool, Trainable
from flowrl.training.loss.objective import CHOSEN, LossInputs, MeanOver, Objective, SampleColumns, StepTokens
from flowrl.training.loss.policy_kinds import KINDS

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class PolicyObjective(Objective):
    """The policy gradient family; see `flowrl.training.loss.policy_kinds` for the formulas.

    Options that only some kinds have are None: the kind's own default.
    """

    kind: str = "ppo"
    """ppo | gspo | cispo | reinforce | sapo | gmpo | vespo | dppo | clip_cov | kl_cov"""
    clip_low: float | None = None
    """How far a ratio may fall. None: 0.2; gmpo 0.4, of its logarithm; dppo 0.2, of the probability; cispo 0, as its
    bounds are absolute."""
    clip_high: float | None = None
    """How far it may rise. None: as clip_low; cispo has no default."""
    dual_clip: float | None = None
    """c, above 1: where the advantage is negative, the loss of a token is at most −c·A (1912.09729; ppo and gspo).
    None: no limit."""
    sapo_temperatures: tuple[float, float] | None = None
    """τ of tokens with a positive advantage, and of the others (sapo). None: 1 and 1.05."""
    vespo_powers: tuple[float, float] | None = None
    """k of tokens whose advantage is not negative, and of the others (vespo). None: 2 and 3."""
    vespo_decays: tuple[float, float] | None = None
    """λ of the same two (vespo). None: 3 and 2."""
    cov_share: float | None = None
    """Share of an optimizer step's tokens that is chosen (clip_cov and kl_cov). None: 0.0002."""
    cov_range: tuple[float, float] | None = None
    """Covariances between which tokens are chosen (clip_cov). None: 1 and 5."""
    ratio_penalty: float | None = None
    """Weight of the penalty on log ratios: squared, of every token (dppo; None: 0.001), or absolute, of the chosen
    tokens (kl_cov; None: 1)."""
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
    def given(self) -> dict[str, Any]:
        """The options that only some kinds have, as far as they are set."""
        names = {name for one in KINDS.values() for name in one.defaults}
        return {name: value for name in sorted(names) if (value := getattr(self, name)) is not None}

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
    def chooses_tokens(self) -> bool:
        return KINDS[self.kind].choose is not None

    @property
    def mean_over(self) -> MeanOver | None:
        if self.chooses_tokens:
            return None
        return "tokens" if self.aggregation == "token" else "sequences"

    @property
    def stats(self) -> tuple[str, ...]:
        return ("clip_fraction", "ratio_mean", "correction_mean", "entropy", "kl", "policy_loss")

    def problems(self) -> list[str]:
        if self.aggregation == "constant" and self.length is None:
            return ["aggregation='constant' needs length, the constant L of Σ/(sequences × L)"]
        return []

    def has_gradient(self, sample: Trainable, mask: Bool) -> bool:
        penalty = KINDS[self.kind].pulls_back and self.ratio_penalty != 0
        return bool(self.kl_coef or self.entropy_coef or penalty or sample.advantages[mask].any())

    def choose_tokens(self, step: StepTokens) -> Bool:
        kind = KINDS[self.kind]
        assert kind.choose is not None
        return kind.choose(step, **{name: value for name, value in self.given.items() if name.startswith("cov_")})

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
            **({CHOSEN.name: sample.column(CHOSEN.name)} if self.chooses_tokens else {}),
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
            kind=self.kind,
            chosen_BT=inputs.columns.get(CHOSEN.name),
            behavior_logprobs_BT=behavior_BT,
            correction=self.correction,  # type: ignore[arg-type]
            correction_range=self.correction_range,
            correction_level=self.correction_level,  # type: ignore[arg-type]
            **shares,
            **self.given,
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
        "kind": tuple(KINDS),
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
    kind = KINDS[chosen.kind]
    for name in sorted(chosen.given.keys() - kind.defaults.keys()):
        having = " and ".join(other for other in KINDS if name in KINDS[other].defaults)
        return f"{name} is for kind {having}, and kind is {chosen.kind!r}; leave it out (None)"
    if kind.against_sampler and chosen.old != "behavior":
        return (
            f"kind={chosen.kind!r} compares with the policy that sampled, not with that of the batch's start; give "
            "old='behavior' and correction=None with it"
        )
    for name, value in {**kind.defaults, **chosen.given}.items():
        if problem := _problem_of_option(name, value, chosen.kind):
            return problem
    low, high = chosen.correction_range
    if not 0.0 <= low < high:
        return f"correction_range is {chosen.correction_range}; it has to be 0 <= low < high"
    return None


def _problem_of_option(name: str, value: Any, kind: str) -> str | None:
    """What is wrong with the value of an option that only some kinds have."""
    if value is None:
        return None
    if name in ("sapo_temperatures", "vespo_powers", "vespo_decays") and not all(0 < one < math.inf for one in value):
        return f"{name} is {value}; both have to be above 0"
    if name == "cov_range" and not value[0] < value[1]:
        return f"cov_range is {value}; it has to be low < high"
    if name == "cov_share" and not 0 < value <= 1:
        return f"cov_share is {value}; it has to be above 0, and at most 1"
    if name == "ratio_penalty" and not 0 <= value < math.inf:
        return f"ratio_penalty is {value}; it has to be 0 or more"
    if name == "dual_clip" and value <= 1.0:
        return f"dual_clip is {value}; it has to be above 1"
    if name in ("clip_low", "clip_high") and kind in ("gmpo", "dppo") and not value >= 0:
        return f"{name} is {value}; kind={kind!r} needs 0 or more"
    return None
