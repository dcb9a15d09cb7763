"""The parts of graphs that learn from rewards: which groups are trained on, the loss, and the KL to a reference."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from flowrl.nodes import AdaptiveKL, Curriculum, DynamicSampling
from flowrl.options.graph_config import ConfigPart, GraphConfig
from flowrl.options.reward_parts import RewardOptions
from flowrl.options.sizes import ReferenceSize, find_unused
from flowrl.options.training_parts import TrainerOptions
from flowrl.training.advantages import WHITENED_ESTIMATORS, Estimate, KlEstimator
from flowrl.training.loss.policy_objective import PolicyObjective


@dataclass(frozen=True)
class GroupOptions(ConfigPart):
    """Which groups are trained on, and which prompts are asked again, by the rewards of their samples."""

    dynamic_sampling: bool = False
    """Filter out groups whose rewards are all equal, which teach nothing, and sample others in their place."""
    mean_between: tuple[float, float] | None = None
    """Instead, filter out groups whose mean raw reward is not between these two."""
    max_filtered_per_step: int | None = None
    """The run ends with an error if more groups than this are filtered out before a batch is full. None: 16 for each
    group of a batch, but at least 256; `flowrl check` says how many."""
    curriculum: Curriculum = Curriculum()
    """Which prompts are asked more often, by how well the policy has answered them, as in --curriculum.chosen 0.5."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        yield from (f"--{problem}" for problem in self.curriculum.find_problems())
        if not self.filters and self.max_filtered_per_step is not None:
            yield "--max-filtered-per-step is for runs that filter; give --dynamic-sampling or --mean-between too"

    def problems_within(self, cfg: GraphConfig) -> Iterator[str]:
        yield from super().problems_within(cfg)
        scorer = cfg.find_part(RewardOptions)
        if self.curriculum.used and self.curriculum.pass_at is None and scorer and scorer.reward_model.model:
            yield (
                "--curriculum.chosen counts samples of a reward of 1, and a reward model's has no such scale; "
                "say with --curriculum.pass-at from which reward a sample has passed"
            )

    @property
    def filters(self) -> bool:
        """Whether any group may be filtered by its rewards."""
        return self.dynamic_sampling or self.mean_between is not None

    def build(self, groups_per_step: int) -> DynamicSampling | None:
        """Which groups go into a batch of `groups_per_step`; None: all."""
        if not self.filters:
            return None
        return DynamicSampling(
            groups_per_step, mean_between=self.mean_between, max_filtered_per_step=self.max_filtered_per_step
        )


@dataclass(frozen=True)
class NormalisationOptions(ConfigPart):
    """Normalisation of rewards over the run, and of advantages over a batch."""

    normalise_rewards: bool = False
    """Subtract the running mean from each reward and divide by the running standard deviation."""
    whiten: Literal["off", "full", "mean"] | None = None
    """Normalise advantages over the batch; None: full for reinforce, reinforce_baseline, gdpo and gae, otherwise
    off."""

    def build(self, estimate: Estimate) -> dict[str, Any]:
        """Arguments of a batcher of groups whose advantages are computed by `estimate`."""
        usual = "full" if estimate.estimator in WHITENED_ESTIMATORS else "off"
        return {"whiten": self.whiten or usual, "estimate": estimate, "normalise_rewards": self.normalise_rewards}


@dataclass(frozen=True)
class PolicyLoss(ConfigPart):
    """A loss of the policy gradient family, and the reference that a KL needs."""

    objective: PolicyObjective = PolicyObjective()
    """The loss of this kind, such as ppo, gspo or sapo; its options as in --objective.dual-clip 3."""
    reference: ReferenceSize = ReferenceSize()
    """The reference, which has the initial weights. A KL in the reward adds it, and so does a KL in the loss, unless
    adapters are trained."""

    def problems_within(self, cfg: GraphConfig) -> Iterator[str]:
        yield from super().problems_within(cfg)
        if self.objective.correction is None:
            names = ("objective.correction_range", "objective.correction_level")
            yield from find_unused(cfg, names, "there is no --objective.correction; leave this out")
        elif self.objective.correction != "tis":
            why = f"--objective.correction is {self.objective.correction}, and only tis has it; leave this out"
            yield from find_unused(cfg, ("objective.correction_level",), why)
        if not self.kl_in_loss:
            why = "there is no KL in the loss; give --objective.kl-coef too"
            yield from find_unused(cfg, ("objective.kl_estimator",), why)
        if self.compared_with(cfg) is None:
            why = "this run has no reference; give it a KL, as with --objective.kl-coef 0.01"
            if self.kl_in_loss:
                why = "a trainer of adapters has the reference in itself; leave it out"
            yield from find_unused(cfg, ("reference",), why)

    @property
    def kl_in_loss(self) -> float:
        """Weight of the KL in the loss."""
        return self.objective.kl_coef

    @property
    def kl_in_reward(self) -> float:
        """Weight of the KL in the reward."""
        return 0.0

    @property
    def adaptive_kl(self) -> AdaptiveKL | None:
        """What adapts the weight of the KL in the reward; None: the weight is constant."""
        return None

    def compared_with(self, cfg: GraphConfig) -> ReferenceSize | None:
        """The size of the reference; None: no KL needs one, or only the KL in the loss of a trainer of adapters, which
        has it."""
        in_itself = cfg.get_part(TrainerOptions).lora.rank > 0
        return self.reference if self.kl_in_reward or (self.kl_in_loss and not in_itself) else None

    def build(self, tokens: int | None) -> PolicyObjective:
        """The loss; `tokens` is the length by which the constant aggregation divides, if the objective gives none."""
        objective = replace(self.objective, kl_coef=self.kl_in_loss)
        if objective.aggregation != "constant" or objective.length is not None:
            return objective
        return replace(objective, length=tokens)


@dataclass(frozen=True)
class RewardKLLoss(PolicyLoss):
    """A loss of the policy gradient family, with or without a KL to the initial weights in the reward."""

    reward_kl_coef: float = 0.0
    """Weight of the KL to the initial weights in the reward; a weight above 0 adds a reference."""
    reward_kl: KlEstimator = "k1"
    """Estimator of that KL."""
    kl_before_baseline: bool = False
    """Subtract the KL of a whole response from its reward before the group's baseline, not token by token."""
    kl_target: float | None = None
    """Adapt `reward_kl_coef` until the KL of a response is this, in nats."""

    def problems_within(self, cfg: GraphConfig) -> Iterator[str]:
        yield from super().problems_within(cfg)
        if not self.reward_kl_coef:
            why = "there is no KL in the reward; give --reward-kl-coef too"
            yield from find_unused(cfg, ("reward_kl", "kl_before_baseline", "kl_target"), why)

    @property
    def kl_in_reward(self) -> float:
        return self.reward_kl_coef

    @property
    def of_estimate(self) -> dict[str, Any]:
        """Arguments of an Estimate, which subtracts the KL from the reward."""
        return {
            "kl_coef": self.reward_kl_coef,
            "kl_estimator": self.reward_kl,
            "kl_before_baseline": self.kl_before_baseline,
        }

    @property
    def adaptive_kl(self) -> AdaptiveKL | None:
        return None if self.kl_target is None else AdaptiveKL(self.kl_target)
