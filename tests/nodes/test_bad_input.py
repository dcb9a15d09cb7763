"""Rewards and responses that are not what they should be: each named, nothing lost, and the other samples train on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any

import numpy as np
import pytest

from flowrl.nodes import GroupAdvantage, Reward, TokenBatch
from flowrl.tasks import Task
from flowrl.testing import run_node, sample, scored
from tests.nodes.groups import arriving, members

TASK = Task("arithmetic:max_value=9")
FAULTY = """
async def f(prompts, responses):
    if responses == ["nan"]: return [float("nan")]
    if responses == ["inf"]: return [float("-inf")]
    if responses == ["long"]: return [1.0, 2.0]
    if responses == ["none"]: return None
    if responses == ["text"]: return ["1.0"]
    if responses == ["map"]: return {"score": [1.0]}
    if responses == ["raise"]: raise KeyError("answer")
    return [float(len(responses[0]))]
"""
REASONS = {
    "nan": "reward_not_finite",
    "inf": "reward_not_finite",
    "long": "reward_wrong_length",
    "none": "reward_malformed",
    "text": "reward_malformed",
    "map": "reward_malformed",
    "raise": "reward_raised",
}


def test_each_bad_reward_costs_its_sample_under_a_name_and_the_rest_is_scored(tmp_path: Path) -> None:
    (tmp_path / "faulty.py").write_text(FAULTY)
    samples = [sample(n, response_text=text) for n, text in enumerate([*REASONS, "fine", ""])]
    record = run_node(Reward(TASK, function=f"{tmp_path}/faulty.py:f"), {"rollouts": samples})
    assert [(one.message.response_text, one.state, one.reason) for one in record.lost] == [
        (text, "failed", reason) for text, reason in REASONS.items()
    ]
    assert [(s.response_text, s.reward) for s in record.sent("scored")] == [("fine", 4.0), ("", 0.0)]
    assert sum(record.metrics.values()) == len(REASONS)


class Judge(BaseHTTPRequestHandler):
    """Answers by what the response says."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if b"hang" in body:
            self.server.hanging.wait(20)  # type: ignore[attr-defined]
        answers = {b"500": (500, b"oh"), b"garbage": (200, b"<html>"), b"short": (200, b"[]")}
        status, text = next((answer for mark, answer in answers.items() if mark in body), (200, b"[0.5]"))
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *args: Any) -> None:
        """Silent."""


@contextmanager
def judging() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    server.hanging = Event()  # type: ignore[attr-defined]
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/score"
    finally:
        server.hanging.set()  # type: ignore[attr-defined]
        server.shutdown()
        thread.join()
        server.server_close()


def test_an_endpoint_that_fails_for_some_samples_costs_these_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowrl.tasks.reward_calls.http.RETRIES", 1)
    monkeypatch.setattr("flowrl.tasks.reward_calls.http.BACKOFF_S", 0.0)
    texts = ["fine", "hang", "500", "garbage", "short", "fine too"]
    with judging() as url:
        samples = [sample(n, response_text=text) for n, text in enumerate(texts)]
        one_a_request = Reward(TASK, function=url, timeout_s=0.3, concurrency=1)
        record = run_node(one_a_request, {"rollouts": samples}, preflight=False)
    assert [(one.message.response_text, one.reason) for one in record.lost] == [
        ("hang", "reward_timed_out"),
        ("500", "reward_http_500"),
        ("garbage", "reward_malformed"),
        ("short", "reward_wrong_length"),
    ]
    assert [(s.response_text, s.reward) for s in record.sent("scored")] == [("fine", 0.5), ("fine too", 0.5)]


def test_a_group_of_which_one_member_is_left_is_filtered_and_named() -> None:
    groups = [members([scored(0, 1.0)]), members([scored(0, 1.0, group="h"), scored(1, 0.0, group="h")])]
    record = run_node(GroupAdvantage("group_norm", size=4), {"scored": arriving(*groups)})
    assert record.reasons() == [("filtered", "group_too_small")]
    assert len(record.sent("groups")) == 1


def test_a_group_of_one_is_refused_before_the_run() -> None:
    (problem,) = GroupAdvantage("rloo", size=1).check(None)
    assert "compares the members of a group, but the group size is 1" in problem


@pytest.mark.parametrize("estimator", ["group_norm", "rloo", "dr_grpo", "reinforce"])
def test_an_empty_response_trains_nothing_and_spoils_nothing(estimator: Any) -> None:
    empty = scored(1, 0.0, response=0, response_text="")
    (group,) = run_node(GroupAdvantage(estimator, size=2), {"scored": [scored(0, 1.0), empty]}).sent("groups")
    assert np.isfinite(group.samples[0].advantages).all() and group.samples[0].advantages.any()
    assert not group.samples[1].advantages.any()
    batch = TokenBatch(1).make_batch([group])
    assert (batch.num_tokens, batch.num_sequences) == (2, 2)
    assert {len(part.samples) for part in batch.split(2)} == {1}


def test_answers_without_a_token_are_evaluated_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOWRL_CACHE", str(tmp_path))
    from tests.nodes.test_nodes_evaluation import Answers, evaluate

    class Silent(Answers):
        async def __call__(self, prompt: Any) -> Any:
            answer = await super().__call__(prompt)
            return answer if prompt.member else sample(0, response=0, response_text="", columns=prompt.columns)

    figures, _ = evaluate(Silent(), num_prompts=3, num_samples=2)
    assert (figures["score"], figures["num_answers"]) == (0.5, 6)
