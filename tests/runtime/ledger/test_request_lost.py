"""The books of a turn whose generator died: another one answers it, under the same id, or its asker books it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from flowrl.runtime.ledger import ledger_client
from flowrl.runtime.ledger.ledger_client import LedgerClient
from tests.runtime.ledger.made_episodes import ask, asked, episode
from tests.runtime.ledger.request_rows import REQUESTS, TOKENS, commit, rows, run, trained
from tests.runtime.ledger.small_run import SmallRun, prompts


@pytest.mark.parametrize("late", [False, True])
def test_a_turn_whose_generator_died_is_answered_by_another_whichever_reports_first(
    tmp_path: Path, *, late: bool
) -> None:
    async def body() -> None:
        small = SmallRun(tmp_path)
        await small.admit(0)
        made = [episode(prompt, [[0] * 2, [0] * 3]) for prompt in prompts(0)]
        turn, reply = asked(made[0])[1]
        arrived = replace(
            reply,
            token_ids=reply.token_ids[:2],
            behavior_logprobs=reply.behavior_logprobs[:2],
            versions=reply.versions[:2],
            generator="generator/9",
        )
        if not late:
            small.client.request_lost(turn, arrived, "generator_died")
        for one in made:
            ask(small.client, one)
        if late:
            small.client.request_lost(turn, arrived, "generator_died")
        for one in made:
            small.client.episode(one, truncated=None, seconds=1.0)
        commit(small)
        of_turn = [row for row in rows(tmp_path, REQUESTS) if row[0] == turn.request_id]
        assert sorted(of_turn, key=str) == [
            (turn.request_id, 0, 1, 2, "generator_died"),
            (turn.request_id, 0, 1, 3, None),
        ]
        assert rows(tmp_path, TOKENS) == [(5, 5, 2)]
        trained(small, made)

    run(body())


def asking(small: SmallRun) -> LedgerClient:
    """The ledger's client of a node that asks generators which stand in for each other."""
    return LedgerClient(small.wire, "environment/0", stand_ins=("generator",))


@pytest.mark.parametrize("booked", [0, 1, 2])
def test_what_a_dead_generator_had_answered_is_booked_once(tmp_path: Path, booked: int) -> None:
    """By the generator, as far as it came, and by whoever has the answers."""

    async def body() -> None:
        small = SmallRun(tmp_path)
        await small.admit(0)
        made = [episode(prompt, [[0] * 2, [0] * 3]) for prompt in prompts(0)]
        client, asks = asking(small), [one for m in made for one in asked(m)]
        for turn, reply in asks:
            client.answered("generator/9", turn, reply)
        for turn, reply in asks[: booked * len(asks) // 2]:
            small.client.request(turn, reply)
        commit(small)
        for _ in range(2):
            client.server_lost(["generator/9"])
        for one in made:
            client.episode(one, truncated=None, seconds=1.0)
        client.flush()
        commit(small)
        found = [row for (row, *_) in rows(tmp_path, REQUESTS)]
        assert sorted(found) == sorted(turn.request_id for turn, _ in asks)
        assert {tuple(row) for row in rows(tmp_path, TOKENS)} == {(5, 5, 0)}
        trained(small, made)

    run(body())


def test_an_answer_that_was_on_the_way_is_booked_too_and_others_are_not(tmp_path: Path) -> None:
    async def body() -> None:
        small = SmallRun(tmp_path)
        await small.admit(0)
        (turn, reply), *others = asked(episode(prompts(0)[0], [[0] * 2, [0] * 3, [0]]))
        client, dead = asking(small), "generator/9"
        client.answered("generator/0", *others[0])
        client.server_lost([dead])
        client.answered(dead, turn, reply)
        client.answered(dead, replace(others[1][0], ticket=-1), others[1][1])
        client.answered(dead, replace(others[1][0], trained=False), others[1][1])
        client.answered("judge/9", *others[1])
        client.flush()
        commit(small)
        assert [row[0] for row in rows(tmp_path, REQUESTS)] == [turn.request_id]

    run(body())


def test_an_answer_is_forgotten_when_the_same_generator_has_answered_much_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of another one says nothing of what this one has reported."""

    async def body() -> None:
        small, now_s = SmallRun(tmp_path), [0.0]
        await small.admit(0)
        monkeypatch.setattr(ledger_client.time, "monotonic", lambda: now_s[0])
        client, asks = asking(small), asked(episode(prompts(0)[0], [[0] * 2] * 4))
        for server, turn in (("generator/0", 0), ("generator/1", 1), ("generator/1", 2)):
            client.answered(server, *asks[turn])
            now_s[0] += 2 * ledger_client.BOOKED_WITHIN_S
        client.server_lost(["generator/0", "generator/1"])
        commit(small)
        assert sorted(row[0] for row in rows(tmp_path, REQUESTS)) == [asks[0][0].request_id, asks[2][0].request_id]

    run(body())
