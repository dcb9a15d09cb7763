"""Which prompt is asked next, depending on how the policy did on earlier prompts: a curriculum, and replay.

A share of all groups asks prompts chosen by pass rate, another share repeats prompts that no sample has passed, and the
remaining groups ask the prompts of the data in their order. So no prompt starves: the remaining groups reach every
prompt once an epoch.

A prompt with pass rate p is chosen with weight p·(1 − p), its learnability (arXiv 2408.15099; for language models arXiv
2502.12272): most often near 1/2, and never while all of its samples pass or none do.

The choices are made by `flowrl.nodes.curricula.pass_rates`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from flowrl.graph.ports import Call
from flowrl.messages import Message, Scored

PASSED = 1.0
ROUNDING = 1e-6


@dataclass(frozen=True)
class Curriculum:
    """Which prompts are asked more often than the others. By default none are."""

    chosen: float = 0.0
    """Share of the groups whose prompt is chosen by its pass rate, most often near 1/2; 0: none."""
    replayed: float = 0.0
    """Share of the groups that repeat a prompt which no sample has passed, the longest waiting first; 0: none."""
    replay_after: int = 256
    """Number of groups after which a prompt that no sample has passed may be repeated."""
    pass_at: float | None = None
    """Lowest raw reward with which a sample has passed; None: 1."""
    by: str = ""
    """Column of the rows, such as level or of_task: rows with the same value share a pass rate. Empty: one per row."""

    @property
    def used(self) -> bool:
        """Whether any prompt is chosen by outcomes."""
        return bool(self.chosen or self.replayed)

    def problems(self) -> Iterator[str]:
        """Sentences that name a field and say what is wrong with its value."""
        for name in ("chosen", "replayed"):
            if not 0 <= getattr(self, name) < 1:
                yield f"curriculum.{name} is {getattr(self, name)}; it has to be in [0, 1)"
        if self.chosen + self.replayed >= 1:
            yield (
                f"curriculum.chosen and curriculum.replayed are {self.chosen} and {self.replayed}; their sum has to be "
                "below 1, or prompts that are neither chosen nor replayed would never be asked"
            )
        if self.replay_after < 0:
            yield f"curriculum.replay_after is {self.replay_after}; it has to be 0 or more"
        if not self.used and self != Curriculum():
            yield "curriculum has settings, but neither curriculum.chosen nor curriculum.replayed is above 0"


@dataclass(frozen=True)
class GroupOutcome(Message):
    """What the policy could do with a prompt: the raw rewards of the group's samples, without those that failed."""

    prompt_id: str
    epoch: int
    """The epoch of the group's prompts: with a curriculum, how often the prompt was asked before."""
    raw_rewards: tuple[float, ...]


@dataclass(frozen=True)
class Noted(Message):
    """The answer to an outcome."""

    is_new: bool
    """False if this outcome, or a later one of the same prompt, was noted before."""


async def report_outcome(outcomes: Call[GroupOutcome, Noted], samples: Sequence[Scored]) -> None:
    """Tell the source how a group was rewarded, if the graph has an edge for that and a sample was scored."""
    if outcomes.connected and samples:
        first, rewards = samples[0], tuple(float(sample.raw_reward) for sample in samples)
        await outcomes(GroupOutcome(first.prompt_id, first.epoch, rewards))
