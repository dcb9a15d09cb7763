"""The block of options of graphs that ask a policy the rows of a task: which rows, and how long a prompt may be."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from flowrl.blocks import OnlineOptions
from flowrl.models import Policy
from flowrl.nodes import (
    Curriculum,
    Overlong,
    PromptLimit,
    PromptSource,
    Reward,
    RewardModel,
    Shaping,
    TokenBatch,
    TooLong,
)
from flowrl.role_options import ShapedReward, too_low, unused
from flowrl.scorer_options import ScorerOptions


@dataclass(frozen=True)
class PromptOptions(OnlineOptions):
    """Options of graphs that train the policy on its answers to the rows of a task."""

    max_prompt_tokens: int = 512
    """Maximum number of tokens in a prompt."""
    too_long: TooLong = "drop"
    """Prompts over the limit are dropped and counted, lose their beginning, or are an error before training."""
    num_prompts: int | None = None
    """Number of prompts of the task to train on, from the first; a mixture divides it by weight. None: all."""
    overlong_filter: bool = False
    """Keep responses that were cut off at `max_tokens` out of the loss. They still count in their group's baseline."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        yield from too_low(self, max_prompt_tokens=1, num_prompts=1)

    @property
    def held_out_prompts(self) -> PromptLimit:
        return PromptLimit(self.evaluate_max_prompt_tokens or self.max_prompt_tokens, self.too_long)

    @property
    def answers_compared(self) -> bool:
        """Whether the task's own verifier judges the policy's answers to the prompts."""
        return True

    def batcher(self, **settings: Any) -> TokenBatch:
        """A batcher of groups; `settings` are further arguments of `TokenBatch`."""
        return super().batcher(mask_truncated=self.overlong_filter, **settings)

    def prompts(self, policy: Policy | None = None, *, curriculum: Curriculum | None = None) -> PromptSource:
        """The source of groups of `group_size` prompts, rendered for `policy` (default: the one that is trained)."""
        return PromptSource(
            self.task,
            policy or self.model,
            repeat=self.group_size,
            part=self.trained_part,
            num_prompts=self.num_prompts,
            max_prompt_tokens=self.max_prompt_tokens,
            too_long=self.too_long,
            curriculum=curriculum,
            answers_compared=self.answers_compared,
        )


@dataclass(frozen=True)
class RewardOptions(ShapedReward, ScorerOptions, PromptOptions):
    """Options of graphs in which a node scores the policy's answers."""

    overlong_buffer: int = 0
    """Number of tokens before `max_tokens` over which a penalty on long responses grows; 0: no penalty."""
    overlong_factor: float = 1.0
    """Size of that penalty at `max_tokens`."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if not self.overlong_buffer:
            why = "there is no penalty on long responses; give --overlong-buffer too"
            yield from unused(self, ("overlong_factor",), why)

    @property
    def shaping(self) -> Shaping:
        """How a reward is shaped before it is trained on."""
        overlong = Overlong(self.max_tokens, self.overlong_buffer, self.overlong_factor)
        return Shaping(
            stop_penalty=self.stop_penalty,
            overlong=overlong if self.overlong_buffer else None,
            clip=self.reward_clip,
            negate=self.negate_rewards,
        )

    def make_reward(
        self, *, function: Callable[..., Any] | None = None, normalise: bool = False
    ) -> Reward | RewardModel:
        """The node that scores responses: the task's reward, or the reward model.

        `function` is a reward that the graph has in place of the task's verifier; --task.reward replaces it.
        `normalise`: the model's scores are normalised by its own mean and standard deviation, unless
        --reward-model.normalise says otherwise.
        """
        if not self.reward_model.model:
            own = None if self.task.reward else function
            return Reward(self.task, function=own, shaping=self.shaping, **self.asking)
        return self.make_reward_model(
            self.task, normalise=normalise, shaping=self.shaping, **self.scoring(self.reward_model)
        )
