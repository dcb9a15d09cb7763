"""LoRA adapters in vLLM: one for every version, kept while a request samples with it.

Invariants:

- A request keeps the adapter it started with: all its tokens have one version, even if others are loaded meanwhile.
  That version is not older than the one its group was admitted under, so the staleness bound still holds.
- An adapter is removed when a newer adapter is current and its own last request has ended, to free its slot.

Waits: `room` waits for a slot, which the end of the oldest adapter's last request frees.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The ranks that vLLM supports; an adapter of another rank uses the next larger one."""
MOST_SLOTS = 8


@dataclass(frozen=True)
class AdapterSlots:
    """How many adapters vLLM serves at a time, and their rank."""

    rank: int
    count: int

    @classmethod
    def of(cls, rank: int, max_staleness: int | None) -> AdapterSlots:
        """Slots for all versions that can be in use at once: from the oldest allowed one, plus the one being loaded."""
        return cls(rank, min(MOST_SLOTS, 2 + (1 if max_staleness is None else max_staleness)))

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of vLLM's AsyncEngineArgs."""
        rank = next(size for size in RANKS if size >= self.rank)
        return {
            "enable_lora": True,
            "max_lora_rank": rank,
            "max_loras": self.count,
            "max_cpu_loras": self.count,
        }


class Adapters:
    """The adapters that one engine holds."""

    def __init__(self, engine: Any, slots: AdapterSlots) -> None:
        self._engine = engine
        self._slots = slots
        self._users: dict[int, int] = {}
        """Adapter id: number of requests that sample with it."""
        self._current = 0
        self._freed = asyncio.Event()

    async def room(self) -> None:
        """Wait until one more adapter fits."""
        await self._leave_idle()
        while len(self._users) >= self._slots.count:
            self._freed.clear()
            await self._freed.wait()
            await self._leave_idle()

    async def load(self, update: Mapping[str, Any], adapter: Mapping[str, Any], version: int) -> float:
        """Make the adapter of `version` current; return the slowest worker's seconds. Call `room` first."""
        adapter_id = version + 1
        seconds: list[float] = await self._engine.collective_rpc(
            "load_adapter", args=(dict(update), dict(adapter), adapter_id)
        )
        self._users[adapter_id] = 0
        self._current = adapter_id
        return max(seconds)

    @contextmanager
    def using(self) -> Iterator[int]:
        """The id of the current adapter, which is kept until the end of the block."""
        adapter_id = self._current
        self._users[adapter_id] += 1
        try:
            yield adapter_id
        finally:
            self._users[adapter_id] -= 1
            self._freed.set()

    async def _leave_idle(self) -> None:
        for adapter_id in [key for key, users in self._users.items() if not users and key != self._current]:
            await self._engine.remove_lora(adapter_id)
            del self._users[adapter_id]
