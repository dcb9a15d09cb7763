"""Episodes of several turns in one process, more than fifty at a time; nothing computes."""

from __future__ import annotations

from dataclasses import dataclass

from flowrl import Graph
from flowrl.models import Policy
from flowrl.nodes import Environment, EnvironmentSource, GroupAdvantage, Limits, Sampling, TokenBatch
from tests.runtime.checkpoints.half_done import Speaker
from tests.runtime.runs.graphs_episodes.played import Training


@dataclass(frozen=True)
class Config:
    kind: str = "Paced"
    """Class in tests/runtime/checkpoints/half_done.py."""
    turns: int = 6
    step_s: float = 0.1
    """A batch takes about half as long as an episode: so long have those of the next batch been played then."""
    group_size: int = 4
    groups_per_step: int = 14
    staleness: int = 1
    generators: int = 2
    retries: int = 0
    apart: bool = False
    """Each generator has a process of its own."""
    dies_s: float = 0.0
    """Seconds after which the engine of the second generator dies; 0: never."""


def graph(cfg: Config) -> Graph:
    g = Graph("half_done")
    name = f"tests.runtime.checkpoints.half_done:{cfg.kind}:turns={cfg.turns},step_s={cfg.step_s}"
    limits = Limits(tokens=400, retries=cfg.retries, step_s=1000.0)
    source = g.add("prompts", EnvironmentSource(name, repeat=cfg.group_size))
    environment = g.add("environment", Environment(name, Policy("tiny"), limits=limits))
    speaker = Speaker(Policy("tiny"), sampling=Sampling(max_tokens=20))
    g.add("generator", speaker, replicas=cfg.generators, cpus=int(cfg.apart))
    speaker.dies_s = cfg.dies_s
    advantage = g.add("advantage", GroupAdvantage(size=cfg.group_size))
    batcher = g.add("batcher", TokenBatch(cfg.groups_per_step, token_budget=4096))
    trainer = g.add("trainer", Training(cfg.turns / 2 * (cfg.step_s + 0.12)))
    g.connect(source.prompts, environment.prompts)
    g.call(environment.generate, speaker.turns, affinity_margin=2)
    g.ignore(speaker.prompts)
    g.ignore(speaker.rollouts)
    g.connect(environment.episodes, advantage.scored)
    g.connect(advantage.groups, batcher.groups)
    g.connect(batcher.batches, trainer.batches, dispatch="gang")
    g.latest(trainer.weights, speaker.weights)
    g.admit(source.prompts, until=speaker.weights, staleness=cfg.staleness)
    return g
