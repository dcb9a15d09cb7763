"""Rewards over HTTP: batched, shared by servers, tried again; a fault has a name and costs its own samples only."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession, web

from flowrl.errors import ConfigError
from flowrl.models.scorer import ONE_LABEL
from flowrl.nodes import Reward
from flowrl.nodes.scoring.reward_service import AskModel, ServeOptions, open_scorer
from flowrl.tasks import Task, reward_parts
from flowrl.tasks.reward_calls.http import HttpReward, Patience, RewardServer
from flowrl.tasks.reward_calls.judge import BadReward, Verdicts
from flowrl.tasks.rewards import open_reward, parse_reward

ROOT = Path(__file__).parents[2]


class Server:
    """Keeps every request, and answers each by the next of `answers`, the last one again and again."""

    def __init__(self, *answers: Any, gate: asyncio.Event | None = None) -> None:
        self.requests: list[dict[str, Any]] = []
        self.url = ""
        self._answers = list(answers) or [lengths]
        self._gate = gate

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests.append(body)
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if self._gate is not None:
            await self._gate.wait()
        if isinstance(answer, int):
            return web.Response(status=answer, text="no such luck")
        if isinstance(answer, str):
            return web.Response(text=answer)
        return web.json_response(answer(body))

    @property
    def sizes(self) -> list[int]:
        return [len(request["prompts"]) for request in self.requests]


def lengths(body: dict[str, Any]) -> Any:
    """Each response's length."""
    return [float(len(response)) for response in body["responses"]]


@asynccontextmanager
async def served(*servers: Server) -> Any:
    async with AsyncExitStack() as stack:
        for server in servers:
            app = web.Application()
            app.add_routes([web.post("/score", server.answer)])
            runner = web.AppRunner(app)
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            server.url = f"http://127.0.0.1:{runner.addresses[0][1]}/score"
        yield


async def ask(reward: HttpReward, *responses: str) -> list[Verdicts | BadReward]:
    """One question a response, all at once; what came of each."""
    questions = (reward.ask(["p"], [response], [{"answer": response}]) for response in responses)
    answers = await asyncio.gather(*questions, return_exceptions=True)
    assert all(isinstance(answer, Verdicts | BadReward) for answer in answers), answers
    return answers  # type: ignore[return-value]


def outcomes(answers: list[Verdicts | BadReward]) -> list[float | str]:
    """The rewards, and the reasons where there is none."""
    return [answer.reason if isinstance(answer, BadReward) else answer.rewards[0] for answer in answers]


def run(*servers: Server, responses: tuple[str, ...] = ("a", "bb"), **options: Any) -> list[float | str]:
    async def scenario() -> list[float | str]:
        async with served(*servers):
            reward = HttpReward(
                [server.url for server in servers], **{"timeout_s": 5.0, "backoff_s": 0.0, "retries": 2, **options}
            )
            try:
                return outcomes(await ask(reward, *responses))
            finally:
                await reward.close()

    return asyncio.run(scenario())


def test_a_request_carries_texts_and_columns_by_name() -> None:
    server = Server()
    assert run(server, responses=("abc",)) == [3.0]
    assert server.requests == [{"prompts": ["p"], "responses": ["abc"], "columns": {"answer": ["abc"]}}]


def test_what_waits_goes_together() -> None:
    async def scenario() -> None:
        gate = asyncio.Event()
        server = Server(gate=gate)
        async with served(server):
            reward = HttpReward([server.url], timeout_s=5.0, batch=8)
            first = [asyncio.create_task(ask(reward, "a")) for _ in range(2)]
            while len(server.requests) < 2:
                await asyncio.wait(first, timeout=0.01)
            later = asyncio.create_task(ask(reward, *("b" * n for n in range(20))))
            gate.set()
            assert outcomes(await later) == [float(n) for n in range(20)]
            await asyncio.gather(*first)
            await reward.close()
        assert sorted(server.sizes) == [1, 1, 4, 8, 8]

    asyncio.run(scenario())


def test_servers_share_the_work() -> None:
    servers = [Server(), Server(), Server()]
    responses = tuple("x" * n for n in range(1, 31))
    assert run(*servers, responses=responses, batch=5) == [float(n) for n in range(1, 31)]
    assert all(server.requests for server in servers)
    assert sum(sum(server.sizes) for server in servers) == 30


def test_of_two_servers_one_that_fails_costs_nothing() -> None:
    broken, sound = Server(500), Server()
    assert run(broken, sound, responses=tuple("x" * n for n in range(1, 9)), batch=2) == [float(n) for n in range(1, 9)]
    assert broken.requests and sound.requests


@pytest.mark.parametrize("faults", [(500,), (503, 429), ("<html>gateway</html>",), ("", 502)])
def test_passing_faults_are_met_by_another_try(faults: tuple[Any, ...]) -> None:
    server = Server(*faults, lengths)
    assert run(server, responses=("abc",)) == [3.0]
    assert len(server.requests) == len(faults) + 1


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (500, "reward_http_500"),
        (404, "reward_http_404"),
        ("garbage", "reward_malformed"),
        (lambda body: {"scores": [1]}, "reward_malformed"),
        (lambda body: "text", "reward_malformed"),
        (lambda body: ["1.0"] * len(body["responses"]), "reward_malformed"),
        (lambda body: [], "reward_wrong_length"),
        (lambda body: [float("nan")] * len(body["responses"]), "reward_not_finite"),
        (lambda body: [float("inf")] * len(body["responses"]), "reward_not_finite"),
        (lambda body: [10**400] * len(body["responses"]), "reward_not_finite"),
        (lambda body: {"rewards": [1.0] * len(body["responses"]), "logs": [1.0]}, "reward_malformed"),
        (lambda body: {"rewards": [1.0] * len(body["responses"]), "extra_logs": [1.0]}, "reward_malformed"),
    ],
)
def test_a_fault_that_stays_has_a_name(answer: Any, reason: str) -> None:
    assert run(Server(answer)) == [reason, reason]


@pytest.mark.parametrize("absent", ["scores", "logs", "extra_logs", "heads"])
def test_what_a_server_answers_as_null_is_absent(absent: str) -> None:
    answers = Server(lambda body: {"rewards": lengths(body), absent: None})
    assert run(answers) == [1.0, 2.0]


def test_a_problem_that_nobody_foresaw_reaches_those_who_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*given: Any) -> Verdicts:
        raise RuntimeError("a defect")

    async def scenario() -> list[Any]:
        async with served(server := Server()):
            reward = HttpReward([server.url], timeout_s=5.0)
            asks = [asyncio.ensure_future(reward.ask(["p"], [text], [{}])) for text in ("a", "b")]
            _, pending = await asyncio.wait(asks, timeout=5.0)
            await reward.close()
            assert not pending
            return [str(one.exception()) for one in asks]

    monkeypatch.setattr("flowrl.tasks.reward_calls.http.as_verdicts", broken)
    assert asyncio.run(scenario()) == ["a defect", "a defect"]


def test_a_client_error_is_not_tried_again() -> None:
    server = Server(404)
    run(server, responses=("a",))
    assert len(server.requests) == 1


def test_one_bad_verdict_costs_its_own_sample_only() -> None:
    def nan_for_b(body: dict[str, Any]) -> list[float]:
        return [float("nan") if response == "b" else 1.0 for response in body["responses"]]

    assert run(Server(nan_for_b), responses=("a", "b", "c", "d")) == [1.0, "reward_not_finite", 1.0, 1.0]


def test_a_server_that_never_answers_is_given_up_after_its_tries() -> None:
    async def scenario() -> list[float | str]:
        gate = asyncio.Event()
        server = Server(gate=gate)
        async with served(server):
            reward = HttpReward([server.url], timeout_s=0.05, retries=2, backoff_s=0.0)
            answers = await ask(reward, "a")
            gate.set()
            await reward.close()
        assert len(server.requests) == 3
        assert isinstance(answers[0], BadReward) and "(3 tries)" in str(answers[0])
        return outcomes(answers)

    assert asyncio.run(scenario()) == ["reward_timed_out"]


def test_nobody_there_is_named() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}/score"

    async def scenario() -> list[float | str]:
        reward = HttpReward([url], timeout_s=5.0, retries=1, backoff_s=0.0, patience=Patience(away_s=0.0))
        try:
            return outcomes(await ask(reward, "a"))
        finally:
            await reward.close()

    assert asyncio.run(scenario()) == ["reward_unreachable"]


def test_a_cancelled_question_is_not_asked_and_the_others_are() -> None:
    async def scenario() -> None:
        gate = asyncio.Event()
        server = Server(gate=gate)
        async with served(server):
            reward = HttpReward([server.url], timeout_s=5.0)
            first = [asyncio.create_task(ask(reward, "a")) for _ in range(2)]
            while len(server.requests) < 2:
                await asyncio.wait(first, timeout=0.01)
            given_up = asyncio.create_task(reward.ask(["p"], ["xx"], [{}]))
            kept = asyncio.create_task(ask(reward, "abc"))
            await asyncio.wait([given_up, kept], timeout=0.01)
            given_up.cancel()
            await asyncio.wait([given_up])
            gate.set()
            assert outcomes(await kept) == [3.0]
            await asyncio.gather(*first)
            await reward.close()
        assert [request["responses"] for request in server.requests[2:]] == [["abc"]]

    asyncio.run(scenario())


# flowrl's own server


class Half:
    """Verdicts of half the length; none for an empty response."""

    closed = False

    async def ask(self, prompts: Any, responses: Any, columns: Any) -> Verdicts:
        if "" in responses:
            raise BadReward("reward_raised", "nothing to judge")
        rewards = tuple(len(response) / 2 for response in responses)
        return Verdicts(rewards, rewards, {"level": tuple(row.get("level", 0) for row in columns)})

    async def close(self) -> None:
        self.closed = True


@asynccontextmanager
async def serving(half: Any) -> Any:
    runner = web.AppRunner(RewardServer("half", half).make_app())
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def test_the_server_and_its_client_understand_each_other() -> None:
    async def scenario() -> None:
        half = Half()
        async with serving(half) as address:
            reward = open_reward(parse_reward(f"{address}/score"), timeout_s=5.0)
            answer = await reward.ask(["p", "q"], ["aa", "b"], [{"level": 3}, {"level": 4}])
            assert answer == Verdicts((1.0, 0.5), (1.0, 0.5), {"level": (3.0, 4.0)})
            with pytest.raises(BadReward, match="nothing to judge"):
                await reward.ask(["p"], [""], [{}])
            await reward.close()
            async with ClientSession() as session, session.get(f"{address}/health") as health:
                assert await health.json() == {"serving": "half", "answered": 2}
        assert half.closed

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("{", "the body is not valid JSON"),
        ("[]", "the body is a list"),
        ('{"prompts": ["p"]}', "responses is 'None'; it needs a list of texts"),
        ('{"prompts": ["p"], "responses": [3]}', "it needs a list of texts"),
        ('{"prompts": ["p"], "responses": ["a", "b"]}', "there are 1 prompts, but 2 of responses"),
        ('{"prompts": ["p"], "responses": ["a"], "columns": {"x": []}}', "there are 1 prompts, but 0 of x"),
        ('{"prompts": ["p"], "responses": ["a"], "columns": []}', "columns is not an object"),
    ],
)
def test_a_request_that_is_none_is_told_what_it_lacks(body: str, says: str) -> None:
    async def scenario() -> None:
        async with (
            serving(Half()) as address,
            ClientSession() as session,
            session.post(f"{address}/score", data=body) as answer,
        ):
            assert answer.status == 400
            assert says in json.loads(await answer.text())["error"]

    asyncio.run(scenario())


@pytest.mark.parametrize("heads", ["x", ["level"], {"other": 1}, {"level": "1"}, {"level": float("inf")}])
def test_heads_that_are_no_weights_of_its_logs_are_malformed(heads: Any) -> None:
    async def scenario() -> list[float | str]:
        server = Server(json.dumps({"rewards": [1.0], "logs": {"level": [2.0]}, "heads": heads}))
        async with served(server):
            reward = HttpReward([server.url], timeout_s=5.0, retries=0)
            try:
                return outcomes(await ask(reward, "a"))
            finally:
                await reward.close()

    assert asyncio.run(scenario()) == ["reward_malformed"]


HEADS = """
async def judge(prompts, responses):
    return {"correct": [1.0 for _ in responses], "length": [float(len(r)) for r in responses]}
"""


def test_weights_are_told_to_the_server_or_by_the_one_who_asks(tmp_path: Path) -> None:
    """The server's are those of heads that the client does not name; of a sum a head is PART/HEAD."""
    (tmp_path / "heads.py").write_text(HEADS)
    place = f"{tmp_path}/heads.py:judge"

    async def answers(what: str, weights: str, asked: str) -> Verdicts | str:
        async with serving(open_scorer(what, ServeOptions(weights=weights))) as address:
            parts = reward_parts(Task(reward=f"{address}/score", reward_weights=asked))
            reward = open_reward(parts, timeout_s=5.0, retries=0)
            try:
                return await reward.ask(["p"], ["aaaa"], [{}])
            except BadReward as bad:
                return str(bad)
            finally:
                await reward.close()

    def rewards(what: str, weights: str = "", asked: str = "") -> float:
        found = asyncio.run(answers(what, weights, asked))
        assert isinstance(found, Verdicts), found
        assert found.rewards == found.scores
        return found.rewards[0]

    assert rewards(place) == 5.0
    assert rewards(place, "length=0.25") == 2.0
    assert rewards(place, "length=0.25", "correct=3") == 4.0
    assert rewards(place, "", "length=0.5,correct=2") == 4.0
    summed = f"2*{place} as judge"
    assert rewards(summed) == 10.0
    assert rewards(summed, "judge/length=0.5", "judge/correct=0") == 2.0
    found = asyncio.run(answers(place, "tidy=1", ""))
    assert isinstance(found, str) and "--weights names tidy, but" in found and "the values correct, length" in found
    with pytest.raises(ConfigError, match="--weights has 'length'; write NAME=WEIGHT"):
        ServeOptions(weights="length")
    with pytest.raises(ConfigError, match="--label is for a reward model"):
        open_scorer(place, ServeOptions(label="length"))


def test_the_trial_of_a_run_knows_the_heads_of_a_server(tmp_path: Path) -> None:
    (tmp_path / "heads.py").write_text(HEADS)

    async def trial(weights: str) -> None:
        async with serving(open_scorer(f"{tmp_path}/heads.py:judge", ServeOptions())) as address:
            task = Task("arithmetic:max_value=3", reward=f"{address}/score", reward_weights=weights)
            await asyncio.to_thread(Reward(task).preflight)

    asyncio.run(trial("length=0"))
    with pytest.raises(ConfigError, match="names tidy, but the reward has the heads correct, length"):
        asyncio.run(trial("tidy=1"))


FUNCTION = """
import time
def half(prompts, responses, answer=None):
    if "loop" in responses:
        time.sleep(60)  # under test: longer than --timeout-s
    return [len(r) / 2 for r in responses]
"""


@pytest.mark.slow
def test_serve_reward_serves_a_function_until_it_is_told_to_end(tmp_path: Path) -> None:
    (tmp_path / "rules.py").write_text(FUNCTION)
    command = [sys.executable, "-m", "flowrl.cli", "serve-reward", f"{tmp_path}/rules.py:half", "--port", "0"]
    server = subprocess.Popen([*command, "--timeout-s", "1"], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert server.stdout is not None
        url = server.stdout.readline().split()[-1]

        async def scenario() -> list[float | str]:
            reward = HttpReward([url], timeout_s=10.0, retries=0)
            try:
                return outcomes([*await ask(reward, "abc"), *await ask(reward, "loop"), *await ask(reward, "ab")])
            finally:
                await reward.close()

        assert asyncio.run(scenario()) == [1.5, "reward_raised", 1.0]
        server.terminate()
        assert server.wait(20) == 0
    finally:
        server.kill()
        server.wait()


def test_a_reward_model_is_told_the_conversation_where_it_is_known() -> None:
    class Lengths:
        def __init__(self) -> None:
            self.asked: list[Any] = []

        labels = ONE_LABEL

        def score_labels(self, asked: list[Any]) -> list[tuple[float]]:
            self.asked += asked
            return [(float(len(response)),) for _, response in asked]

        def sum_labels(self, scores: tuple[float]) -> float:
            return scores[0]

    turns = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "q"}]
    model = Lengths()
    asking = AskModel(model)  # type: ignore[arg-type]
    verdicts = asyncio.run(asking.ask(["rendered", "p"], ["abc", "d"], [{"messages": turns}, {"messages": None}]))
    assert verdicts.rewards == verdicts.scores == (3.0, 1.0)
    assert model.asked == [(turns, "abc"), ([{"role": "user", "content": "p"}], "d")]
