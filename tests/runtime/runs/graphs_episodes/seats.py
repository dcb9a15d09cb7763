"""Games for two seats in one process: the real environment nodes, and players and a trainer that compute nothing."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from flowrl import Graph
from flowrl.environments.sticks_env import Sticks
from flowrl.messages.episode import Reply, Turn
from flowrl.models import Policy
from flowrl.nodes import Environment, EnvironmentSource, Evaluation, GroupAdvantage, Limits, TokenBatch
from flowrl.nodes.generation.responses import skips_version
from tests.runtime.runs.graphs_episodes.played import Meddler, Speaker, Training

SAYS = "111122233334"
"""What players say: mostly a move that is allowed."""


class Unreplayed(Sticks):
    """Its state can be saved."""

    def save(self) -> bytes:
        return bytes([self.left])

    def restore(self, state: bytes) -> None:
        (self.left,) = state


class Mover(Speaker):
    """Plays sticks at random; takes every nth version."""

    def __init__(self, every: int = 1) -> None:
        super().__init__()
        self.every = every

    async def follow(self) -> None:
        async for weights in self.weights:
            if not skips_version(self.version, weights.version, every=self.every):
                self.version = weights.version
            self.ready.set()
            self.context.ledger.holds(f"{self.name}/{self.context.replica}", weights.policy, weights.version)

    def says(self, draws: random.Random) -> str:
        return draws.choice(SAYS)


class First(Mover):
    """Stays at version 0, and says so in every request that it answers."""

    async def follow(self) -> None:
        self.version = 0
        self.ready.set()

    async def answer(self, turn: Turn) -> Reply:
        self.context.metric("asked_of_first", 1)
        return replace(await super().answer(turn), generator="first/0")


@dataclass(frozen=True)
class Config:
    opponent_every: int = -1
    """-1: the policy plays both seats; 0: one against version 0."""
    saves: bool = False
    credit: str = "episode"
    group_size: int = 4
    groups_per_step: int = 4
    staleness: int = 2
    evaluate: int = 0
    meddle: bool = False


def graph(cfg: Config) -> Graph:
    g = Graph("seats")
    name = f"{__file__}:Unreplayed" if cfg.saves else "flowrl.environments.sticks_env:Sticks"
    limits = Limits(tokens=200)
    source = g.add("prompts", EnvironmentSource(name, repeat=cfg.group_size))
    environment = g.add("environment", Environment(name, Policy("tiny"), limits=limits))
    speaker = g.add("generator", Mover())
    advantage = g.add("advantage", GroupAdvantage("dr_grpo", size=cfg.group_size))
    batcher = g.add("batcher", TokenBatch(cfg.groups_per_step, token_budget=4096))
    trainer = g.add("trainer", Training(0.2))
    g.connect(source.prompts, environment.prompts)
    g.call(environment.generate, speaker.turns, affinity_margin=2)
    if cfg.meddle:
        meddler = g.add("meddler", Meddler())
        g.connect(environment.episodes, meddler.episodes)
        g.connect(meddler.out, advantage.scored)
    else:
        g.connect(environment.episodes, advantage.scored)
    g.connect(advantage.groups, batcher.groups)
    g.connect(batcher.batches, trainer.batches, dispatch="gang")
    g.latest(trainer.weights, speaker.weights)
    until = [speaker.weights]
    if cfg.opponent_every > 0:
        opponent = g.add("opponent", Mover(cfg.opponent_every))
        g.call(environment.opponent, opponent.turns)
        g.latest(trainer.weights, opponent.weights)
        until.append(opponent.weights)
    if cfg.opponent_every == 0 or cfg.evaluate:
        first = g.add("first", First())
        g.ignore(first.weights)
        if cfg.opponent_every == 0:
            g.call(environment.opponent, first.turns)
        if cfg.evaluate:
            arena = g.add("arena", Environment(name, Policy("tiny"), limits=limits))
            g.ignore(arena.prompts)
            g.ignore(arena.episodes)
            g.call(arena.generate, speaker.turns)
            g.call(arena.opponent, first.turns)
            held_out = Evaluation((), Policy("tiny"), num_prompts=cfg.evaluate, environments=(name,))
            g.call(g.add("evaluation", held_out).play, arena.requests)
    g.admit(source.prompts, until=tuple(until), staleness=cfg.staleness)
    return g
