"""Run-wide locks and the batch-end barrier, kept in the driver.

Invariants
- A taker holds a lock from the moment the lock is granted, even while the answer is in transit. So a taker that stops
  waiting must also call `release_lock`.
- A rank counts at the barrier only while it waits there.

Waits: a lock becomes free by its holder's `release_lock`, or by the holder's death; a barrier opens when every trainer
has arrived and the work that is due there, such as a checkpoint, is done.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from typing import Any

LockClaim = tuple[str, int]
"""(node or process, number of the take)"""


class Locks:
    """Named locks, granted in order of request.

    A lock is held by one holder, or by several processes of one `party`: the ranks of a gang work in lockstep, so they
    must hold it together. A `claim` distinguishes the requests of one node.
    """

    def __init__(self) -> None:
        self._holders: dict[str, tuple[str, list[LockClaim]]] = {}
        """Lock -> (party that holds it, the claims of that party)."""
        self._queues: dict[str, list[tuple[str, LockClaim, asyncio.Future[None]]]] = {}
        self._reserved: dict[str, frozenset[str]] = {}
        """Lock -> the only parties to which it is granted now."""
        self._freed: dict[str, asyncio.Event] = {}
        """Reserved lock -> set when no other party holds it."""

    @asynccontextmanager
    async def reserve_lock(self, name: str, parties: Collection[str]) -> AsyncIterator[None]:
        """Inside, only these parties are granted the lock; begins when no other party holds it."""
        self._reserved[name] = frozenset(parties)
        freed = self._freed[name] = asyncio.Event()
        self._report_freed(name)
        try:
            await freed.wait()
            yield
        finally:
            del self._reserved[name], self._freed[name]
            if name not in self._holders:
                self._grant_next(name)

    def _report_freed(self, name: str) -> None:
        if name in self._reserved and self._may_hold(name, self._holders.get(name, ("", []))[0]):
            self._freed[name].set()

    def _may_hold(self, name: str, party: str) -> bool:
        """Whether the party may be granted the lock now; "" means no party."""
        return not party or name not in self._reserved or party in self._reserved[name]

    async def take_lock(self, host: str, body: dict[str, Any]) -> None:
        name, claim = body["name"], _read_claim(body)
        party = body.get("party", body["claimant"])
        if self._try_to_hold(name, party, claim):
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (party, claim, waiter)
        self._queues.setdefault(name, []).append(entry)
        try:
            await waiter
        except asyncio.CancelledError:
            if not waiter.cancelled():  # granted and cancelled in one tick of the loop
                self.release_lock(host, body)
            elif entry in self._queues[name]:
                self._queues[name].remove(entry)
            raise

    def release_lock(self, host: str, body: dict[str, Any]) -> None:
        """Release a claim. A claim that does not hold the lock changes nothing."""
        name, claim = body["name"], _read_claim(body)
        _, claims = self._holders.get(name, ("", []))
        if claim not in claims:
            return
        claims.remove(claim)
        if not claims:
            del self._holders[name]
            self._report_freed(name)
            self._grant_next(name)

    def claimants_died(self, claimants: Collection[str]) -> None:
        """Release all locks that these claimants hold. Their waiting claims end with the requests of their process."""
        held = [(name, claim) for name, (_, claims) in self._holders.items() for claim in claims]
        for name, (claimant, number) in held:
            if claimant in claimants:
                self.release_lock("", {"name": name, "claimant": claimant, "claim": number})

    def _try_to_hold(self, name: str, party: str, claim: LockClaim) -> bool:
        if not self._may_hold(name, party):
            return False
        holder, claims = self._holders.setdefault(name, (party, []))
        if holder == party:
            claims.append(claim)
        return holder == party

    def _grant_next(self, name: str) -> None:
        """Grant the lock to the first waiter in the queue that may have it, and to all waiters of its party."""
        queue = [entry for entry in self._queues.get(name, ()) if not entry[2].cancelled()]
        first = next((party for party, _, _ in queue if self._may_hold(name, party)), "")
        self._queues[name] = [entry for entry in queue if entry[0] != first]
        for party, claim, waiter in queue:
            if party == first:
                self._try_to_hold(name, party, claim)
                waiter.set_result(None)


def _read_claim(body: dict[str, Any]) -> LockClaim:
    return body["claimant"], body.get("claim", 0)


class BatchEnd:
    """The barrier at which trainers wait at a batch's end while work that is due there is done, such as a checkpoint.

    `due(version)` tells whether work is due; `write(version)` does it, called once when all `size` replicas have
    arrived. Nodes named in `passing` do not wait here: they count their own versions.
    """

    def __init__(
        self,
        size: int,
        due: Callable[[int], bool],
        write: Callable[[int], Awaitable[None]],
        *,
        passing: Collection[str] = (),
    ) -> None:
        self._size = size
        self._passing = frozenset(passing)
        self._due = due
        self._write = write
        self._arrived: dict[int, int] = {}
        self._open: dict[int, asyncio.Event] = {}

    async def arrive(self, host: str, body: dict[str, Any]) -> None:
        version = int(body["version"])
        if body.get("replica_id", "").partition("/")[0] in self._passing:
            return
        # The first replica's answer holds for all: an interrupt between two arrivals cancels what was due.
        if version not in self._open and not self._due(version):
            return
        opened = self._open.setdefault(version, asyncio.Event())
        self._arrived[version] = self._arrived.get(version, 0) + 1
        if self._arrived[version] < self._size:
            try:
                await opened.wait()
            except asyncio.CancelledError:
                if not opened.is_set():
                    self._arrived[version] -= 1
                raise
            return
        try:
            await self._write(version)
        finally:
            opened.set()
