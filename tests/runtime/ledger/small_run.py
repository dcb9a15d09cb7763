"""A run directory made by the real books, without processes: a loop of admission, generation and steps."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from flowrl.messages import Prompt, Sample, Scored, Tombstone
from flowrl.runtime.ledger.accounting import Accounting, LedgerClient, Use
from flowrl.runtime.ledger.ledger_client import EvaluationRow
from flowrl.runtime.telemetry.metrics import Metrics
from flowrl.runtime.telemetry.statistics import Statistics
from flowrl.wire.tickets import Tickets
from tests.runtime.ledger.made_episodes import play

POLICY = "trainer"
MEMBERS = 3


class Wire:
    """Joins clients to books as the endpoint does: bodies go through msgpack. Notifications may be held back."""

    def __init__(self) -> None:
        self.handlers: dict[str, Any] = {}
        self.held: list[tuple[str, bytes]] | None = None

    def on(self, kind: str, handler: Any) -> None:
        self.handlers[kind] = handler

    async def request(self, host: str, kind: str, body: dict[str, Any]) -> Any:
        assert host == "driver"
        return await self.handlers[kind]("core", msgpack.unpackb(msgpack.packb(body)))

    def notify(self, host: str, kind: str, body: dict[str, Any]) -> None:
        assert host == "driver"
        packed = msgpack.packb(body)
        if self.held is not None:
            self.held.append((kind, packed))
        else:
            self.handlers[kind]("core", msgpack.unpackb(packed))


def prompts(group: int | str, size: int = MEMBERS) -> list[Prompt]:
    """The members of one group, `g7`: samples `g7/0` ..."""
    name = f"g{group}"
    tokens = np.arange(5, dtype=np.int32)
    return [Prompt(f"{name}/{m}", name, f"p{group}", 0, m, size, 1, "1+1=", tokens) for m in range(size)]


def derived(parent: Prompt | Sample, number: int, label: str = "branch", most: int = 2) -> list[Prompt]:
    """Samples derived from one of a group of MEMBERS, where one label derives `most`."""
    first = MEMBERS + parent.member * most
    tokens = np.arange(5, dtype=np.int32)
    ids = {name: getattr(parent, name) for name in ("group_id", "prompt_id", "epoch", "group_size")}
    more: dict[str, Any] = {**ids, "seed": 1, "text": "1+1=", "token_ids": tokens, "parent_id": parent.sample_id}
    return [Prompt(sample_id=f"{parent.sample_id}/{label}.{i}", member=first + i, **more) for i in range(number)]


def sample(prompt: Prompt, versions: Sequence[int], *, reward: float = 1.0, generator: str = "generator/0") -> Scored:
    """A scored rollout with one policy token for each of `versions`."""
    num_prompt, num = len(prompt.token_ids), len(versions)
    fields: dict[str, Any] = {name: getattr(prompt, name) for name in IDS}
    return Scored(
        **fields,
        prompt_text=prompt.text,
        response_text="2",
        token_ids=np.arange(num_prompt + num, dtype=np.int32),
        policy_mask=np.array([False] * num_prompt + [True] * num),
        behavior_logprobs=np.zeros(num_prompt + num, np.float32),
        versions=np.array([-1] * num_prompt + list(versions), np.int32),
        prompt_tokens=num_prompt,
        truncated=False,
        generator=generator,
        reward=reward,
    )


IDS = ("sample_id", "group_id", "prompt_id", "epoch", "member", "group_size", "parent_id")


def lost(of: Sample | Prompt, state: str, reason: str, tokens: int = 0) -> Tombstone:
    return Tombstone(of.group_id, of.member, state, reason, "reward/0", (of.sample_id,), of.group_size, tokens)


@dataclass
class SmallRun:
    """P = 2 groups of three, `ahead` S, one generator by default; everything a run's books can meet."""

    directory: Path
    ahead: int = 1
    steps: int | None = 6
    seed: int = 0
    start_version: int = 0
    resume: bool = False
    generators: tuple[str, ...] = ("generator/0",)
    wire: Wire = field(default_factory=Wire)
    derives: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        numbers = {
            "tickets": (self.ahead + 1) * 2,
            "window": 1,
            "max_staleness": self.ahead,
            "groups_per_batch": 2,
            "group_size": MEMBERS,
            "trainers": [POLICY],
            "own_clock": [],
            "derives": self.derives,
        }
        (self.directory / "graph.json").write_text(json.dumps(numbers))
        tickets = Tickets(
            2,
            self.ahead,
            consumers=[(generator, POLICY) for generator in self.generators],
            start_version=self.start_version,
            max_groups=None if self.steps is None else (self.steps - self.start_version) * 2,
        )
        self.accounting = Accounting(self.directory, tickets, on_step=self.on_step, resume=self.resume)
        self.metrics = Metrics(self.directory, Statistics(), roles={}, record_line=self.accounting.book_line)
        self.accounting.register_handlers(self.wire)
        self.client = LedgerClient(self.wire, "generator/0")
        self.rng = random.Random(self.seed)
        self.version = self.start_version
        self.group = 0

    def on_step(self, record: dict[str, Any]) -> None:
        self.metrics.write_line(record | {"ledger_head": self.accounting.ledger.head})

    async def admit(self, group: int | str) -> int | None:
        return await self.client.admit("prompts/0", prompts(group))

    def step(self, samples: Sequence[Scored], masks: Sequence[Any] | None = None) -> None:
        """Train these samples and let the generator load what that made."""
        uses = [Use.of(s, mask) for s, mask in zip(samples, masks or [None] * len(samples), strict=True)]
        ages = [self.version - u.oldest_version for u in uses if u.oldest_version is not None]
        self.version += 1
        record = {
            "step": self.version,
            "tokens_trained": sum(u.tokens for u in uses),
            "staleness_max": max(ages, default=None),
            "reward_mean": np.float32(0.5),
        }
        self.client.step(record, uses, policy=POLICY)
        self.client.holds("generator/0", POLICY, self.version)

    def generate(self, group: int | str, *, filtered: bool = False) -> list[Scored]:
        """What is left of a group after generation, reward and filter; every event is booked."""
        done = []
        for prompt in prompts(group):
            if self.rng.random() < 0.1:
                self.client.lost(lost(prompt, "failed", "timeout", tokens=2))
                continue
            made = sample(prompt, [self.version] * self.rng.randint(1, 9))
            self.client.generated(made)
            self.client.scored(made)
            if filtered:
                self.client.lost(lost(made, "filtered", "no_spread"))
            else:
                done.append(made)
        return done

    async def train(self) -> None:
        """Batches of two groups until admission has ended; every fifth group is filtered."""
        waiting: list[list[Scored]] = []
        while not self.accounting.tickets.closed:
            while not self.accounting.tickets.closed and not self.accounting.tickets.why_waiting():
                await self.admit(self.group)
                done = self.generate(self.group, filtered=self.group % 5 == 4)
                self.group += 1
                waiting += [done] if done else []
            batch, waiting = waiting[:2], waiting[2:]
            self.step([s for group in batch for s in group])

    def evaluate(self, phase: str, version: int) -> None:
        self.client.evaluation(
            [
                EvaluationRow(phase, version, f"q{i}", 0, float(i % 2), bool(i % 2), 4, version, version)
                for i in range(8)
            ]
        )

    def close(self, *, orderly: bool = True) -> None:
        self.client.flush()
        self.accounting.close(orderly=orderly)
        self.metrics.close()


async def whole_run(directory: Path, seed: int = 0) -> None:
    """From the first evaluation to closed books, with leftovers in flight at the end."""
    run = SmallRun(directory, seed=seed)
    run.evaluate("before", 0)
    await run.train()
    run.evaluate("after", run.version)
    run.close()


async def derived_run(directory: Path, seed: int = 0, steps: int = 3) -> None:
    """Up to two samples are derived from each that was sampled; one of them may fail, and some groups are given up."""
    run = SmallRun(directory, seed=seed, steps=steps, derives={"branch": 2})
    for step in range(steps):
        batch: list[Scored] = []
        for group in (2 * step, 2 * step + 1):
            await run.admit(group)
            trunks = run.generate(group)
            if group == 3:  # another node gives the group up while one derives
                run.client.lost(Tombstone(trunks[0].group_id, -1, "dropped", "given_up", "reward/0"))
            for trunk in trunks:
                made = derived(trunk, 2 if trunk.member == 0 else run.rng.randint(0, 2))
                if made:
                    await run.client.derive(trunk.sample_id, "branch", made, trainers=[POLICY])
                for one in made:
                    if run.rng.random() < 0.2:
                        run.client.lost(lost(one, "failed", "timeout"))
                    else:
                        branch = sample(one, [run.version] * run.rng.randint(1, 5))
                        run.client.generated(branch)
                        run.client.scored(branch)
                        batch += [branch] if group != 3 else []
                batch += [trunk] if group != 3 else []
        run.step(batch)
    run.close()


class TwoTrainers:
    """An actor and a critic on two branches, each of which leaves samples out; old tokens are masked."""

    def __init__(self, directory: Path) -> None:
        numbers = {"tickets": 4, "window": 0, "max_staleness": 1, "groups_per_batch": 2, "group_size": MEMBERS}
        trainers = {"trainers": ["actor", "critic"], "own_clock": ["critic"]}
        (directory / "graph.json").write_text(json.dumps(numbers | trainers))
        consumers = [("generator/0", "actor"), ("critic/0", "critic")]
        tickets = Tickets(2, 1, consumers=consumers, trainers=["actor", "critic"])
        self.accounting = Accounting(directory, tickets, on_step=self.on_step, bound=1, own_clock=["critic"])
        self.metrics = Metrics(directory, Statistics(), roles={}, record_line=self.accounting.book_line)
        wire = Wire()
        self.accounting.register_handlers(wire)
        self.client = LedgerClient(wire, "generator/0")

    def on_step(self, record: dict[str, Any]) -> None:
        self.metrics.write_line(record | {"ledger_head": self.accounting.ledger.head})

    def sample(self, prompt: Prompt, version: int) -> Scored:
        """A rollout with its reports; the third member is an episode, which begins twice in every second group."""
        if prompt.member == 2:
            void = ("env_raised",) if prompt.group_id[-1] in "13579" else ()
            return play(self.client, prompt, [[version] * 2] * 2, void=void)
        made = sample(prompt, [version] * 4)
        self.client.generated(made)
        self.client.scored(made)
        return made

    async def step(self, version: int) -> None:
        """Admit two groups and train them: the first member of each fails, the critic does without the second."""
        groups = [version * 2, version * 2 + 1]
        for group in groups:
            await self.client.admit("prompts/0", prompts(group))
        samples = [self.sample(prompt, version) for group in groups for prompt in prompts(group)]
        for one in samples:
            if one.member == 0:
                self.client.lost(lost(one, "failed", "timeout"))
            if one.member == 1:
                self.client.lost(lost(one, "filtered", "for_the_critic"), ["critic"])
        for trainer, least in (("critic", 2), ("actor", 1)):
            uses = [Use.of(one, half(one) if one.member == 2 else None) for one in samples if one.member >= least]
            record = {"step": version + 1, "tokens_trained": sum(use.tokens for use in uses), "staleness_max": 0}
            self.client.step(record, uses, policy=trainer)
            self.client.holds("generator/0" if trainer == "actor" else "critic/0", trainer, version + 1)

    def close(self) -> None:
        self.client.flush()
        self.accounting.close(orderly=True)
        self.metrics.close()


def half(of: Sample) -> np.ndarray:
    """Every second token."""
    return np.arange(len(of.policy_mask)) % 2 == 0


async def two_trainers(directory: Path, steps: int = 3) -> None:
    run = TwoTrainers(directory)
    for version in range(steps):
        await run.step(version)
    run.client.evaluation([EvaluationRow("after", steps, f"q{i}", 0, 0.5, False, 4, steps, steps) for i in range(3)])
    run.close()
