"""Blocks of options of graphs that train the policy on episodes, and their evaluation."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from flowrl.agents import History
from flowrl.blocks import EvaluationOptions, OnlineOptions
from flowrl.graph.graph import AFFINITY_MARGIN, Graph
from flowrl.graph.machine import GB
from flowrl.nodes import AgentProgram, Environment, Evaluation, Generator, Limits, Sampling, Shaping
from flowrl.role_options import ShapedReward, too_low, unused
from flowrl.training.advantage.advantages import Estimator
from flowrl.training.advantage.estimate import Estimate
from flowrl.training.advantage.turn_credit import Credit


@dataclass(frozen=True)
class EpisodeOptions(ShapedReward, OnlineOptions):
    """Options of graphs that train the policy on episodes, with environments or agents."""

    staleness: int = 2
    look_ahead: int | None = None  # type: ignore[assignment]  # only graphs of episodes derive it
    """Groups among which the batcher may choose a finished one; 1 is admission order. None: those of one step, or 1
    where that leaves no room: with a staleness below 2, and at --on-limit mask."""
    num_prompts: int | None = None
    """Train on the first so many rows of the environment or the task, in a mixture by weight; None: all."""
    limits: Limits = Limits(tokens=2048)
    """What bounds an episode, as in --limits.turns 8."""
    processes: int = 256
    """Processes of environments, or of agents, at a time."""
    episodes_per_process: int = 1
    """Episodes that a process plays, one after the other. More than 1 save the time of new processes; what a program or
    an environment keeps in its modules is then there in the next episode."""
    memory_gb: float = 1.0
    """GiB of data that each of them may take, beyond what its imports take."""
    affinity_margin: int | None = AFFINITY_MARGIN
    """A session stays on its generator while that has at most so many more open requests than the least loaded. None:
    each of its requests goes where least is open."""
    tool_parser: str = ""
    """vLLM's parser that reads the policy's calls of tools, by the name that its server takes, such as hermes; none:
    the tokenizer's response_template, if it has one."""
    reasoning_parser: str = ""
    """vLLM's parser that tells the policy's reasoning from its answer, such as qwen3."""
    max_tokens: int = 256
    """Most tokens of one reply."""
    credit: Credit = "episode"
    """A token has the advantage of its whole episode, or of its turn: of what follows, compared with the group."""
    gamma: float = 1.0
    """Discount of rewards from turn to turn; for credit by turn."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        yield from too_low(self, processes=1, episodes_per_process=1, affinity_margin=0, num_prompts=1)
        if not 0 < self.memory_gb < math.inf:
            yield f"--memory-gb is {self.memory_gb}; it has to be above 0"
        if self.task.reward:
            yield f"--task.reward is {self.task.reward!r}, but an episode is scored by its environment or agent"
        if self.reward_timeout_s is not None:
            yield "--reward-timeout-s is for reward functions, and an episode's environment has --limits; leave it out"
        why = "an episode's first prompt is bounded as all of it is, by --limits.tokens; leave this out"
        yield from unused(self, ("evaluate_max_prompt_tokens",), why)

    @property
    def window(self) -> int:
        """`look_ahead`, or what follows from the other options.

        Groups of one step cost one version of the staleness: of 1 they would leave a synchronous run. With mask
        batches have no window.
        """
        if self.look_ahead is not None:
            return self.look_ahead
        return self.groups_per_step if self.on_limit == "wait" and self.staleness >= 2 else 1

    @property
    def bounds(self) -> dict[str, Any]:
        """The arguments of nodes with episodes that bound these and their processes."""
        return {
            "limits": self.limits,
            "processes": self.processes,
            "memory_bytes": int(self.memory_gb * GB),
            "episodes_per_process": self.episodes_per_process,
        }

    @property
    def parsers(self) -> dict[str, Any]:
        """The arguments of `Generator` that say how replies are parsed."""
        return {"tool_parser": self.tool_parser, "reasoning_parser": self.reasoning_parser}

    def make_generator(self, sampling: Sampling, **settings: Any) -> Generator:
        return super().make_generator(sampling, **self.parsers, **settings)

    def agents(self, agent: str, command: str = "", **settings: Any) -> AgentProgram:
        """The node with agents: a function `FILE.py:FUNCTION`, a command, or "outside".

        `settings` are further arguments of `AgentProgram`.
        """
        return AgentProgram(
            self.model,
            agent=agent,
            command=command,
            sampling=self.sampling,
            shaping=self.shaping,
            **self.bounds,
            **settings,
        )

    @property
    def shaping(self) -> Shaping:
        """What becomes of an episode's reward before it is trained on."""
        return Shaping(stop_penalty=self.stop_penalty, clip=self.reward_clip, negate=self.negate_rewards)

    def estimate(self, estimator: Estimator, **settings: Any) -> Estimate:
        """How advantages are computed, with that estimator; `settings` are further arguments of `Estimate`."""
        return Estimate(estimator, gamma=self.gamma, credit=self.credit, **settings)


@dataclass(frozen=True)
class EnvironmentOptions(EpisodeOptions):
    """Options of graphs that train the policy on episodes with an environment."""

    history: History = "append"
    """Contexts keep what was sampled, or are what the template makes of the messages: then an episode has a further
    sequence for each context that the template rewrites."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.task.template:
            yield f"--task.template is {self.task.template!r}, but an environment words its questions; leave it out"
        why = "held-out episodes are those of the environment; name sets of questions with --evaluate-task"
        yield from unused(self, ("evaluate_also",), why)

    def episodes(self, environment: str) -> Environment:
        """The node that plays the environment of that name."""
        return Environment(
            environment,
            self.model,
            shaping=self.shaping,
            history=self.history,
            **self.bounds,
            system_prompt=self.task.system_prompt,
        )


def evaluate_episodes(
    g: Graph, cfg: EvaluationOptions, player: Environment | AgentProgram, generator: Generator
) -> None:
    """Let `generator` serve episodes alone, and add the evaluation node, whose held-out rows `player` plays.

    They are those of its environment, or else of the task, for agents; with --evaluate-task the questions of those
    sets. There is no evaluation if `cfg` has none to ask.
    """
    g.ignore(generator.prompts)
    g.ignore(generator.rollouts)
    if not cfg.evaluates:
        return
    agents, environment = isinstance(player, AgentProgram), player.environment
    further = tuple(replace(cfg.task, name=name, reward="") for name in cfg.evaluate_also)
    held_out = Evaluation(
        (),
        cfg.model,
        num_prompts=max(1, cfg.evaluate),
        num_samples=cfg.evaluate_samples,
        every=cfg.evaluate_every,
        environments=(environment,) if environment and not cfg.evaluate_task else (),
        agent_tasks=further if environment or cfg.evaluate_task else (cfg.task, *further),
        sets=cfg.evaluation_sets,
        agents=agents or bool(cfg.evaluate_task),
        asked_in="" if agents else environment,
        training=cfg.task,
        concurrency=generator.engine.concurrency * g.placed[generator.name].replicas,
    )
    evaluation = g.add("evaluation", held_out)
    g.call(evaluation.play, player.requests)
