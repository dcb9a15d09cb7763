"""The causes for which an episode's attempt is void, one word each, and the boundary to an environment's code."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import traceback
from collections.abc import Iterator
from typing import Literal, get_args

from flowrl.environments.protocol import MalformedValue
from flowrl.errors import AttemptFailed, FlowrlError

ResumeCause = Literal["replay_differs", "resumed"]
EnvCause = Literal["env_raised", "env_timed_out", "env_died", "env_out_of_memory", "env_malformed", "env_unreachable"]
Cause = EnvCause | ResumeCause
CAUSES: tuple[EnvCause, ...] = get_args(EnvCause)
"""What an environment can do wrong."""
RESUME_CAUSES: tuple[ResumeCause, ...] = get_args(ResumeCause)
"""Why an attempt that was unfinished in a checkpoint does not continue in a resumed run."""
TAIL = 2_000
"""Characters of a traceback that are kept, from its end."""
OWN_FRAMES = 2
"""Frames of a traceback that belong to `boundary` and its caller."""
UNREACHABLE = (ConnectionError, socket.gaierror)
"""What an environment raises when the server behind it cannot be reached."""


class EnvironmentFailed(AttemptFailed):
    """An environment failed."""

    cause: Cause

    def __init__(self, cause: Cause, text: str, *, event: str = "") -> None:
        super().__init__(cause, text, event=event)


class ZygoteFailed(FlowrlError):
    """The process that starts the processes of episodes died too often: no more episodes can be played."""


@contextlib.contextmanager
def boundary(doing: str) -> Iterator[None]:
    """Turns what an environment's code raises into EnvironmentFailed. `doing` names the call, as in "FrozenLake.step".

    A cancellation from outside passes through; one that the environment itself raised becomes EnvironmentFailed.
    """
    try:
        yield
    except EnvironmentFailed:
        raise
    except MalformedValue as problem:
        raise EnvironmentFailed("env_malformed", f"{doing}: {problem}") from None
    except MemoryError as problem:
        raise EnvironmentFailed("env_out_of_memory", f"{doing} ran out of memory: {problem}".rstrip(": ")) from None
    except UNREACHABLE as problem:
        raise EnvironmentFailed("env_unreachable", f"{doing} lost its server: {_tail(problem)}") from None
    except SystemExit as problem:
        raise EnvironmentFailed("env_died", f"{doing} called sys.exit({problem.code!r})") from None
    except asyncio.CancelledError as problem:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise EnvironmentFailed("env_raised", f"{doing} raised: {_tail(problem)}") from None
    except Exception as problem:  # the boundary to the environment's code
        raise EnvironmentFailed("env_raised", f"{doing} raised: {_tail(problem)}") from None


def _tail(problem: BaseException) -> str:
    """The end of a traceback, from the environment's own frames on."""
    trace = problem.__traceback__
    for _ in range(OWN_FRAMES):
        trace = trace.tb_next if trace is not None and trace.tb_next is not None else trace
    return "".join(traceback.format_exception(type(problem), problem, trace)).rstrip()[-TAIL:]
