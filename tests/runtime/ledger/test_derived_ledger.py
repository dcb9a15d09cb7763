"""Derived samples in the ledger: they join the group and the ticket of their parent, and the audit proves them."""

from __future__ import annotations

import asyncio
import random
import shutil
import sqlite3
from collections.abc import Coroutine
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flowrl.errors import FlowrlError
from flowrl.messages import Tombstone
from flowrl.messages.episode import Reply, Turn
from flowrl.runtime.audit.audit import audit
from flowrl.runtime.ledger.ledger_client import Use
from flowrl.wire.tickets import Tickets
from tests.runtime.ledger.audit_damages import DAMAGES_OF_DERIVED
from tests.runtime.ledger.small_run import (
    POLICY,
    SmallRun,
    TwoTrainers,
    derived,
    derived_run,
    half,
    lost,
    prompts,
    sample,
)
from tests.runtime.ledger.test_audit import damage, found
from tests.runtime.ledger.test_audit_groups import falsify, in_ranges, in_whole, num_plain


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("derived")
    asyncio.run(derived_run(directory))
    return directory


def rows(directory: Path, query: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(directory / "ledger.sqlite")) as db:
        return db.execute(query).fetchall()


def run(body: Coroutine[Any, Any, None]) -> None:
    asyncio.run(body)


def branching(directory: Path, **options: Any) -> SmallRun:
    return SmallRun(directory, derives={"branch": 2}, **options)


@pytest.mark.parametrize("seed", range(20))
def test_books_with_derived_samples_are_sound(tmp_path: Path, seed: int) -> None:
    run(derived_run(tmp_path, seed))
    report = audit(tmp_path)
    assert report.ok, str(report)
    assert report.figures["groups"] == 6
    assert report.figures["samples"] == 18 + rows(tmp_path, "SELECT COUNT(*) FROM derived")[0][0]
    kinds = {state for (state,) in rows(tmp_path, "SELECT state FROM samples JOIN derived USING (sample_id)")}
    assert "trained" in kinds and kinds <= {"trained", "failed", "dropped"}


@pytest.mark.parametrize("name", DAMAGES_OF_DERIVED)
def test_each_damage_is_named(sound: Path, tmp_path: Path, name: str) -> None:
    statements, kind, text = DAMAGES_OF_DERIVED[name]
    copy = Path(shutil.copytree(sound, tmp_path / "run"))
    damage(copy, *statements)
    assert any(k == kind and text in t for k, t in found(copy)), found(copy)


def test_whatever_is_falsified_the_same_is_found_in_ranges_and_in_the_whole(sound: Path) -> None:
    with closing(sqlite3.connect(sound / "ledger.sqlite")) as db:
        db.execute("PRAGMA journal_mode = DELETE")
        image = bytes(db.serialize())
    num_wrong = 0
    for seed in range(120):
        with closing(sqlite3.connect(":memory:", isolation_level=None)) as db:
            db.deserialize(image)
            assert 0 <= num_plain(db) < 6, "a group with derived samples is not plain"
            what = falsify(db, random.Random(seed))
            seen, figures = in_ranges(db)
            assert (seen, figures) == in_whole(db), f"seed {seed}: {what}"
            num_wrong += bool(seen)
    assert num_wrong > 60


def test_the_ticket_is_out_until_the_derived_samples_have_their_fates(tmp_path: Path) -> None:
    async def body() -> None:
        life = branching(tmp_path, ahead=0)
        await life.admit(0)
        trunks = [sample(one, [0] * 3) for one in prompts(0)]
        children = derived(trunks[1], 2)
        await life.client.derive(trunks[1].sample_id, "branch", children, trainers=[POLICY])
        for trunk in trunks:
            life.client.generated(trunk)
            life.client.lost(lost(trunk, "filtered", "no_spread"))
        assert life.accounting.in_flight() == {"g0": 0}
        assert [life.accounting.is_open(one.sample_id) for one in children] == [True, True]
        life.client.lost(lost(children[0], "failed", "timeout"))
        assert life.accounting.in_flight() == {"g0": 0}
        life.client.lost(lost(children[1], "dropped", "unused"))
        assert life.accounting.in_flight() == {} and life.accounting.tickets.num_open == 0
        life.close()
        assert audit(tmp_path).ok, str(audit(tmp_path))

    run(body())


def test_a_repeated_derivation_changes_nothing_and_another_is_refused(tmp_path: Path) -> None:
    async def body() -> None:
        life = branching(tmp_path)
        await life.admit(0)
        (trunk, *_), children = prompts(0), derived(prompts(0)[0], 2)
        await asyncio.gather(*(life.client.derive("g0/0", "branch", children, trainers=[POLICY]) for _ in range(2)))
        assert rows(tmp_path, "SELECT sample_id, parent_id, label, ordinal FROM derived") == [
            ("g0/0/branch.0", "g0/0", "branch", 0),
            ("g0/0/branch.1", "g0/0", "branch", 1),
        ], "committed before `derive` returns"
        with pytest.raises(FlowrlError, match="1 samples were derived from 'g0/0' under 'branch', but 2 before"):
            await life.client.derive(trunk.sample_id, "branch", children[:1], trainers=[POLICY])
        with pytest.raises(FlowrlError, match="derived from 'x/0', which was never admitted"):
            await life.client.derive("x/0", "branch", children, trainers=[POLICY])
        taken = [replace(one, member=2, sample_id=f"g0/1/branch.{i}") for i, one in enumerate(children)]
        with pytest.raises(FlowrlError, match=r"sample 'g0/1/branch\.0' has the number 2 of 'g0/2' in their group"):
            await life.client.derive("g0/1", "branch", taken[:1], trainers=[POLICY])
        life.accounting.close(orderly=False)

    run(body())


def test_many_derivations_at_a_time_do_not_wait_for_each_other(tmp_path: Path) -> None:
    """They come while a step is booked, which takes several ticks of the loop."""

    async def body() -> None:
        life = branching(tmp_path, ahead=3)
        for group in range(8):
            await life.admit(group)
        parents = [one for group in range(8) for one in prompts(group)]
        derivations = (
            life.client.derive(one.sample_id, "branch", derived(one, 2), trainers=[POLICY]) for one in parents
        )
        life.accounting.bookings.add_job(iter([None] * 10))
        async with asyncio.timeout(20):
            await asyncio.gather(*derivations)
        assert rows(tmp_path, "SELECT COUNT(*) FROM derived") == [(48,)]
        life.close()
        assert audit(tmp_path).ok, str(audit(tmp_path))

    run(body())


def test_nothing_is_derived_from_a_sample_that_a_trainer_has_used(tmp_path: Path) -> None:
    async def body() -> None:
        life = branching(tmp_path)
        await life.admit(0)
        trunks = [sample(one, [0] * 3) for one in prompts(0)]
        for trunk in trunks:
            life.client.generated(trunk)
        life.step(trunks[:1])
        for _ in range(2):  # while others of the group are in flight, and when all have their fates
            with pytest.raises(FlowrlError, match="from 'g0/0', which 'trainer' has used already; derive them before"):
                await life.client.derive("g0/0", "branch", derived(trunks[0], 2), trainers=[POLICY])
            for trunk in trunks[1:]:
                life.client.lost(lost(trunk, "filtered", "no_spread"))
        life.close()
        assert audit(tmp_path).ok, str(audit(tmp_path))

    run(body())


@pytest.mark.parametrize("whole", [False, True], ids=["the rest in flight", "the whole group"])
def test_what_is_derived_from_a_lost_sample_is_lost_for_the_same_reason(tmp_path: Path, whole: bool) -> None:
    async def body() -> None:
        life = branching(tmp_path)
        await life.admit(0)
        life.client.lost(Tombstone("g0", -1 if whole else 0, "dropped", "given_up", "reward/0"))
        await life.client.derive("g0/0", "branch", derived(prompts(0)[0], 2), trainers=[POLICY])
        assert life.accounting.in_flight() == ({} if whole else {"g0": 0})
        life.close()
        query = "SELECT state, reason FROM samples JOIN derived USING (sample_id)"
        assert rows(tmp_path, query) == [("dropped", "given_up")] * 2
        assert audit(tmp_path).ok, str(audit(tmp_path))

    run(body())


def test_a_derived_sample_is_left_out_by_trainers_that_it_cannot_reach(tmp_path: Path) -> None:
    async def body() -> None:
        life = TwoTrainers(tmp_path)
        await life.client.admit("prompts/0", prompts(0))
        trunks = [sample(one, [0] * 4) for one in prompts(0)]
        (child,) = derived(trunks[0], 1)
        await life.client.derive(trunks[0].sample_id, "branch", [child], trainers=["actor"])
        branch = sample(child, [0] * 4)
        for one in (*trunks, branch):
            life.client.generated(one)
        life.client.step({"step": 1}, [Use.of(one, half(one)) for one in trunks], policy="critic")
        assert life.accounting.is_open(branch.sample_id)
        life.client.step({"step": 1}, [Use.of(one) for one in (*trunks, branch)], policy="actor")
        life.close()
        query = "SELECT trainer, state, reason FROM losses WHERE sample_id = 'g0/0/branch.0'"
        assert rows(tmp_path, query) == [("critic", "dropped", "not_routed")]
        assert audit(tmp_path).ok, str(audit(tmp_path))

    run(body())


def test_a_resumed_run_has_the_derived_samples_in_flight(tmp_path: Path) -> None:
    async def body() -> None:
        life = branching(tmp_path)
        await life.admit(0)
        children = derived(prompts(0)[1], 2)
        await life.client.derive("g0/1", "branch", children, trainers=[POLICY])
        life.client.lost(lost(children[0], "failed", "timeout"))
        life.accounting.close(orderly=False)
        again = branching(tmp_path, resume=True)
        assert again.accounting.is_open("g0/1/branch.1") and not again.accounting.is_open("g0/1/branch.0")
        await again.client.derive("g0/1", "branch", children, trainers=[POLICY])
        assert isinstance(again.accounting.tickets, Tickets) and again.accounting.tickets.num_open == 1
        again.close()
        states = rows(tmp_path, "SELECT state, reason FROM samples ORDER BY sample_id")
        assert states.count(("dropped", "run_end")) == 4 and states.count(("failed", "timeout")) == 1
        assert audit(tmp_path).ok, str(audit(tmp_path))

    run(body())


def test_the_same_token_trained_by_trunk_and_branch_is_refused_where_it_is_reported(tmp_path: Path) -> None:
    """The branch was asked for turn by turn, after a prefix of the trunk; its mask has the prefix's tokens as well."""

    async def body() -> None:
        life = branching(tmp_path)
        await life.admit(0)
        trunk = sample(prompts(0)[0], [0] * 4)
        life.client.generated(trunk)
        (child,) = derived(trunk, 1)
        await life.client.derive(trunk.sample_id, "branch", [child], trainers=[POLICY])
        right = sample(replace(child, token_ids=trunk.token_ids[:7]), [0] * 3)
        place = (child.sample_id, child.group_id, 0, 0, 0, 1)
        turn = Turn("r", *place, token_ids=right.token_ids[:7], max_tokens=3)
        arrays = (right.token_ids[7:], right.behavior_logprobs[7:], right.versions[7:])
        reply = Reply("r", *arrays, "stop", {}, "", 0, 0.0, 0.0, "generator/0")
        life.client.request(turn, reply)
        life.client.answered("generator/0", turn, reply)
        wrong = sample(child, [0] * 5)
        with pytest.raises(FlowrlError, match=r"marks 5 tokens after its first 5 as the policy's, but no reply"):
            life.client.asked(replace(wrong, parent_id=trunk.sample_id), resumed=False)
        life.client.answered("generator/0", turn, reply)
        life.close()

    run(body())


def test_a_sample_asked_turn_by_turn_is_booked_with_its_requests(tmp_path: Path) -> None:
    async def body() -> None:
        life = branching(tmp_path)
        await life.admit(0)
        trunks = [sample(one, [0] * 4) for one in prompts(0)]
        (child,) = derived(trunks[0], 1)
        await life.client.derive(trunks[0].sample_id, "branch", [child], trainers=[POLICY])
        branch = sample(replace(child, token_ids=trunks[0].token_ids[:7]), [0] * 3)
        turn = Turn("r", branch.sample_id, branch.group_id, 0, 0, 0, 1, token_ids=branch.token_ids[:7], max_tokens=3)
        arrays = (branch.token_ids[7:], branch.behavior_logprobs[7:], branch.versions[7:])
        reply = Reply("r", *arrays, "stop", {}, "", 0, 0.0, 0.0, "generator/0")
        life.client.request(turn, reply)
        life.client.answered("generator/0", turn, reply)
        for _ in range(2):
            life.client.asked(branch, resumed=False)
        for trunk in trunks:
            life.client.generated(trunk)
        life.step([*trunks, branch])
        life.close()
        assert rows(tmp_path, "SELECT prompt_tokens, response_tokens FROM samples WHERE member > 2") == [(7, 3)]
        assert audit(tmp_path).ok, str(audit(tmp_path))
        damage(tmp_path, "UPDATE spans SET digest = 'x' WHERE sample_id = 'g0/0/branch.0'")
        named = "trainer was fed 3 tokens of sample g0/0/branch.0 after its first 7 at step 1, and no request sampled"
        assert any(kind == "spans" and text.startswith(named) for kind, text in found(tmp_path))

    run(body())
