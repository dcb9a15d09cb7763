"""Sends damaged requests to the endpoint: each has to be answered, and none with a 500.

    python -m tests.agents.endpoint_fuzz --requests 100000 --seed 0

A request is a valid one of an API in which values, at any depth, are replaced, removed, doubled or put into each
other, or whose bytes are damaged. It prints how many had which status.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import logging
import random
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import aiohttp

from tests.agents.endpoint_rig import an_endpoint

CALL = {"id": "call1", "type": "function", "function": {"name": "add", "arguments": '{"a": "1 2"}'}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "description": "numbers"}}, "required": ["a"]}
FUNCTION = {"name": "add", "description": "Adds.", "parameters": SCHEMA, "strict": False}
USER = {"role": "user", "content": "q"}
BODIES: tuple[tuple[str, dict[str, Any]], ...] = (
    (
        "/v1/chat/completions",
        {
            "model": "policy",
            "messages": [
                {"role": "system", "content": "s"},
                {"role": "user", "content": [{"type": "text", "text": "q"}]},
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "call1", "content": "3"},
            ],
            "tools": [{"type": "function", "function": FUNCTION}],
            "tool_choice": "auto",
            "max_tokens": 5,
            "stop": ["x"],
            "n": 1,
            "stream": False,
            "stream_options": None,
            "logprobs": True,
            "temperature": 1.0,
            "top_p": 1.0,
            "response_format": {"type": "text"},
            "metadata": {"a": "b"},
        },
    ),
    (
        "/v1/messages",
        {
            "model": "policy",
            "max_tokens": 5,
            "system": [{"type": "text", "text": "s"}],
            "messages": [
                USER,
                {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "add", "input": {"a": "1"}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "3"}]},
            ],
            "tools": [{"name": "add", "description": "Adds.", "input_schema": SCHEMA}],
            "tool_choice": {"type": "auto"},
            "stop_sequences": ["x"],
            "stream": False,
        },
    ),
    (
        "/v1/responses",
        {
            "model": "policy",
            "instructions": "s",
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "q"}]},
                {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "3"},
            ],
            "tools": [{"type": "function", **FUNCTION}],
            "max_output_tokens": 5,
            "stream": False,
            "store": True,
        },
    ),
    (
        "/v1/completions",
        {"model": "policy", "prompt": ["q", "r"], "max_tokens": 5, "n": 1, "stop": "x", "echo": False, "logprobs": 0},
    ),
    ("/v1/messages/count_tokens", {"model": "policy", "messages": [USER], "system": "s", "tools": []}),
)
VALUES: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        0,
        -1,
        1,
        2**70,
        1.5,
        float("nan"),
        float("inf"),
        "",
        "q",
        "assistant",
        "tool",
        "\x00",
        "é\u2028",
    ),
    *("\ud800", "<|end|>", "{}", "[]", "{", "null", [], [None], [[]], [""], [0], {}, {"": None}, {"type": None}),
    *({"type": "text"}, {"type": "text", "text": None}, {"role": "user"}, {"properties": None}, {"properties": []}),
    *({"properties": {"a": None}}, {"a": {"b": {"c": [1, {"d": None}]}}}, "x" * 300, [1, "a", None, {}], [-1], [2**40]),
)


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Each container within, with each of its keys."""
    for key in list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from places(value[key])


def damaged(chance: random.Random) -> tuple[str, bytes]:
    """A path and a body."""
    path, body = copy.deepcopy(chance.choice(BODIES))
    for _ in range(chance.choice((1, 1, 1, 2, 3, 6))):
        container, key = chance.choice(list(places(body)) or [({"": 0}, "")])
        what = chance.randrange(6)
        if what < 3:
            container[key] = copy.deepcopy(chance.choice(VALUES))
        elif what == 3:
            del container[key]
        elif what == 4 and isinstance(container, list):
            container.append(copy.deepcopy(container[key]))
        elif what == 4:
            container[chance.choice(("type", "role", "name", "content", "properties", "x"))] = copy.deepcopy(
                chance.choice(VALUES)
            )
        else:
            _, other = chance.choice(BODIES)
            from_, at = chance.choice(list(places(other)))
            container[key] = copy.deepcopy(from_[at])
    raw = json.dumps(body).encode()
    if chance.random() < 0.05:
        at = chance.randrange(len(raw) + 1)
        raw = (
            raw[:at]
            + bytes(chance.randrange(256) for _ in range(chance.randrange(4)))
            + raw[at + chance.randrange(3) :]
        )
    return chance.choice(BODIES)[0] if chance.random() < 0.05 else path, raw


async def fuzz(num_requests: int, seed: int, *, concurrency: int = 16) -> tuple[Counter[int], list[str]]:
    """The number of answers by status, and the first requests that were answered with a 5xx."""
    chance, statuses, bad = random.Random(seed), Counter[int](), list[str]()
    left = iter(range(num_requests))

    async def worker(http: aiohttp.ClientSession, url: str, headers: dict[str, str]) -> None:
        for _ in left:
            path, raw = damaged(chance)
            async with http.post(url + path, data=raw, headers=headers) as answer:
                text = await answer.text()
            statuses[answer.status] += 1
            if answer.status >= 500 and len(bad) < 20:
                bad.append(f"{path} {raw.decode(errors='replace')}: {answer.status} {text[:200]}")

    while num_requests:
        part = min(num_requests, 2000)  # a session keeps its conversations, so each has a bounded number
        num_requests -= part
        left = iter(range(part))
        async with an_endpoint() as rig, aiohttp.ClientSession() as http:
            headers = {"Authorization": f"Bearer {rig.access.api_key}", "Content-Type": "application/json"}
            await asyncio.gather(*(worker(http, rig.endpoint.url, headers) for _ in range(concurrency)))
    return statuses, bad


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    logging.disable(logging.CRITICAL)
    began_s = time.monotonic()
    statuses, bad = asyncio.run(fuzz(given.requests, given.seed))
    print(*bad, sep="\n")
    found = ", ".join(f"{status}: {number}" for status, number in sorted(statuses.items()))
    print(f"{statuses.total()} requests in {time.monotonic() - began_s:.0f} s; {found}")


if __name__ == "__main__":
    main()
