"""The nodes that random graphs are built of. They do nothing but take time, lose items and keep a record.

What a node does with an item follows from seed, node and item alone, so it does the same again after a crash.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from flowrl import Ask, Call, Group, In, Message, Node, Out, Prompt, Sample, Serve, Weights
from flowrl.errors import SampleFailed
from flowrl.graph.node import Facts
from flowrl.messages import Int32
from flowrl.messages.episode import Reply, Turn
from flowrl.messages.sampling import Sampling
from flowrl.testing import said
from tests.random_graphs.dice import lot
from tests.random_graphs.record import Record, record_of
from tests.random_graphs.shape import Part, Shape
from tests.rigs.ticks import ticks

PROMPT_TOKENS, LONGEST_RESPONSE = 2, 6
STRAGGLERS = 0.05
SLOWER = 20
MOST_DERIVED = 3
PATIENCE_S = 0.1


@dataclass(frozen=True)
class Wrapped(Message):
    """A sample in a message of the user's own."""

    sample: Sample
    note: str


@dataclass(frozen=True)
class Question(Message):
    """What `Asking` asks about a sample."""

    sample_id: str


@dataclass(frozen=True)
class Verdict(Message):
    """The answer."""

    good: bool


def fate(seed: int, part: Part, key: str) -> str:
    """What the node of `part` does with the item `key`: pass, drop, filter, fail, or late."""
    drawn = lot(seed, part.name, key)
    for how, share in part.losses:
        if drawn < share:
            return how
        drawn -= share
    return "pass"


def num_derived(seed: int, part: Part, key: str) -> int:
    return int(lot(seed, part.name, key, "derived") * (MOST_DERIVED + 1))


def goes_left(seed: int, part: Part, key: str) -> bool:
    return lot(seed, part.name, key, "way") < 0.5


def response_length(seed: int, sample_id: str) -> int:
    return 1 + int(lot(seed, sample_id, "length") * LONGEST_RESPONSE)


def key_of(item: Message) -> str:
    """What names an item: its sample, or its group."""
    if isinstance(item, Wrapped):
        return item.sample.sample_id
    return item.group_id if isinstance(item, Group) else cast(Sample, item).sample_id


class Played(Node):
    """What all of them have."""

    def __init__(self, part: Part, shape: Shape) -> None:
        self.part = part
        self.shape = shape

    @property
    def record(self) -> Record:
        return record_of(self.context.run_dir)

    def fate(self, key: str) -> str:
        return fate(self.shape.seed, self.part, key)

    async def take_time(self, key: str) -> None:
        """In half of the nodes some ticks of the loop, in the others a time that only stragglers have much of."""
        drawn = lot(self.shape.seed, self.part.name, key, "time")
        if not self.part.delay_s:
            await ticks(int(drawn * 4))
        else:
            slower = SLOWER if drawn > 1 - STRAGGLERS else 1
            await asyncio.sleep(self.part.delay_s * drawn * slower)  # slow, in virtual time


class Source(Played):
    prompts: Out[Prompt]
    number = 0
    first = 0
    """Number of the group that this life begins with."""

    def facts(self) -> Facts:
        return Facts(group_size=self.shape.group_size, longest_prompt=PROMPT_TOKENS)

    async def run(self) -> None:
        while not self.shape.total or self.number < self.shape.total:
            group_id = f"g{self.number}"
            await self.take_time(group_id)
            asked = self.held()
            if not await self.prompts.admit([self.prompt(group_id, member) for member in range(self.shape.group_size)]):
                return
            self.record.admitted.append(group_id)
            if self.number != self.first or not self.first:
                got = self.held()
                self.record.held[group_id] = {trainer: (asked[trainer], got[trainer]) for trainer in got}
            self.number += 1

    def held(self) -> dict[str, int]:
        """The version of each trainer that all of its readers hold now."""
        readers = self.shape.parts[self.shape.sampler].replicas
        return {trainer: self.record.floor(trainer, readers) for trainer in self.shape.trainers}

    def prompt(self, group_id: str, member: int) -> Prompt:
        ids = np.zeros(PROMPT_TOKENS, np.int32)
        return Prompt(
            f"{group_id}:{member}", group_id, group_id, 0, member, self.shape.group_size, self.number, "", ids
        )

    async def checkpoint(self, path: str) -> None:
        self.record.save(Path(path))

    def state(self) -> Mapping[str, Any]:
        return {"number": self.number}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.number = self.first = int(state["number"])


class Holder(Played):
    """Has the newest weights."""

    weights: In[Weights]
    values: In[Weights]

    def __init__(self, part: Part, shape: Shape) -> None:
        super().__init__(part, shape)
        self.versions: dict[str, int] = {}
        self.changed = asyncio.Event()

    async def serve(self) -> None:
        """What it does once it has weights."""

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            readers = [port for port in (self.weights, self.values) if port.connected]
            for port in readers:
                tasks.create_task(self.follow(port))
            while len(self.versions) < len(readers):
                self.changed.clear()
                await self.changed.wait()
            await self.serve()

    async def follow(self, port: In[Weights]) -> None:
        me = f"{self.name}/{self.context.replica}"
        async for weights in port:
            if self.shape.lag:
                slow_s = self.part.delay_s * lot(self.shape.seed, me, weights.policy, weights.version)
                await asyncio.sleep(slow_s)  # in virtual time
            self.versions[weights.policy] = weights.version
            self.changed.set()
            self.record.holders[weights.policy][me] = weights.version
            self.context.ledger.holds(me, weights.policy, weights.version)

    async def sampled_versions(self, key: str, length: int) -> list[int]:
        versions = []
        for position in range(length):
            if position in (0, length // 2):
                await self.take_time(f"{key}:{position}")
            versions.append(self.versions[self.shape.trainers[0]])
        return versions


class Generator(Holder):
    """Samples with the newest weights it has; they may change in the middle of a sample."""

    prompts: In[Prompt]
    samples: Out[Sample]

    def facts(self) -> Facts:
        concurrency = self.part.concurrency
        return Facts(longest_response=LONGEST_RESPONSE, concurrency=concurrency, drops=True, optional=("values",))

    async def serve(self) -> None:
        await self.prompts.each(self.generate, concurrency=self.part.concurrency)
        self.samples.close()

    async def generate(self, prompt: Prompt) -> None:
        if self.samples.was_sent():
            return
        how = self.fate(prompt.sample_id)
        if how == "fail":
            raise SampleFailed(f"{self.name}_fail")
        if how in ("drop", "filter"):
            self.prompts.drop(prompt, f"{self.name}_{how}", state=STATES[how])
            return
        sample = await self.sampled(prompt)
        self.context.ledger.generated(sample)
        await self.samples.send(sample)
        if how == "late":
            raise SampleFailed(f"{self.name}_late")

    async def sampled(self, prompt: Prompt) -> Sample:
        length = response_length(self.shape.seed, prompt.sample_id)
        versions = await self.sampled_versions(prompt.sample_id, length)
        return rollout(prompt, versions, f"{self.name}/{self.context.replica}")


def rollout(prompt: Prompt, versions: Sequence[int], generator: str) -> Sample:
    """A sample with a policy token for each of `versions`."""
    number = PROMPT_TOKENS + len(versions)
    return Sample.of_prompt(
        prompt,
        prompt_text="",
        response_text="",
        token_ids=np.zeros(number, np.int32),
        policy_mask=np.arange(number) >= PROMPT_TOKENS,
        behavior_logprobs=np.zeros(number, np.float32),
        versions=np.array([-1] * PROMPT_TOKENS + [*versions], np.int32),
        prompt_tokens=PROMPT_TOKENS,
        truncated=False,
        generator=generator,
    )


class Sampler(Holder):
    """Answers what is asked with as many tokens as the ask says."""

    turns: Serve[Turn, Reply]

    def facts(self) -> Facts:
        return Facts(optional=("values",))

    async def serve(self) -> None:
        await self.turns.each(self.answer, concurrency=self.part.concurrency)

    async def answer(self, turn: Turn) -> Reply:
        length = cast(Sampling, turn.sampling).max_tokens
        versions = await self.sampled_versions(turn.request_id, length)
        ids = [int(lot(turn.seed, position) * 1000) for position in range(length)]
        made = {"versions": np.array(versions, np.int32), "token_ids": np.array(ids, np.int32)}
        reply = replace(said(turn, "a" * length), **made, generator=f"{self.name}/{self.context.replica}")
        self.context.ledger.request(turn, reply)
        return reply


class Solver(Played):
    """Makes each sample of one reply or two, and sometimes asks for one that it leaves out."""

    prompts: In[Prompt]
    samples: Out[Sample]
    policy: Ask

    def facts(self) -> Facts:
        return Facts(longest_response=LONGEST_RESPONSE, drops=True)

    async def run(self) -> None:
        await self.prompts.each(self.solve, concurrency=self.part.concurrency)

    async def solve(self, prompt: Prompt) -> None:
        if self.samples.was_sent():
            return
        how, length = self.fate(prompt.sample_id), response_length(self.shape.seed, prompt.sample_id)
        sizes = [length] if length == 1 else [length // 2, length - length // 2]
        asks = [self.ask(prompt.token_ids, sizes[0])]
        if lot(self.shape.seed, prompt.sample_id, "draft") < 0.3:
            asks.append(self.ask(prompt.token_ids, 2))
        replies = (await asyncio.gather(*asks))[:1]
        await self.take_time(prompt.sample_id)
        if how == "fail":
            raise SampleFailed(f"{self.name}_fail")
        if how in ("drop", "filter"):
            self.prompts.drop(prompt, f"{self.name}_{how}", state=STATES[how])
            return
        for size in sizes[1:]:
            context = np.concatenate([replies[0].context_ids, replies[0].token_ids, [7]]).astype(np.int32)
            replies.append(await self.ask(context, size))
        await self.samples.send(self.policy.make_sample(prompt, replies))
        if how == "late":
            raise SampleFailed(f"{self.name}_late")

    async def ask(self, token_ids: Int32, size: int) -> Reply:
        return await self.policy.ask(token_ids, trained=True, sampling=Sampling(max_tokens=size))


STATES = {"drop": "dropped", "filter": "filtered", "fail": "failed", "late": "failed"}


class Passing(Played):
    """Works on each item and passes it on, made into something else or as it is, or loses it."""

    items: Any
    done: Any

    def facts(self) -> Facts:
        return Facts(drops=bool(self.part.losses))

    def made(self, item: Any) -> Any:
        return item

    async def run(self) -> None:
        if self.part.style == "each":
            await self.items.each(self.one, concurrency=self.part.concurrency)
        elif self.part.style == "later":
            await self.hand_over()
        elif self.part.style == "impatient":
            await self.ask_again_and_again()
        else:
            async for item in self.items:
                await self.one(item)

    async def one(self, item: Any) -> None:
        await self.take_time(key_of(item))
        how = self.fate(key_of(item))
        if how == "fail" and self.part.style == "each":
            raise SampleFailed(f"{self.name}_fail")
        if how in ("drop", "filter", "fail"):
            self.items.drop(item, f"{self.name}_{how}", state=STATES[how])
            return
        await self.forward(item)
        if how == "late" and self.part.style == "each":
            raise SampleFailed(f"{self.name}_late")

    async def forward(self, item: Any) -> None:
        await self.done.send(self.made(item), made_from=[item] if self.part.style == "later" else None)

    async def hand_over(self) -> None:
        """Each item is put on hold, and a task of the node's own ends it."""
        async with asyncio.TaskGroup() as tasks:
            async for item in self.items:
                self.items.hold(item)
                tasks.create_task(self.one(item))

    async def ask_again_and_again(self) -> None:
        """Other work of the node has its turn when no item has come for some time."""
        items = aiter(self.items)
        while True:
            try:
                async with asyncio.timeout(PATIENCE_S):
                    item = await anext(items)
            except TimeoutError:
                continue
            except StopAsyncIteration:
                return
            await self.one(item)


class Work(Passing):
    items: In[Sample]
    done: Out[Sample]

    def made(self, item: Sample) -> Sample:
        """A new message from one half of them, the same from the other."""
        return replace(item, metrics={"worked": 1.0}) if lot(self.part.name, item.sample_id, "new") < 0.5 else item


class Deriving(Passing):
    """Derives some samples from each, and samples them itself, with the newest version of their parent."""

    items: In[Sample]
    done: Out[Sample]

    def facts(self) -> Facts:
        return Facts(drops=bool(self.part.losses), derives={self.part.name: MOST_DERIVED})

    async def forward(self, item: Any) -> None:
        number = num_derived(self.shape.seed, self.part, item.sample_id)
        children = await self.context.derive(item, number) if number else []
        self.record.derived |= {child.sample_id: item.sample_id for child in children}
        if self.fate(f"{item.sample_id}/") == "fail" and self.part.style == "each":
            raise SampleFailed(f"{self.name}_fail")
        for child in children:
            await self.forward_derived(child, int(item.versions.max()))
        await super().forward(item)

    async def forward_derived(self, child: Prompt, version: int) -> None:
        if self.done.was_sent(made_from=[child]):
            return
        await self.take_time(child.sample_id)
        how = self.fate(child.sample_id)
        if how in ("drop", "filter", "fail"):
            self.items.drop(cast(Any, child), f"{self.name}_{how}", state=STATES[how])
            return
        length = response_length(self.shape.seed, child.sample_id)
        sample = rollout(child, [version] * length, f"generator/{self.context.replica}")
        self.context.ledger.generated(sample)
        await self.done.send(sample)


class GroupWork(Passing):
    items: In[Group]
    done: Out[Group]


class Wrap(Passing):
    items: In[Sample]
    done: Out[Wrapped]

    def made(self, item: Sample) -> Wrapped:
        return Wrapped(item, self.part.name)


class WrappedWork(Passing):
    items: In[Wrapped]
    done: Out[Wrapped]


class Unwrap(Passing):
    items: In[Wrapped]
    done: Out[Sample]

    def made(self, item: Wrapped) -> Sample:
        return item.sample


class Asking(Passing):
    """Asks a server about each sample."""

    items: In[Sample]
    done: Out[Sample]
    ask: Call[Question, Verdict]

    def facts(self) -> Facts:
        return Facts(drops=True)

    async def forward(self, item: Any) -> None:
        try:
            await self.ask(Question(item.sample_id), session=item.group_id)
        except SampleFailed as failure:
            self.items.drop(item, str(failure), state="failed")
            return
        await super().forward(item)


class Server(Played):
    asked: Serve[Question, Verdict]

    async def run(self) -> None:
        await self.asked.each(self.answer, concurrency=self.part.concurrency)

    async def answer(self, question: Question) -> Verdict:
        await self.take_time(question.sample_id)
        if self.fate(question.sample_id) != "pass":
            raise SampleFailed(f"{self.name}_fail")
        return Verdict(True)


class Judged(Passing):
    """Asks a policy about each sample, whose tokens are not trained."""

    items: In[Sample]
    done: Out[Sample]
    judge: Ask

    def facts(self) -> Facts:
        return Facts(drops=True)

    async def forward(self, item: Any) -> None:
        try:
            replies = await asyncio.gather(*(self.judge.ask(f"{item.sample_id} {number}") for number in range(2)))
        except SampleFailed as failure:
            self.items.drop(item, str(failure), state="failed")
            return
        assert all(reply.text == f"on {item.sample_id}" for reply in replies)
        await super().forward(item)


class Judge(Played):
    """What `Judged` asks."""

    turns: Serve[Turn, Reply]

    async def run(self) -> None:
        await self.turns.each(self.answer, concurrency=self.part.concurrency)

    async def answer(self, turn: Turn) -> Reply:
        asked = str(turn.messages[0]["content"]).split()[0]
        await self.take_time(asked)
        if self.fate(asked) != "pass":
            raise SampleFailed(f"{self.name}_fail")
        return said(turn, f"on {asked}")


class Router(Passing):
    """Sends each sample one of two ways."""

    items: In[Sample]
    left: Out[Sample]
    right: Out[Sample]

    async def forward(self, item: Any) -> None:
        port = self.left if goes_left(self.shape.seed, self.part, key_of(item)) else self.right
        await port.send(item, made_from=[item] if self.part.style == "later" else None)


class GroupRouter(Router):
    items: In[Group]
    left: Out[Group]
    right: Out[Group]
