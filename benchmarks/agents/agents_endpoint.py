"""What the endpoint costs: requests/s at many sessions, and ms of its own CPU a request, against recorded replies.

    python -m benchmarks.agents.agents_endpoint

The client is a process of its own, so that its CPU is not the endpoint's: plain HTTP, each session a conversation
that grows with each call and begins anew after `calls` of them. The server's CPU is its whole process's, user and
system, in the time in which the requests are counted. Wanted are at least 200 requests/s and at most 3 ms, as medians:
the exit status is 1 otherwise.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import numpy as np
import tyro

from flowrl.agents.endpoint import (
    AgentEndpoint,
    EndpointSettings,
    FinishedSession,
    SampledAnswer,
    SessionTask,
    Unavailable,
)
from flowrl.messages import Int32
from flowrl.models import Policy, load_tokenizer, resolve
from flowrl.models.tokens.chat import Messages

RATE, CPU, CLIENT_CPU = "requests/s", "server's CPU ms a request", "client's CPU ms a request"
WANTED = {RATE: (200.0, float("inf")), CPU: (0.0, 3.0)}
"""Figure -> least and most of its median."""


@dataclass(frozen=True)
class Options:
    model: str = "smollm2"
    """Whose tokenizer and chat template are used."""
    sessions: int = 64
    calls: int = 8
    """Calls of each conversation."""
    words: int = 40
    """Words of each message and reply."""
    measure_s: float = 5.0
    repeats: int = 3
    client: str = ""
    """What the client's process is told, as JSON; for this script itself."""


class Recorded:
    """Answers at once with one reply, and keeps nothing."""

    def __init__(self, tokenizer: Any, words: int) -> None:
        text = "word " * words
        ids = np.asarray(tokenizer(text)["input_ids"], np.int32)
        self._answer = SampledAnswer(ids, np.zeros(ids.size, np.float32), np.zeros(ids.size, np.int32), "stop", text)

    async def reply(
        self, session: str, context_ids: Int32, *, max_tokens: int, stop: tuple[str, ...], tools: Messages
    ) -> SampledAnswer:
        return self._answer

    async def next_task(self) -> SessionTask:
        raise Unavailable("this benchmark begins its sessions itself")

    def finished(self, session: FinishedSession) -> None:
        pass


async def served(options: Options) -> list[Mapping[str, float]]:
    """The figures of each repetition."""
    tokenizer = load_tokenizer(resolve(Policy(options.model)))
    backend = Recorded(tokenizer, options.words)
    settings = EndpointSettings(context_tokens=1 << 20, turn_tokens=1024)
    async with AgentEndpoint(backend, backend, tokenizer, settings) as endpoint:
        found = []
        for repeat in range(options.repeats):
            names = [f"s{repeat}-{n}" for n in range(options.sessions)]
            urls = [endpoint.open_session(SessionTask(name)).openai_base_url for name in names]
            told = {"urls": urls, "key": endpoint.key}
            found.append(await one_repetition(options, told))
            sequences = sum(len(endpoint.end_session(name, 1.0).sequences) for name in names)
            print(f"repetition {repeat}: {found[-1]}, {sequences} sequences")
        return found


async def one_repetition(options: Options, told: Mapping[str, Any]) -> Mapping[str, float]:
    """Requests/s and CPU between the client's first line, when it has warmed up, and its last."""
    command = [sys.executable, "-m", "benchmarks.agents.agents_endpoint", "--client", json.dumps(told)]
    command += ["--calls", str(options.calls), "--words", str(options.words), "--measure-s", str(options.measure_s)]
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    await process.stdout.readline()
    began_s, cpu_s = time.perf_counter(), time.process_time()
    last = json.loads(await process.stdout.readline())
    cpu_s, wall_s = time.process_time() - cpu_s, time.perf_counter() - began_s
    await process.wait()
    return {
        RATE: round(last["requests"] / wall_s, 1),
        CPU: round(1000 * cpu_s / last["requests"], 3),
        CLIENT_CPU: round(1000 * last["cpu_s"] / last["requests"], 3),
    }


async def ask(options: Options, told: Mapping[str, Any]) -> None:
    """The client: all sessions at once, each as fast as it is answered."""
    warm, done, number = asyncio.Event(), asyncio.Event(), [0]
    headers = {"Authorization": f"Bearer {told['key']}"}
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(headers=headers, connector=connector) as http, asyncio.TaskGroup() as group:
        for url in told["urls"]:
            group.create_task(converse(options, http, url, number, done))
        group.create_task(_after(1.0, warm))
        await warm.wait()
        print("warm", flush=True)
        before, cpu_s = number[0], time.process_time()
        await asyncio.sleep(options.measure_s)
        print(json.dumps({"requests": number[0] - before, "cpu_s": time.process_time() - cpu_s}), flush=True)
        done.set()


async def _after(seconds: float, event: asyncio.Event) -> None:
    await asyncio.sleep(seconds)
    event.set()


async def converse(
    options: Options, http: aiohttp.ClientSession, url: str, number: list[int], done: asyncio.Event
) -> None:
    messages: list[dict[str, str]] = []
    begun = 0
    while not done.is_set():
        if len(messages) == 2 * options.calls or not messages:
            messages, begun = [], begun + 1
        messages.append({"role": "user", "content": f"{begun} " + "what " * options.words})
        async with http.post(f"{url}/chat/completions", json={"model": "policy", "messages": messages}) as response:
            answer = await response.json()
        messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
        number[0] += 1


def main(options: Options) -> int:
    if options.client:
        asyncio.run(ask(options, json.loads(options.client)))
        return 0
    return 0 if report(asyncio.run(served(options))) else 1


def report(found: Sequence[Mapping[str, float]]) -> bool:
    """Print the figures of all repetitions; whether their medians are as wanted."""
    print(f"{'':28}{'median':>10}{'least':>10}{'most':>10}")
    reached = True
    for name in found[0]:
        values = [one[name] for one in found]
        middle = statistics.median(values)
        least, most = WANTED.get(name, (0.0, float("inf")))
        wanted = f"  wanted {least:g} to {most:g}" if name in WANTED else ""
        missed = "" if least <= middle <= most else ": MISSED"
        print(f"{name:28}{middle:10.2f}{min(values):10.2f}{max(values):10.2f}{wanted}{missed}")
        print(json.dumps({"benchmark": "agents_endpoint", "figure": name, "value": middle, "runs": values}))
        reached = reached and not missed
    return reached


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options, description=__doc__)))
