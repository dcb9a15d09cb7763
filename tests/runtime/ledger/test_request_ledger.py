"""What the ledger says of requests and episodes: every event, in any order between hosts."""

from __future__ import annotations

import random
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

from flowrl.messages import Prompt, Scored
from flowrl.runtime.audit.audit import audit
from flowrl.runtime.ledger import request_ledger
from flowrl.runtime.ledger.accounting import LedgerClient, Use
from flowrl.runtime.ledger.token_digest import policy_spans
from tests.runtime.ledger.made_episodes import ask, asked, episode, play
from tests.runtime.ledger.request_rows import ATTEMPTS, EPISODES, REQUESTS, TOKENS, commit, rows, run, trained
from tests.runtime.ledger.small_run import POLICY, SmallRun, lost, prompts, sample

# Samples that nobody asked turn by turn


def test_a_rollout_is_booked_with_its_one_request(tmp_path: Path) -> None:
    async def body() -> None:
        small = SmallRun(tmp_path)
        await small.admit(0)
        made = [replace(sample(p, [0, 0, 0]), generated_s=7.5, truncated=p.member == 1) for p in prompts(0)]
        for one in made:
            small.client.generated(one)
        commit(small)
        digest = policy_spans(made[0])[0].digest
        query = "SELECT * FROM requests WHERE sample_id IN ('g0/0', 'g0/1') ORDER BY number"
        ids, sizes = [("g0/0", "g0/0"), ("g0/1", "g0/1")], (digest, 3, 5, None, 0, 0, "generator/0")
        assert rows(tmp_path, query) == [
            (number, *ids[number], 0, 0, *sizes, reason, None, 0, 7.5)
            for number, reason in enumerate(["stop", "length"])
        ]
        trained(small, made)
        spans = rows(tmp_path, "SELECT * FROM spans WHERE sample_id = 'g0/0'")
        assert spans == [("g0/0", POLICY, 1, 5, 3, digest)]

    run(body())


def test_a_sample_with_several_replies_has_a_request_for_each(tmp_path: Path) -> None:
    async def body() -> None:
        small = SmallRun(tmp_path)
        await small.admit(0)
        made = [episode(prompt, [[0] * 2, [0] * 3]) for prompt in prompts(0)]
        for one in made:
            small.client.generated(one)
        commit(small)
        assert rows(tmp_path, REQUESTS)[:2] == [("g0/0", 0, 0, 2, None), ("g0/0", 0, 1, 3, None)]
        assert rows(tmp_path, EPISODES) == []
        trained(small, made)

    run(body())


def test_a_rollout_that_is_generated_again_abandons_its_first_request(tmp_path: Path) -> None:
    async def body() -> None:
        small = SmallRun(tmp_path)
        await small.admit(0)
        first, *others = [sample(p, [0] * 4) for p in prompts(0)]
        again = sample(prompts(0)[0], [0] * 2)
        for one in (first, *others, again):
            small.client.generated(one)
        commit(small)
        assert rows(tmp_path, REQUESTS)[0::3] == [
            ("g0/0", 0, 0, 4, "generated again"),
            ("g0/0", 0, 0, 2, None),
        ]
        assert rows(tmp_path, TOKENS) == [(5, 2, 4)]
        trained(small, [again, *others])

    run(body())


def test_a_copy_of_what_a_checkpoint_kept_books_no_request(tmp_path: Path) -> None:
    async def body() -> None:
        small = SmallRun(tmp_path)
        await small.admit(0)
        made = [sample(p, [0] * 4) for p in prompts(0)]
        for one in made:
            small.client.generated(one)
        small.client.flush()
        small.accounting.note_kept({"g0/0"}, set())
        small.client.generated(sample(prompts(0)[0], [0] * 6))
        commit(small)
        assert rows(tmp_path, REQUESTS) == [(f"g0/{member}", 0, 0, 4, None) for member in range(3)]
        assert rows(tmp_path, TOKENS) == [(5, 4, 6)]
        trained(small, made)

    run(body())


def test_what_the_trainer_is_fed_is_booked_though_all_of_it_is_too_old(tmp_path: Path) -> None:
    async def body() -> None:
        small = SmallRun(tmp_path)
        await small.admit(0)
        made = [sample(p, [0, 0]) for p in prompts(0)]
        for one in made:
            small.client.generated(one)
        small.step(made, [np.zeros_like(one.policy_mask) for one in made])
        assert rows(tmp_path, "SELECT COUNT(*) FROM uses") == [(0,)]
        assert rows(tmp_path, "SELECT sample_id, start, tokens FROM spans") == [(f"g0/{m}", 5, 2) for m in range(3)]

    run(body())


# Episodes


def test_an_episode_is_booked_with_its_requests(tmp_path: Path) -> None:
    async def body() -> None:
        small = SmallRun(tmp_path)
        await small.admit(0)
        made = [play(small.client, p, [[0] * 2, [0] * 3]) for p in prompts(0)]
        small.client.episode(replace(made[0], environment="other"), truncated="turns", seconds=2.5)  # once more
        commit(small)
        assert rows(tmp_path, REQUESTS)[:2] == [("g0/0:0:0", 0, 0, 2, None), ("g0/0:0:1", 0, 1, 3, None)]
        query = "SELECT digest, context_tokens, cached_tokens, oldest_version, newest_version, generator, finish_reason"
        ends = (0, 0, "generator/0", "stop")
        assert rows(tmp_path, f"{query} FROM requests ORDER BY number LIMIT 2") == [
            (span.digest, span.start, span.start // 2, *ends) for span in policy_spans(made[0])
        ]
        assert rows(tmp_path, EPISODES)[1] == ("g0/1", "counting", 1, 2, None, None, 1.5, 0)
        assert rows(tmp_path, EPISODES)[0][4] == "turns"
        life = "prompt_tokens, response_tokens, redone_tokens, oldest_version, newest_version, generator"
        assert rows(tmp_path, f"SELECT {life} FROM samples WHERE member = 1") == [(5, 5, 0, 0, 0, "generator/0")]

    run(body())


def test_void_attempts_are_abandoned_and_their_tokens_redone(tmp_path: Path) -> None:
    async def body() -> None:
        small = SmallRun(tmp_path)
        await small.admit(0)
        first, *others = prompts(0)
        made = [play(small.client, first, [[0] * 2, [0] * 3], void=("env_raised", "env_timed_out"))]
        small.client.attempt_void("g0/0", 1, "env_died")  # known to be void
        commit(small)
        assert rows(tmp_path, REQUESTS) == [
            ("g0/0:0:0", 0, 0, 2, "env_raised"),
            ("g0/0:1:0", 1, 0, 2, "env_timed_out"),
            ("g0/0:2:0", 2, 0, 2, None),
            ("g0/0:2:1", 2, 1, 3, None),
        ]
        assert rows(tmp_path, ATTEMPTS) == [("g0/0", 0, "env_raised", 0), ("g0/0", 1, "env_timed_out", 0)]
        assert rows(tmp_path, TOKENS) == [(5, 5, 4)]
        assert rows(tmp_path, EPISODES)[0][2:4] == (3, 2)
        trained(small, [*made, *(play(small.client, p, [[0]]) for p in others)])

    run(body())


@pytest.mark.parametrize("told", [False, True])
def test_an_episode_that_failed_has_no_attempt_that_counts(tmp_path: Path, told: bool) -> None:
    async def body() -> None:
        small = SmallRun(tmp_path)
        await small.admit(0)
        first, *others = prompts(0)
        for attempt, cause in enumerate(("env_raised", "env_died")):
            ask(small.client, episode(first, [[0] * 2, [0]]), attempt)
            if told or attempt == 0:
                small.client.attempt_void("g0/0", attempt, cause)
        small.client.episode_failed("g0/0", "counting", attempts=2, turns=2, cause="env_died", seconds=3.0)
        small.client.lost(lost(first, "failed", "env_died"))
        commit(small)
        assert [row[4] for row in rows(tmp_path, REQUESTS)] == ["env_raised"] * 2 + ["env_died"] * 2
        assert rows(tmp_path, EPISODES) == [("g0/0", "counting", 2, 2, None, "env_died", 3.0, 0)]
        assert rows(tmp_path, TOKENS) == [(5, 0, 6)]
        trained(small, [play(small.client, p, [[0]]) for p in others])

    run(body())


@pytest.mark.parametrize("early", [False, True])
def test_a_request_that_nobody_waited_for_is_abandoned_whichever_report_is_first(tmp_path: Path, early: bool) -> None:
    async def body() -> None:
        small = SmallRun(tmp_path)
        await small.admit(0)
        turn, reply = asked(episode(prompts(0)[0], [[0] * 2, [0] * 3]))[1]
        if early:
            small.client.abandoned(turn.request_id, "cancelled")
        small.client.request(turn, reply)
        if not early:
            small.client.abandoned(turn.request_id, "cancelled")
        commit(small)
        assert rows(tmp_path, REQUESTS) == [("g0/0:0:1", 0, 1, 3, "cancelled")]
        assert rows(tmp_path, TOKENS) == [(5, 0, 3)]

    run(body())


def test_a_turn_that_was_asked_again_is_answered_by_the_newer_reply(tmp_path: Path) -> None:
    async def body() -> None:
        small = SmallRun(tmp_path)
        await small.admit(0)
        made = [episode(prompt, [[0] * 2, [0] * 3]) for prompt in prompts(0)]
        turn, reply = asked(made[0])[1]
        small.client.request(turn, replace(reply, token_ids=reply.token_ids + 1, generator="generator/9"))
        for one in made:
            ask(small.client, one)
            small.client.episode(one, truncated=None, seconds=1.0)
        commit(small)
        assert rows(tmp_path, REQUESTS)[:3] == [
            ("g0/0:0:1", 0, 1, 3, "asked again"),
            ("g0/0:0:0", 0, 0, 2, None),
            ("g0/0:0:1", 0, 1, 3, None),
        ]
        assert rows(tmp_path, TOKENS) == [(5, 5, 3)]
        trained(small, made)

    run(body())


def test_turns_of_held_out_episodes_are_not_booked(tmp_path: Path) -> None:
    async def body() -> None:
        small = SmallRun(tmp_path)
        turn, reply = asked(episode(prompts(0)[0], [[0]]))[0]
        small.client.request(replace(turn, ticket=-1), reply)
        commit(small)
        assert rows(tmp_path, REQUESTS) == []

    run(body())


def test_an_episode_that_is_given_up_leaves_its_requests_to_its_sample(tmp_path: Path) -> None:
    async def body() -> None:
        small = SmallRun(tmp_path)
        await small.admit(0)
        first, *others = prompts(0)
        ask(small.client, episode(first, [[0] * 2]))
        small.client.lost(lost(first, "dropped", "cancelled", tokens=2))
        trained(small, [play(small.client, p, [[0]]) for p in others])
        assert rows(tmp_path, REQUESTS)[0] == ("g0/0:0:0", 0, 0, 2, None)

    run(body())


@pytest.mark.parametrize("orderly", [False, True])
@pytest.mark.parametrize("what", ["missing", "different", "missing from a rollout"])
def test_a_failed_run_may_lack_requests_of_episodes_but_none_may_differ(
    tmp_path: Path, what: str, orderly: bool
) -> None:
    async def body() -> None:
        small = SmallRun(tmp_path)
        await small.admit(0)
        made = [episode(p, [[0] * 2, [0] * 3]) for p in prompts(0)]
        turns = [asked(one) for one in made]
        turn, reply = turns[0].pop()
        if what == "different":
            turns[0].append((turn, replace(reply, token_ids=reply.token_ids + 1)))
        for each in turns:
            for of_turn in each:
                small.client.request(*of_turn)
        for one in made:
            small.client.episode(one, truncated=None, seconds=1.0)
        small.step(made)
        small.close(orderly=orderly)

    run(body())
    if what == "missing from a rollout":
        with closing(sqlite3.connect(tmp_path / "ledger.sqlite", isolation_level=None)) as db:
            db.execute("DELETE FROM episodes")
    texts = [violation.text for violation in audit(tmp_path).violations if violation.kind == "spans"]
    not_sampled = "trainer was fed 3 tokens of sample g0/0 after its first 9 at step 1, and no request sampled exactly"
    assert [text[: len(not_sampled)] for text in texts] == [not_sampled] * (orderly or what != "missing")


# Order


class Story:
    """A group of three episodes, told by the hosts of a generator, an environment and a trainer."""

    def __init__(self, small: SmallRun) -> None:
        self.generator, self.environment, self.trainer = (LedgerClient(small.wire, f"{n}/0") for n in ("g", "e", "t"))

    def tell(self) -> None:
        made = [self.play(prompt) for prompt in prompts(0)]
        uses = [Use.of(one) for one in made if one is not None]
        self.trainer.step({"step": 1, "tokens_trained": sum(use.tokens for use in uses)}, uses, policy=POLICY)
        for client in (self.generator, self.environment):
            client.flush()

    def play(self, prompt: Prompt) -> Scored | None:
        """As many void attempts as the member has for a number, and an abandoned request; the last member fails."""
        for attempt in range(prompt.member):
            ask(self.generator, episode(prompt, [[0] * 2, [0] * (attempt + 1)]), attempt)
            self.environment.attempt_void(prompt.sample_id, attempt, "env_raised")
        turn, reply = asked(episode(prompt, [[0] * 2, [0], [0] * 6]), min(prompt.member, 1))[2]
        self.generator.request(turn, reply)
        self.environment.abandoned(turn.request_id, "cancelled")
        if prompt.member == 2:
            self.environment.episode_failed(prompt.sample_id, "counting", 2, 2, "env_raised", 1.0)
            self.environment.lost(lost(prompt, "failed", "env_raised"))
            return None
        played = replace(episode(prompt, [[0] * 2, [0]]), attempts=prompt.member + 1)
        ask(self.generator, played, prompt.member)
        self.environment.episode(played, truncated=None, seconds=1.0)
        return played


def told(directory: Path, rng: random.Random | None) -> list[Any]:
    """What the ledger says of the story: told at once, or with the events of the hosts in any order between them."""
    contents: list[Any] = []

    async def body() -> None:
        small = SmallRun(directory)
        await small.admit(0)
        small.wire.held = [] if rng else None
        Story(small).tell()
        held, small.wire.held = small.wire.held, None
        hosts: dict[str, list[Any]] = {}
        for _, packed in held or ():
            for event in msgpack.unpackb(packed)["events"]:
                hosts.setdefault(HOST_OF[event[0]], []).append(event)
        while rng and hosts:
            host = rng.choice(sorted(hosts))
            small.accounting.record_events([hosts[host].pop(0)])
            hosts = {name: events for name, events in hosts.items() if events}
            if rng.random() < 0.3:
                small.accounting.bookings.commit_all()
        small.close()

    run(body())
    report = audit(directory)
    assert report.ok, str(report)
    for table in ("requests", "attempts", "episodes", "spans", "samples"):
        with closing(sqlite3.connect(directory / "ledger.sqlite")) as db:
            names = [name for _, name, *_ in db.execute(f"PRAGMA table_info({table})")]
            kept = [name for name in names if not name.endswith("_s") and name != "number"]
            contents.append(sorted(map(repr, db.execute(f"SELECT {', '.join(kept)} FROM {table}"))))
    return contents


HOST_OF = {
    "request": "generator",
    **dict.fromkeys(("void", "abandoned", "episode", "episode failed", "lost"), "environment"),
    "step": "trainer",
}


@pytest.mark.parametrize("seed", range(30))
def test_any_order_between_hosts_ends_alike(tmp_path: Path, seed: int) -> None:
    for name in ("at once", "mixed"):
        (tmp_path / name).mkdir()
    assert told(tmp_path / "mixed", random.Random(seed)) == told(tmp_path / "at once", None)


def test_requests_of_closed_samples_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_ledger, "KEPT_CLOSED", 4)

    async def body() -> None:
        small = SmallRun(tmp_path, steps=None)
        for group in range(0, 8, 2):
            await small.admit(group)
            small.step([play(small.client, prompt, [[group // 2] * 2]) for prompt in prompts(group)])
        book = small.accounting._requests
        assert len(book._samples) == len(book._sample_of) == 4
        small.close()
        assert audit(tmp_path).ok

    run(body())
