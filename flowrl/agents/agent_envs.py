"""Agents' programs as environments of one step, so that they get what environments get.

That is a new process for every attempt, forked from one that has imported the agent's file; limits of time and memory;
a parent-death signal; and the end of everything that the program has started.

The row's options say what is to be done; the text of the one action is the JSON of the variables that lead to the
session; the text of the observation is the result.

A function gets a client of OpenAI's library. A fresh process spends some 90 ms on a client and its first call: 20 on
TLS certificates, the rest on what the library loads and builds at a first call. `warm_up` does both in the process from
which the agents' processes are forked; in these, a client and two calls, one with a tool's result, then take 17 ms.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import json
import os
import shlex
import ssl
import subprocess
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from flowrl.agents.programs import AgentResult
from flowrl.environments import Action, Env, EnvironmentFailed, Observation, Step
from flowrl.environments.episode_processes.zygote import Output
from flowrl.environments.open_episode import one_thread_left
from flowrl.errors import ConfigError
from flowrl.tasks.user_code import load_user_module, program_variables

TOOL: Any = {"type": "function", "function": {"name": "tool", "description": "", "parameters": {"type": "object"}}}
CALLED: Any = {"id": "call", "type": "function", "function": {"name": "tool", "arguments": "{}"}}
THREADS_END_S = 5.0
"""Seconds to wait for the library's threads, some of which end after its client."""
ANSWER: Any = {
    "id": "warm-up",
    "object": "chat.completion",
    "created": 0,
    "model": "policy",
    "choices": [
        {
            "index": 0,
            "finish_reason": "tool_calls",
            "message": {"role": "assistant", "content": "", "tool_calls": [CALLED]},
        }
    ],
    "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
}


def openai_client(**options: Any) -> Any:
    """An `openai.AsyncOpenAI`; without `options` its address and key are those of the environment variables.

    It uses no proxy: it is for the run's endpoint.
    """
    try:
        import openai
    except ImportError:
        raise ConfigError("an agent's function gets a client of the package openai; install it") from None
    direct = openai.DefaultAsyncHttpxClient(verify=load_certificates(), trust_env=False)
    return openai.AsyncOpenAI(http_client=direct, **options)


def warm_up() -> None:
    """Make two calls to a server in this process. Leaves no event loop and no thread: the process is about to be
    forked."""
    asyncio.run(make_two_calls())
    one_thread_left(THREADS_END_S)


@functools.lru_cache(maxsize=1)
def load_certificates() -> ssl.SSLContext:
    return ssl.create_default_context()


async def make_two_calls() -> None:
    server = await asyncio.start_server(answer_of_example, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, openai_client(api_key="none", base_url=f"http://127.0.0.1:{port}/v1") as client:
        messages: list[Any] = [{"role": "user", "content": "hello"}]
        for _ in range(2):  # the second one sends a tool's result, for which the library also builds something
            answer = await client.chat.completions.create(model="policy", messages=messages, tools=[TOOL])
            messages.append(answer.choices[0].message.to_dict())
            messages.append({"role": "tool", "tool_call_id": CALLED["id"], "content": ""})


async def answer_of_example(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
        await reader.readuntil(b"\r\n\r\n")
        body = json.dumps(ANSWER).encode()
        head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close"
        writer.write(f"{head}\r\n\r\n".encode() + body)
        await writer.drain()
    writer.close()


Function = Callable[[Any, Mapping[str, Any]], Awaitable[object]]
LINE_BYTES = 1 << 20
"""A longer last line of a program is no result."""


class ProgramAgent(Env):
    """Base of both kinds. A program of a resumed run makes its calls again, and gets the replies that it had."""

    async def reset(self, task: Mapping[str, Any], seed: int) -> Observation:
        self._options: Mapping[str, Any] = task["options"]
        return Observation()

    async def step(self, action: Action) -> Step:
        os.environ.update(json.loads(action.text))
        result = await self.play_program(self._options)
        return Step(Observation(result.packed()), terminated=True)

    async def play_program(self, options: Mapping[str, Any]) -> AgentResult:
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

    async def play_program(self, options: Mapping[str, Any]) -> AgentResult:
        async with openai_client() as client:
            return AgentResult.of(await self._function(client, options["task"]))


class CommandAgent(ProgramAgent):
    """A command line. It finds the task as JSON on its standard input. Its end ends the episode, and with it helpers
    that it has started and that outlive it."""

    async def play_program(self, options: Mapping[str, Any]) -> AgentResult:
        # All output is copied to this process's, for the texts of errors.
        output = Output(kept_bytes=LINE_BYTES, copied=True)
        try:
            program = start_program(options["command"], json.dumps(options["task"]), output.target)
            output.handed_over()
            if status := await exit_status(program):
                raise EnvironmentFailed("env_died", f"the command ended with the status {status}")
            # A helper of the program may hold the pipe, so its end is not waited for.
            return AgentResult.of_line(output.tail(1))
        finally:
            output.close_output()


@functools.lru_cache(maxsize=1)
def agent_function(place: str) -> Function:
    """The function `FILE.py:FUNCTION`. Raises ConfigError. A forked process already has it."""
    file, _, name = place.rpartition(":")
    function = getattr(load_user_module(file, owner="agent"), name, None)
    if function is None:
        raise ConfigError(f"the agent's file {file} has no function {name!r}")
    if not inspect.iscoroutinefunction(function):
        raise ConfigError(f"the agent {place!r} is not async; write async def {name}(client, task)")
    if len(inspect.signature(function).parameters) != 2:
        raise ConfigError(f"the agent {place!r} needs two parameters; write async def {name}(client, task)")
    return function  # type: ignore[no-any-return]


def start_program(command: str, text: str, output: int) -> subprocess.Popen[bytes]:
    """The program, with `text` as its input: in a file, which needs nobody who writes while the program reads."""
    with tempfile.TemporaryFile() as given:
        given.write(text.encode())
        given.seek(0)
        try:
            return subprocess.Popen(shlex.split(command), stdin=given, stdout=output, env=program_variables())
        except OSError as problem:
            told = f"the command {command!r} cannot be started: {problem.strerror}"
            raise EnvironmentFailed("env_died", told) from None


async def exit_status(program: subprocess.Popen[bytes]) -> int:
    """The exit status, as soon as the program has ended. If the wait is cancelled, the program is killed."""
    loop, handle = asyncio.get_running_loop(), os.pidfd_open(program.pid)
    ended = asyncio.Event()
    loop.add_reader(handle, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(handle)
        os.close(handle)
        program.kill()
        status = program.wait()
    return status
