"""A reward server that cannot be reached is waited for, on the outside, for a stated time; then the run ends."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from flowrl.errors import ConfigError, FlowrlError
from flowrl.nodes import Reward
from flowrl.tasks import Task
from flowrl.tasks.reward_calls.http import (
    LONGEST_BACKOFF_S,
    HttpReward,
    Outage,
    Patience,
    ServersAway,
    pause_s,
    retry_after_s,
)
from flowrl.tasks.reward_calls.judge import BadReward
from flowrl.testing import NodeRecord, NodeRig, run_node, sample


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Server:
    """A server at one port that is started and stopped; answers the length of each response, or a status."""

    def __init__(self) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}/score"
        self.requests: list[list[str]] = []
        self.status = 200
        self.retry_after = ""
        self.poison = ""
        """A response for which the server answers 502."""
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        app = web.Application()
        app.add_routes([web.post("/score", self._answer)])
        self._runner = web.AppRunner(app, shutdown_timeout=0.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True).start()

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests.append(body["responses"])
        if self.status != 200:
            return web.Response(status=self.status, headers={"Retry-After": self.retry_after})
        if self.poison in body["responses"]:
            return web.Response(status=502)
        return web.json_response([float(len(response)) for response in body["responses"]])


class Watch:
    """Who waits on the outside, and what has been told."""

    def __init__(self, away_s: float) -> None:
        self.inside = 0
        self.lines: list[str] = []
        self.all_wait = asyncio.Event()
        self.expected = 1
        self.patience = Patience(away_s, self._outside, self.lines.append)

    @contextmanager
    def _outside(self, what: str) -> Iterator[None]:
        self.inside += 1
        if self.inside >= self.expected:
            self.all_wait.set()
        try:
            yield
        finally:
            self.inside -= 1


def test_a_server_that_goes_away_and_comes_back_costs_no_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowrl.tasks.reward_calls.http.TOLD_AFTER_S", 0.0)

    async def scenario() -> None:
        server, watch = Server(), Watch(60.0)
        watch.expected = 40
        await server.start()
        reward = HttpReward([server.url], timeout_s=5.0, backoff_s=0.01, patience=watch.patience)
        assert (await reward.ask(["p"], ["a"], [{}])).rewards == (1.0,)
        assert watch.inside == 0, "a server that answers is no wait on the outside"
        await server.stop()
        asked = [asyncio.create_task(reward.ask(["p"], ["x" * n], [{}])) for n in range(1, 41)]
        await watch.all_wait.wait()
        assert not any(task.done() for task in asked)
        await server.start()
        assert [(await task).rewards for task in asked] == [(float(n),) for n in range(1, 41)]
        assert watch.inside == 0
        assert len(watch.lines) == 2
        assert watch.lines[0].startswith(f"waits for the reward server {server.url}: ")
        assert "it is tried again for 60 s" in watch.lines[0]
        assert watch.lines[1].startswith(f"the reward server {server.url} answers again after ")
        await reward.close()
        await server.stop()

    asyncio.run(scenario())


@pytest.mark.parametrize("status", [502, 503, 504])
def test_a_proxy_without_its_server_is_waited_for(status: int) -> None:
    async def scenario() -> None:
        server, watch = Server(), Watch(60.0)
        server.status = status
        await server.start()
        reward = HttpReward([server.url], timeout_s=5.0, retries=0, backoff_s=0.01, patience=watch.patience)
        asked = asyncio.create_task(reward.ask(["p"], ["abc"], [{}]))
        await watch.all_wait.wait()
        server.status = 200
        assert (await asked).rewards == (3.0,)
        await reward.close()
        await server.stop()

    asyncio.run(scenario())


def test_a_server_that_never_comes_back_ends_all_questions_with_one_sentence() -> None:
    async def scenario() -> None:
        server, watch = Server(), Watch(0.3)
        reward = HttpReward([server.url], timeout_s=5.0, backoff_s=0.01, patience=watch.patience)
        asked = [reward.ask(["p"], ["a"], [{}]) for _ in range(100)]
        loop = asyncio.get_running_loop()
        began = loop.time()
        found = await asyncio.gather(*asked, return_exceptions=True)
        assert {type(one) for one in found} == {ServersAway}
        assert 0.3 <= loop.time() - began < 3.0, "later questions do not wait anew"
        assert str(found[0]).startswith(f"the reward server {server.url} could not be reached for 0.3 s: ")
        assert "--resume" in str(found[0]) and "--reward-away-s" in str(found[0])
        await reward.close()

    asyncio.run(scenario())


def test_the_node_ends_the_run_and_fails_no_sample() -> None:
    node = Reward(Task("arithmetic:max_value=9"), function=f"http://127.0.0.1:{free_port()}/score", away_s=0.2)
    with pytest.raises(FlowrlError, match=r"could not be reached for 0\.2 s"):
        run_node(node, {"rollouts": [sample(n) for n in range(300)]}, preflight=False)


def test_a_checkpoint_is_made_while_no_server_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the run goes on with the same samples when one is back: a line says so, and one that it waits."""
    monkeypatch.setattr("flowrl.tasks.reward_calls.http.TOLD_AFTER_S", 0.0)

    async def scenario() -> NodeRecord:
        server = Server()
        node = Reward(Task("arithmetic:max_value=9"), function=server.url)
        async with NodeRig(node, preflight=False) as rig:
            rig.feed(node.rollouts, *(sample(n, response_text="x" * n) for n in range(1, 41)))
            await rig.until(lambda record: len(record.progress) == 1)
            await rig.snapshot(tmp_path / "saved")
            assert not rig.record.sent("scored")
            await server.start()
            record = await rig.finished()
        await server.stop()
        return record

    record = asyncio.run(scenario())
    assert sorted(one.reward for one in record.sent("scored")) == [float(n) for n in range(1, 41)]
    assert not record.lost
    assert [line.split(":")[0].split(" http")[0] for line in record.progress] == [
        "waits for the reward server",
        "the reward server",
    ]


def test_the_trial_before_a_run_waits_for_nobody() -> None:
    node = Reward(Task("arithmetic:max_value=9"), function=f"http://127.0.0.1:{free_port()}/score")
    with pytest.raises(ConfigError, match=r"the trial reward failed: .* cannot be reached: .*; start the server"):
        node.preflight()


def test_of_two_servers_one_that_is_away_is_no_outage() -> None:
    async def scenario() -> None:
        there, gone, watch = Server(), Server(), Watch(60.0)
        await there.start()
        reward = HttpReward([gone.url, there.url], timeout_s=5.0, batch=1, patience=watch.patience)
        found = await asyncio.gather(*(reward.ask(["p"], ["x" * n], [{}]) for n in range(1, 31)))
        assert [one.rewards for one in found] == [(float(n),) for n in range(1, 31)]
        assert not watch.all_wait.is_set() and not watch.lines
        await reward.close()
        await there.stop()

    asyncio.run(scenario())


def test_a_sample_at_which_alone_a_server_fails_costs_that_sample() -> None:
    """Others are answered meanwhile, so that the server is there."""

    async def scenario() -> None:
        server, watch = Server(), Watch(60.0)
        server.poison = "bad"
        await server.start()
        reward = HttpReward([server.url], timeout_s=5.0, retries=2, backoff_s=0.001, batch=1, patience=watch.patience)
        bad = asyncio.create_task(reward.ask(["p"], ["bad"], [{}]))
        while not bad.done():
            assert (await reward.ask(["p"], ["good"], [{}])).rewards == (4.0,)
        with pytest.raises(BadReward, match=r"answered 502.*\(3 tries\)"):
            await bad
        await reward.close()
        await server.stop()

    asyncio.run(scenario())


def test_a_wrong_answer_is_no_outage() -> None:
    async def scenario(status: int, tries: int) -> None:
        server, watch = Server(), Watch(60.0)
        server.status = status
        await server.start()
        reward = HttpReward([server.url], timeout_s=5.0, retries=2, backoff_s=0.0, patience=watch.patience)
        with pytest.raises(BadReward, match=f"answered {status}"):
            await reward.ask(["p"], ["a"], [{}])
        assert len(server.requests) == tries and not watch.all_wait.is_set()
        await reward.close()
        await server.stop()

    for status, tries in {404: 1, 400: 1, 500: 3, 429: 3}.items():
        asyncio.run(scenario(status, tries))


def test_pauses_double_up_to_a_longest_and_are_never_shorter_than_asked_for() -> None:
    for failures, longest in enumerate((0.5, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0), 1):
        drawn = [pause_s(0.5, failures) for _ in range(50)]
        assert longest / 2 <= min(drawn) < max(drawn) <= longest <= LONGEST_BACKOFF_S
    assert pause_s(0.5, 1, asked_s=30.0) == 30.0
    assert pause_s(0.5, 10_000) <= LONGEST_BACKOFF_S


def test_retry_after_is_a_number_or_a_date() -> None:
    assert [retry_after_s(one) for one in (None, "", "nonsense", "7")] == [0.0, 0.0, 0.0, 7.0]
    soon = format_datetime(datetime.now(UTC) + timedelta(seconds=60), usegmt=True)
    assert 55.0 < retry_after_s(soon) <= 60.0
    assert retry_after_s(format_datetime(datetime.now(UTC) - timedelta(hours=1), usegmt=True)) == 0.0


def test_a_pause_that_a_server_asks_for_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr("flowrl.tasks.reward_calls.http.time.monotonic", lambda: clock[0])
    lines: list[str] = []
    outage = Outage(["u"], Patience(60.0, report=lines.append))
    outage.note_failure("u", "answered 503", 20.0)
    assert (outage.servers_to_ask(), outage.wait_s()) == ([], 20.0)
    clock[0] += 20.0
    assert outage.servers_to_ask() == ["u"]
    outage.note_failure("u", "answered 503", 500.0)
    assert outage.wait_s() == 40.0, "the end of the outage comes before the pause that is asked for"
    clock[0] += 40.0
    with pytest.raises(ServersAway, match="could not be reached for 60 s: answered 503"):
        outage.require_hope()
    assert lines == ["waits for the reward server u: answered 503; it is tried again for 60 s"]


def check_of(**given: Any) -> list[str]:
    return Reward(Task("arithmetic:max_value=9"), **given).check(None)


def test_what_cannot_be_is_refused() -> None:
    assert check_of() == []
    assert "away_s is -1" in " ".join(check_of(away_s=-1.0))
