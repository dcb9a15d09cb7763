"""Rewards as text: single ones, weighted sums, and each part under its name."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from flowrl.errors import ConfigError
from flowrl.nodes import Reward, Shaping
from flowrl.tasks import Task, reward_parts
from flowrl.tasks.reward_calls.judge import BadReward, Verdicts
from flowrl.tasks.rewards import Part, open_reward, parse_reward
from flowrl.testing import run_node, sample

RULES = """
async def length(prompts, responses): return [float(len(r)) for r in responses]
async def form(prompts, responses):
    n = len(responses)
    return {"rewards": [2.0] * n, "scores": [1.0] * n, "logs": {"dots": [0.5] * n}}
async def nothing(prompts, responses): return [float("nan")] * len(responses)
"""
EXACT = "flowrl.tasks.checks.answer_checks:exact_match"


@pytest.fixture
def rules(tmp_path: Path) -> str:
    (tmp_path / "rules.py").write_text(RULES)
    return f"{tmp_path}/rules.py"


def test_a_sum_has_weights_places_and_names() -> None:
    text = "verifier + 0.1*rules.py:short + -2e-1 * http://a:1/s,http://b:2/s + pack.age:f as taste"
    assert parse_reward(text, verifier=EXACT) == (
        Part(EXACT, 1.0, "verifier"),
        Part("rules.py:short", 0.1, "short"),
        Part("http://a:1/s,http://b:2/s", -0.2, "http"),
        Part("pack.age:f", 1.0, "taste"),
    )
    assert parse_reward(text)[2].urls == ("http://a:1/s", "http://b:2/s")


def test_a_task_without_reward_is_judged_by_its_own_verifier() -> None:
    assert [part.place for part in reward_parts(Task("arithmetic"))] == [EXACT]
    assert [part.place for part in reward_parts(Task("reasoning_gym/chain_sum"))] == ["flowrl.tasks.reasoning:score"]
    assert [part.place for part in reward_parts(Task(reward="verifier + a.py:f"))] == [EXACT, "a.py:f"]
    assert reward_parts(Task(), test_a_sum_has_weights_places_and_names)[0].place.endswith(
        "test_rewards_sums.py:test_a_sum_has_weights_places_and_names"
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("rules.py", "does not exist"),
        ("verifier + ", "has an empty summand"),
        ("verifier +  + a.py:f", "has an empty summand"),
        ("1.2.3*a.py:f", "the weight 1.2.3 is no number"),
        ("a.py:f + b.py:f", "has two parts called f; name them"),
        ("http://", "is no address"),
        ("http://a/s,b/s", "'b/s' is no address"),
    ],
)
def test_what_is_no_reward_is_refused(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Task(reward=text)


def ask(text: str, responses: list[str]) -> Verdicts:
    async def scenario() -> Verdicts:
        asking = open_reward(parse_reward(text, verifier=EXACT), timeout_s=5.0)
        try:
            return await asking.ask(["p"] * len(responses), responses, [{"answer": "bb"}] * len(responses))
        finally:
            await asking.close()

    return asyncio.run(scenario())


def test_parts_are_weighted_summed_and_logged(rules: str) -> None:
    verdicts = ask(f"verifier + 0.5*{rules}:length as long + -1*{rules}:form", ["a", "bb"])
    assert verdicts.rewards == (0 + 0.5 - 2, 1 + 1 - 2)
    assert verdicts.scores == (0 + 0.5 - 1, 1 + 1 - 1)
    assert verdicts.logs == {
        "verifier": (0.0, 1.0),
        "long": (1.0, 2.0),
        "form": (2.0, 2.0),
        "form/dots": (0.5, 0.5),
    }


def test_a_single_reward_is_left_as_it_is_and_a_weight_makes_it_a_sum(rules: str) -> None:
    assert ask(f"{rules}:form", ["a"]) == Verdicts((2.0,), (1.0,), {"dots": (0.5,)})
    weighed = Verdicts((6.0,), (3.0,), {"form": (2.0,), "form/dots": (0.5,)}, {"form": 3.0})
    assert ask(f"3*{rules}:form", ["a"]) == weighed


def test_a_part_without_verdict_is_the_whole_sums(rules: str) -> None:
    with pytest.raises(BadReward, match="nothing returned rewards with nan") as bad:
        ask(f"verifier + {rules}:nothing", ["a"])
    assert bad.value.reason == "reward_not_finite"


def test_the_node_logs_each_part_and_shapes_the_sum(rules: str) -> None:
    node = Reward(
        Task("arithmetic:max_value=9"), function=f"verifier + 0.25*{rules}:length", shaping=Shaping(clip=(0, 1))
    )
    found = run_node(node, {"rollouts": [sample(0), sample(1, response_text="33")]}).sent("scored")
    assert [s.reward for s in found] == [1.0, 0.5]
    assert [s.raw_reward for s in found] == [1.25, 0.5]
    assert [dict(s.reward_parts) for s in found] == [
        {"verifier": 1.0, "length": 1.0},
        {"verifier": 0.0, "length": 2.0},
    ]


def test_over_http_many_are_asked_at_once_without_being_told() -> None:
    assert Reward(Task()).concurrency == 1
    assert Reward(Task(reward="verifier + http://a:1/s")).concurrency == 64
    assert Reward(Task(reward="http://a:1/s"), concurrency=3).concurrency == 3
