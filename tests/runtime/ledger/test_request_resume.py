"""What the ledger says of requests and episodes after a resume."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from flowrl.runtime.ledger import ledger_file
from tests.runtime.ledger.made_episodes import ask, asked, episode, play
from tests.runtime.ledger.request_rows import ATTEMPTS, EPISODES, REQUESTS, TOKENS, commit, rows, run, trained
from tests.runtime.ledger.small_run import SmallRun, prompts, sample


def checkpoint(small: SmallRun, directory: Path) -> None:
    """Write one, and end the run as a kill does."""
    commit(small)
    (directory / "checkpoint").mkdir()
    small.accounting.as_of_now().write(directory / "checkpoint")
    small.close(orderly=False)


def resumed(directory: Path, *, generated: Collection[str] = (), requests: Collection[str] = ()) -> SmallRun:
    """Go on from a checkpoint that holds these samples, and records with the replies of these requests."""
    ledger_file.restore_ledger(directory / "checkpoint", directory / "ledger.sqlite")
    small = SmallRun(directory, resume=True)
    small.accounting.note_kept(set(generated), set(), set(requests))
    return small


def test_what_is_generated_again_after_a_resume_abandons_the_request_before_it(tmp_path: Path) -> None:
    async def before() -> None:
        small = SmallRun(tmp_path)
        await small.admit(0)
        for prompt in prompts(0):
            small.client.generated(sample(prompt, [0] * 4))
        checkpoint(small, tmp_path)

    async def after() -> None:
        small = resumed(tmp_path)
        made = [sample(p, [0] * 2) for p in prompts(0)]
        small.client.generated(made[0])
        commit(small)
        assert rows(tmp_path, REQUESTS)[0::3] == [("g0/0", 0, 0, 4, "generated again"), ("g0/0", 0, 0, 2, None)]
        assert rows(tmp_path, TOKENS) == [(5, 2, 4)]
        trained(small, [made[0], *(sample(p, [0] * 4) for p in prompts(0)[1:])])

    run(before())
    run(after())


def test_an_unfinished_episode_begins_again_with_the_same_request_ids(tmp_path: Path) -> None:
    async def before() -> None:
        small = SmallRun(tmp_path)
        await small.admit(0)
        ask(small.client, episode(prompts(0)[0], [[0] * 2]), 0)
        small.client.attempt_void("g0/0", 0, "env_raised")
        ask(small.client, episode(prompts(0)[0], [[0] * 4]), 1)
        checkpoint(small, tmp_path)

    async def after() -> None:
        small = resumed(tmp_path)
        made = [play(small.client, p, [[0] * 2, [0]], void=["env_died"] * (p.member == 0)) for p in prompts(0)]
        commit(small)
        assert rows(tmp_path, REQUESTS)[:5] == [
            ("g0/0:0:0", 0, 0, 2, "env_raised"),
            ("g0/0:1:0", 1, 0, 4, "resumed"),
            ("g0/0:0:0", 0, 0, 2, "env_died"),
            ("g0/0:1:0", 1, 0, 2, None),
            ("g0/0:1:1", 1, 1, 1, None),
        ]
        assert rows(tmp_path, "SELECT incarnation FROM requests ORDER BY number LIMIT 3") == [(0,), (0,), (1,)]
        assert rows(tmp_path, ATTEMPTS) == [("g0/0", 0, "env_raised", 0), ("g0/0", 0, "env_died", 1)]
        assert rows(tmp_path, TOKENS) == [(5, 3, 8)]
        trained(small, made)

    run(before())
    run(after())


def test_a_copy_of_an_episode_that_a_checkpoint_kept_is_redone_work(tmp_path: Path) -> None:
    async def before() -> None:
        small = SmallRun(tmp_path)
        await small.admit(0)
        for prompt in prompts(0):
            play(small.client, prompt, [[0] * 2, [0] * 3])
        checkpoint(small, tmp_path)

    async def after() -> None:
        small = resumed(tmp_path, generated={"g0/0", "g0/1"})
        play(small.client, prompts(0)[0], [[0] * 4], void=["env_raised"])
        ask(small.client, episode(prompts(0)[1], [[0]]))
        small.client.episode_failed("g0/1", "counting", 1, 1, "env_raised", 1.0)
        commit(small)
        assert [row[4] for row in rows(tmp_path, REQUESTS)] == [None] * 6 + ["redone"] * 3
        assert rows(tmp_path, TOKENS) == [(5, 5, 8)]
        assert rows(tmp_path, ATTEMPTS) == []
        assert [row[2:6] for row in rows(tmp_path, EPISODES)] == [(1, 2, None, None)] * 3
        trained(small, [episode(p, [[0] * 2, [0] * 3]) for p in prompts(0)])

    run(before())
    run(after())


def test_an_episode_whose_result_is_gone_is_played_and_booked_again(tmp_path: Path) -> None:
    async def before() -> None:
        small = SmallRun(tmp_path)
        await small.admit(0)
        for prompt in prompts(0):
            play(small.client, prompt, [[0] * 2, [0] * 3])
        checkpoint(small, tmp_path)

    async def after() -> None:
        small = resumed(tmp_path)
        made = [play(small.client, p, [[0] * 4], void=["env_raised"]) for p in prompts(0)]
        commit(small)
        reasons = [row[4] for row in rows(tmp_path, REQUESTS)]
        assert reasons == ["generated again"] * 6 + ["env_raised", None] * 3
        assert rows(tmp_path, TOKENS) == [(5, 4, 5 + 4)]
        assert rows(tmp_path, EPISODES)[0] == ("g0/0", "counting", 2, 1, None, None, 1.5, 1)
        trained(small, made)

    run(before())
    run(after())


def test_requests_whose_replies_a_checkpoint_holds_count_on(tmp_path: Path) -> None:
    whole = [replace(episode(p, [[0] * 2, [0] * 3]), attempts=2) for p in prompts(0)]

    async def before() -> None:
        small = SmallRun(tmp_path)
        await small.admit(0)
        ask(small.client, episode(prompts(0)[0], [[0]]))
        for played in whole:
            small.client.attempt_void(played.sample_id, 0, "env_raised")
            small.client.request(*asked(played, 1)[0])
        checkpoint(small, tmp_path)

    async def after() -> None:
        small = resumed(tmp_path, requests={f"{played.sample_id}:1:0" for played in whole[:2]})
        small.client.attempt_void("g0/1", 1, "replay_differs")
        again, anew = (episode(p, [[0], [0] * 3]) for p in prompts(0)[1:])
        made = [whole[0], replace(again, attempts=3), anew]
        small.client.request(*asked(made[0], 1)[1])
        ask(small.client, made[1], 2)
        ask(small.client, made[2], 0)
        for played in made:
            small.client.episode(played, truncated=None, seconds=1.0)
            small.client.scored(played)
        commit(small)
        found = rows(tmp_path, "SELECT request_id, abandoned FROM requests WHERE incarnation = 0 ORDER BY number")
        assert found == [
            ("g0/0:0:0", "env_raised"),
            ("g0/0:1:0", None),
            ("g0/1:1:0", "replay_differs"),
            ("g0/2:1:0", "resumed"),
        ]
        assert rows(tmp_path, TOKENS) == [(5, 5, 1)]
        trained(small, made)

    run(before())
    run(after())


def test_what_happens_after_a_snapshot_is_reported_after_it(tmp_path: Path) -> None:
    async def body() -> None:
        small = SmallRun(tmp_path)
        await small.admit(0)
        first, second = asked(episode(prompts(0)[0], [[0], [0]]))
        small.client.request(*first)
        small.client.pause(True)
        small.client.request(*second)
        commit(small)
        assert [row[2] for row in rows(tmp_path, REQUESTS)] == [0]
        small.client.pause(False)
        commit(small)
        assert [row[2] for row in rows(tmp_path, REQUESTS)] == [0, 1]
        small.close(orderly=False)

    run(body())
