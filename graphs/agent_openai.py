"""GRPO on an agent in any language or library: its program asks the policy over HTTP and reports its episode's reward.

The default agent does the task of agent_tools.py: it answers questions and may use a calculator first. It is a file
that imports OpenAI's library and nothing of flowrl. A group is one question, given to `group_size` agents.

    flowrl run agent_openai --steps 40
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from flowrl import Graph
from flowrl.blocks import refer
from flowrl.episode_options import EpisodeOptions, evaluate_episodes
from flowrl.loss_options import RewardKLOptions
from flowrl.nodes import AgentProgram, EnvironmentSource, GroupAdvantage, TaskSource
from flowrl.role_options import unused
from flowrl.tasks import Task

CALCULATOR_AGENT = str(Path(__file__).resolve().parent / "agents" / "calculator_agent.py")


@dataclass(frozen=True)
class AgentOpenAI(RewardKLOptions, EpisodeOptions):
    policy: str = "tiny_agent"
    task: Task = Task("arithmetic:min_value=30")
    """The task that agents do; each agent gets the columns and the messages of one row."""
    agent: str = f"{CALCULATOR_AGENT}:play"
    """FILE.py:FUNCTION, an async function of a client and the task that returns the reward; or verifiers/PACKAGE, an
    environment of verifiers, which has its own questions; or `outside`: workers that flowrl does not start ask for
    tasks, as docs/endpoint.md says."""
    command: str = ""
    """A command line in place of a function, as in --agent "" --command "node agent.js"."""
    idle_s: float = 600.0
    """Seconds after which a session that asks nothing has failed."""
    host: str = "127.0.0.1"
    """Address at which agents reach the policy; the default is for agents on this machine only."""
    port: int = 0
    """0 is any free port."""
    models: tuple[str, ...] = ("policy",)
    """Model names that calls may give to the policy, for agents with fixed or several model names."""
    processes: int = 128
    """Maximum number of agents at a time: their processes, or the sessions of outside workers."""
    groups_per_step: int = 8
    max_tokens: int = 40
    lr: float = 3e-4
    evaluate: int = 128
    evaluate_samples: int = 4
    """Number of episodes of each held-out question: a single one is greedy, several are sampled."""
    advantage: Literal["group_norm", "dr_grpo", "rloo", "reinforce_baseline"] = "group_norm"
    """What an episode is compared with: the mean of its group, with or without division by the group's standard
    deviation, or the other episodes."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.players.environment and self.evaluate_task:
            yield "--evaluate-task is for agents that get the rows of a task; one of verifiers has its own questions"
        if self.players.environment:
            why = "it is for agents that get the rows of a task; one of verifiers has its own questions"
            yield from unused(self, ("evaluate_also",), why)

    @property
    def players(self) -> AgentProgram:
        """The node whose agents play the episodes."""
        where = {"host": self.host, "port": self.port, "models": self.models}
        return self.agents(self.agent, self.command, idle_s=self.idle_s, **where)

    @property
    def groups(self) -> dict[str, Any]:
        """Arguments of a source: what it asks, and how often."""
        return {"repeat": self.group_size, "num_prompts": self.num_prompts, "curriculum": self.curriculum}

    @property
    def source(self) -> EnvironmentSource | TaskSource:
        """The source of what the agents are to do."""
        if name := self.players.environment:
            return EnvironmentSource(name, **self.groups)
        return TaskSource(self.task, part=self.trained_part, **self.groups)


def graph(cfg: AgentOpenAI) -> Graph:
    estimate = cfg.estimate(cfg.advantage, **cfg.reward_kl_settings)
    filtering = cfg.filtering(cfg.groups_per_step)

    g = Graph("agent_openai")
    prompts = g.add("prompts", cfg.source)
    agents = g.add("agents", cfg.players)
    generator = g.add("generator", cfg.make_generator(cfg.sampling), **cfg.place_generator())
    advantage = g.add("advantage", GroupAdvantage(estimate, size=cfg.group_size, dynamic=filtering))
    batcher = g.add("batcher", cfg.batcher(**cfg.of_advantages(estimate), adaptive_kl=cfg.adaptive_kl))
    trainer = g.add("trainer", cfg.make_trainer(cfg.loss(cfg.limits.tokens)), **cfg.place(cfg.trainer))

    g.connect(prompts.prompts, agents.prompts)
    g.call(agents.generate, generator.turns, affinity_margin=cfg.affinity_margin)
    episodes, followers = refer(g, cfg, cfg.compared_with, agents.episodes, trainer)
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
    evaluate_episodes(g, cfg, agents, generator)
    cfg.share_devices(g, ("trainer", "reference"))
    return g
