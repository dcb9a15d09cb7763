"""Environments of gymnasium and reasoning_gym, each in real processes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from flowrl.environments import Action, EnvironmentName, EnvironmentRow, Episodes, OpenEpisode, Step, environment_rows
from flowrl.errors import ConfigError
from flowrl.tasks import reasoning
from flowrl.tasks.task import Task

LAKE = "gymnasium/FrozenLake-v1:is_slippery=False,actions=left/down/right/up"
SLIPPERY = "gymnasium/FrozenLake-v1"
SUMS = "reasoning_gym/chain_sum:min_terms=2,max_terms=2,min_digits=1,max_digits=1"
pytestmark = pytest.mark.timeout(90)


def played(name: str, scenario: Callable[[Episodes], Awaitable[None]]) -> None:
    async def whole() -> None:
        async with Episodes(name) as pool:
            await scenario(pool)

    asyncio.run(whole())


async def steps(episode: OpenEpisode, *texts: str) -> list[Step]:
    found = [await episode.step(Action(text)) for text in texts]
    await episode.close()
    return found


def test_frozen_lake_is_walked_to_its_goal() -> None:
    async def scenario(pool: Episodes) -> None:
        episode = await pool.reset(EnvironmentRow(LAKE))
        assert episode.observation.text == (
            "[S]FFF\nFHFH\nFFFH\nHFFG\n\nObservation: 0\n\nAnswer with one action: 0 left, 1 down, 2 right, 3 up."
        )
        walk = ("down", "I was thinking of right, but: 1", "Right.", "2", "DOWN", "right")
        *before, last = await steps(episode, *walk)
        assert [step.rewards[0] for step in before] == [0.0] * 5 and not any(step.over for step in before)
        assert (last.reward, last.terminated) == (1.0, True)
        assert last.observations[0].text == "(Right)\nSFFF\nFHFH\nFFFH\nHFF[G]\n\nObservation: 15"

    played(LAKE, scenario)


def test_a_reply_without_an_action_changes_nothing_and_the_third_truncates() -> None:
    async def scenario(pool: Episodes) -> None:
        replies = ("banana", "7", "down", "", "-1", "upwards")
        found = await steps(await pool.reset(EnvironmentRow(LAKE)), *replies)
        assert [step.metrics["malformed"] for step in found] == [1.0, 1.0, 0.0, 1.0, 1.0, 1.0]
        assert [step.truncated for step in found] == [False] * 5 + [True]
        assert "There is no action in this reply" in found[0].observations[0].text

    played(LAKE, scenario)


def test_the_same_seed_and_actions_give_the_same_episode_alone_and_among_32() -> None:
    async def one(pool: Episodes, seed: int) -> list[Step]:
        episode = await pool.reset(EnvironmentRow(SLIPPERY, {}, seed))
        found = [await episode.step(Action("2"))]
        while not found[-1].over and len(found) < 20:
            found.append(await episode.step(Action("1")))
        await episode.close()
        return found

    async def scenario(pool: Episodes) -> None:
        alone = [await one(pool, seed) for seed in range(4)]
        assert alone[0] != alone[1] or alone[0] != alone[2]
        assert (await asyncio.gather(*(one(pool, seed) for seed in range(32))))[:4] == alone

    played(SLIPPERY, scenario)


def test_a_problem_is_tried_until_it_is_right() -> None:
    async def scenario(pool: Episodes) -> None:
        row = environment_rows(SUMS).train[5]
        known = reasoning.problem(Task(SUMS), row.seed)
        episode = await pool.reset(row)
        assert episode.observation.text == known.question
        wrong, right = await steps(episode, "fish", known.answer)
        assert (wrong.reward, wrong.over) == (0.0, False)
        assert wrong.observations[0].text == "That is not right. Tries left: 2."
        assert (right.reward, right.terminated) == (1.0, True)
        assert right.metrics == {"score": 1.0, "tries": 2.0}
        assert (await steps(await pool.reset(row), "a", "b", "c"))[-1].terminated

    played(SUMS, scenario)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("gymnasium/FrozenLak-v1", "Environment `FrozenLak` doesn't exist"),
        ("gymnasium/FrozenLake-v1:slip=1", "gymnasium refuses it: .*unexpected keyword argument 'slip'"),
        ("gymnasium/FrozenLake-v1:actions=a/b", r"actions has 2 name\(s\) and the environment 4 actions"),
        ("gymnasium/CartPole-v1", "has observations in Box.*; only discrete ones become text"),
        ("gymnasium/Pendulum-v1", "has the actions Box.*; only discrete ones can be said"),
        ("reasoning_gym/chain_som", "has no task 'chain_som' among its .*; try chain_sum"),
        ("reasoning_gym/chain_sum:terms=3", "reasoning_gym refuses these options"),
        ("reasoning_gym/chain_sum:tries=0", "tries is 0; it has to be at least 1"),
        ("reasoning_gym/chain_sum:feedback=loud", "feedback is 'loud'; it has to be wrong or score"),
        ("reasoning_gym/chain_sum:seed=3", "has the option seed, which its rows decide"),
    ],
)
def test_a_users_mistake_gets_one_message_before_anything_starts(name: str, says: str) -> None:
    async def nothing(pool: Episodes) -> None:
        raise AssertionError

    assert EnvironmentName(name).adapter
    with pytest.raises(ConfigError, match=says):
        played(name, nothing)
