"""A process reward model as a node: it scores every step of a response and computes the reward from these scores."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, get_args

from flowrl.messages import Bool, Int32
from flowrl.models import Policy
from flowrl.models.tokens.steps import separator_of, split_steps, step_tokens
from flowrl.nodes.rewarding.model_scores import ScoreQuestion
from flowrl.nodes.rewarding.reward_model import RewardModel, require_finite
from flowrl.nodes.scoring.shared_pass import SharedPass
from flowrl.tasks import Task

OfSteps = Literal["min", "mean", "product", "last"]
MOST_LOGGED = 32
"""Most steps of a response whose scores are logged."""


class ProcessReward(RewardModel):
    """Scores steps with a model that the graph process_reward_model trains; a score is σ of the model's output.

    For a model with several labels, `label` says how its output is computed from them; good=1,bad=-1 gives the softmax
    of two.

    `separator` ends a step, and `of_steps` says how a response's reward follows from the scores of its steps.
    `reward_parts` has the scores as `step_0`, `step_1` and so on, and their number as `steps`.
    """

    def __init__(
        self, model: str, policy: Policy, task: Task, *, separator: str, of_steps: OfSteps = "min", **options: Any
    ) -> None:
        super().__init__(model, policy, task, **options)
        self.separator = separator_of(separator)
        self.of_steps: OfSteps = of_steps
        self._steps: SharedPass[tuple[Int32, Bool], Sequence[float]] = SharedPass(self._score_steps)

    def check(self, facts: Any) -> list[str]:
        problems = super().check(facts)
        if self.of_steps not in get_args(OfSteps):
            problems.append(f"of_steps is {self.of_steps!r}; choose one of {', '.join(get_args(OfSteps))}")
        if self.normalise:
            problems.append("normalise is set, but the scores of steps are probabilities; leave it out")
        return problems

    @property
    def reads_text(self) -> bool:
        return True

    async def model_score(self, asked: ScoreQuestion, *, later: bool = False) -> tuple[float, dict[str, float]]:
        scores = await self._steps.ask(self.rendered(self.step_tokens, asked), later=later)
        require_finite(scores)
        parts = {"steps": float(len(scores))} | {f"step_{n}": score for n, score in enumerate(scores[:MOST_LOGGED])}
        return reward_of(scores, self.of_steps), parts

    def step_tokens(self, asked: ScoreQuestion) -> tuple[Int32, Bool]:
        """The tokens that the model reads, and a mask of the positions with the steps' scores."""
        steps = split_steps(asked.response, self.separator)
        return step_tokens(self._scorer.chat.with_tools(asked.tools), asked.turns, steps, self.separator)

    async def _score_steps(self, asked: list[tuple[Int32, Bool]]) -> Sequence[Sequence[float]]:
        with self.context.busy("score"):
            return await self.blocking(self._scorer.step_scores, asked)


def reward_of(scores: Sequence[float], of_steps: OfSteps) -> float:
    """The reward of a response whose steps have these scores."""
    found = {"min": min(scores), "mean": sum(scores) / len(scores), "product": math.prod(scores), "last": scores[-1]}
    return found[of_steps]
