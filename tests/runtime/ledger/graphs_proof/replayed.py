"""A graph that trains groups again, without a model; `wrong` is what its batcher does wrong."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from benchmarks.runs.stages import Collect, Numbers, SleepingGenerator, SleepingTrainer, record
from flowrl import Batch, Facts, Graph, Group, Prompt
from flowrl.nodes.groups.batch import TokenBatch
from flowrl.nodes.groups.replay import KeptGroup, Replay, ReplayBuffer
from flowrl.runtime.ledger.ledger_client import Use

Wrong = Literal["", "too often", "too old", "changed", "too early", "miscounted", "undeclared"]


class Generating(SleepingGenerator):
    """Tokens differ from sample to sample."""

    cpus = 0

    async def generate(self, prompt: Prompt) -> None:
        from benchmarks.runs.stages import sampled

        sample = sampled(prompt, self.version, f"{self.name}/{self.context.replica}")
        rng = np.random.default_rng(prompt.seed * 100 + prompt.member)
        sample = replace(sample, token_ids=rng.integers(1, 1000, len(sample.token_ids)).astype(np.int32))
        self.context.metric("tokens_generated", sample.response_tokens)
        self.context.ledger.generated(sample)
        await self.samples.send(sample)


class Training(SleepingTrainer):
    cpus = 0

    def facts(self) -> Facts:
        return replace(super().facts(), correction="its weights")

    async def run(self) -> None:
        version = self.context.start_version
        await self.publish(version)
        async for batch in self.batches:
            version += 1
            fresh = [sample for sample in batch.samples if not sample.times_trained]
            again = [sample for sample in batch.samples if sample.times_trained]
            line = record(version, fresh) | dict(batch.metrics)
            line["reused_tokens"] = sum(Use.of(sample).tokens for sample in again)
            self.context.ledger.step(line, [Use.of(sample) for sample in batch.samples], policy=self.name)
            await self.publish(version)
            self.batches.finish(batch)
            await self.context.step_done(version)


class Careless(ReplayBuffer):
    """Offers what it must not."""

    wrong: Wrong = ""

    def _usable(self, version: int) -> list[KeptGroup]:
        if self.wrong in ("too often", "too old"):
            return list(self._kept)
        return super()._usable(version)

    def choose_groups(self, version: int) -> list[Group]:
        chosen = super().choose_groups(version)
        if self.wrong == "changed":
            return [replace(group, samples=tuple(map(changed, group.samples))) for group in chosen]
        if self.wrong == "miscounted":
            return [replace(g, samples=tuple(replace(s, times_trained=7) for s in g.samples)) for g in chosen]
        return chosen


def changed(sample: Any) -> Any:
    ids = sample.token_ids.copy()
    ids[-1] += 1
    return replace(sample, token_ids=ids)


class Batching(TokenBatch):
    wrong: Wrong = ""

    def facts(self) -> Facts:
        facts = super().facts()
        return replace(facts, max_uses=None, max_reuse_age=0) if self.wrong == "undeclared" else facts

    async def setup(self) -> None:
        await super().setup()
        assert self.replay is not None
        self._careless = Careless(self.replay, self.context.seed)
        self._careless.wrong = self.wrong

    def make_batch(self, groups: Sequence[Group], *, last: bool = True, again: Sequence[Group] = ()) -> Batch:
        if self.wrong and not isinstance(self._buffer, Careless):
            self._buffer = self._careless
        if self.wrong == "too early":
            again = [replace(g, samples=tuple(replace(s, times_trained=1) for s in g.samples)) for g in groups[:1]]
        return super().make_batch(groups, last=last, again=again)


class ByNumber(Replay):
    """Ranks groups by a function of its own."""

    def rank_group(self, group: Group, age: int, rng: random.Random) -> float:
        return -int(group.group_id.removeprefix("group"))


REPLAY = Replay(groups=2, keep=8, max_uses=3, max_age=3, prefer="random")


@dataclass(frozen=True)
class Config:
    groups_per_step: int = 3
    group_size: int = 2
    staleness: int = 1
    replay: Replay = REPLAY
    by_number: bool = False
    wrong: Wrong = ""
    look_ahead: int = 1


def graph(cfg: Config) -> Graph:
    g = Graph("replayed")
    replay = ByNumber(**vars(cfg.replay)) if cfg.by_number else cfg.replay
    source = g.add("prompts", Numbers(cfg.group_size))
    generator = g.add("generator", Generating(0.001, 8))
    collect = g.add("collect", Collect(cfg.group_size))
    batcher = g.add("batcher", Batching(cfg.groups_per_step, token_budget=4096, replay=replay))
    batcher.wrong = cfg.wrong
    trainer = g.add("trainer", Training(0.0))
    g.connect(source.prompts, generator.prompts)
    g.connect(generator.samples, collect.samples)
    g.connect(collect.groups, batcher.groups)
    g.connect(batcher.batches, trainer.batches, dispatch="gang")
    g.latest(trainer.weights, generator.weights)
    g.admit(source.prompts, until=generator.weights, staleness=cfg.staleness, look_ahead=cfg.look_ahead)
    return g
