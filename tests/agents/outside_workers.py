"""Outside workers for tests, with the real clients: httpx for tasks, `openai` for replies.

    python -m tests.agents.outside_workers URL KEY_FILE

plays a run from its beginning, which is when the file appears, to its end, as `unsteady` does.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
import stat
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from openai import AsyncOpenAI, OpenAIError

PLACE = re.compile(r"outside workers get their tasks from (http://127\.0\.0\.1:\d+)/sessions, with the key in (\S+)$")


@dataclass
class OutsideSession:
    """An open session, and the clients that reach it."""

    http: httpx.AsyncClient
    client: AsyncOpenAI
    session_id: str
    task: Mapping[str, Any]

    async def say(self, messages: Sequence[Any] | None = None) -> Any:
        """The policy's reply."""
        asked: Any = list(messages or self.task["messages"])
        answer = await self.client.chat.completions.create(model="policy", messages=asked)
        return answer.choices[0].message

    async def post(self, what: str, body: Any = None) -> httpx.Response:
        return await self.http.post(f"/sessions/{self.session_id}/{what}", json=body)

    async def finish(self, reward: float) -> Mapping[str, Any]:
        """Post the reward, and end the session: what the end says."""
        assert (await self.post("reward", {"reward": reward})).status_code == 200
        ended = await self.post("end")
        assert ended.status_code == 200
        return ended.json()  # type: ignore[no-any-return]


def authorized(key_file: Path) -> dict[str, str]:
    return {"Authorization": f"Bearer {key_file.read_text()}"}


class Worker:
    """Knows what the run has printed, and no more."""

    def __init__(self, printed: Sequence[str]) -> None:
        (place,) = [found for line in printed if (found := PLACE.match(line))]
        self.url, self.key_file = place[1], Path(place[2])
        assert stat.S_IMODE(self.key_file.stat().st_mode) == 0o600

    async def __aenter__(self) -> Worker:
        self.http = httpx.AsyncClient(base_url=self.url, headers=authorized(self.key_file), timeout=30)
        self._openai = AsyncOpenAI(base_url=self.url, api_key="none", max_retries=0)
        return self

    async def __aexit__(self, *problem: object) -> None:
        await self._openai.close()
        await self.http.aclose()

    async def take(self) -> OutsideSession:
        """The next task."""
        asked = await self.http.post("/sessions")
        assert asked.status_code == 201, asked.text
        return self.begin(asked.json())

    def begin(self, found: Mapping[str, Any]) -> OutsideSession:
        """The session that the run has answered with."""
        client = self._openai.with_options(base_url=found["openai_base_url"], api_key=found["api_key"])
        return OutsideSession(self.http, client, found["id"], found["task"])


@asynccontextmanager
async def a_worker(printed: Sequence[str]) -> AsyncIterator[Worker]:
    """One that has read the key."""
    async with Worker(printed) as worker:
        yield worker


async def unsteady(worker: Worker, fates: Iterator[str]) -> None:
    """Plays a task in two turns, and rewards it; or disappears after one, or ends without a reward."""
    while (asked := await worker.http.post("/sessions")).status_code != 410:
        if asked.status_code != 201:
            continue
        session = worker.begin(asked.json())
        with contextlib.suppress(OpenAIError):  # the run has given the session up
            await fated(session, next(fates))


async def fated(session: OutsideSession, fate: str) -> None:
    reply = await session.say()
    if fate == "disappears":
        return
    reply = await session.say([*session.task["messages"], reply.to_dict(), {"role": "user", "content": "sure?"}])
    if fate != "forgets":
        await session.post("reward", {"reward": float(len(reply.content) % 2)})
    await session.post("end")


async def play(url: str, key_file: Path) -> None:
    printed = [f"outside workers get their tasks from {url}/sessions, with the key in {key_file}"]
    async with a_worker(printed) as worker:
        with contextlib.suppress(httpx.TransportError):
            fates = itertools.cycle(("", "disappears", "", "", "", "", "forgets", "", "", ""))
            await asyncio.gather(*(unsteady(worker, fates) for _ in range(4)))


def main(url: str, key_file: Path) -> None:
    while not key_file.exists():
        time.sleep(0.02)  # nothing tells of a file of another process
    asyncio.run(play(url, key_file))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
