"""The parts about rewards: who scores the policy's answers, and how a reward is shaped before it is trained on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from flowrl.models import Policy
from flowrl.nodes import Overlong, ProcessReward, Reward, RewardModel, Shaping
from flowrl.nodes.scoring.reward_model import OfSteps
from flowrl.options.graph_config import ConfigPart, GraphConfig
from flowrl.options.sizes import RewardModelSize, find_unused, too_low
from flowrl.tasks import Task, parts_of
from flowrl.tasks.reward_calls.http import AWAY_S
from flowrl.tasks.rewards import is_sum, names_model


@dataclass(frozen=True)
class TimedReward(ConfigPart):
    """The time limit of a reward, wherever answers are scored: those to held-out prompts, too."""

    reward_timeout_s: float | None = None
    """Seconds after which a call of a reward function or server counts as failed; None: 10, and 60 for a comparison of
    the answers to a prompt."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.reward_timeout_s is not None and not self.reward_timeout_s > 0:
            yield f"--reward-timeout-s is {self.reward_timeout_s}; it has to be above 0"

    @property
    def timed(self) -> dict[str, Any]:
        """The argument of a node that scores answers; {} for its own default."""
        return {} if self.reward_timeout_s is None else {"timeout_s": self.reward_timeout_s}

    @property
    def held_out_asking(self) -> dict[str, Any]:
        """Arguments of the node that asks for the scores of held-out answers."""
        return self.timed

    def held_out_task(self, task: Task) -> Task:
        """`task` with the reward that scores held-out answers."""
        return task

    def compares_answers(self, task: Task) -> bool:
        """Whether the task's own verifier judges the policy's answers; if not, nothing compares the answers."""
        return True


@dataclass(frozen=True)
class RewardOptions(TimedReward):
    """The node that scores the policy's answers: by the task's reward, by a reward model, or by a sum of both."""

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
        yield from too_low(self, reward_concurrency=1, reward_away_s=0)
        if self.step_separator and not self.reward_model.model:
            yield "--step-separator is for a process reward model; name its directory with --reward-model"
        if self.reward_model != RewardModelSize() and not self.reward_model.model:
            yield "--reward-model.gpus and the like size a reward model; name its directory with --reward-model"

    def problems_within(self, cfg: GraphConfig) -> Iterator[str]:
        yield from super().problems_within(cfg)
        model, task = self.reward_model.model, cfg.data.task
        if self.reward_concurrency is not None and model and not names_model(task.reward):
            yield "--reward-concurrency is for reward functions and servers, and --reward-model scores; leave one out"
        if model and not names_model(task.reward) and not cfg.asks_functions:
            why = "--reward-model scores, and no reward function or server is asked; leave this out"
            yield from find_unused(cfg, ("reward_timeout_s", "reward_away_s"), why)
        if self.step_separator:
            why = "a process reward model's scores of steps are not normalised; leave this out"
            yield from find_unused(cfg, ("reward_model.normalise",), why)
        else:
            why = "responses are scored as a whole; give --step-separator and the --reward-model of steps too"
            yield from find_unused(cfg, ("of_steps",), why)
        if names_model(task.reward) and not model:
            yield f"--task.reward {task.reward!r} names reward_model; name its directory with --reward-model"

    @property
    def asking(self) -> dict[str, Any]:
        """Arguments of a node that asks reward functions and servers."""
        given = {} if self.reward_concurrency is None else {"concurrency": self.reward_concurrency}
        return {**self.timed, **given, "away_s": self.reward_away_s}

    @property
    def held_out_asking(self) -> dict[str, Any]:
        return {**self.timed, "reward_concurrency": self.reward_concurrency, "away_s": self.reward_away_s}

    def held_out_task(self, task: Task) -> Task:
        return task.by_model if self.reward_model.model else task

    def compares_answers(self, task: Task) -> bool:
        return not self.reward_model.model or (names_model(task.reward) and task.compares)

    def part_weights(self, task: Task) -> tuple[tuple[str, float], ...]:
        """(name, weight) of the parts of a reward that is a sum, as samples have them; () if it is none."""
        parts = parts_of(task, task.reward or task.verifier)
        if not is_sum(parts) or (self.reward_model.model and not names_model(task.reward)):
            return ()
        return tuple((part.name, part.weight) for part in parts)

    def place_in(self, cfg: GraphConfig) -> dict[str, Any]:
        """The arguments of `Graph.add` for the node that scores responses."""
        return cfg.place(self.reward_model) if self.reward_model.model else {}

    def build_scorer(self, task: Task, policy: Policy) -> Reward | RewardModel:
        """The node that scores responses to the rows of `task`, in a graph that trains nothing."""
        if not self.reward_model.model:
            return Reward(task, **self.asking)
        return self.build_model(task, policy, **self.reward_model.given)

    def build_model(self, task: Task, policy: Policy, *, normalise: bool = False, **settings: Any) -> RewardModel:
        """The node of the reward model; `settings` are further arguments of it.

        `normalise`: its scores are normalised by its own mean and standard deviation, unless
        --reward-model.normalise says otherwise.
        """
        size = self.reward_model
        settings |= {"label": size.label, **self.asking}
        if self.step_separator:
            settings |= {"separator": self.step_separator, "of_steps": self.of_steps}
            return ProcessReward(size.model, policy, task, **settings)
        settings["normalise"] = normalise if size.normalise is None else size.normalise
        return RewardModel(size.model, policy, task, **settings)


@dataclass(frozen=True)
class ShapingOptions(ConfigPart):
    """How a reward is shaped, wherever it is trained on."""

    reward_clip: tuple[float, float] | None = None
    """Bounds of the reward of a response or an episode, before it is compared with others; None: none."""
    stop_penalty: float | None = None
    """For what was cut off (a response at `max_tokens`, an episode at a limit): a value in [0, 1] is a factor of the
    reward, and a value below 0 replaces the reward."""
    negate_rewards: bool = False
    """A control experiment: the sign of every reward is changed, so the policy must get worse."""

    def build(self, overlong: Overlong | None = None) -> Shaping:
        """How a reward is shaped; `overlong` is a penalty on long responses."""
        clip, negate = self.reward_clip, self.negate_rewards
        return Shaping(stop_penalty=self.stop_penalty, overlong=overlong, clip=clip, negate=negate)


@dataclass(frozen=True)
class ResponseShaping(ShapingOptions):
    """How the reward of a single response is shaped: long ones may have a penalty."""

    overlong_buffer: int = 0
    """Number of tokens before `max_tokens` over which a penalty on long responses grows; 0: no penalty."""
    overlong_factor: float = 1.0
    """Size of that penalty at `max_tokens`."""

    def problems_within(self, cfg: GraphConfig) -> Iterator[str]:
        yield from super().problems_within(cfg)
        if not self.overlong_buffer:
            why = "there is no penalty on long responses; give --overlong-buffer too"
            yield from find_unused(cfg, ("overlong_factor",), why)

    def overlong(self, max_tokens: int) -> Overlong | None:
        """The penalty on responses that are almost as long as `max_tokens`; None: there is none."""
        return Overlong(max_tokens, self.overlong_buffer, self.overlong_factor) if self.overlong_buffer else None
