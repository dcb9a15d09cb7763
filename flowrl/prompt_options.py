"""The block of options of graphs that ask a policy the rows of a task: which rows, and how long a prompt may be."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from flowrl.blocks import OnlineOptions, too_low
from flowrl.models import Policy
from flowrl.nodes import ProcessReward, PromptSource, Reward, RewardModel, Shaping, TokenBatch
from flowrl.nodes.process_reward import OfSteps
from flowrl.nodes.source import TooLong
from flowrl.tasks.rewards import names_model


@dataclass(frozen=True)
class PromptOptions(OnlineOptions):
    """Options of graphs that train the policy on its answers to the rows of a task."""

    max_prompt_tokens: int = 512
    """Most tokens of a prompt."""
    too_long: TooLong = "drop"
    """Prompts over the limit are dropped and counted, lose their beginning, or are an error before training."""
    overlong_filter: bool = False
    """Keep responses that were cut off at `max_tokens` out of the loss. They still count in their group's baseline."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        yield from too_low(self, max_prompt_tokens=1)

    def batcher(self, **settings: Any) -> TokenBatch:
        """A batcher of groups; `settings` are further arguments of `TokenBatch`."""
        return super().batcher(mask_truncated=self.overlong_filter, **settings)

    def prompts(self, policy: Policy | None = None) -> PromptSource:
        """The source of groups of `group_size` prompts, rendered for `policy` (default: the one that is trained)."""
        return PromptSource(
            self.task,
            policy or self.model,
            repeat=self.group_size,
            part=self.trained_part,
            max_prompt_tokens=self.max_prompt_tokens,
            too_long=self.too_long,
        )


@dataclass(frozen=True)
class RewardOptions(PromptOptions):
    """Options of graphs in which a node scores the policy's answers."""

    reward_model: str = ""
    """Directory of a trained reward model, which scores responses in place of the task's own reward; empty: none.
    In a sum with functions where --task.reward says so: verifier + 0.5*reward_model."""

    step_separator: str = ""
    """The reward model scores every step of a response, and this ends a step, as '\\n'; empty: it scores responses."""
    of_steps: OfSteps = "min"
    """What a response's reward is of the scores of its steps."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.step_separator and not self.reward_model:
            yield "--step-separator is for a process reward model; name its directory with --reward-model"
        if names_model(self.task.reward) and not self.reward_model:
            yield f"--task.reward {self.task.reward!r} names reward_model; name its directory with --reward-model"

    def scoring(self, *, shaping: Shaping | None = None, normalise: bool = False) -> Reward | RewardModel:
        """The node that scores responses: the task's reward, or the reward model.

        `normalise`: the model's scores are normalised by its own mean and standard deviation.
        """
        shaping = shaping or Shaping(negate=self.negate_rewards)
        if not self.reward_model:
            return Reward(self.task, shaping=shaping)
        if self.step_separator:
            return ProcessReward(
                self.reward_model,
                self.model,
                self.task,
                separator=self.step_separator,
                of_steps=self.of_steps,
                shaping=shaping,
                dtype=self.dtype,
            )
        return RewardModel(
            self.reward_model, self.model, self.task, normalise=normalise, shaping=shaping, dtype=self.dtype
        )

    @property
    def reward_gpus(self) -> float:
        """GPUs of the node that scores responses."""
        return self.one_gpu if self.reward_model else 0
