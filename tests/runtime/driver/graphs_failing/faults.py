"""A training loop without models in which one thing goes wrong."""

from __future__ import annotations

from dataclasses import dataclass

from parts import Collect, Faulty, Generator, Numbers, Ranks, Trainer

from flowrl import Graph
from flowrl.nodes.groups.batch import TokenBatch


@dataclass(frozen=True)
class Faults:
    fault: str = "none"
    at: int = 6
    """Number of the group that it happens to."""
    processes: bool = False
    """Generators and trainers have processes of their own; else everything runs in one."""
    generators: int = 1
    ranks: int = 1
    generate_s: float = 0.02
    train_s: float = 0.02
    close_s: float = 0.0
    """How long a generator takes to close."""
    group_size: int = 2
    capacity: int = 64
    """Of the edge from the generator on: when it is full, turns stand in their send while a checkpoint is made."""


def graph(cfg: Faults) -> Graph:
    g = Graph("faults")
    cpus = 0.25 if cfg.processes else 0
    source = g.add("prompts", Numbers(cfg.group_size))
    generator = g.add(
        "generator", Generator(cfg.generate_s, 2 * cfg.group_size, cfg.close_s), replicas=cfg.generators, cpus=cpus
    )
    faulty = g.add("faulty", Faulty(cfg.fault, cfg.at))
    collect = g.add("collect", Collect(cfg.group_size))
    batcher = g.add("batcher", TokenBatch(2, token_budget=4096))
    trainer = g.add("trainer", (Ranks if cfg.ranks > 1 else Trainer)(cfg.train_s), replicas=cfg.ranks, cpus=cpus)
    g.connect(source.prompts, generator.prompts)
    g.connect(generator.samples, faulty.samples, capacity=cfg.capacity)
    g.connect(faulty.passed, collect.samples)
    g.connect(collect.groups, batcher.groups)
    g.connect(batcher.batches, trainer.batches, dispatch="gang")
    g.latest(trainer.weights, generator.weights)
    g.admit(source.prompts, until=generator.weights, staleness=1)
    return g
