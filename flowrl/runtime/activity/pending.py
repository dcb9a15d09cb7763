"""The reasons why a node counts as alive: what will wake it, other than another node. A deadlocked node has none.

Each task of a node is judged separately. Every task counts as alive except these:
- a task in one of the engine's waits: only another node, or the driver, ends that wait;
- a task that waits for tasks of its own node (`await task`, gather, wait, wait_for, a TaskGroup): those tasks are
  judged separately;
- a task that waits for an asyncio Lock or Semaphore, or for PrioritySlots: another task ends this wait.
A timer, a call in a thread, a server and a watched descriptor also keep their node alive. Anything unknown counts as
alive: at worst a deadlock is reported as a standstill, and never a standstill as a deadlock.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from types import AsyncGeneratorType, FrameType
from typing import Any

from flowrl.runtime.activity.activity import OUTSIDE, Activity
from flowrl.runtime.activity.hostloop import Pending
from flowrl.runtime.activity.slots import PrioritySlots

LOCKS = (asyncio.Lock.acquire.__code__, asyncio.Semaphore.acquire.__code__, PrioritySlots.take.__code__)
GROUP = asyncio.TaskGroup.__aexit__.__code__
WAIT = asyncio.tasks._wait.__code__  # type: ignore[attr-defined]
WAIT_FOR = asyncio.wait_for.__code__
TOLD = 3
"""Number of reasons reported for one node, which may have a thousand tasks."""


def reasons(activity: Activity, now_s: float) -> list[str]:
    """What will wake this node, as texts; empty if only another node can wake it."""
    pending = activity.pending
    found = [wait.what for wait in activity.waits.values() if wait.kind == OUTSIDE]
    if not (found or pending.tasks):
        return ["its code has not started"]
    found += _of_tasks(activity)
    if any(not timer.cancelled() and timer.when() >= now_s for timer in pending.timers):
        found.append("a timer")
    if pending.calls:
        found.append("a call in a thread")
    if pending.readers or any(server.is_serving() for server in pending.servers):
        found.append("a connection")
    found = list(dict.fromkeys(found))
    return found if len(found) <= TOLD else [*found[:TOLD], f"{len(found) - TOLD} more"]


def _of_tasks(activity: Activity) -> Iterator[str]:
    waiting = {wait.task for wait in activity.waits.values()}
    for task in activity.pending.tasks:
        future = task._fut_waiter  # type: ignore[attr-defined]
        if future is None or future.done():
            yield place_of(task)  # it resumes in this tick of the loop, or in the next
        elif task not in waiting and not _waits_within(task, future, activity.pending):
            yield place_of(task)


def _waits_within(task: asyncio.Task[Any], future: asyncio.Future[Any], pending: Pending) -> bool:
    """Whether `task` waits only for other tasks of its node."""
    awaited = _awaited(task, future)
    return awaited is not None and all(other in pending.tasks for other in awaited)


def _awaited(task: asyncio.Task[Any], future: asyncio.Future[Any]) -> list[Any] | None:
    """The tasks that `task` waits for; [] for a lock; None if it waits for something else."""
    if isinstance(future, asyncio.Task):
        return [future]
    if isinstance(future, asyncio.tasks._GatheringFuture):  # type: ignore[attr-defined]
        return [child for child in future._children if not child.done()]
    frame = innermost(task)
    if frame is None:
        return None
    if frame.f_code in LOCKS:
        return []
    if frame.f_code is GROUP:
        return list(frame.f_locals["self"]._tasks)
    if frame.f_code is WAIT:
        return [one for one in frame.f_locals["fs"] if not one.done()]
    return [frame.f_locals["fut"]] if frame.f_code is WAIT_FOR else None


def innermost(task: asyncio.Task[Any]) -> FrameType | None:
    """The innermost frame of `task` that can be found."""
    return next(reversed(list(_frames(task))), None)


def _frames(task: asyncio.Task[Any]) -> Iterator[FrameType]:
    """The frames of `task`, outermost first: of coroutines and of the async generators that they iterate."""
    at: Any = task.get_coro()
    while at is not None:
        if type(at).__name__.startswith("async_generator_"):  # an `anext`, which refers to its generator
            at = next((one for one in gc.get_referents(at) if isinstance(one, AsyncGeneratorType)), None)
        frame = getattr(at, "cr_frame", None) or getattr(at, "ag_frame", None)
        if frame is None:
            return
        yield frame
        at = getattr(at, "cr_await", None) or getattr(at, "ag_await", None)


def place_of(task: asyncio.Task[Any]) -> str:
    """ "Judge.ask (judge.py:21)": the innermost place of `task` outside of libraries, else the innermost place."""
    frames = list(_frames(task))
    if not frames:
        return task.get_name()
    frame = ([frame for frame in frames if not _of_library(frame)] or frames)[-1]
    return f"{frame.f_code.co_qualname} ({frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno})"


def _of_library(frame: FrameType) -> bool:
    name = frame.f_code.co_filename
    return "/site-packages/" in name or "/asyncio/" in name
