"""A graph whose stages take a known time: what is left of the overlap is the engine's doing.

Generating one batch takes `generate_s` however many prompts are in it (a full vLLM batch does too),
training on it `train_s`. No model is involved; admission, tickets, versions and ledger are the real ones. The
trainer takes a batch in pieces, if the batcher sends it so: a part of the time for a part of the groups.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from flowrl import Batch, Graph, Group, In, Node, Out, Prompt, Sample, Trainable, Weights
from flowrl.graph.node import Facts
from flowrl.nodes.groups.batch import TokenBatch
from flowrl.runtime.ledger.ledger_client import Use
from flowrl.training.settings import Accumulate

PROMPT_TOKENS, RESPONSE_TOKENS = 8, 8


@dataclass(frozen=True)
class Stages:
    generate_s: float = 0.5
    """Seconds that a batch of rollouts takes."""
    train_s: float = 0.5
    """Seconds that a batch's update takes."""
    uneven: float = 0.0
    """Part of `generate_s` by which the first group of a batch is done earlier than the last."""
    accumulate: Accumulate = "auto"
    """Whether training begins with the groups that are done."""
    groups_per_step: int = 4
    group_size: int = 2
    staleness: int = 1
    """Largest staleness of any trained token, in versions. 0 is synchronous."""
    time_share: tuple[str, ...] = ()
    """generator trainer: the two stages take turns on the same core instead of working side by side."""


class Numbers(Node):
    """An endless source of prompts."""

    prompts: Out[Prompt]

    def __init__(self, size: int) -> None:
        self.size = size
        self.number = 0

    def facts(self) -> Facts:
        return Facts(group_size=self.size, longest_prompt=PROMPT_TOKENS)

    async def run(self) -> None:
        while await self.prompts.admit([self.prompt(self.number, member) for member in range(self.size)]):
            self.number += 1

    def state(self) -> Mapping[str, Any]:
        return {"number": self.number}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.number = int(state["number"])

    def prompt(self, number: int, member: int) -> Prompt:
        group = f"group{number}"
        ids = np.zeros(PROMPT_TOKENS, np.int32)
        return Prompt(f"{group}:{member}", group, group, 0, member, self.size, number, "", ids)


class SleepingGenerator(Node):
    """Every prompt takes the stage's time; a batch's worth of them runs at once."""

    cpus = 0.5

    prompts: In[Prompt]
    samples: Out[Sample]
    weights: In[Weights]

    uneven = 0.0

    def __init__(self, seconds: float, concurrency: int) -> None:
        self.seconds = seconds
        self.concurrency = concurrency
        self.version = -1
        self.ready = asyncio.Event()

    def facts(self) -> Facts:
        return Facts(longest_response=RESPONSE_TOKENS, concurrency=self.concurrency)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.follow())
            await self.ready.wait()
            await self.prompts.each(self.generate, concurrency=self.concurrency)
            self.samples.close()

    async def follow(self) -> None:
        async for weights in self.weights:
            self.version = weights.version
            self.ready.set()
            self.context.ledger.holds(f"{self.name}/{self.context.replica}", weights.policy, weights.version)

    async def generate(self, prompt: Prompt) -> None:
        version = self.version
        with self.context.busy("generate"):
            await asyncio.sleep(self.seconds * (1 - self.uneven * self.earlier(prompt)))
        sample = sampled(prompt, version, f"{self.name}/{self.context.replica}")
        self.context.metric("tokens_generated", RESPONSE_TOKENS)
        self.context.ledger.generated(sample)
        await self.samples.send(sample)

    def earlier(self, prompt: Prompt) -> float:
        """The part of a batch's groups that come after this prompt's."""
        groups = self.concurrency // prompt.group_size
        return 1 - (1 + int(prompt.group_id.removeprefix("group")) % groups) / groups if self.uneven else 0.0


class Collect(Node):
    """Groups by prompt, all advantages 0."""

    keyed_state = True

    samples: In[Sample]
    groups: Out[Group]

    def __init__(self, size: int) -> None:
        self.size = size

    def facts(self) -> Facts:
        return Facts(group_size=self.size, keeps_lineage=False)

    async def run(self) -> None:
        async for members in self.samples.groups(self.size):
            group = Group(members.group_id, tuple(map(trainable, members.items)), members.size)
            await self.groups.send(group, made_from=members.items)


class SleepingTrainer(Node):
    """Takes the stage's time for a batch and makes a version."""

    cpus = 0.5
    gang = True

    batches: In[Batch]
    weights: Out[Weights]

    groups = 0
    """Groups of a batch, to know the time of a piece; 0: batches come whole."""
    accumulate: Accumulate = "off"

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def facts(self) -> Facts:
        return Facts(accumulate=self.accumulate, whole_batches="" if self.groups else None)

    async def run(self) -> None:
        version = self.context.start_version
        await self.publish(version)
        pieces: list[Batch] = []
        async for batch in self.batches:
            with self.context.busy("train"):
                await asyncio.sleep(self.seconds * (batch.num_groups / self.groups if self.groups else 1))
            pieces.append(batch)
            if not batch.last:
                self.batches.hold(batch)
                continue
            version += 1
            samples = [sample for piece in pieces for sample in piece.samples]
            self.context.ledger.step(record(version, samples), list(map(Use.of, samples)), policy=self.name)
            await self.publish(version)
            for piece in pieces:
                self.batches.finish(piece)
            pieces = []
            await self.context.step_done(version)

    async def publish(self, version: int) -> None:
        await self.weights.send(Weights(self.name, version, version - 1, "unchanged", "none", 0, 0))


def sampled(prompt: Prompt, version: int, generator: str) -> Sample:
    """The rollout of a prompt, without content."""
    length = PROMPT_TOKENS + RESPONSE_TOKENS
    mask = np.arange(length) >= PROMPT_TOKENS
    return Sample.of_prompt(
        prompt,
        prompt_text="",
        response_text="",
        token_ids=np.zeros(length, np.int32),
        policy_mask=mask,
        behavior_logprobs=np.zeros(length, np.float32),
        versions=np.where(mask, version, -1).astype(np.int32),
        prompt_tokens=PROMPT_TOKENS,
        truncated=False,
        generator=generator,
    )


def trainable(sample: Sample) -> Trainable:
    values = {field.name: getattr(sample, field.name) for field in fields(Sample)}
    return Trainable(**values, advantages=np.zeros(len(sample.token_ids), np.float32))


def record(version: int, samples: Sequence[Sample]) -> dict[str, float | None]:
    """What a metrics line needs to know of a batch."""
    uses = [Use.of(sample) for sample in samples]
    ages = [version - 1 - use.oldest_version for use in uses if use.oldest_version is not None]
    return {
        "step": version,
        "optimizer_steps": 1,
        "num_samples": len(samples),
        "tokens_trained": sum(use.tokens for use in uses),
        "staleness_mean": float(np.mean(ages)) if ages else None,
        "staleness_max": max(ages, default=None),
    }


def graph(cfg: Stages) -> Graph:
    g = Graph("stages")
    source = g.add("prompts", Numbers(cfg.group_size))
    generator = g.add("generator", SleepingGenerator(cfg.generate_s, cfg.groups_per_step * cfg.group_size))
    generator.uneven = cfg.uneven
    collect = g.add("collect", Collect(cfg.group_size))
    batcher = g.add("batcher", TokenBatch(cfg.groups_per_step, token_budget=4096))
    trainer = g.add("trainer", SleepingTrainer(cfg.train_s))
    trainer.groups, trainer.accumulate = cfg.groups_per_step, cfg.accumulate
    if cfg.time_share:
        g.time_share(*(g.nodes[name] for name in cfg.time_share))
    g.connect(source.prompts, generator.prompts)
    g.connect(generator.samples, collect.samples)
    g.connect(collect.groups, batcher.groups)
    g.connect(batcher.batches, trainer.batches, dispatch="gang")
    g.latest(trainer.weights, generator.weights)
    g.admit(source.prompts, until=generator.weights, staleness=cfg.staleness)
    return g
