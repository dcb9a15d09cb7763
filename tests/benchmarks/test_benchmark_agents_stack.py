"""What benchmarks/agents/agents_stack.py reads in a ledger, on books that are known."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.agents.agents_stack import AGES, CACHED, STAYED, TURNS, VERSIONS, WORK, Played, as_wanted, staleness
from tests.runtime.ledger.made_episodes import asked, episode
from tests.runtime.ledger.request_rows import commit, run, trained
from tests.runtime.ledger.small_run import SmallRun, prompts


def test_figures_of_episodes_with_two_turns(tmp_path: Path) -> None:
    """The second turn of the first episode went to another generator, and half of its context was cached."""
    found: dict[str, Any] = {}

    async def body() -> None:
        small = SmallRun(tmp_path)
        await small.admit(0)
        made = [episode(prompt, [[0] * 2, [0] * 3]) for prompt in prompts(0)]
        for number, one in enumerate(made):
            for turn, reply in asked(one):
                moved = number == 0 and turn.turn == 1
                cached = turn.token_ids.size // 2 if turn.turn else 0
                at = "generator/1" if moved else "generator/0"
                small.client.request(turn, replace(reply, cached_tokens=cached, generator=at))
            small.client.episode(one, truncated=None, seconds=1.0)
        commit(small)
        trained(small, made)
        with closing(sqlite3.connect(tmp_path / "ledger.sqlite")) as db:
            for name, query in {"c": CACHED, "w": WORK, "s": STAYED, "a": AGES, "v": VERSIONS, "t": TURNS}.items():
                found[name] = db.execute(query).fetchall()
        found["contexts"] = [turn.token_ids.size for turn, _ in asked(made[0])]
        found["number"] = len(made)

    run(body())
    number, (first, second) = found["number"], found["contexts"]
    assert found["c"] == [(second // 2 / second,)]
    one, other = first + 2, second - second // 2 + 3
    assert sorted(tokens for (tokens,) in found["w"]) == sorted([number * one + (number - 1) * other, other])
    assert found["s"] == [(pytest.approx(1 - 1 / number),)]
    assert sorted(found["a"]) == [(0, 0, 2 * number), (1, 0, 3 * number)]
    assert found["v"] == [(1,)] * number and found["t"] == [(2, "trained")] * number
    lines = list(staleness([Played(0.5, 1.0, 1.0, 9.0, 0, found["a"], [1, 3], found["t"])]))
    assert "1 of 2 episodes lasted three versions or more, the longest 3" in lines[0]
    assert lines[-1] == f"trained, {number} episodes: 2 turns 1.000"


def test_a_missed_figure_of_two_generators_is_seen() -> None:
    def played(cached: float, balance: float) -> list[Played]:
        return [Played(cached, balance, 1.0, 9.0, 0, [], [], [])]

    assert as_wanted(played(0.8, 1.0), played(0.721, 1.3))
    assert not as_wanted(played(0.8, 1.0), played(0.719, 1.3))
    assert not as_wanted(played(0.8, 1.0), played(0.8, 1.31))
