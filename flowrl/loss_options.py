"""Blocks of options of graphs that learn from rewards: which groups are trained on, and the loss.

They stand before the block of the graph's data: `class GRPO(AdvantageOptions, RewardOptions)`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from flowrl.errors import ConfigError
from flowrl.nodes import Curriculum, DynamicSampling
from flowrl.policy_options import PolicyOptions
from flowrl.role_options import ReferenceSize
from flowrl.training.loss.policy_objective import PolicyObjective


@dataclass(frozen=True)
class FilterOptions(PolicyOptions):
    """Options of graphs that may leave whole groups out, by their rewards."""

    dynamic_sampling: bool = False
    """Filter groups whose rewards are all equal, which teach nothing, and sample others in their place."""
    mean_between: tuple[float, float] | None = None
    """Filter groups whose mean raw reward is not between these two instead."""
    max_filtered_per_step: int | None = None
    """The run ends with an error if more groups are filtered before a batch is full. None: 16 for each group of a
    batch, and 256 or more; `flowrl check` says how many."""
    curriculum: Curriculum = Curriculum()
    """Which prompts are asked more often, by what the policy could do with them, as in --curriculum.chosen 0.5."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        yield from (f"--{problem}" for problem in self.curriculum.problems())
        reward_model = getattr(self, "reward_model", None)
        if self.curriculum.used and self.curriculum.pass_at is None and reward_model and reward_model.model:
            yield (
                "--curriculum.chosen counts samples of a reward of 1, and a reward model's has no such scale; "
                "say with --curriculum.pass-at from which reward a sample has passed"
            )
        if not self.filters and self.max_filtered_per_step is not None:
            yield "--max-filtered-per-step is for runs that filter; give --dynamic-sampling or --mean-between too"

    @property
    def filters(self) -> bool:
        """Whether any group may be filtered by its rewards."""
        return self.dynamic_sampling or self.mean_between is not None

    def filtering(self, groups_per_step: int) -> DynamicSampling | None:
        """Which groups a batch of so many is made of; None: all."""
        if not self.filters:
            return None
        return DynamicSampling(
            groups_per_step, mean_between=self.mean_between, max_filtered_per_step=self.max_filtered_per_step
        )


@dataclass(frozen=True)
class LossOptions(PolicyOptions):
    """Options of graphs with a loss of the policy gradient family."""

    has_reference: ClassVar[bool] = False
    """Whether the graph adds a Reference where the loss needs one."""

    objective: PolicyObjective = PolicyObjective()
    """The loss: ppo, gspo, cispo or reinforce; its options as in --objective.dual-clip 3."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        adapters = getattr(self, "lora", None)
        if self.objective.kl_coef and not self.has_reference and not (adapters and adapters.rank):
            yield (
                f"--objective.kl-coef is {self.objective.kl_coef}, but this graph has no reference; train adapters "
                "(--lora.rank 16), whose base is the reference, or take a graph with --reference.gpus, such as grpo"
            )

    def loss(self, tokens: int | None) -> PolicyObjective:
        """The loss; `tokens` is the length by which the constant aggregation divides, if none is given."""
        if self.objective.aggregation != "constant" or self.objective.length is not None:
            return self.objective
        return replace(self.objective, length=tokens)


@dataclass(frozen=True)
class AdvantageOptions(LossOptions, FilterOptions):
    """Options of graphs whose advantages are made of rewards."""

    normalise_rewards: bool = False
    """Subtract the running mean from each reward and divide by the running standard deviation."""


def require_reference(size: ReferenceSize, fix: str) -> None:
    """Raise ConfigError if a run without a reference is to refresh it; `fix` says what gives it one."""
    if size.refresh_every:
        raise ConfigError(f"--reference.refresh-every is {size.refresh_every}, but this run has no reference; {fix}")
