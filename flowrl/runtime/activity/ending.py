"""How the code of a node may end: by returning, or by an Exception, which fails the node.

Everything else is converted to such an exception. Code that nobody cancelled raises CancelledError when a library
cancels what the code awaits; asyncio treats that as an orderly end, so the current item would stay open forever.
SystemExit and KeyboardInterrupt end an event loop, and GeneratorExit passes every `except Exception`.
"""

from __future__ import annotations

import asyncio
from typing import Any

from flowrl.channel.control import as_exception


def ended_by_itself(error: BaseException, task: asyncio.Task[Any] | None = None) -> Exception:
    """The Exception to report when the code of a node (in `task`) ended by `error`."""
    return as_exception("its code" if task is None else f"its task {task.get_name()}, {task.get_coro()!r},", error)


def as_failure(error: BaseException, *, cancelled: bool) -> BaseException:
    """The Exception to raise for `error`; `error` itself if it is an Exception, or follows from the engine's cancel.

    `cancelled`: the engine has cancelled the code, or a task that contains it.
    """
    if isinstance(error, Exception) or (cancelled and isinstance(error, asyncio.CancelledError | GeneratorExit)):
        return error
    if isinstance(error, BaseExceptionGroup) and (exceptions := error.subgroup(Exception)) is not None:
        return exceptions
    return ended_by_itself(error)


def is_cancelled() -> bool:
    """Whether the current task was cancelled, or the code is being discarded outside of any task."""
    try:
        task = asyncio.current_task()
    except RuntimeError:  # the loop is not running any more
        task = None
    return task is None or bool(task.cancelling())
