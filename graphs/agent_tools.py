"""GRPO on episodes: the policy answers questions of a task and may call tools first.

A group is one question played `group_size` times; the reward of an episode is the task verifier's score of its last
message. Calls and the tools' answers stay in the episode as token ids, and only what the policy sampled is trained.

    flowrl run agent_tools --steps 40
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from flowrl import Graph
from flowrl.blocks import refer
from flowrl.environments.task_questions import with_sets
from flowrl.episode_options import EnvironmentOptions, evaluate_episodes
from flowrl.loss_options import RewardKLOptions
from flowrl.nodes import EnvironmentSource, GroupAdvantage, RowPart
from flowrl.tasks import Task
from flowrl.tasks.task_syntax import write_option


@dataclass(frozen=True)
class GroupedEpisodes(RewardKLOptions, EnvironmentOptions):
    """Options of graphs that compare the episodes of a group."""

    groups_per_step: int = 8
    lr: float = 3e-4
    advantage: Literal["group_norm", "dr_grpo", "rloo", "reinforce_baseline"] = "group_norm"
    """What an episode is compared with: the mean of its group, with or without division by the group's standard
    deviation, or the other episodes."""


def episode_graph(name: str, cfg: GroupedEpisodes, environment_name: str) -> Graph:
    """The graph that trains the policy on episodes of the environment of that name."""
    estimate = cfg.estimate(cfg.advantage, **cfg.reward_kl_settings)
    filtering = cfg.filtering(cfg.groups_per_step)

    evaluated = with_sets(environment_name, cfg.evaluate_task) if cfg.evaluate_task else environment_name
    part: RowPart = "all" if cfg.evaluate_task else "train"

    g = Graph(name)
    source = EnvironmentSource(
        environment_name, repeat=cfg.group_size, part=part, num_prompts=cfg.num_prompts, curriculum=cfg.curriculum
    )
    prompts = g.add("prompts", source)
    environment = g.add("environment", cfg.episodes(evaluated))
    generator = g.add("generator", cfg.make_generator(cfg.sampling), **cfg.place_generator())
    advantage = g.add("advantage", GroupAdvantage(estimate, size=cfg.group_size, dynamic=filtering))
    batcher = g.add("batcher", cfg.batcher(**cfg.of_advantages(estimate), adaptive_kl=cfg.adaptive_kl))
    trainer = g.add("trainer", cfg.make_trainer(cfg.loss(cfg.limits.tokens)), **cfg.place(cfg.trainer))

    g.connect(prompts.prompts, environment.prompts)
    g.call(environment.generate, generator.turns, affinity_margin=cfg.affinity_margin)
    episodes, followers = refer(g, cfg, cfg.compared_with, environment.episodes, trainer)
    g.connect(episodes, advantage.scored)
    g.connect(advantage.groups, batcher.groups)
    g.connect(batcher.batches, trainer.batches, dispatch="gang")
    g.latest(trainer.weights, generator.weights)
    if cfg.curriculum.used:
        g.call(advantage.outcomes, prompts.outcomes)
    g.admit(
        prompts.prompts,
        until=(generator.weights, *followers),
        staleness=cfg.staleness,
        on_limit=cfg.on_limit,
        look_ahead=cfg.window,
    )
    evaluate_episodes(g, cfg, environment, generator)
    cfg.share_devices(g, ("trainer", "reference"))
    return g


@dataclass(frozen=True)
class AgentTools(GroupedEpisodes):
    policy: str = "tiny_agent"
    task: Task = Task("arithmetic:min_value=30")
    """What is asked: a task with answers and a verifier."""
    tools: str = "calculator"
    """Names joined by +: calculator; python, code in a sandbox; mcp:COMMAND or mcp:URL; FILE.py:NAME."""
    max_tokens: int = 40

    @property
    def environment(self) -> str:
        """The environment's name."""
        name, _, options = self.task.name.partition(":")
        return f"tools/{name}:" + ",".join(filter(None, (write_option("tools", self.tools), options)))


def graph(cfg: AgentTools) -> Graph:
    return episode_graph("agent_tools", cfg, cfg.environment)
