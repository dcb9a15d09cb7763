"""Tracks what a node replica is doing: for stall reports, quiescence and the view.

Invariants
- `working` counts the invocations that are inside user code and not in one of the engine's waits. An invocation with
  several concurrent waits (it sends two messages at once) counts as waiting while any of them lasts. A checkpoint
  waits until `working` is 0.
- Each wait records the task that waits. `flowrl.runtime.activity.pending` judges the other tasks of the node.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from flowrl.runtime.activity.hostloop import Pending

OUTSIDE = "outside"
"""The kind of a wait that something outside the graph ends."""


def _report_to_loop(error: BaseException) -> None:
    asyncio.get_running_loop().call_exception_handler({"message": str(error), "exception": error})


@dataclass(slots=True)
class Wait:
    """A wait in the engine that has started and not ended."""

    kind: str
    """item, credit, ticket, reply, lock, barrier, waiting (for what the node itself or the driver does) or outside."""
    what: str
    since_s: float
    task: asyncio.Task[Any] | None


@dataclass(eq=False)
class Activity:
    """One node replica's waits and counters; touched only on the host's event loop."""

    node: str
    working: int = 0
    moves: int = 0
    """Increases with every event: an item taken, a message sent, a ticket received, a call returned."""
    waits: dict[int, Wait] = field(default_factory=dict)
    died: Callable[[BaseException], None] = _report_to_loop
    """Called when a task that the node started fails, and no code awaits it."""
    last_token: int = 0
    """The key of the newest wait."""
    _idle: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._idle.set()
        self.pending = Pending(lambda error: self.died(error))

    def begin(self) -> ActiveInvocation:
        """Begin an invocation, which enters user code."""
        self.work(+1)
        return ActiveInvocation(self)

    def work(self, change: int) -> None:
        self.working += change
        if self.working > 0:
            self._idle.clear()
        else:
            self._idle.set()

    def waiting(self, kind: str, what: str, *, inside: ActiveInvocation | None) -> ActiveWait:
        """Record a wait. `inside`: the invocation that the wait is part of; it does not count as working meanwhile."""
        return ActiveWait(self, kind, what, inside)

    async def idle(self) -> None:
        """Wait until no invocation is inside user code."""
        await self._idle.wait()


class ActiveWait:
    """One wait of an activity, as a `with` block.

    It is a class because a generator costs more, and each turn of an episode has a dozen waits.
    """

    __slots__ = ("_activity", "_inside", "_kind", "_token", "_what")

    def __init__(self, activity: Activity, kind: str, what: str, inside: ActiveInvocation | None) -> None:
        self._activity, self._kind, self._what, self._inside = activity, kind, what, inside

    def __enter__(self) -> None:
        activity = self._activity
        activity.last_token = self._token = activity.last_token + 1
        activity.waits[self._token] = Wait(self._kind, self._what, time.monotonic(), asyncio.current_task())
        if self._inside is not None:
            self._inside.count_wait(+1)

    def __exit__(self, *error: object) -> None:
        del self._activity.waits[self._token]
        self._activity.moves += 1
        if self._inside is not None:
            self._inside.count_wait(-1)


class ActiveInvocation:
    """One invocation of a node, shared by all tasks that work on it."""

    __slots__ = ("_activity", "_over", "_waits")

    def __init__(self, activity: Activity) -> None:
        self._activity = activity
        self._waits = 0
        self._over = False

    def count_wait(self, change: int) -> None:
        """Count a wait of the invocation that begins (+1) or has ended (-1)."""
        stood = self._waits > 0
        self._waits += change
        if not self._over and stood != (self._waits > 0):
            self._activity.work(1 if stood else -1)

    def end(self) -> None:
        """End the invocation, even if some of its waits still last. May be called more than once."""
        if not self._over:
            self._over = True
            if not self._waits:
                self._activity.work(-1)


in_invocation: ContextVar[ActiveInvocation | None] = ContextVar("flowrl_in_invocation", default=None)
"""The invocation that the current task works on."""
