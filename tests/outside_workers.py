"""Outside workers for tests, with the real clients: httpx for tasks, `openai` for replies."""

from __future__ import annotations

import re
import stat
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from openai import AsyncOpenAI

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


class Worker:
    """Knows what the run has printed, and no more."""

    def __init__(self, printed: Sequence[str]) -> None:
        (place,) = [found for line in printed if (found := PLACE.match(line))]
        self.url, self.key_file = place[1], Path(place[2])
        assert stat.S_IMODE(self.key_file.stat().st_mode) == 0o600
        self._key = self.key_file.read_text()
        self._clients: list[AsyncOpenAI] = []

    async def __aenter__(self) -> Worker:
        self.http = httpx.AsyncClient(base_url=self.url, headers={"Authorization": f"Bearer {self._key}"}, timeout=30)
        return self

    async def __aexit__(self, *problem: object) -> None:
        for client in self._clients:
            await client.close()
        await self.http.aclose()

    async def take(self) -> OutsideSession:
        """The next task."""
        asked = await self.http.post("/sessions")
        assert asked.status_code == 201, asked.text
        found = asked.json()
        client = AsyncOpenAI(base_url=found["openai_base_url"], api_key=found["api_key"], max_retries=0)
        self._clients.append(client)
        return OutsideSession(self.http, client, found["id"], found["task"])


@asynccontextmanager
async def a_worker(printed: Sequence[str]) -> AsyncIterator[Worker]:
    """One that has read the key."""
    async with Worker(printed) as worker:
        yield worker
