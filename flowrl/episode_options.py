"""Blocks of options of graphs that train the policy on episodes, and the evaluation of such graphs."""

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
from flowrl.training.advantages import Credit, Estimate, Estimator


@dataclass(frozen=True)
class EpisodeOptions(ShapedReward, OnlineOptions):
    """Options of graphs that train the policy on episodes, with environments or agents."""

    staleness: int = 2
    look_ahead: int | None = None  # type: ignore[assignment]  # only graphs of episodes derive it
    """Number of groups among which the batcher may choose a finished one; 1: groups are taken in admission order. None:
    the groups of one step, or 1 where that is impossible: with a staleness below 2, and with --on-limit mask."""
    num_prompts: int | None = None
    """Number of rows of the environment or the task to train on, from the first; a mixture divides it by weight. None:
    all."""
    limits: Limits = Limits(tokens=2048)
    """Limits of an episode, as in --limits.turns 8."""
    processes: int = 256
    """Maximum number of processes of environments, or of agents, at a time."""
    episodes_per_process: int = 1
    """Number of episodes that a process plays, one after the other. More than 1 saves the start of new processes, but
    what a program or an environment keeps in its modules then still exists in the next episode."""
    keep_variables: tuple[str, ...] = ()
    """Names of environment variables of the run that these processes get too, such as OPENAI_API_KEY or WANDB_*. They
    get those that every program needs, and neither keys nor tokens."""
    memory_gb: float = 1.0
    """GiB of data that each of these processes may take, beyond what its imports take."""
    affinity_margin: int | None = AFFINITY_MARGIN
    """A session stays on its generator while this generator has at most this many more open requests than the least
    loaded one. None: each request goes to the generator with the fewest open requests."""
    tool_parser: str = ""
    """vLLM's parser that reads the policy's tool calls, by its name in vLLM's server, such as hermes; empty: the
    tokenizer's response_template, if it has one."""
    reasoning_parser: str = ""
    """vLLM's parser that separates the policy's reasoning from its answer, such as qwen3."""
    max_tokens: int = 256
    """Maximum number of tokens in one reply."""
    credit: Credit = "episode"
    """A token has the advantage of its whole episode (episode), or of its turn (turn): of the rewards that follow,
    compared with the group."""
    gamma: float = 1.0
    """Discount of rewards from turn to turn; only for credit by turn."""

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
        """`look_ahead` or, if that is None, a value derived from the other options.

        A window of one step's groups uses up one version of the staleness: with a staleness of 1, the run would become
        synchronous. With `on_limit="mask"`, batches have no window.
        """
        if self.look_ahead is not None:
            return self.look_ahead
        return self.groups_per_step if self.on_limit == "wait" and self.staleness >= 2 else 1

    @property
    def bounds(self) -> dict[str, Any]:
        """The arguments with which nodes that play episodes limit the episodes and their processes."""
        return {
            "limits": self.limits,
            "processes": self.processes,
            "memory_bytes": int(self.memory_gb * GB),
            "episodes_per_process": self.episodes_per_process,
            "keep_variables": self.keep_variables,
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
        """How an episode's reward is shaped before it is trained on."""
        return Shaping(stop_penalty=self.stop_penalty, clip=self.reward_clip, negate=self.negate_rewards)

    def estimate(self, estimator: Estimator, **settings: Any) -> Estimate:
        """How advantages are computed, with that estimator; `settings` are further arguments of `Estimate`."""
        return Estimate(estimator, gamma=self.gamma, credit=self.credit, **settings)


@dataclass(frozen=True)
class EnvironmentOptions(EpisodeOptions):
    """Options of graphs that train the policy on episodes with an environment."""

    history: History = "append"
    """append: contexts keep the sampled tokens. template: contexts are what the template makes of the messages, and an
    episode has a further sequence for each context that the template rewrites."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.task.reasoning:
            yield f"--task.reasoning is {self.task.reasoning}, but an environment's rows have no replies; leave it out"
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
    """Let `generator` serve only episodes, and add the evaluation node, whose held-out rows `player` plays.

    The held-out rows are those of the player's environment or, for agents without one, those of the task; with
    --evaluate-task they are the questions of those sets. No evaluation is added if `cfg` asks for none.
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
