"""Sessions of the endpoint: begun, named, rewarded and ended; what is refused, and with which status."""

from __future__ import annotations

import asyncio
import stat
from collections.abc import Coroutine
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import openai
import pytest
from openai import AsyncOpenAI

from flowrl.agents.endpoint import Busy, SessionTask, Unavailable
from flowrl.errors import ConfigError
from tests.agents.chat_templates import ADD
from tests.agents.endpoint_rig import EndpointRig, an_endpoint

pytestmark = pytest.mark.timeout(30)
ASK: list[Any] = [{"role": "user", "content": "7+5="}]


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


def client_of(rig: EndpointRig, **more: Any) -> AsyncOpenAI:
    chosen = {"base_url": rig.access.openai_base_url, "api_key": rig.access.api_key, "max_retries": 0, **more}
    return AsyncOpenAI(**chosen)


async def chat(client: AsyncOpenAI, **more: Any) -> Any:
    return await client.chat.completions.create(**{"model": "policy", "messages": ASK, **more})


async def asked(rig: EndpointRig, method: str, path: str, body: Any = None, key: str | None = None) -> tuple[int, Any]:
    """(status, body) of a request with the run's key."""
    headers = {"Authorization": f"Bearer {key or rig.endpoint.key}"}
    async with (
        aiohttp.ClientSession(headers=headers) as http,
        http.request(method, rig.endpoint.url + path, json=body) as response,
    ):
        return response.status, await response.json()


def test_a_worker_takes_a_task_plays_and_ends() -> None:
    async def work() -> None:
        async with an_endpoint() as rig:
            status, begun = await asked(rig, "POST", "/sessions")
            assert status == 201 and begun["task"] == {"question": "7+5="}
            async with client_of(rig, base_url=begun["openai_base_url"], api_key=begun["api_key"]) as client:
                await chat(client)
            assert rig.backend.requests[0].session == begun["id"] == "s1"
            assert await asked(rig, "POST", "/sessions/s1/reward", {"reward": 0.5}) == (
                200,
                {"id": "s1", "reward": 0.5},
            )
            ended = (200, {"id": "s1", "reward": 0.5, "cause": ""})
            assert await asked(rig, "POST", "/sessions/s1/end", key=begun["api_key"]) == ended
            (finished,) = rig.sessions.done
            assert (finished.reward, finished.cause, len(finished.sequences)) == (0.5, "", 1)

    run(work())


def test_a_session_without_a_reward_has_none() -> None:
    async def work() -> None:
        async with an_endpoint() as rig:
            assert await asked(rig, "DELETE", "/sessions/mine") == (
                200,
                {"id": "mine", "reward": None, "cause": "no_reward"},
            )
            assert [(one.reward, one.cause) for one in rig.sessions.done] == [(None, "no_reward")]

    run(work())


def test_a_session_is_named_by_its_key_or_its_url() -> None:
    async def work() -> None:
        async with an_endpoint() as rig:
            rig.endpoint.open_session(SessionTask("other"))
            url = rig.endpoint.url
            by_key = client_of(rig, base_url=f"{url}/v1")
            by_url = client_of(rig, base_url=f"{url}/s/other/v1", api_key=rig.endpoint.key)
            async with by_key, by_url:
                await chat(by_key)
                await chat(by_url)
            assert [request.session for request in rig.backend.requests] == ["mine", "other"]
            assert rig.access.environment == {
                "OPENAI_BASE_URL": f"{url}/s/mine/v1",
                "OPENAI_API_KEY": rig.access.api_key,
                "ANTHROPIC_BASE_URL": f"{url}/s/mine",
                "ANTHROPIC_API_KEY": rig.access.api_key,
            }
            with pytest.raises(ConfigError, match="'other' is taken"):
                rig.endpoint.open_session(SessionTask("other"))

    run(work())


def test_keys_open_what_is_theirs() -> None:
    async def work() -> None:
        async with an_endpoint() as rig:
            rig.endpoint.open_session(SessionTask("other"))
            url, mine = rig.endpoint.url, rig.access.api_key
            for base, key in [
                (f"{url}/s/other/v1", mine),
                (f"{url}/v1", rig.endpoint.key),
                (f"{url}/v1", "nonsense"),
                (f"{url}/v1", "mine.é"),
            ]:
                async with client_of(rig, base_url=base, api_key=key) as client:
                    with pytest.raises(openai.AuthenticationError if key.isascii() else Exception):
                        await chat(client)
            for method, path in [("POST", "/sessions"), ("DELETE", "/sessions/other")]:
                assert (await asked(rig, method, path, key=mine))[0] == 401
            async with aiohttp.ClientSession() as http, http.post(f"{url}/v1/chat/completions", json={}) as response:
                assert response.status == 401
            assert rig.backend.requests == []

    run(work())


def test_a_session_that_is_idle_ends_and_one_that_waits_does_not() -> None:
    async def work() -> None:
        async with an_endpoint(idle_s=0.5) as rig, client_of(rig) as client:
            rig.backend.gate = asyncio.Event()
            call = asyncio.create_task(chat(client))
            await asyncio.sleep(1.2)  # more than twice the time after which an idle session ends
            assert rig.sessions.done == []
            rig.backend.gate.set()
            await call
            await rig.sessions.ended.wait()
            assert [(one.cause, len(one.sequences)) for one in rig.sessions.done] == [("session_idle", 1)]

    run(work())


def test_rewards_are_finite_numbers_and_one_a_session() -> None:
    async def work() -> None:
        async with an_endpoint() as rig:
            for wrong in (None, "1", [1]):
                status, body = await asked(rig, "POST", "/sessions/mine/reward", {"reward": wrong})
                assert status == 400 and body["error"]["param"] == "reward"
            headers = {"Authorization": f"Bearer {rig.endpoint.key}"}
            async with aiohttp.ClientSession(headers=headers) as http:
                url = f"{rig.endpoint.url}/sessions/mine/reward"
                async with http.post(url, data=b'{"reward": NaN}') as response:
                    assert response.status == 400
            assert (await asked(rig, "POST", "/sessions/mine/reward", {"reward": 1}))[0] == 200
            for same in (1.0, True):
                assert (await asked(rig, "POST", "/sessions/mine/reward", {"reward": same}))[0] == 200
            assert (await asked(rig, "POST", "/sessions/mine/reward", {"reward": 2}))[0] == 409

    run(work())


def test_ending_a_session_gives_up_its_calls() -> None:
    async def work() -> None:
        async with an_endpoint() as rig, client_of(rig) as client:
            rig.backend.gate = asyncio.Event()
            call = asyncio.create_task(chat(client))
            await rig.backend.arrived.acquire()
            finished = rig.end()
            with pytest.raises(openai.ConflictError, match="the session ended while this call was open"):
                await call
            await rig.backend.cancelled.acquire()
            assert finished.sequences == ()
            with pytest.raises(openai.ConflictError, match="the session mine has ended"):
                await chat(client)
            assert (await asked(rig, "POST", "/sessions/mine/end"))[0] == 409

    run(work())


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"logit_bias": {"5": 1}}, "logit_bias"),
    ({"frequency_penalty": 0.5}, "frequency_penalty"),
    ({"presence_penalty": 0.5}, "presence_penalty"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}}}, "response_format"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"tools": [ADD], "tool_choice": "required"}, "tool_choice"),
    ({"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "add"}}}, "tool_choice"),
    ({"tools": [ADD], "tool_choice": "none"}, "tool_choice"),
    ({"tools": [ADD], "parallel_tool_calls": False}, "parallel_tool_calls"),
    ({"seed": 1}, "seed"),
    ({"reasoning_effort": "low"}, "reasoning_effort"),
    ({"logprobs": True, "top_logprobs": 3}, "top_logprobs"),
    ({"extra_body": {"top_k": 5}}, "top_k"),
    ({"extra_body": {"guided_json": {}}}, "guided_json"),
    ({"n": 0}, "n"),
    ({"stop": [""]}, "stop"),
    ({"temperature": "hot"}, "temperature"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages[0].content[0]"),
    ({"messages": [*ASK, {"role": "assistant", "content": "1"}]}, "messages"),
]


@pytest.mark.parametrize(("more", "param"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_cannot_be_trained_is_a_400_that_names_it(more: dict[str, Any], param: str) -> None:
    async def work() -> None:
        async with an_endpoint() as rig, client_of(rig) as client:
            with pytest.raises(openai.BadRequestError) as caught:
                await chat(client, **more)
            assert caught.value.param == param and param in str(caught.value) and rig.backend.requests == []

    run(work())


ASKS_FOR_NOTHING: list[dict[str, Any]] = [
    {"logit_bias": {}, "frequency_penalty": 0.0, "presence_penalty": 0, "response_format": {"type": "text"}},
    {"tools": [ADD], "tool_choice": "auto", "parallel_tool_calls": True},
    {"tool_choice": "none", "user": "me", "metadata": {"a": "b"}, "store": False, "seed": None},
]


@pytest.mark.parametrize("more", ASKS_FOR_NOTHING, ids=str)
def test_what_asks_for_nothing_is_taken(more: dict[str, Any]) -> None:
    async def work() -> None:
        async with an_endpoint() as rig, client_of(rig) as client:
            assert (await chat(client, **more)).choices[0].message.content == "yes"

    run(work())


def test_each_status_is_the_clients_own_error() -> None:
    async def work() -> None:
        answers = (Busy("too much to do", retry_after_s=3), Unavailable("no generator"), RuntimeError("no such luck"))
        async with an_endpoint(*answers, context_tokens=60, body_bytes=2000, session_calls=1) as rig:
            async with client_of(rig) as client:
                with pytest.raises(openai.RateLimitError, match="too much to do") as busy:
                    await chat(client)
                assert busy.value.response.headers["Retry-After"] == "3"
                with pytest.raises(openai.InternalServerError, match="no generator") as absent:
                    await chat(client)
                assert (absent.value.status_code, absent.value.response.headers["Retry-After"]) == (503, "1")
                with pytest.raises(openai.InternalServerError, match="RuntimeError: no such luck") as failed:
                    await chat(client)
                assert failed.value.status_code == 500
                with pytest.raises(openai.NotFoundError, match="'gpt-5' is not served here; use policy"):
                    await chat(client, model="gpt-5")
                with pytest.raises(openai.BadRequestError, match="prompt is too long: 82 tokens") as full:
                    await chat(client, messages=[{"role": "user", "content": "x" * 79}])
                assert full.value.code == "context_length_exceeded"
                with pytest.raises(openai.APIStatusError, match="the body is too large") as large:
                    await chat(client, messages=[{"role": "user", "content": "x" * 3000}])
                assert large.value.status_code == 413
                rig.backend.gate = asyncio.Event()
                call = asyncio.create_task(chat(client))
                for _ in range(4):
                    await rig.backend.arrived.acquire()
                with pytest.raises(openai.RateLimitError, match="has 1 calls open already"):
                    await chat(client)
                call.cancel()
            async with client_of(rig, base_url=f"{rig.endpoint.url}/s/nobody/v1", api_key=rig.endpoint.key) as client:
                with pytest.raises(openai.NotFoundError, match="there is no session nobody"):
                    await chat(client)
                with pytest.raises(openai.NotFoundError, match="Not Found"):
                    await client.embeddings.create(model="policy", input="a")
            assert (await asked(rig, "GET", "/sessions"))[0] == 405

    run(work())


def test_no_task_is_a_503_and_no_place_a_429() -> None:
    async def work() -> None:
        async with an_endpoint(sessions=3) as rig:
            assert [(await asked(rig, "POST", "/sessions"))[0] for _ in range(3)] == [201, 201, 429]
            rig.end()
            rig.sessions.left = 2
            status, body = await asked(rig, "POST", "/sessions")
            assert status == 503 and body["error"]["message"] == "the run has no further task"

    run(work())


UTF_16 = '{"model": "policy", "messages": [{"role": "user", "content": "\\ud800"}]}'.encode("utf-16")
"""JSON is UTF-8; this has a surrogate, too, which no tokenizer can encode."""


def test_bodies_that_are_no_json_objects() -> None:
    async def work() -> None:
        async with an_endpoint() as rig:
            headers = {"x-api-key": rig.access.api_key}
            async with aiohttp.ClientSession(headers=headers) as http:
                for body in (b"", b"[1]", b"{", b'{"a": "\\ud800"}', b"[" * 100_000, b"\xff", UTF_16):
                    for path in ("chat/completions", "messages"):
                        async with http.post(f"{rig.endpoint.url}/v1/{path}", data=body) as response:
                            assert response.status == 400, body[:20]
                            assert "the body is" in (await response.json())["error"]["message"]

    run(work())


def test_headers_that_no_client_sends() -> None:
    """A key of bytes that are no UTF-8 is a wrong key; a count of retries may have more digits than `int` reads."""

    async def answered(rig: EndpointRig, *headers: bytes) -> bytes:
        where = urlsplit(rig.endpoint.url)
        body = b'{"model": "policy", "messages": [{"role": "user", "content": "7+5="}]}'
        lines = [b"POST /v1/chat/completions HTTP/1.1", b"Host: here", b"Content-Length: %d" % len(body), *headers]
        reader, writer = await asyncio.open_connection(where.hostname, where.port)
        writer.write(b"\r\n".join([*lines, b"", body]))
        line = await reader.readline()
        writer.close()
        return line.split()[1]

    async def work() -> None:
        async with an_endpoint() as rig:
            known = b"x-api-key: " + rig.access.api_key.encode()
            assert await answered(rig, known) == b"200"
            assert await answered(rig, b"x-api-key: \xff\xfe") == b"401"
            assert await answered(rig, known, b"x-stainless-retry-count: " + b"1" * 5000) == b"200"

    run(work())


def test_bodies_up_to_32_mib() -> None:
    async def work() -> None:
        async with an_endpoint() as rig, client_of(rig) as client:
            assert (await chat(client, user="x" * (31 << 20))).choices[0].message.content == "yes"
            with pytest.raises(openai.APIStatusError, match="the body is too large"):
                await chat(client, user="x" * (33 << 20))

    run(work())


def test_the_runs_key_is_in_a_file_of_its_user_alone(tmp_path: Path) -> None:
    async def work() -> None:
        file = tmp_path / "key"
        file.write_text("old")
        file.chmod(0o644)
        async with an_endpoint(key_file=str(file)) as rig:
            assert file.read_text() == rig.endpoint.key and stat.S_IMODE(file.stat().st_mode) == 0o600
            assert rig.endpoint.url.startswith("http://127.0.0.1:")
            port = int(rig.endpoint.url.rpartition(":")[2])
            with pytest.raises(ConfigError, match="the endpoint cannot be opened"):
                async with an_endpoint(port=port):
                    pass
        assert not file.exists()

    run(work())


def test_a_template_that_cannot_take_the_messages_is_a_400() -> None:
    async def work() -> None:
        async with an_endpoint() as rig, client_of(rig) as client:
            rig.backend.tokenizer.chat_template = "{{ raise_exception('no system message here') }}"
            with pytest.raises(openai.BadRequestError, match="no system message here"):
                await chat(client)

    run(work())
