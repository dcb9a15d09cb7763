"""The graph of episodes_stack.py: episodes without a trainer, or the requests of such a run once more.

Nothing is trained, so no ticket bounds the episodes: `Limits.episodes` says how many there are at a time. The generator
is the same in both, with weights of its own; it notes every request and when it was answered. What is noted is written
when the run ends.
"""

from __future__ import annotations

import asyncio
import pickle
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.agents import waiting_env
from flowrl import Call, Graph, In, Node
from flowrl.graph.node import Facts
from flowrl.messages import Prompt
from flowrl.messages.episode import Episode, Reply, Turn
from flowrl.models import Policy
from flowrl.nodes import Engine, Environment, EnvironmentSource, Generator, Limits, Sampling
from flowrl.tasks import Task

ENVIRONMENT, GENERATOR = "environment.pickle", "generator.pickle"
METER_S = 0.25
POLICY = Policy("tiny_agent", task=Task("arithmetic:min_value=30"))


@dataclass(frozen=True)
class Config:
    out: str = ""
    """A directory for what is noted."""
    requests: str = ""
    """A file with the requests of another run, to be asked in place of playing."""
    episodes: int = 1000
    """So many at a time."""
    total: int = 5000
    """So many in all."""
    num_turns: int = 4
    least_s: float = 0.5
    most_s: float = 5.0
    max_tokens: int = 8
    concurrency: int = 128
    """So many places the generator has."""


Answered = tuple[Turn, float]
"""A request, and when its reply was ready."""


class NotingGenerator(Generator):
    """Notes what it is asked."""

    def __init__(self, out: Path, sampling: Sampling, engine: Engine) -> None:
        super().__init__(POLICY, sampling=sampling, evaluation=sampling, engine=engine, trained=False)
        self.out = out
        self.noted: list[Answered] = []

    async def _generate_reply(self, turn: Turn) -> Reply:
        reply = await super()._generate_reply(turn)
        self.noted.append((turn, time.monotonic()))
        return reply

    async def close(self) -> None:
        await super().close()
        (self.out / GENERATOR).write_bytes(pickle.dumps(self.noted))


class PlayedEpisodes(Node):
    """Takes episodes out of the graph, and meters the process that it shares with their environment."""

    episodes: In[Episode]

    def __init__(self, out: Path) -> None:
        self.out = out
        self.used: list[tuple[float, float]] = []
        """(time, processor seconds so far)"""

    def facts(self) -> Facts:
        return Facts(drops=True, keeps_lineage=False)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            meter = tasks.create_task(self._meter())
            async for episode in self.episodes:
                self.episodes.drop(episode, "played")
            meter.cancel()

    async def _meter(self) -> None:
        while True:
            self.used.append((time.monotonic(), time.process_time()))
            await asyncio.sleep(METER_S)  # between two looks at the clocks

    async def close(self) -> None:
        (self.out / ENVIRONMENT).write_bytes(pickle.dumps(self.used))


class AskingAgain(Node):
    """Asks one request of another run for each prompt, as many at a time as the generator takes."""

    prompts: In[Prompt]
    generate: Call[Turn, Reply]

    def __init__(self, requests: str, concurrency: int) -> None:
        self.requests = requests
        self.concurrency = concurrency

    def facts(self) -> Facts:
        return Facts(drops=True, keeps_lineage=False)

    async def setup(self) -> None:
        self.left: Iterator[Turn] = await self.blocking(self._turns)

    def _turns(self) -> Iterator[Turn]:
        noted: list[Answered] = pickle.loads(Path(self.requests).read_bytes())
        return iter([turn for turn, _ in noted])

    async def run(self) -> None:
        await self.prompts.each(self.ask, concurrency=2 * self.concurrency)

    async def ask(self, prompt: Prompt) -> None:
        if (turn := next(self.left, None)) is not None:
            await self.generate(replace(turn, ticket=-1))  # of samples that this run has not admitted
        self.prompts.drop(prompt, "asked")


def graph(cfg: Config) -> Graph:
    g = Graph("load")
    name = f"{waiting_env.__file__}:Waiting:least_s={cfg.least_s},most_s={cfg.most_s},steps={cfg.num_turns},sums=True"
    out, sampling = Path(cfg.out), Sampling(max_tokens=cfg.max_tokens)
    generator = g.add("generator", NotingGenerator(out, sampling, Engine(concurrency=cfg.concurrency)))
    most = cfg.num_turns if cfg.requests else 1
    prompts = g.add("prompts", EnvironmentSource(name, repeat=most, num_prompts=cfg.total, epochs=1, part="all"))
    if cfg.requests:
        asking = g.add("asking", AskingAgain(cfg.requests, cfg.concurrency))
        g.connect(prompts.prompts, asking.prompts)
        g.call(asking.generate, generator.turns)
    else:
        limits = Limits(tokens=400, episodes=cfg.episodes, step_s=3600.0)
        environment = g.add("environment", Environment(name, POLICY, limits=limits))
        played = g.add("played", PlayedEpisodes(out))
        g.connect(prompts.prompts, environment.prompts, capacity=cfg.episodes)
        g.call(environment.generate, generator.turns, affinity_margin=2)
        g.connect(environment.episodes, played.episodes)
        g.ignore(environment.requests)
        g.together(environment, played)
    for port in (generator.prompts, generator.rollouts, generator.requests, generator.weights):
        g.ignore(port)
    return g
