"""An episode that is being played, the calls to its environment's code, and the causes for which an attempt is void.

`Player` calls the environment and checks what it answers, in the process that has the environment: this one
(`LoopEpisode`), or one that plays episodes only.

Waits: every call has a limit in seconds. When it passes, or the call is cancelled, the environment's coroutine is
cancelled, or its process killed with its group.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
import sys
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any, Literal, cast, get_args

from flowrl.environments.environment_class import FoundEnvironment
from flowrl.environments.environment_row import EnvironmentRow
from flowrl.environments.protocol import (
    Action,
    Env,
    MalformedValue,
    Observation,
    Step,
    shorten_value,
)
from flowrl.errors import AttemptFailed, FlowrlError


class Player:
    """One environment object through its one episode. All methods raise EnvironmentFailed."""

    def __init__(self, name: str, make: Callable[[], Env]) -> None:
        with guard_calls(f"making {name}"):
            self.env = make()
        self._name = type(self.env).__name__

    async def reset(self, task: Mapping[str, Any], seed: int) -> tuple[Observation, ...]:
        with guard_calls(f"{self._name}.reset"):
            found: Any = await self.env.reset(task, seed)
            observations = tuple(found) if isinstance(found, tuple | list) else (found,)
            for one in observations:
                if not isinstance(one, Observation):
                    shown = shorten_value(one)
                    raise MalformedValue(f"{self._name}.reset returned {shown}; it needs an Observation")
            self._check_seats("reset", "observations", len(observations))
            return observations

    async def restore(self, state: bytes) -> None:
        with guard_calls(f"{self._name}.restore"):
            self.env.restore(state)

    async def step(self, action: Action, seat: int) -> Step:
        with guard_calls(f"{self._name}.step"):
            seats: tuple[int, ...] = () if self.env.seats == 1 else (seat,)
            found = await cast(Any, self.env.step)(action, *seats)
            if not isinstance(found, Step):
                raise MalformedValue(f"{self._name}.step returned {shorten_value(found)}; it needs a Step")
            self._check_seats("step", "observations", len(found.observations))
            self._check_seats("step", "rewards", len(found.rewards))
            return found

    def save(self) -> bytes | None:
        with guard_calls(f"{self._name}.save"):
            found: Any = self.env.save()
            if found is not None and not isinstance(found, bytes):
                raise MalformedValue(f"{self._name}.save returned {shorten_value(found)}; it needs bytes or None")
            return found

    async def close(self) -> None:
        with guard_calls(f"{self._name}.close"):
            await self.env.close()

    def _check_seats(self, method: str, what: str, number: int) -> None:
        if number != self.env.seats:
            needed = f"it has {self.env.seats} seat(s) and needs one for each"
            raise MalformedValue(f"{self._name}.{method} returned {number} {what}; {needed}")


def seed_global_state(seed: int) -> None:
    """Seed the global generators that packages use: Python's, and those of numpy and torch if they are loaded."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % (1 << 32))
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)


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
def guard_calls(doing: str) -> Iterator[None]:
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
        raise EnvironmentFailed("env_unreachable", f"{doing} lost its server: {tail_of_traceback(problem)}") from None
    except SystemExit as problem:
        raise EnvironmentFailed("env_died", f"{doing} called sys.exit({problem.code!r})") from None
    except asyncio.CancelledError as problem:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise EnvironmentFailed("env_raised", f"{doing} raised: {tail_of_traceback(problem)}") from None
    except Exception as problem:  # the boundary to the environment's code
        raise EnvironmentFailed("env_raised", f"{doing} raised: {tail_of_traceback(problem)}") from None


def tail_of_traceback(problem: BaseException) -> str:
    """The end of a traceback, from the environment's own frames on."""
    trace = problem.__traceback__
    for _ in range(OWN_FRAMES):
        trace = trace.tb_next if trace is not None and trace.tb_next is not None else trace
    return "".join(traceback.format_exception(type(problem), problem, trace)).rstrip()[-TAIL:]


@contextlib.asynccontextmanager
async def limit_time(seconds: float, doing: str) -> AsyncIterator[None]:
    """Raises EnvironmentFailed(env_timed_out) when the time is over."""
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        raise EnvironmentFailed("env_timed_out", f"{doing} took more than {seconds:g} s") from None


class OpenEpisode(ABC):
    """One episode, from its first observation to `close`, which has to be called. One call at a time.

    All methods raise EnvironmentFailed; after that only `close` may be called. A cancelled call also ends the episode.
    """

    observations: tuple[Observation, ...] = ()
    """What each seat sees first; none after `restore`."""

    def __init__(self, name: str, *, step_s: float) -> None:
        self._name, self._step_s = name, step_s
        self._over = self._closed = False
        self.on_close: Callable[[OpenEpisode], None] = lambda episode: None

    @property
    def observation(self) -> Observation:
        """What the only seat sees first."""
        (only,) = self.observations
        return only

    async def step(self, action: Action, seat: int = 0) -> Step:
        """Play one action."""
        assert not self._over, f"an episode of {self._name} is over, and was asked for one more step"
        self._over = True
        step = await self._call_step(action, seat)
        self._over = step.over
        return step

    async def close(self) -> None:
        """Close the environment and end its process. When it returns or raises, nothing of the episode is left."""
        if not self._closed:
            self._closed = self._over = True
            try:
                await self._call_close()
            finally:
                self.on_close(self)

    async def close_quietly(self) -> None:
        """`close` for an episode that has failed or is given up, so that errors of closing it do not matter."""
        try:
            await self.close()
        except EnvironmentFailed:
            return

    @abstractmethod
    async def begin_episode(self, row: EnvironmentRow, state: bytes | None, *, limit_s: float) -> None:
        """Reset, or restore a saved state."""

    @abstractmethod
    async def save_state(self) -> bytes | None:
        """The environment's state for `Episodes.restore`; None if it has none."""

    @abstractmethod
    async def _call_step(self, action: Action, seat: int) -> Step: ...

    @abstractmethod
    async def _call_close(self) -> None: ...


class LoopEpisode(OpenEpisode):
    """An episode whose environment is cooperative and runs in this event loop."""

    def __init__(self, found: FoundEnvironment, *, step_s: float) -> None:
        super().__init__(found.text, step_s=step_s)
        self._found = found
        self._player: Player | None = None

    async def begin_episode(self, row: EnvironmentRow, state: bytes | None, *, limit_s: float) -> None:
        self._player = Player(self._name, self._found.make)
        async with limit_time(limit_s, f"{self._name}: reset"):
            if state is None:
                self.observations = await self._player.reset(row.task, row.seed)
            else:
                await self._player.restore(state)

    async def save_state(self) -> bytes | None:
        assert self._player is not None
        return self._player.save()

    async def _call_step(self, action: Action, seat: int) -> Step:
        assert self._player is not None
        async with limit_time(self._step_s, f"{self._name}: step"):
            return await self._player.step(action, seat)

    async def _call_close(self) -> None:
        if self._player is not None:
            async with limit_time(self._step_s, f"{self._name}: close"):
                await self._player.close()


def num_threads() -> int:
    """The kernel's number of threads, which includes those that libraries have started."""
    return len(os.listdir("/proc/self/task"))


def one_thread_left(within_s: float) -> bool:
    """Wait at most `within_s` for all threads but this one to end. Returns whether all have ended."""
    until_s = time.monotonic() + within_s
    for thread in set(threading.enumerate()) - {threading.current_thread()}:
        if not isinstance(thread, threading._DummyThread):  # one that Python did not start, and cannot join
            thread.join(max(0.0, until_s - time.monotonic()))
    while num_threads() > 1 and time.monotonic() < until_s:
        time.sleep(0.001)  # there is no event for a joined thread leaving the kernel
    return num_threads() == 1
