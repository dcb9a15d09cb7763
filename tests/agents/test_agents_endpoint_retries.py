"""Clients that leave, and clients that ask again: nothing is sampled twice, and nothing is sampled for nobody."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from openai import AsyncOpenAI

from flowrl.agents.endpoint import Unavailable
from flowrl.agents.endpoint.apis.api import ApiProblem
from flowrl.agents.endpoint.session_table import CallRuns
from tests.agents.endpoint_rig import EndpointRig, an_endpoint

pytestmark = pytest.mark.timeout(30)
ASK: list[Any] = [{"role": "user", "content": "7+5="}]


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


class Caller:
    """Sends the same call as often as it is told to, as an SDK's attempt of that number."""

    def __init__(self, rig: EndpointRig, http: aiohttp.ClientSession) -> None:
        self._rig = rig
        self._http = http

    def begin(self, attempt: int, **more: Any) -> asyncio.Task[tuple[int, Any]]:
        return asyncio.create_task(self._call(attempt, {"model": "policy", "messages": ASK, **more}))

    async def _call(self, attempt: int, body: dict[str, Any]) -> tuple[int, Any]:
        headers = {"x-api-key": self._rig.access.api_key, "x-stainless-retry-count": str(attempt)}
        url = f"{self._rig.endpoint.url}/v1/chat/completions"
        async with self._http.post(url, json=body, headers=headers) as response:
            return response.status, await response.json()


class Leaving:
    """Counts the clients whose call the endpoint has left, answered or not."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._left = asyncio.Semaphore(0)
        joined = CallRuns.join_run

        @asynccontextmanager
        async def counted(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
            try:
                async with joined(*args, **kwargs) as found:
                    yield found
            finally:
                self._left.release()

        monkeypatch.setattr(CallRuns, "join_run", counted)

    async def seen(self) -> None:
        """Returns when the endpoint has seen that one more client has left."""
        await self._left.acquire()


@asynccontextmanager
async def a_caller(*answers: Any, **settings: Any) -> AsyncIterator[tuple[EndpointRig, Caller]]:
    """A backend whose gate is closed, and a caller of an endpoint before it."""
    async with an_endpoint(*answers, **settings) as rig, aiohttp.ClientSession() as http:
        rig.backend.gate = asyncio.Event()
        yield rig, Caller(rig, http)


async def gone(task: asyncio.Task[Any]) -> None:
    """The client leaves."""
    task.cancel()
    await asyncio.wait({task})


@pytest.mark.parametrize("sdk", ["openai", "anthropic"])
def test_an_sdk_that_times_out_and_asks_again_gets_the_first_answer(sdk: str) -> None:
    from anthropic import AsyncAnthropic

    async def work() -> None:
        async with an_endpoint("first", "second") as rig:
            rig.backend.gate = asyncio.Event()
            access = rig.access
            # Closed here: one that is collected later closes itself in whatever loop then runs, and fails there.
            client: Any
            if sdk == "openai":
                client = AsyncOpenAI(
                    base_url=access.openai_base_url, api_key=access.api_key, max_retries=5, timeout=0.1
                )
                call: Any = client.chat.completions.with_raw_response.create(model="policy", messages=ASK)
            else:
                client = AsyncAnthropic(
                    base_url=access.anthropic_base_url, api_key=access.api_key, max_retries=5, timeout=0.1
                )
                call = client.messages.with_raw_response.create(model="policy", messages=ASK, max_tokens=9)
            async with client:
                asyncio.get_running_loop().call_later(0.3, rig.backend.gate.set)
                raw = await call
                assert raw.retries_taken >= 1 and "first" in (await _text(raw))
            assert len(rig.backend.requests) == 1 and len(rig.end().sequences) == 1

    run(work())


async def _text(raw: Any) -> str:
    return str(raw.text if isinstance(raw.text, str) else await raw.text())


def test_a_retry_joins_a_call_whose_client_is_still_there() -> None:
    async def work() -> None:
        async with a_caller("first", "second") as (rig, caller):
            one = caller.begin(0)
            await rig.backend.arrived.acquire()
            other = caller.begin(1)
            rig.backend.gate.set()
            assert await one == await other and (await one)[0] == 200
            assert len(rig.backend.requests) == 1 and len(rig.end().sequences) == 1

    run(work())


def test_a_retry_repeats_an_answer_that_nobody_was_there_to_receive() -> None:
    async def work() -> None:
        async with a_caller("first", "second") as (rig, caller):
            one = caller.begin(0)
            await rig.backend.arrived.acquire()
            await gone(one)
            rig.backend.gate.set()
            status, body = await caller.begin(2)
            assert status == 200 and body["choices"][0]["message"]["content"] == "first"
            assert (await caller.begin(1))[1] == body
            assert len(rig.backend.requests) == 1 and len(rig.end().sequences) == 1

    run(work())


def test_a_call_that_a_retry_joined_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        leaving = Leaving(monkeypatch)
        async with a_caller("first", leave_s=0.1) as (rig, caller):
            one = caller.begin(0)
            await rig.backend.arrived.acquire()
            await gone(one)
            await leaving.seen()
            retry = caller.begin(1)
            await asyncio.sleep(0.2)  # twice that time
            rig.backend.gate.set()
            assert (await retry)[0] == 200 and len(rig.backend.requests) == 1

    run(work())


def test_what_was_sampled_when_its_session_had_ended_is_not_delivered() -> None:
    async def work() -> None:
        runs: CallRuns[str, str] = CallRuns(
            asyncio.get_running_loop().create_task, leave_s=1.0, most_open=1, changed=lambda: None
        )

        async def sampled() -> str:
            return "yes"

        with pytest.raises(ApiProblem, match="the session ended while this call was open"):
            async with runs.join_run(b"call", sampled, str, retried=False) as joined:
                await asyncio.wait({joined.task})
                runs.close_runs()
                await joined.deliver_once()

    run(work())


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_aborts_the_sampling(stream: bool) -> None:
    async def work() -> None:
        async with a_caller(leave_s=0.0, keep_alive_s=0.01) as (rig, caller):
            one = caller.begin(0, n=3, stream=stream)
            for _ in range(3):
                await rig.backend.arrived.acquire()
            await gone(one)
            for _ in range(3):
                await rig.backend.cancelled.acquire()
            assert rig.end().sequences == ()

    run(work())


def test_an_answer_that_no_client_received_is_not_part_of_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        leaving = Leaving(monkeypatch)
        async with a_caller("first", "second", leave_s=0.05) as (rig, caller):
            one = caller.begin(0)
            await rig.backend.arrived.acquire()
            await gone(one)
            await leaving.seen()
            rig.backend.gate.set()
            await asyncio.sleep(0.1)  # twice that time
            status, body = await caller.begin(1)
            assert status == 200 and body["choices"][0]["message"]["content"] == "second"
            finished = rig.end()
            assert finished.request_ids == ("request-2",) and len(finished.sequences) == 1

    run(work())


def test_what_is_no_retry_is_sampled_anew() -> None:
    """The same call once more, another call as a retry, and a retry of a call that failed."""

    async def work() -> None:
        async with a_caller("a", "b", "c", Unavailable("no generator"), "d") as (rig, caller):
            rig.backend.gate.set()
            assert [(await caller.begin(0))[1]["choices"][0]["message"]["content"] for _ in range(2)] == ["a", "b"]
            assert (await caller.begin(1, stop="x"))[1]["choices"][0]["message"]["content"] == "c"
            assert (await caller.begin(0, stop="y"))[0] == 503
            assert (await caller.begin(1, stop="y"))[1]["choices"][0]["message"]["content"] == "d"
            assert len(rig.end().sequences) == 4

    run(work())


def test_of_equal_calls_a_retry_joins_that_one_whose_client_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        leaving = Leaving(monkeypatch)
        async with a_caller("a", "b", "c") as (rig, caller):
            calls = []
            for _ in range(3):
                calls.append(caller.begin(0))
                await rig.backend.arrived.acquire()
            await gone(calls[1])
            await leaving.seen()
            retry = caller.begin(1)
            rig.backend.gate.set()
            said = [(await call)[1]["choices"][0]["message"]["content"] for call in (calls[0], retry, calls[2])]
            assert sorted(said) == ["a", "b", "c"] and len(rig.backend.requests) == 3

    run(work())
