"""What a node replica is doing: for stall reports, quiescence and the view.

Invariants
- `working` counts the invocations that are inside user code and not in one of the engine's waits; an invocation
  with several waits at once (it sends two messages side by side) waits as long as any of them. A checkpoint waits
  for 0.
- Each wait knows the task that stands in it. What other tasks of the node do, `flowrl.runtime.activity.pending` says.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from flowrl.runtime.activity.hostloop import Pending

OUTSIDE = "outside"
"""The kind of a wait that something beyond the graph ends."""


def _tell_loop(error: BaseException) -> None:
    asyncio.get_running_loop().call_exception_handler({"message": str(error), "exception": error})


@dataclass(slots=True)
class Wait:
    """A wait of the engine's that has begun and not ended."""

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
    """Grows with everything that moves: items taken, messages sent, tickets got, calls returned."""
    waits: dict[int, Wait] = field(default_factory=dict)
    died: Callable[[BaseException], None] = _tell_loop
    """Told of the death of a task that the node started and nobody awaits."""
    _token: int = 0
    _idle: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._idle.set()
        self.pending = Pending(lambda error: self.died(error))

    def begin(self) -> ActiveInvocation:
        """An invocation of the node enters user code."""
        self.work(+1)
        return ActiveInvocation(self)

    def work(self, change: int) -> None:
        self.working += change
        if self.working > 0:
            self._idle.clear()
        else:
            self._idle.set()

    @contextmanager
    def waiting(self, kind: str, what: str, *, inside: ActiveInvocation | None) -> Iterator[None]:
        """`inside`: the invocation that the wait is part of, which does not count as working meanwhile."""
        self._token += 1
        token = self._token
        self.waits[token] = Wait(kind, what, time.monotonic(), asyncio.current_task())
        if inside is not None:
            inside.stand(+1)
        try:
            yield
        finally:
            del self.waits[token]
            self.moves += 1
            if inside is not None:
                inside.stand(-1)

    async def idle(self) -> None:
        """Returns when no invocation is inside user code; ended by the invocations themselves."""
        await self._idle.wait()


class ActiveInvocation:
    """One invocation of a node, in all tasks that work on it."""

    __slots__ = ("_activity", "_over", "_waits")

    def __init__(self, activity: Activity) -> None:
        self._activity = activity
        self._waits = 0
        self._over = False

    def stand(self, change: int) -> None:
        """A wait of the invocation begins (+1) or has ended (-1)."""
        stood = self._waits > 0
        self._waits += change
        if not self._over and stood != (self._waits > 0):
            self._activity.work(1 if stood else -1)

    def end(self) -> None:
        """The invocation leaves user code, whatever it has left waiting. Once or more."""
        if not self._over:
            self._over = True
            if not self._waits:
                self._activity.work(-1)


in_invocation: ContextVar[ActiveInvocation | None] = ContextVar("flowrl_in_invocation", default=None)
"""The invocation that the present task works on."""
