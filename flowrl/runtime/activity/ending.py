"""How the code of a node may end: by returning, or by an Exception, which fails the node.

Everything else is made such an exception. CancelledError comes out of code that nobody cancelled when a library
cancels what the code awaits; asyncio takes it for an orderly end, so the item at hand would stay open for ever.
SystemExit and KeyboardInterrupt end an event loop, GeneratorExit passes every `except Exception`.
"""

from __future__ import annotations

import asyncio
from typing import Any

from flowrl.channel.control import as_exception


def ended_by_itself(error: BaseException, task: asyncio.Task[Any] | None = None) -> Exception:
    """What `error` is told as, which the code of a node (in `task`) ended by."""
    return as_exception("its code" if task is None else f"its task {task.get_name()}, {task.get_coro()!r},", error)


def as_failure(error: BaseException, *, cancelled: bool) -> BaseException:
    """The Exception that `error` is to be raised as, or `error` itself where it is one, or has been asked for.

    `cancelled`: the engine has cancelled the code, or what it is part of.
    """
    if isinstance(error, Exception) or (cancelled and isinstance(error, asyncio.CancelledError | GeneratorExit)):
        return error
    if isinstance(error, BaseExceptionGroup) and (exceptions := error.subgroup(Exception)) is not None:
        return exceptions
    return ended_by_itself(error)


def is_cancelled() -> bool:
    """Somebody has cancelled the present task, or the code is being thrown away outside of any."""
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no loop runs any more
        task = None
    return task is None or bool(task.cancelling())
