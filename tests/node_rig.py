"""In-memory ports and context for one node's body: what goes in is given, what comes out is listed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from flowrl.errors import SampleFailed
from flowrl.graph.node import Node
from flowrl.graph.ports import Members
from flowrl.messages import Message, Sample, Scored, Tombstone


class Ledger:
    """Lists what it is told."""

    def __init__(self) -> None:
        self.events: list[tuple[str, Any]] = []

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *what: self.events.append((name, *what))


class FakeContext:
    """A place in a run that does not exist."""

    replica, num_replicas, seed, start_version = 0, 1, 7, 0
    steps: int | None = None
    window: int | None = 1
    max_staleness: int | None = 1
    cores, gpus = (0,), ()

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.told: list[str] = []
        self.metrics: dict[str, float] = {}

    async def blocking(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    def progress(self, text: str) -> None:
        self.told.append(text)

    def metric(self, name: str, value: float) -> None:
        self.metrics[name] = self.metrics.get(name, 0.0) + value

    @contextmanager
    def busy(self, name: str) -> Iterator[None]:
        yield

    waiting = outside = busy


class InMemoryIn:
    """An In port fed from a list. `dropped` lists (item, state, reason)."""

    def __init__(self, items: Sequence[Any]) -> None:
        self.items = items
        self.dropped: list[tuple[Any, str, str]] = []

    async def iterate(self) -> AsyncIterator[Any]:
        for item in self.items:
            yield item

    ordered = iterate

    async def groups(self, size: int) -> AsyncIterator[Any]:
        for item in self.items:
            yield item

    async def each(self, body: Callable[[Any], Awaitable[None]], concurrency: int) -> None:
        for item in self.items:
            try:
                await body(item)
            except SampleFailed as failure:
                self.drop(item, str(failure), "failed")

    def drop(self, item: Any, reason: str, state: str, *, group: bool = False) -> None:
        self.dropped.append((item, state, reason))

    def join(self, others: Sequence[Any]) -> InMemoryIn:
        """The items of all ports side by side, in order."""
        return InMemoryIn(list(zip(self.items, *(other.items for other in others), strict=True)))


class InMemoryOut:
    """An Out port that lists what is sent, and admits `tickets` groups."""

    def __init__(self, tickets: int = 1 << 30) -> None:
        self.sent: list[Any] = []
        self.made_from: list[Any] = []
        self.groups: list[list[Any]] = []
        self._tickets = tickets

    async def send(self, item: Message, made_from: Sequence[Message] | None) -> None:
        self.sent.append(item)
        self.made_from.append(made_from)

    def was_sent(self) -> bool:
        return False

    async def admit(self, items: Sequence[Message]) -> bool:
        if len(self.groups) == self._tickets:
            return False
        self.groups.append(list(items))
        return True


def run(node: Node, **ports: Any) -> FakeContext:
    """Set up, run and close `node` with these live ports."""
    node.name = node.name or "node"
    context = attach(node, **ports)

    async def life() -> None:
        await node.setup()
        try:
            await node.run()
        finally:
            await node.close()

    asyncio.run(life())
    return context


def attach(node: Node, **ports: Any) -> FakeContext:
    """Give `node` a context, if it has none yet, and these live ports."""
    if not hasattr(node, "context"):
        node.context = FakeContext()  # type: ignore[assignment]
    for name, live in ports.items():
        node.ports[name].live = live
        node.ports[name].connected = True
    return node.context  # type: ignore[return-value]


def sample(member: int = 0, *, response: int = 2, group: str = "g", **more: Any) -> Sample:
    """A rollout of three prompt tokens and `response` policy tokens."""
    return Sample(**(_fields(member, response, group) | more))


def scored(member: int, reward: float, *, response: int = 2, group: str = "g", **more: Any) -> Scored:
    """The same with its reward."""
    return Scored(**(_fields(member, response, group) | {"reward": reward, "raw_reward": reward} | more))


def members(items: Sequence[Scored], *, size: int = 4) -> Members[Scored]:
    """A complete group, of which `size - len(items)` members were lost."""
    lost = tuple(Tombstone("g", m, "failed", "test", "reward/0") for m in range(len(items), size))
    return Members(items[0].group_id, 0, size, tuple(items), lost)


def _fields(member: int, response: int, group: str) -> dict[str, Any]:
    mask = np.array([False] * 3 + [True] * response)
    return {
        "sample_id": f"{group}:{member}",
        "group_id": group,
        "prompt_id": "p",
        "epoch": 0,
        "member": member,
        "group_size": 4,
        "prompt_text": "1+1=",
        "response_text": "2",
        "token_ids": np.arange(3 + response, dtype=np.int32),
        "policy_mask": mask,
        "behavior_logprobs": np.where(mask, -0.5, 0.0).astype(np.float32),
        "versions": np.where(mask, 0, -1).astype(np.int32),
        "prompt_tokens": 3,
        "truncated": False,
        "generator": "generator/0",
        "columns": {"answer": "2"},
    }
