"""Agents' programs for tests. Functions get the client and the task; as a script this file is a command's program."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from openai import APIStatusError, APITimeoutError, AsyncOpenAI, OpenAI

IMPORTED_BY = os.getpid()
MARKS = "FLOWRL_TEST_MARKS"
"""Names the folder where programs leave marks, beside the run's folder `run`."""


async def say(client: AsyncOpenAI, messages: list[Any], **more: Any) -> Any:
    """The whole answer of the policy."""
    return await client.chat.completions.create(model="policy", messages=messages, **more)


async def answers(client: AsyncOpenAI, task: Mapping[str, Any]) -> dict[str, float]:
    """Two turns; the reward is the number of characters of the last."""
    messages = list(task["messages"])
    for again in ({"role": "user", "content": "sure?"}, None):
        reply = (await say(client, messages)).choices[0].message
        messages += [reply.to_dict(), again]
    return {"reward": float(len(reply.content)), "forked": float(os.getpid() != IMPORTED_BY)}


async def raises(client: AsyncOpenAI, task: Mapping[str, Any]) -> float:
    print("about to fail")
    await say(client, task["messages"])
    raise LookupError("a bug of the agent")


async def fails_at_first(client: AsyncOpenAI, task: Mapping[str, Any]) -> float:
    """Fails while the file that the task names says that it was begun fewer than three times."""
    await say(client, task["messages"])
    if counted(Path(task["begun"])) < 3:
        raise LookupError("not yet")
    return 1.0


def counted(file: Path) -> int:
    """The number of calls with this file."""
    with file.open("a", encoding="utf-8") as begun:
        begun.write("begun\n")
    return len(file.read_text().splitlines())


PLAYED: list[str] = []
"""The sessions of this process."""


async def counts(client: AsyncOpenAI, task: Mapping[str, Any]) -> dict[str, float]:
    """Says how many episodes its process has played, in how many sessions, and which process it is."""
    PLAYED.append(f"{client.base_url} {client.api_key}")
    await say(client, task["messages"])
    return {"reward": 1.0, "played": len(PLAYED), "sessions": len(set(PLAYED)), "pid": os.getpid()}


async def dies(client: AsyncOpenAI, task: Mapping[str, Any]) -> float:
    await say(client, task["messages"])
    os._exit(7)


async def hangs(client: AsyncOpenAI, task: Mapping[str, Any]) -> float:
    """With a process of its own that hangs too; the file that the task names gets their ids."""
    await say(client, task["messages"])
    child = await asyncio.create_subprocess_exec("sleep", "1000", start_new_session=True)
    tell(Path(task["begun"]), f"{os.getpid()} {child.pid}")
    if task.get("posts"):
        await asyncio.to_thread(post, 0.5)
    await asyncio.get_running_loop().create_future()
    return 1.0


def tell(file: Path, text: str) -> None:
    file.write_text(text)


async def returns_nothing(client: AsyncOpenAI, task: Mapping[str, Any]) -> None:
    await say(client, task["messages"])


async def returns_text(client: AsyncOpenAI, task: Mapping[str, Any]) -> Any:
    await say(client, task["messages"])
    return "good"


async def asks_nothing(client: AsyncOpenAI, task: Mapping[str, Any]) -> float:
    return 1.0


async def asks_for_two(client: AsyncOpenAI, task: Mapping[str, Any]) -> float:
    await say(client, task["messages"], n=2)
    return 1.0


async def posts(client: AsyncOpenAI, task: Mapping[str, Any]) -> float | None:
    """Posts the rewards that the task names, one after the other, and returns what it says."""
    await say(client, task["messages"])
    for reward in task["posts"]:
        await asyncio.to_thread(post, reward)
    if task.get("ends"):
        await asyncio.to_thread(request, "end", {})
    return task.get("returns")


async def leaves(client: AsyncOpenAI, task: Mapping[str, Any]) -> float:
    """Does not wait for the first answer, and goes on."""
    hurried = client.with_options(timeout=0.2, max_retries=0)
    with contextlib.suppress(APITimeoutError):
        await say(hurried, [*task["messages"], {"role": "user", "content": "slow"}])
    await say(client, task["messages"])
    return 1.0


async def goes_on(client: AsyncOpenAI, task: Mapping[str, Any]) -> float | None:
    """Talks until it may not; then its reward is the number of replies, unless it is not to tell."""
    messages = list(task["messages"])
    replies = 0
    while True:
        try:
            reply = (await say(client, messages)).choices[0].message
        except APIStatusError as problem:
            assert problem.code in ("limit_reached", "context_length_exceeded"), problem
            return None if task.get("silent") else float(replies)
        replies += 1
        messages += [reply.to_dict(), {"role": "user", "content": "go on"}]


async def until_a_checkpoint(task: Mapping[str, Any], name: str = "") -> None:
    """If the task asks for it, leaves a mark of this name and waits until the run has a checkpoint."""
    marks = Path(os.environ[MARKS])
    if task["held"]:
        (marks / f"held-{name or os.getpid()}").touch()
        await seen(marks.parent, "run/checkpoints/step_*/state.msgpack")


async def seen(folder: Path, pattern: str, number: int = 1) -> None:
    """Returns when other processes have made so many files of this name."""

    def look() -> None:
        while len(list(folder.glob(pattern))) < number:
            time.sleep(0.02)  # files tell nobody that they are there

    await asyncio.to_thread(look)


async def takes_its_time(client: AsyncOpenAI, task: Mapping[str, Any]) -> float:
    """Two turns, and `until_a_checkpoint` after each."""
    messages = list(task["messages"])
    for _ in range(2):
        reply = (await say(client, messages)).choices[0].message
        messages += [reply.to_dict(), {"role": "user", "content": "go on"}]
        await until_a_checkpoint(task)
    return float(len(reply.content) % 2)


async def paces(client: AsyncOpenAI, task: Mapping[str, Any]) -> float:
    """Six turns with pauses of half a second between them; a task is always played alike."""
    messages, total = list(task["messages"]), 0
    for _ in range(6):
        reply = (await say(client, messages)).choices[0].message
        messages += [{"role": "assistant", "content": reply.content}, {"role": "user", "content": "1+1="}]
        total += len(reply.content or "")
        await asyncio.sleep(0.5)  # the program's own work
    return float(total % 2)


async def several_answers(client: AsyncOpenAI, task: Mapping[str, Any]) -> float:
    """Each of its two calls has three replies, which end at different times."""
    messages = list(task["messages"])
    for _ in range(2):
        replies = await say(client, messages, n=3)
        messages += [replies.choices[2].message.to_dict(), {"role": "user", "content": "go on"}]
        await until_a_checkpoint(task)
    return 1.0


async def ends_early(client: AsyncOpenAI, task: Mapping[str, Any]) -> float:
    """Makes two calls. If it was held before, it ends after the first."""
    return await _once(client, task)


async def fails_early(client: AsyncOpenAI, task: Mapping[str, Any]) -> float:
    """Makes two calls. If it was held before, it fails after the first."""
    await _once(client, task, mode="x")
    return 1.0


async def _once(client: AsyncOpenAI, task: Mapping[str, Any], mode: str = "") -> float:
    name = str(random.random())  # seeded by the attempt
    mark = Path(os.environ[MARKS]) / f"held-{name}"
    begun = mark.exists()
    await say(client, list(task["messages"]))
    if begun and mode:
        mark.open(mode)
    if not begun:
        await say(client, [{"role": "user", "content": "1+1="}])
        await until_a_checkpoint(task, name)
    return 1.0


async def asks_the_time(client: AsyncOpenAI, task: Mapping[str, Any]) -> float:
    """Its questions are others each time that it is run."""
    for _ in range(2):
        await say(client, [{"role": "user", "content": f"{time.time_ns()}="}])
        await until_a_checkpoint(task)
    return 1.0


async def branches(client: AsyncOpenAI, task: Mapping[str, Any]) -> float:
    """Asks twice in a row, and then something else."""
    await answers(client, task)
    await say(client, [{"role": "user", "content": "1+1="}])
    return 1.0


async def continues_the_text(client: AsyncOpenAI, task: Mapping[str, Any]) -> float:
    """The second prompt is the first and its reply, and nothing more."""
    asked = "abc"
    reply = await client.completions.create(model="policy", prompt=asked, max_tokens=2)
    await client.completions.create(model="policy", prompt=asked + reply.choices[0].text)
    return 1.0


async def unsteady(client: AsyncOpenAI, task: Mapping[str, Any]) -> float:
    """A random number of turns; in half of the attempts it raises, dies, or leaves before its answer."""
    fate = random.choice(("raises", "dies", "leaves", "", "", ""))
    messages = list(task["messages"])
    for _ in range(random.randrange(1, 4)):
        if fate == "leaves":
            hurried = client.with_options(timeout=0.01, max_retries=0)
            with contextlib.suppress(APITimeoutError):
                await say(hurried, [*messages, {"role": "user", "content": "never mind"}])
        reply = (await say(client, messages)).choices[0].message
        messages += [reply.to_dict(), {"role": "user", "content": "go on"}]
    if fate == "raises":
        raise LookupError("a bug of the agent")
    if fate == "dies":
        os._exit(7)
    return float(len(reply.content) % 2)


def not_async(client: AsyncOpenAI, task: Mapping[str, Any]) -> float:
    return 1.0


async def one_parameter(client: AsyncOpenAI) -> float:
    return 1.0


def post(reward: float) -> None:
    request("reward", {"reward": reward})


def request(what: str, body: Mapping[str, Any]) -> None:
    """To the session that the environment's variables name."""
    url = os.environ["OPENAI_BASE_URL"].replace("/s/", "/sessions/").removesuffix("/v1")
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    asked = urllib.request.Request(f"{url}/{what}", json.dumps(body).encode(), headers)
    try:
        urllib.request.urlopen(asked).close()
    except urllib.error.HTTPError as problem:
        with problem:
            raise LookupError(f"{problem.code} {problem.read().decode()}") from None


def main(kind: str) -> None:
    task = json.load(sys.stdin)
    text = OpenAI().chat.completions.create(model="policy", messages=task["messages"]).choices[0].message.content
    if kind == "posts":
        post(2.0)
        print("no result")
    if kind == "prints":
        print("thinking")
        print(json.dumps({"reward": len(text), "seen": 1}))
    if kind == "helped":  # by a program that outlives it, and has its output
        subprocess.Popen(["setsid", "sleep", "1000"])
        print(json.dumps({"reward": len(text), "seen": 1}), flush=True)
    if kind == "fails":
        print("something is wrong", file=sys.stderr)
        sys.exit(3)


if __name__ == "__main__":
    main(sys.argv[1])
