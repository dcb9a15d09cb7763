"""Agents' programs as environments of one step, so that they get what environments get.

That is a new process for every attempt, forked from one that has imported the agent's file; limits of time and memory;
a parent-death signal; and the end of everything that the program has started.

The row's options say what is to be done; the text of the one action is the JSON of the variables that lead to the
session; the text of the observation is the result.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import os
import shlex
import subprocess
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from flowrl.agents.programs.agent_result import AgentResult
from flowrl.agents.programs.openai_client import openai_client, warm_up
from flowrl.environments import Action, Env, EnvironmentFailed, Observation, Step
from flowrl.errors import ConfigError
from flowrl.tasks.program_variables import program_variables
from flowrl.tasks.user_module import user_module

Function = Callable[[Any, Mapping[str, Any]], Awaitable[object]]
READ_BYTES = 1 << 16
LINE_BYTES = 1 << 20
"""A longer last line of a program is no result."""


class ProgramAgent(Env):
    """Base of both kinds. A program of a resumed run makes its calls again, and gets the replies that it had."""

    async def reset(self, task: Mapping[str, Any], seed: int) -> Observation:
        self._options: Mapping[str, Any] = task["options"]
        return Observation()

    async def step(self, action: Action) -> Step:
        os.environ.update(json.loads(action.text))
        result = await self.play(self._options)
        return Step(Observation(result.packed()), terminated=True)

    async def play(self, options: Mapping[str, Any]) -> AgentResult:
        """Run the program. `options["task"]` is what it is to do."""
        raise NotImplementedError


class FunctionAgent(ProgramAgent):
    """`async def agent(client, task)`, with a client of OpenAI's library that leads to the session."""

    def __init__(self, function: str) -> None:
        self._function = agent_function(function)

    @classmethod
    def before_fork(cls, **options: Any) -> None:
        """Import what all attempts need, once."""
        agent_function(options["function"])
        warm_up()

    async def play(self, options: Mapping[str, Any]) -> AgentResult:
        async with openai_client() as client:
            return AgentResult.of(await self._function(client, options["task"]))


class CommandAgent(ProgramAgent):
    """A command line. It finds the task as JSON on its standard input."""

    async def play(self, options: Mapping[str, Any]) -> AgentResult:
        program = await self._started(options["command"])
        assert program.stdin is not None and program.stdout is not None
        _, last = await asyncio.gather(_write(program.stdin, json.dumps(options["task"])), _last_line(program.stdout))
        if status := await program.wait():
            raise EnvironmentFailed("env_died", f"the command ended with the status {status}")
        return AgentResult.of_line(last)

    async def _started(self, command: str) -> asyncio.subprocess.Process:
        pipe = subprocess.PIPE
        try:
            return await asyncio.create_subprocess_exec(
                *shlex.split(command), stdin=pipe, stdout=pipe, env=program_variables()
            )
        except OSError as problem:
            text = f"the command {command!r} cannot be started: {problem.strerror}"
            raise EnvironmentFailed("env_died", text) from None


@functools.lru_cache(maxsize=1)
def agent_function(place: str) -> Function:
    """The function `FILE.py:FUNCTION`. Raises ConfigError. A forked process already has it."""
    file, _, name = place.rpartition(":")
    function = getattr(user_module(file, owner="agent"), name, None)
    if function is None:
        raise ConfigError(f"the agent's file {file} has no function {name!r}")
    if not inspect.iscoroutinefunction(function):
        raise ConfigError(f"the agent {place!r} is not async; write async def {name}(client, task)")
    if len(inspect.signature(function).parameters) != 2:
        raise ConfigError(f"the agent {place!r} needs two parameters; write async def {name}(client, task)")
    return function  # type: ignore[no-any-return]


async def _write(stdin: asyncio.StreamWriter, text: str) -> None:
    """Write the program's input; it is no error if the program does not read it."""
    try:
        stdin.write(text.encode())
        await stdin.drain()
        stdin.close()
        await stdin.wait_closed()
    except ConnectionError:
        return


async def _last_line(stdout: asyncio.StreamReader) -> str:
    """The last line that is not empty. All output is copied to this process's stdout, for the texts of errors."""
    end = b""
    while part := await stdout.read(READ_BYTES):
        os.write(1, part)
        end = (end + part)[-LINE_BYTES:]
    lines = end.decode(errors="replace").rstrip().splitlines()
    return lines[-1] if lines else ""
