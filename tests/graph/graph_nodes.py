"""Small nodes and a whole GRPO graph for the tests of declaring, checking, planning and drawing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flowrl import (
    Batch,
    Call,
    Cluster,
    Facts,
    Graph,
    Group,
    In,
    Machine,
    Node,
    Out,
    Prompt,
    Sample,
    Scored,
    Serve,
    Weights,
)
from flowrl.graph.analysis.check import check

MACHINE = Cluster((Machine(cores=tuple(range(8)), gpus=0, memory_bytes=16 << 30),))


class Idle(Node):
    """A node whose graph is checked, not run."""

    async def run(self) -> None: ...


class Prompts(Idle):
    prompts: Out[Prompt]

    def __init__(self, group_size: int = 4, longest: int = 64) -> None:
        self.group_size = group_size
        self.longest = longest

    def facts(self) -> Facts:
        return Facts(group_size=self.group_size, longest_prompt=self.longest)


class Generator(Idle):
    cpus = 1
    prompts: In[Prompt]
    rollouts: Out[Sample]
    weights: In[Weights]
    requests: Serve[Prompt, Sample]

    def facts(self) -> Facts:
        return Facts(longest_response=128, concurrency=16, optional=("requests",))


class Reward(Idle):
    rollouts: In[Sample]
    scored: Out[Scored]

    def facts(self) -> Facts:
        return Facts(drops=True)


class Teacher(Idle):
    """A branch beside the reward."""

    rollouts: In[Sample]
    rated: Out[Sample]


class Advantage(Idle):
    keyed_state = True
    scored: In[Scored]
    groups: Out[Group]

    def __init__(self, group_size: int = 4) -> None:
        self.group_size = group_size

    def facts(self) -> Facts:
        return Facts(group_size=self.group_size, keeps_lineage=False)


class JoinedAdvantage(Advantage):
    rated: In[Sample]

    def facts(self) -> Facts:
        return Facts(group_size=self.group_size, keeps_lineage=False, joins=("scored", "rated"))


class Batcher(Idle):
    groups: In[Group]
    batches: Out[Batch]

    def __init__(self, groups: int = 4, token_budget: int = 4096) -> None:
        self.groups_per_batch = groups
        self.token_budget = token_budget

    def facts(self) -> Facts:
        return Facts(groups_per_batch=self.groups_per_batch, token_budget=self.token_budget)


class Trainer(Idle):
    cpus = 1
    gang = True
    batches: In[Batch]
    weights: Out[Weights]

    def __init__(self, publish_every: int = 1) -> None:
        self.publish_every = publish_every

    def facts(self) -> Facts:
        return Facts(publish_every=self.publish_every)


class Evaluation(Idle):
    generate: Call[Prompt, Sample]


class Filter(Idle):
    scored: In[Scored]
    kept: Out[Scored]

    def facts(self) -> Facts:
        return Facts(drops=True)


@dataclass
class Grpo:
    """The usual graph. Its parts are attributes, so that a test can add what it is about."""

    graph: Graph
    prompts: Prompts
    generator: Generator
    reward: Reward
    advantage: Advantage
    batcher: Batcher
    trainer: Trainer

    @property
    def problems(self) -> tuple[str, ...]:
        return check(self.graph, MACHINE).problems

    def problem(self) -> str:
        """The only problem."""
        (problem,) = self.problems
        return problem

    def cut(self, out: Any) -> None:
        """Take the edges of an Out port away."""
        self.graph.edges = [edge for edge in self.graph.edges if edge.out is not out]


def grpo(
    *,
    group_size: int = 4,
    collected: int | None = None,
    groups: int = 4,
    staleness: int = 1,
    look_ahead: int = 1,
    on_limit: Any = "wait",
    token_budget: int = 4096,
    publish_every: int = 1,
    num_generators: int = 1,
    num_trainers: int = 1,
    admit: bool = True,
    latest: bool = True,
) -> Grpo:
    g = Graph("grpo")
    parts = Grpo(
        g,
        g.add("prompts", Prompts(group_size)),
        g.add("generator", Generator(), replicas=num_generators),
        g.add("reward", Reward(), replicas=2),
        g.add("advantage", Advantage(group_size if collected is None else collected)),
        g.add("batcher", Batcher(groups, token_budget)),
        g.add("trainer", Trainer(publish_every), replicas=num_trainers),
    )
    g.connect(parts.prompts.prompts, parts.generator.prompts)
    g.connect(parts.generator.rollouts, parts.reward.rollouts)
    g.connect(parts.reward.scored, parts.advantage.scored)
    g.connect(parts.advantage.groups, parts.batcher.groups)
    g.connect(parts.batcher.batches, parts.trainer.batches, capacity=2, dispatch="gang")
    if latest:
        g.latest(parts.trainer.weights, parts.generator.weights)
    if admit:
        g.admit(
            parts.prompts.prompts,
            until=parts.generator.weights,
            staleness=staleness,
            on_limit=on_limit,
            look_ahead=look_ahead,
        )
    return parts
