"""For parts of a generator by themselves: a context that records, and prompts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import numpy as np

from flowrl.messages import Prompt, Sample


class RecordingContext:
    """What a part of a generator uses of its node's context; keeps gauges and versions held."""

    def __init__(self) -> None:
        self.replica = 0
        self.gpus: tuple[int, ...] = ()
        self.ledger = self
        self.gauges: dict[str, list[float]] = {}
        self.held: list[tuple[str, str, int]] = []
        self.counted: dict[str, float] = {}
        self.exclusive_uses = 0

    async def blocking(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return await asyncio.to_thread(fn, *args, **kwargs)

    def metric(self, name: str, value: float) -> None:
        self.counted[name] = self.counted.get(name, 0.0) + value

    def gauge(self, name: str, value: float) -> None:
        self.gauges.setdefault(name, []).append(value)

    @contextmanager
    def busy(self, name: str) -> Any:
        yield

    @contextmanager
    def waiting(self, what: str) -> Any:
        yield

    @asynccontextmanager
    async def exclusive(self, name: str) -> AsyncIterator[None]:
        self.exclusive_uses += 1
        yield

    def generated(self, sample: Sample) -> None:
        pass

    def holds(self, replica: str, policy: str, version: int) -> None:
        self.held.append((replica, policy, version))


def make_prompt(number: int, *, length: int = 12, member: int = 0, **more: Any) -> Prompt:
    draw = np.random.default_rng(number)
    return Prompt(
        sample_id=f"s{number}/{member}",
        group_id=f"g{number}",
        prompt_id=f"p{number}",
        epoch=0,
        member=member,
        group_size=1,
        seed=1000 + number,
        text="",
        token_ids=draw.integers(4, 99, length).astype(np.int32),
        **more,
    )
