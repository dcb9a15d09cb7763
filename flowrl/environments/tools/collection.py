"""`Tools`: functions that a policy may call, described and executed.

The policy gets a text as the answer to an unknown name, to arguments that do not fit, and to a function that raises or
takes too long. None of these is a failure of the environment.

A function runs in the main thread of the episode's process, and an alarm raises an exception inside it when its time is
over. So it leaves nothing behind. A thread that is given up would instead continue during the next call, with the same
objects, and a loop in it would keep the interpreter busy. The alarm cannot end code that never returns to the
interpreter, or that keeps catching every exception; `step_s` then ends the process, and the attempt is void. A function
that sets SIGALRM itself, as some packages do for limits of their own, switches this limit off.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from types import FrameType
from typing import Any

from pydantic import ValidationError

from flowrl.environments.open_episode import EnvironmentFailed
from flowrl.environments.protocol import LEAST_BYTES, ToolCall, shorten_value, without_middle
from flowrl.environments.tools.tool import (
    CALL_S,
    OBSERVATION_BYTES,
    Tool,
    ToolDescription,
    ToolError,
    ToolResult,
    ToolSource,
    describe_function,
)
from flowrl.errors import ConfigError
from flowrl.tasks.user_code import one_line

AGAIN_S = 1.0
"""Seconds after which the alarm is repeated, in case the function has caught it."""


class OutOfTime(BaseException):
    """Raised inside the function. It does not derive from Exception, so the function's own handlers let it pass."""


def call_within(limit_s: float, function: Callable[[], Any]) -> Any:
    """The function's result. Raises OutOfTime, and what the function raises. Only for the main thread."""
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError(
            "a synchronous tool runs in the main thread of its process alone, which has the alarm that ends it; make "
            "the tool `async def`, or leave the environment's `cooperative` False"
        )
    here = sys._getframe()

    def on_alarm(number: int, frame: FrameType | None) -> None:
        if frame is not here:  # else the function has returned already, and the alarm came a moment too late
            raise OutOfTime

    before = signal.signal(signal.SIGALRM, on_alarm)
    try:
        signal.setitimer(signal.ITIMER_REAL, limit_s, AGAIN_S)
        return function()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


class Tools:
    """`Tools([search, calculator], call_s=5.0)`; `Tools([*some, *others])` joins several collections.

    Functions are synchronous or `async def`; see `alarm` for how a synchronous one is ended. A result that is no text
    becomes JSON. Raises ConfigError for a function that its hints and docstring do not describe.

    The tools of a `ToolSource` exist only in `session`, which every episode enters for itself.
    """

    def __init__(
        self,
        functions: Iterable[Callable[..., Any] | Tool | ToolSource],
        *,
        call_s: float = CALL_S,
        observation_bytes: int = OBSERVATION_BYTES,
    ) -> None:
        """`call_s` limits a call's time, `observation_bytes` its text: the middle of a longer one is cut out."""
        if not call_s > 0:
            raise ConfigError(f"call_s of tools is {call_s}; it has to be above 0")
        if observation_bytes < LEAST_BYTES:
            raise ConfigError(f"observation_bytes of tools is {observation_bytes}; it has to be at least {LEAST_BYTES}")
        self._tools: dict[str, Tool] = {}
        self._observation_bytes = observation_bytes
        self._sources: list[ToolSource] = []
        for one in functions:
            if isinstance(one, ToolSource):
                self._sources.append(one)
                continue
            tool = one if isinstance(one, Tool) else Tool(one, describe_function(one), call_s, observation_bytes)
            if tool.name in self._tools:
                raise ConfigError(f"two tools have the name {tool.name}; rename one of the functions")
            self._tools[tool.name] = tool

    def __iter__(self) -> Iterator[Tool | ToolSource]:
        yield from self._tools.values()
        yield from self._sources

    @property
    def replays(self) -> bool:
        """Whether the same calls give the same answers, and may be made again."""
        return all(source.replays for source in self._sources)

    @property
    def descriptions(self) -> tuple[Mapping[str, Any], ...]:
        """The description of each tool, in the form of OpenAI's API, as `Observation.tools` takes them."""
        if self._sources:
            names = ", ".join(source.name for source in self._sources)
            raise ConfigError(f"what {names} offers is known in an episode: use `async with tools.session(seed)`")
        described = [tool.description for tool in self._tools.values()]
        functions = [{"name": one.name, "description": one.text, "parameters": one.parameters} for one in described]
        return tuple({"type": "function", "function": function} for function in functions)

    def check_tools(self) -> None:
        """Try everything that sessions need. Raises ConfigError. Not for use in an event loop."""
        for source in self._sources:
            source.check()

    @asynccontextmanager
    async def session(self, seed: int = 0) -> AsyncIterator[Tools]:
        """The tools of one episode: these, and what the sources open for it. Raises as ToolSource.session does."""
        async with AsyncExitStack() as stack:
            found = [await stack.enter_async_context(source.session(seed)) for source in self._sources]
            opened = [tool for tools in found for tool in tools]
            yield Tools([*self._tools.values(), *opened], observation_bytes=self._observation_bytes)

    async def execute(self, call: ToolCall, *, limit_s: float | None = None) -> ToolResult:
        """Make the call, within the tool's own limit and `limit_s`.

        Errors of the call become a result. Raises EnvironmentFailed only if what is behind the tool has failed.
        """
        tool = self._tools.get(call.name)
        if tool is None:
            known = ", ".join(self._tools) or "none"
            refused = f"There is no tool {shorten_value(call.name)}; the tools are: {known}."
        else:
            most_s = tool.call_s if limit_s is None else min(tool.call_s, limit_s)
            arguments, refused = read_arguments(tool.description, call.arguments)
            if not refused and most_s > 0:
                return await run_function(tool, arguments, most_s)
            refused = refused or f"{tool.name} was not called: no time is left."
        return ToolResult(without_middle(refused, self._observation_bytes), failed=True)


async def run_function(tool: Tool, arguments: dict[str, Any], most_s: float) -> ToolResult:
    failed = True
    try:
        text = await result_text(tool, arguments, most_s)
        failed = False
    except EnvironmentFailed:
        raise
    except ToolError as answer:
        text = str(answer)
    except OutOfTime:
        text = f"{tool.name} was stopped: it took more than {most_s:.3g} s. {tool.when_stopped}".rstrip()
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        text = f"{tool.name} cancelled itself."
    except SystemExit as end:
        text = f"{tool.name} called sys.exit({end.code!r})."
    except Exception as problem:  # the boundary to the tool's code
        text = f"{tool.name} raised {one_line(problem)}"
    return ToolResult(without_middle(text, tool.observation_bytes), failed)


async def result_text(tool: Tool, arguments: dict[str, Any], most_s: float) -> str:
    """The function's result as text."""
    if not inspect.iscoroutinefunction(tool.function):
        return str(call_within(most_s, lambda: as_text(tool.function(**arguments))))
    limit = asyncio.timeout(most_s)
    try:
        async with limit:
            return as_text(await tool.function(**arguments))
    except TimeoutError:
        if limit.expired():
            raise OutOfTime from None
        raise


def as_text(result: Any) -> str:
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)


def read_arguments(description: ToolDescription, given: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """(the function's keyword arguments, of which those with a default may be missing; what is wrong with them, "" if
    they fit).

    They are checked as JSON, which has lists but no tuples.
    """
    name = description.name
    try:
        if description.model is None:
            return dict(json.loads(json.dumps(given))), ""
        model = description.model.model_validate_json(json.dumps(given))
    except ValidationError as problem:
        misfits = []
        for error in problem.errors():
            where = ".".join(map(str, error["loc"]))
            if error["type"] == "missing":
                misfits.append(f"{name} needs the argument {where}.")
            elif error["type"] == "extra_forbidden":
                known = ", ".join(description.parameters["properties"]) or "none"
                misfits.append(f"{name} has no argument {shorten_value(where)}; its arguments are: {known}.")
            elif not where:
                misfits.append(f"The arguments of {name} are no JSON object: {error['msg']}.")
            else:
                misfits.append(f"The argument {where} of {name} is {shorten_value(error['input'])}: {error['msg']}.")
        return {}, " ".join(misfits)
    except (TypeError, ValueError, RecursionError) as problem:
        return {}, f"The arguments of {name} are no JSON: {one_line(problem)}."
    fields = type(model).model_fields
    return {str(fields[key].alias): getattr(model, key) for key in model.model_fields_set}, ""
