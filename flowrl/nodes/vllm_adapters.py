"""LoRA adapters in vLLM: one for every version, there for as long as a request samples with it.

Invariants:

- A request keeps the adapter it began with: all its tokens are of one version, whatever is loaded meanwhile.
  That is no older than the version its group was admitted under, so the bound of staleness holds as ever.
- An adapter goes when a newer one is current and its last request has ended, to make room for the next.

Waits: `room` waits for a slot, which the end of the oldest adapter's last request frees.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM makes room for; an adapter of another rank takes the next."""
MOST_SLOTS = 8


@dataclass(frozen=True)
class AdapterSlots:
    """How many adapters of which rank vLLM serves at a time."""

    rank: int
    count: int

    @classmethod
    def of(cls, rank: int, max_staleness: int | None) -> AdapterSlots:
        """Versions that can be in use at once: those from the oldest allowed on, and the next one loading."""
        return cls(rank, min(MOST_SLOTS, 2 + (1 if max_staleness is None else max_staleness)))

    @property
    def arguments(self) -> dict[str, Any]:
        """Of vLLM's AsyncEngineArgs."""
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
        """Adapter id: requests that sample with it."""
        self._current = 0
        self._freed = asyncio.Event()

    async def room(self) -> None:
        """Returns when one more adapter fits."""
        await self._leave_idle()
        while len(self._users) >= self._slots.count:
            self._freed.clear()
            await self._freed.wait()
            await self._leave_idle()

    async def load(self, update: Mapping[str, Any], adapter: Mapping[str, Any], version: int) -> float:
        """Make the adapter of `version` the current one; the slowest worker's seconds. After `room`."""
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
