"""A request for several samples of which some fail: it is asked again in halves, and only where that may help."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web

from flowrl.tasks.reward_calls.http import HttpReward, Patience
from tests.tasks.test_rewards_http import Server, ask, outcomes, served


class Picky(Server):
    """Answers `status` to each request with one of the responses in `bad`."""

    def __init__(self, status: int, *bad: str) -> None:
        super().__init__()
        self._status = status
        self._bad = set(bad)

    async def answer(self, request: web.Request) -> web.Response:
        if self._bad & set((await request.json())["responses"]):
            self.requests.append(await request.json())
            return web.Response(status=self._status, text="no such luck")
        return await super().answer(request)


RESPONSES = tuple("x" * n for n in range(1, 33))


def answers(server: Server) -> list[float | str]:
    """What came of 32 samples that go together."""

    async def scenario() -> list[float | str]:
        async with served(server):
            patience = Patience(away_s=0.0)
            reward = HttpReward([server.url], timeout_s=5.0, retries=2, backoff_s=0.0, patience=patience)
            try:
                return outcomes(await ask(reward, *RESPONSES))
            finally:
                await reward.close()

    return asyncio.run(scenario())


def all_but(bad: dict[int, str]) -> list[float | str]:
    return [bad.get(n, float(n)) for n in range(1, 33)]


def sent_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """All questions are asked before the first request is sent."""
    send = HttpReward._send_requests

    def later(reward: HttpReward) -> None:
        asyncio.get_running_loop().call_soon(send, reward)

    monkeypatch.setattr(HttpReward, "_send_requests", later)


@pytest.mark.parametrize(("status", "tries"), [(400, 1), (413, 1), (418, 1), (500, 3)])
def test_one_sample_that_a_server_cannot_take_fails_alone(
    status: int, tries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent_together(monkeypatch)
    server = Picky(status, RESPONSES[0])
    assert answers(server) == all_but({1: f"reward_http_{status}"})
    assert server.sizes == [32] * tries + [16, 8, 4, 2, 1, 1, 2, 4, 8, 16]


def test_several_samples_are_found_wherever_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    sent_together(monkeypatch)
    server = Picky(422, *RESPONSES[:20], RESPONSES[31])
    assert answers(server) == all_but(dict.fromkeys((*range(1, 21), 32), "reward_raised"))
    assert len(server.sizes) <= 1 + 62


@pytest.mark.parametrize(("status", "tries"), [(401, 1), (403, 1), (404, 1), (429, 3), (503, 3)])
def test_what_concerns_the_server_is_not_multiplied(status: int, tries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sent_together(monkeypatch)
    server = Server(status)
    assert set(answers(server)) == {f"reward_http_{status}"}
    assert server.sizes == [32] * tries


@pytest.mark.parametrize(("status", "tries"), [(400, 1), (500, 3)])
def test_a_server_that_fails_at_everything_is_soon_left_alone(
    status: int, tries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent_together(monkeypatch)
    server = Server(status)
    assert set(answers(server)) == {f"reward_http_{status}"}
    assert len(server.sizes) <= tries + 16


def test_a_part_is_tried_again_after_what_no_sample_causes(monkeypatch: pytest.MonkeyPatch) -> None:
    sent_together(monkeypatch)
    server = Server(400, 429, 429, lambda body: [1.0] * len(body["responses"]))
    assert answers(server) == [1.0] * 32
    assert server.sizes == [32, 16, 16, 16, 16]
