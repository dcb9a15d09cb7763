"""Rewards with several values: each logged by name, weighed by option, and added up."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from flowrl.errors import ConfigError
from flowrl.nodes import Reward
from flowrl.tasks import Task, reward_parts
from flowrl.tasks.reward_calls.judge import BadReward, Verdicts
from flowrl.tasks.rewards import open_reward
from flowrl.testing import run_node, sample

RULES = """
async def lists(prompts, responses):
    return {"correct": [1.0 for _ in responses], "length": [float(len(r)) for r in responses]}
def one(prompt, response):
    if response == "plain": return 0.5
    return {"correct": 1.0, "length": float(len(response)), "logs": {"seen": 7.0}}
async def mixed(prompt, response): return one(prompt, response)
async def odd(prompts, responses): return {"correct": [1.0], "scores": [1.0]}
"""


@pytest.fixture
def rules(tmp_path: Path) -> str:
    (tmp_path / "rules.py").write_text(RULES)
    return f"{tmp_path}/rules.py"


def verdicts(reward: str, weights: str = "", responses: tuple[str, ...] = ("12", "1234")) -> Verdicts:
    async def ask() -> Verdicts:
        client = open_reward(reward_parts(Task(reward=reward, reward_weights=weights)), timeout_s=20.0)
        try:
            return await client.ask(["p"] * len(responses), list(responses), [{}] * len(responses))
        finally:
            await client.close()

    return asyncio.run(ask())


@pytest.mark.parametrize("name", ["lists", "one"])
def test_the_heads_add_up_with_their_weights(rules: str, name: str) -> None:
    """`one` runs in a process of its own."""
    plain = verdicts(f"{rules}:{name}")
    assert plain.rewards == plain.scores == (3.0, 5.0)
    assert (plain.logs["correct"], plain.logs["length"]) == ((1.0, 1.0), (2.0, 4.0))
    assert verdicts(f"{rules}:{name}", "length=0.25,correct=2").rewards == (2.5, 3.0)


def test_further_logs_and_plain_numbers_beside_them(rules: str) -> None:
    found = verdicts(f"{rules}:mixed", "length=0.5", ("12", "plain"))
    assert found.rewards == (2.0, 0.5)
    assert found.logs["seen"] == (7.0, 0.0) and found.logs["reward"] == (0.0, 0.5)


def test_in_a_sum_the_whole_has_its_weight_and_the_heads_theirs(rules: str) -> None:
    found = verdicts(f"0.5*{rules}:lists as judge", "length=0.5", ("12",))
    assert found.rewards == (1.0,)
    assert found.logs == {"judge": (2.0,), "judge/correct": (1.0,), "judge/length": (2.0,)}


def test_a_mapping_without_heads_is_malformed(rules: str) -> None:
    with pytest.raises(BadReward, match="mapping of correct, scores; it needs the key 'rewards', or a number"):
        verdicts(f"{rules}:odd", responses=("1",))


def test_samples_keep_the_heads(rules: str) -> None:
    task = Task("arithmetic:max_value=3", reward=f"{rules}:lists", reward_weights="length=0")
    (found,) = run_node(Reward(task), {"rollouts": [sample(0, response=2)]}, timeout_s=60).sent("scored")
    assert found.reward == found.raw_reward == 1.0
    assert set(found.reward_parts) == {"correct", "length"}


def test_weights_of_nothing_are_refused(rules: str) -> None:
    with pytest.raises(ConfigError, match="names tidy, but the reward has the heads correct, length; "):
        Reward(Task("arithmetic:max_value=3", reward=f"{rules}:lists", reward_weights="tidy=1")).preflight()
    Reward(
        Task("arithmetic:max_value=3", reward=f"verifier as length + {rules}:lists", reward_weights="length=0")
    ).preflight()
    with pytest.raises(ConfigError, match="names verifier, but the reward has the heads correct, length; "):
        reward = f"verifier + 2*{rules}:lists"
        Reward(Task("arithmetic:max_value=3", reward=reward, reward_weights="verifier=1")).preflight()
    with pytest.raises(ConfigError, match="names tidy, but the reward has one value and no heads"):
        Reward(Task("arithmetic:max_value=3", reward_weights="tidy=1")).preflight()
    for text in ("length", "length=x", "=1", "a=1,b=nan"):
        with pytest.raises(ConfigError, match="write NAME=WEIGHT,NAME=WEIGHT"):
            Task(reward_weights=text)
