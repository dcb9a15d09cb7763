"""The books of a turn whose generator died: another one answers it, under the same id."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.made_episodes import ask, asked, episode
from tests.request_rows import REQUESTS, TOKENS, commit, rows, run, trained
from tests.small_run import SmallRun, prompts


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
