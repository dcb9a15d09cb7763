"""The configuration of graphs that train the policy on episodes, with environments or agents, and their evaluation."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from flowrl.agents import History
from flowrl.graph.graph import AFFINITY_MARGIN, Graph
from flowrl.graph.machine import GB
from flowrl.models.model_size import Learning
from flowrl.nodes import (
    AgentProgram,
    Environment,
    Evaluation,
    Generator,
    GroupAdvantage,
    Limits,
    TokenBatch,
    Trainer,
)
from flowrl.nodes.sources.row_source import RowSource
from flowrl.options.graph_config import ConfigPart, DataOptions, GeneratorOptions, GraphConfig, SamplingOptions
from flowrl.options.loss_parts import GroupOptions, NormalisationOptions, RewardKLLoss
from flowrl.options.online import StepOptions, add_reference, train_on_groups
from flowrl.options.reward_parts import ShapingOptions, TimedReward
from flowrl.options.sizes import find_unused, too_low
from flowrl.options.training_parts import EvaluationOptions, TrainerOptions
from flowrl.training.advantages import Credit, Estimate


@dataclass(frozen=True)
class EpisodeData(DataOptions):
    """The rows that episodes are played on."""

    num_prompts: int | None = None
    """Number of rows of the environment or the task to train on, from the first; a mixture divides it by weight. None:
    all."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        yield from too_low(self, num_prompts=1)


@dataclass(frozen=True)
class ReplySampling(SamplingOptions):
    """How the replies of an episode are sampled."""

    max_tokens: int = 256
    """Maximum number of tokens in one reply."""


@dataclass(frozen=True)
class EpisodeSteps(StepOptions):
    """How episodes make steps."""

    staleness: int = 2
    look_ahead: int | None = None  # type: ignore[assignment]  # only graphs of episodes derive it
    """Number of groups among which the batcher may choose a finished one; 1: groups are taken in admission order. None:
    the groups of one step, or 1 where that is impossible: with a staleness below 2, and with --on-limit mask."""
    groups_per_step: int = 8

    @property
    def window(self) -> int:
        """`look_ahead` or, if that is None, a value derived from the other options.

        A window of one step's groups uses up one version of the staleness: with a staleness of 1, the run would become
        synchronous. With `on_limit="mask"`, batches have no window.
        """
        if self.look_ahead is not None:
            return self.look_ahead
        return self.groups_per_step if self.on_limit == "wait" and self.staleness >= 2 else 1


@dataclass(frozen=True)
class EpisodeOptions(ConfigPart):
    """How episodes are played, and how their tokens are credited."""

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
    advantage: Literal["group_norm", "dr_grpo", "rloo", "reinforce_baseline", "max_rl", "pass_at_k"] = "group_norm"
    """What an episode is compared with: the mean of its group, with or without division by the group's standard
    deviation or mean (max_rl), the other episodes, or the best of k episodes (pass_at_k)."""
    pass_k: int | None = None
    """k, for `advantage` pass_at_k: of so many episodes one has to pass."""
    pass_at: float = 1.0
    """The reward from which an episode passes, for `advantage` pass_at_k."""
    credit: Credit = "episode"
    """A token has the advantage of its whole episode (episode), or of its turn (turn): of the rewards that follow,
    compared with the group."""
    gamma: float = 1.0
    """Discount of rewards from turn to turn; only for credit by turn."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        yield from too_low(self, processes=1, episodes_per_process=1, affinity_margin=0)
        if not 0 < self.memory_gb < math.inf:
            yield f"--memory-gb is {self.memory_gb}; it has to be above 0"

    def problems_within(self, cfg: GraphConfig) -> Iterator[str]:
        yield from super().problems_within(cfg)
        if cfg.data.task.reward:
            yield f"--task.reward is {cfg.data.task.reward!r}, but an episode is scored by its environment or agent"
        if cfg.get_part(TimedReward).reward_timeout_s is not None:
            yield "--reward-timeout-s is for reward functions, and an episode's environment has --limits; leave it out"
        if self.advantage == "max_rl":
            why = "--advantage max_rl divides by a mean reward, and this makes rewards negative; leave it out"
            yield from find_unused(cfg, ("negate_rewards",), why)
        why = "an episode's first prompt is bounded as all of it is, by --limits.tokens; leave this out"
        yield from find_unused(cfg, ("evaluate_max_prompt_tokens",), why)

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

    def build_agents(self, cfg: GraphConfig, *, agent: str, command: str = "", **settings: Any) -> AgentProgram:
        """The node with agents: a function `FILE.py:FUNCTION`, a command, or "outside".

        `settings` are further arguments of `AgentProgram`.
        """
        return AgentProgram(
            cfg.model,
            agent=agent,
            command=command,
            sampling=cfg.get_part(SamplingOptions).build(cfg.get_part(GeneratorOptions).stop_strings),
            shaping=cfg.get_part(ShapingOptions).build(),
            **self.bounds,
            **settings,
        )


@dataclass(frozen=True)
class EnvironmentOptions(EpisodeOptions):
    """How episodes with an environment are played."""

    history: History = "append"
    """append: contexts keep the sampled tokens. template: contexts are what the template makes of the messages, and an
    episode has a further sequence for each context that the template rewrites."""

    def problems_within(self, cfg: GraphConfig) -> Iterator[str]:
        yield from super().problems_within(cfg)
        task = cfg.data.task
        if task.reasoning:
            yield f"--task.reasoning is {task.reasoning}, but an environment's rows have no replies; leave it out"
        if task.template:
            yield f"--task.template is {task.template!r}, but an environment words its questions; leave it out"
        why = "held-out episodes are those of the environment; name sets of questions with --evaluate-task"
        yield from find_unused(cfg, ("evaluate_also",), why)

    def build(self, cfg: GraphConfig, environment: str) -> Environment:
        """The node that plays the environment of that name."""
        return Environment(
            environment,
            cfg.model,
            shaping=cfg.get_part(ShapingOptions).build(),
            history=self.history,
            **self.bounds,
            system_prompt=cfg.data.task.system_prompt,
        )


@dataclass(frozen=True)
class EpisodeConfig(GraphConfig):
    """The configuration of a graph that compares the episodes of a group."""

    learning: ClassVar[Learning | None] = "samples"

    data: EpisodeData = EpisodeData()
    generator: GeneratorOptions = GeneratorOptions()
    sampling: ReplySampling = ReplySampling()
    episodes: EpisodeOptions = EpisodeOptions()
    reward: TimedReward = TimedReward()
    shaping: ShapingOptions = ShapingOptions()
    groups: GroupOptions = GroupOptions()
    normalisation: NormalisationOptions = NormalisationOptions()
    loss: RewardKLLoss = RewardKLLoss()
    steps: EpisodeSteps = EpisodeSteps()
    trainer: TrainerOptions = TrainerOptions(lr=3e-4)
    evaluation: EvaluationOptions = EvaluationOptions()

    @property
    def asks_functions(self) -> bool:
        return self.evaluation.evaluates

    @property
    def estimate(self) -> Estimate:
        """How advantages are computed: a token has that of its episode, or of its turn."""
        how = self.episodes
        return Estimate(
            how.advantage,
            gamma=how.gamma,
            credit=how.credit,
            pass_k=how.pass_k,
            pass_at=how.pass_at,
            **self.loss.of_estimate,
        )


def train_on_episodes(
    g: Graph,
    cfg: EpisodeConfig,
    prompts: RowSource,
    player: Environment | AgentProgram,
    generator: Generator,
    advantage: GroupAdvantage,
    batcher: TokenBatch,
    trainer: Trainer,
) -> Graph:
    """Wire these nodes: `player` plays episodes on the prompts and asks `generator` for its replies; then as with
    answers. Adds the evaluation and returns the graph."""
    g.connect(prompts.prompts, player.prompts)
    g.call(player.generate, generator.turns, affinity_margin=cfg.episodes.affinity_margin)
    episodes, followers = add_reference(g, cfg, cfg.loss.compared_with(cfg), player.episodes, trainer)
    g.connect(episodes, advantage.scored)
    train_on_groups(g, cfg, prompts.prompts, advantage.groups, batcher, trainer, generator, followers=followers)
    if prompts.curriculum is not None:
        g.call(advantage.outcomes, prompts.outcomes)
    add_episode_evaluation(g, cfg, player, generator)
    cfg.share_devices(g, ("trainer", "reference"))
    return g


def add_episode_evaluation(
    g: Graph, cfg: EpisodeConfig, player: Environment | AgentProgram, generator: Generator
) -> None:
    """Let `generator` serve only episodes, and add the evaluation node, whose held-out rows `player` plays.

    The held-out rows are those of the player's environment or, for agents without one, those of the task; with
    --evaluate-task they are the questions of those sets. No evaluation is added if `cfg` asks for none.
    """
    g.ignore(generator.prompts)
    g.ignore(generator.rollouts)
    asked, task = cfg.evaluation, cfg.data.task
    if not asked.evaluates:
        return
    agents, environment = isinstance(player, AgentProgram), player.environment
    further = tuple(replace(task, name=name, reward="") for name in asked.evaluate_also)
    held_out = Evaluation(
        (),
        cfg.model,
        num_prompts=max(1, asked.evaluate),
        num_samples=asked.evaluate_samples,
        every=asked.evaluate_every,
        environments=(environment,) if environment and not asked.evaluate_task else (),
        agent_tasks=further if environment or asked.evaluate_task else (task, *further),
        sets=asked.sets(cfg),
        agents=agents or bool(asked.evaluate_task),
        asked_in="" if agents else environment,
        training=task,
        concurrency=generator.engine.concurrency * g.placed[generator.name].replicas,
    )
    evaluation = g.add("evaluation", held_out)
    g.call(evaluation.play, player.requests)
