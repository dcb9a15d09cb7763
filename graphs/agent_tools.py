"""GRPO on episodes: the policy answers questions of a task and may call tools first.

A group is one question played `group_size` times; the reward of an episode is the task verifier's score of its last
message. Calls and the tools' answers stay in the episode as token ids, and only what the policy sampled is trained.

    advantage   A_i = (R_i − mean R) / std R, over the episodes of one question; with --credit turn, of each turn
    loss        −Σ w·min(ρA, clip(ρ, 0.8, 1.2)A) / number of tokens, ρ = π/π_p, w = min(π_p/π_b, 2) of each token;
                π_p is the policy at the batch's start, π_b the one that sampled

    flowrl run agent_tools --steps 40
"""

from __future__ import annotations

from dataclasses import dataclass

from flowrl import Graph
from flowrl.environments.task_questions import with_sets
from flowrl.nodes import EnvironmentSource, GroupAdvantage, RowPart
from flowrl.options import (
    EnvironmentOptions,
    EpisodeConfig,
    EpisodeData,
    PolicyOptions,
    ReplySampling,
    make_batcher,
    make_generator,
    make_trainer,
    train_on_episodes,
)
from flowrl.tasks import Task
from flowrl.tasks.task_syntax import write_option
from flowrl.training.advantages import Estimate


def episode_graph(name: str, cfg: EpisodeConfig, environment_name: str, estimate: Estimate | None = None) -> Graph:
    """The graph that trains the policy on episodes of the environment of that name; `estimate` replaces cfg's own."""
    estimate = estimate or cfg.estimate
    objective = cfg.loss.build(cfg.episodes.limits.tokens)
    asked = cfg.evaluation.evaluate_task
    evaluated = with_sets(environment_name, asked) if asked else environment_name
    part: RowPart = "all" if asked else "train"
    size, count, curriculum = cfg.sampling.group_size, cfg.data.num_prompts, cfg.groups.curriculum

    g = Graph(name)
    source = EnvironmentSource(environment_name, repeat=size, part=part, num_prompts=count, curriculum=curriculum)
    prompts = g.add("prompts", source)
    environment = g.add("environment", cfg.get_part(EnvironmentOptions).build(cfg, evaluated))
    generator = g.add("generator", make_generator(cfg, **cfg.episodes.parsers), **cfg.place_generator())
    filtering = cfg.groups.build(cfg.steps.groups_per_step)
    advantage = g.add("advantage", GroupAdvantage(estimate, size=size, dynamic=filtering))
    batcher = g.add("batcher", make_batcher(cfg, estimate))
    trainer = g.add("trainer", make_trainer(cfg, objective), **cfg.place(cfg.trainer.size))
    return train_on_episodes(g, cfg, prompts, environment, generator, advantage, batcher, trainer)


@dataclass(frozen=True)
class AgentTools(EpisodeConfig):
    help_texts = {"task": "What is asked: a task with answers and a verifier."}

    policy: PolicyOptions = PolicyOptions("tiny_agent")
    data: EpisodeData = EpisodeData(Task("arithmetic:min_value=30"))
    sampling: ReplySampling = ReplySampling(max_tokens=40)
    episodes: EnvironmentOptions = EnvironmentOptions()

    tools: str = "calculator"
    """Names joined by +: calculator; python, code in a sandbox; mcp:COMMAND or mcp:URL; FILE.py:NAME."""

    @property
    def environment(self) -> str:
        """The environment's name."""
        name, _, options = self.data.task.name.partition(":")
        return f"tools/{name}:" + ",".join(filter(None, (write_option("tools", self.tools), options)))


def graph(cfg: AgentTools) -> Graph:
    return episode_graph("agent_tools", cfg, cfg.environment)
