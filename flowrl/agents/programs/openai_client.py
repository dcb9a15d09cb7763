"""The client of OpenAI's library that an agent's function gets, and how to make one cheaply.

A fresh process spends some 90 ms on a client and its first call: 20 on TLS certificates, the rest on what the library
loads and builds at a first call. `warm_up` does both in the process from which the agents' processes are forked; in
these, a client and two calls, one with a tool's result, then take 17 ms.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import ssl
from typing import Any

from flowrl.environments.episode_processes.one_thread import one_thread_left
from flowrl.errors import ConfigError

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
    direct = openai.DefaultAsyncHttpxClient(verify=_certificates(), trust_env=False)
    return openai.AsyncOpenAI(http_client=direct, **options)


def warm_up() -> None:
    """Make two calls to a server in this process. Leaves no event loop and no thread: the process is about to be
    forked."""
    asyncio.run(_one_call())
    one_thread_left(THREADS_END_S)


@functools.lru_cache(maxsize=1)
def _certificates() -> ssl.SSLContext:
    return ssl.create_default_context()


async def _one_call() -> None:
    server = await asyncio.start_server(_answered, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, openai_client(api_key="none", base_url=f"http://127.0.0.1:{port}/v1") as client:
        messages: list[Any] = [{"role": "user", "content": "hello"}]
        for _ in range(2):  # the second one sends a tool's result, for which the library also builds something
            answer = await client.chat.completions.create(model="policy", messages=messages, tools=[TOOL])
            messages.append(answer.choices[0].message.to_dict())
            messages.append({"role": "tool", "tool_call_id": CALLED["id"], "content": ""})


async def _answered(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
        await reader.readuntil(b"\r\n\r\n")
        body = json.dumps(ANSWER).encode()
        head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close"
        writer.write(f"{head}\r\n\r\n".encode() + body)
        await writer.drain()
    writer.close()
