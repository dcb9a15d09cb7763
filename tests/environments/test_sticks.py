"""The game of sticks: its rules, the environment by hand, and the rows that `tiny` is warm-started on."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

from flowrl.environments import Action, Episodes, Step, environment_rows
from flowrl.environments.sticks_env import SticksAgainst
from flowrl.errors import ConfigError
from flowrl.tasks import Task, demonstrator, load_rows
from flowrl.tasks.toy_tasks import SticksRules

STICKS = "flowrl.environments.sticks_env:Sticks"


def play(moves: list[str], *, options: str = "least=5,most=5") -> tuple[list[str], list[Step]]:
    """What the seat that acts sees before each move, and the steps."""

    async def life() -> tuple[list[str], list[Step]]:
        async with Episodes(f"{STICKS}:{options}") as pool:
            episode = await pool.reset(environment_rows(STICKS).train[0])
            shown, steps = [episode.observations[0].text], []
            for number, move in enumerate(moves):
                steps.append(await episode.step(Action(move), number % 2))
                shown.append(steps[-1].observations[(number + 1) % 2].text)
            await episode.close()
            return shown, steps

    return asyncio.run(life())


def test_who_takes_the_last_stick_wins() -> None:
    shown, steps = play(["1", "3", " 1 "])
    assert shown == ["5", "4", "1", ""]
    assert [(step.rewards, step.terminated) for step in steps] == [
        ((0.0, 0.0), False),
        ((0.0, 0.0), False),
        ((1.0, 0.0), True),
    ]
    assert all(step.observations[number % 2].text == "" for number, step in enumerate(steps))


@pytest.mark.parametrize("reply", ["4", "0", "-1", "two", "", "1 1", "³"])
def test_what_is_no_allowed_move_loses(reply: str) -> None:
    _, (*_, last) = play(["1", reply])
    assert last.rewards == (1.0, 0.0) and last.metrics == {"not_allowed": 1.0}


def test_more_than_are_left_is_not_allowed() -> None:
    _, (*_, last) = play(["3", "3"])
    assert last.rewards == (1.0, 0.0)


def test_winning_moves_win_against_every_play() -> None:
    rules = SticksRules(take=3)

    def wins(left: int) -> bool:
        """Whether who moves now can win, by trying everything."""
        return any(left == move or not wins(left - move) for move in rules.allowed_moves(left))

    for left in range(1, 17):
        move = rules.winning_move(left)
        assert bool(move) == wins(left)
        assert not move or left == move or not wins(left - move)


def games(skill: float, *, best: bool, number: int = 400) -> list[Step]:
    """The last steps of games of one seat, played by winning moves or at random."""

    async def game(seed: int) -> Step:
        env, rng = SticksAgainst(skill), random.Random(seed + 1_000_000)
        left = int((await env.reset({}, seed)).text)
        while True:
            winning = env.rules.winning_move(left) if best else 0
            step = await env.step(Action(str(winning or rng.choice(env.rules.allowed_moves(left)))))
            if step.terminated:
                return step
            left = int(step.observation.text)

    async def all_games() -> list[Step]:
        return [await game(seed) for seed in range(number)]

    return asyncio.run(all_games())


@pytest.mark.parametrize(
    ("skill", "best", "wins"), [(0.0, False, 0.5), (0.5, False, 0.32), (0.5, True, 0.82), (1.0, True, 0.5)]
)
def test_how_often_one_seat_wins_depends_on_both_players(skill: float, best: bool, wins: float) -> None:
    last = games(skill, best=best)
    assert sum(step.reward for step in last) / len(last) == pytest.approx(wins, abs=0.08)
    assert all(step.metrics == {"not_allowed": 0.0} for step in last)


def test_the_same_seed_and_moves_give_the_same_game() -> None:
    assert games(0.5, best=False, number=50) == games(0.5, best=False, number=50)


@pytest.mark.parametrize("reply", ["4", "0", "two", ""])
def test_in_a_game_for_one_seat_what_is_no_allowed_move_loses_too(reply: str) -> None:
    async def game() -> Step:
        env = SticksAgainst(least=9, most=9)
        await env.reset({}, 0)
        return await env.step(Action(reply))

    step = asyncio.run(game())
    assert (step.reward, step.terminated, step.metrics) == (0.0, True, {"not_allowed": 1.0})


def test_the_rows_are_games_and_the_demonstrations_are_allowed_moves() -> None:
    task = Task("sticks")
    rows, rules = load_rows(task), SticksRules()
    demonstrate, rng = demonstrator(task), random.Random(0)
    assert len(rows.train) > 300 and len(rows.held_out) > 30
    assert {len(row.turns) for row in rows.train} >= {1, 3, 5, 7}
    best: Counter[bool] = Counter()
    for row in (*rows.train, *rows.held_out):
        left = int(row.prompt)
        assert int(str(row.answer)) in rules.allowed_moves(left)
        move = int(demonstrate(row, rng))
        assert move in rules.allowed_moves(left)
        if rules.winning_move(left):
            assert row.answer == str(rules.winning_move(left))
            best[move == rules.winning_move(left)] += 1
    assert 0.4 < best[True] / best.total() < 0.65


def test_settings_out_of_range_are_said() -> None:
    for options, text in (("least=9,most=8", "1 <= least <= most"), ("take=10", "1 to 9")):
        with pytest.raises(ConfigError, match=text):
            load_rows(Task(f"sticks:{options}"))
    with pytest.raises(ConfigError, match="skill is 2"):
        SticksAgainst(skill=2)
