"""GRPO on an agent in any language or library: its program asks the policy over HTTP and reports its episode's reward.

The default agent does the task of agent_tools.py: it answers questions and may use a calculator first. It is a file
that imports OpenAI's library and nothing of flowrl. A group is one question, given to `group_size` agents.

    flowrl run agent_openai --steps 40
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowrl import Graph
from flowrl.nodes import AgentProgram, EnvironmentSource, GroupAdvantage, TaskSource
from flowrl.options import (
    EpisodeConfig,
    EpisodeData,
    EpisodeOptions,
    EvaluationOptions,
    PolicyOptions,
    ReplySampling,
    find_unused,
    make_batcher,
    make_generator,
    make_trainer,
    train_on_episodes,
)
from flowrl.tasks import Task

CALCULATOR_AGENT = str(Path(__file__).resolve().parent / "agents" / "calculator_agent.py")


@dataclass(frozen=True)
class AgentOpenAI(EpisodeConfig):
    help_texts = {
        "task": "The task that agents do; each agent gets the columns and the messages of one row.",
        "processes": "Maximum number of agents at a time: their processes, or the sessions of outside workers.",
        "evaluate_samples": "Number of episodes of each held-out question: a single one is greedy, several are "
        "sampled.",
    }

    policy: PolicyOptions = PolicyOptions("tiny_agent")
    data: EpisodeData = EpisodeData(Task("arithmetic:min_value=30"))
    sampling: ReplySampling = ReplySampling(max_tokens=40)
    episodes: EpisodeOptions = EpisodeOptions(processes=128)
    evaluation: EvaluationOptions = EvaluationOptions(evaluate=128, evaluate_samples=4)

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

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.players.environment and self.evaluation.evaluate_task:
            yield "--evaluate-task is for agents that get the rows of a task; one of verifiers has its own questions"
        if self.players.environment:
            why = "it is for agents that get the rows of a task; one of verifiers has its own questions"
            yield from find_unused(self, ("evaluate_also",), why)

    @property
    def players(self) -> AgentProgram:
        """The node whose agents play the episodes."""
        where = {"host": self.host, "port": self.port, "models": self.models, "idle_s": self.idle_s}
        return self.episodes.build_agents(self, agent=self.agent, command=self.command, **where)

    @property
    def source(self) -> EnvironmentSource | TaskSource:
        """The source of what the agents are to do."""
        asked: dict[str, Any] = {"repeat": self.sampling.group_size, "num_prompts": self.data.num_prompts}
        asked["curriculum"] = self.groups.curriculum
        if name := self.players.environment:
            return EnvironmentSource(name, **asked)
        return TaskSource(self.data.task, part=self.evaluation.trained_part(self.data.task), **asked)


def graph(cfg: AgentOpenAI) -> Graph:
    objective = cfg.loss.build(cfg.episodes.limits.tokens)

    g = Graph("agent_openai")
    prompts = g.add("prompts", cfg.source)
    agents = g.add("agents", cfg.players)
    generator = g.add("generator", make_generator(cfg, **cfg.episodes.parsers), **cfg.place_generator())
    filtering = cfg.groups.build(cfg.steps.groups_per_step)
    advantage = g.add("advantage", GroupAdvantage(cfg.estimate, size=cfg.sampling.group_size, dynamic=filtering))
    batcher = g.add("batcher", make_batcher(cfg, cfg.estimate))
    trainer = g.add("trainer", make_trainer(cfg, objective), **cfg.place(cfg.trainer.size))
    return train_on_episodes(g, cfg, prompts, agents, generator, advantage, batcher, trainer)
