"""The block of options of graphs that ask a policy the rows of a task: which rows, and how long a prompt may be."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from flowrl.blocks import OnlineOptions, too_low
from flowrl.models import Policy
from flowrl.nodes import PromptSource
from flowrl.nodes.source import TooLong


@dataclass(frozen=True)
class PromptOptions(OnlineOptions):
    """Options of graphs that train the policy on its answers to the rows of a task."""

    max_prompt_tokens: int = 512
    """Most tokens of a prompt."""
    too_long: TooLong = "drop"
    """Prompts over the limit are dropped and counted, lose their beginning, or are an error before training."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        yield from too_low(self, max_prompt_tokens=1)

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
