"""The block of options of graphs in which a node scores the policy's answers: by the task's reward, or by a model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from flowrl.nodes import ProcessReward, Reward, RewardModel
from flowrl.nodes.scoring.reward_model import OfSteps
from flowrl.policy_options import PolicyOptions
from flowrl.role_options import RewardModelSize, TimedReward, too_low, unused
from flowrl.tasks import Task
from flowrl.tasks.reward_calls.http import AWAY_S
from flowrl.tasks.rewards import names_model


@dataclass(frozen=True)
class ScorerOptions(TimedReward, PolicyOptions):
    """Options of graphs in which a node scores the policy's answers."""

    reward_model: RewardModelSize = RewardModelSize()
    """A reward model in place of the task's own reward, or in a sum with it."""
    step_separator: str = ""
    """What ends a step, such as '\\n', if the reward model scores every step of a response; empty: it scores
    responses."""
    of_steps: OfSteps = "min"
    """How a response's reward is computed from the scores of its steps."""

    reward_concurrency: int | None = None
    """How many at a time: processes of each reward function, calls of each `async` function, and samples that reward
    servers are asked about. None: 1, 4 for check=code, 64 for servers."""
    reward_away_s: float = AWAY_S
    """Seconds for which reward servers that cannot be reached are tried again before the run ends. 0: samples fail at
    once."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        yield from self.timeout_problems()
        yield from too_low(self, reward_concurrency=1, reward_away_s=0)
        if self.reward_concurrency is not None and self.reward_model.model and not names_model(self.task.reward):
            yield "--reward-concurrency is for reward functions and servers, and --reward-model scores; leave one out"
        if self.step_separator and not self.reward_model.model:
            yield "--step-separator is for a process reward model; name its directory with --reward-model"
        if not self.asks_functions:
            why = "--reward-model scores, and no reward function or server is asked; leave this out"
            yield from unused(self, ("reward_timeout_s", "reward_away_s"), why)
        if self.step_separator:
            why = "a process reward model's scores of steps are not normalised; leave this out"
            yield from unused(self, ("reward_model.normalise",), why)
        else:
            why = "responses are scored as a whole; give --step-separator and the --reward-model of steps too"
            yield from unused(self, ("of_steps",), why)
        if names_model(self.task.reward) and not self.reward_model.model:
            yield f"--task.reward {self.task.reward!r} names reward_model; name its directory with --reward-model"
        if self.reward_model != RewardModelSize() and not self.reward_model.model:
            yield "--reward-model.gpus and the like size a reward model; name its directory with --reward-model"

    @property
    def asks_functions(self) -> bool:
        """Whether reward functions or servers may be asked: by the reward, by `prefer`, or for held-out answers."""
        further = getattr(self, "evaluates", False) or getattr(self, "prefer", "")
        return bool(further) or not self.reward_model.model or names_model(self.task.reward)

    @property
    def answers_compared(self) -> bool:
        """Whether the task's own verifier scores responses, by itself or in a sum; if not, nothing compares the
        answers."""
        return not self.reward_model.model or (names_model(self.task.reward) and self.task.compares)

    def make_scorer(self, task: Task) -> Reward | RewardModel:
        """The node that scores responses to the rows of `task`, in a graph that trains nothing."""
        if not self.reward_model.model:
            return Reward(task, **self.asking)
        return self.make_reward_model(task, **self.reward_model.given)

    @property
    def asking(self) -> dict[str, Any]:
        """Arguments of a node that asks reward functions and servers."""
        given = {} if self.reward_concurrency is None else {"concurrency": self.reward_concurrency}
        return {**self.timed, **given, "away_s": self.reward_away_s}

    @property
    def held_out_task(self) -> Task:
        """--task with the reward that scores held-out answers."""
        return self.task.by_model if self.reward_model.model else self.task

    @property
    def held_out_asking(self) -> dict[str, Any]:
        return {**self.timed, "reward_concurrency": self.reward_concurrency, "away_s": self.reward_away_s}

    def make_reward_model(self, task: Task, *, normalise: bool = False, **settings: Any) -> RewardModel:
        """The node of the reward model; `settings` are further arguments of it.

        `normalise`: its scores are normalised by its own mean and standard deviation, unless
        --reward-model.normalise says otherwise.
        """
        size = self.reward_model
        settings |= {"label": size.label, **self.asking}
        if self.step_separator:
            settings |= {"separator": self.step_separator, "of_steps": self.of_steps}
            return ProcessReward(size.model, self.model, task, **settings)
        settings["normalise"] = normalise if size.normalise is None else size.normalise
        return RewardModel(size.model, self.model, task, **settings)

    def place_reward(self) -> dict[str, Any]:
        """The arguments of `Graph.add` for the node that scores responses."""
        return self.place(self.reward_model) if self.reward_model.model else {}
