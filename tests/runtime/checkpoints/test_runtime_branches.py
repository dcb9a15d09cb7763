"""Branches, routers, joins and several trainers: what the ledger says is what has happened. No Ray, real driver."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flowrl.errors import FlowrlError, GraphError
from flowrl.graph.analysis.check import check
from flowrl.graph.load import load_file
from flowrl.testing import EIGHT_CORES, GraphRun, run_graph
from tests.rigs.in_process import looking_every

WAYS = Path(__file__).parent / "graphs_branches" / "ways.py"


def ways(tmp_path: Path, kind: str, *, steps: int | None = None, **config: Any) -> GraphRun:
    return run_graph(WAYS, tmp_path / "run", {"kind": kind} | config, steps=steps, timeout_s=40)


def seen() -> list[Any]:
    """What the nodes of the last run told."""
    modules = [m for m in sys.modules.values() if str(getattr(m, "__file__", "")) == str(WAYS)]
    return list(modules[-1].SEEN)


@pytest.fixture(autouse=True)
def looked_at() -> Iterator[None]:
    with looking_every(1.0):
        yield


@pytest.fixture(autouse=True)
def forget() -> None:
    for module in list(sys.modules.values()):
        if str(getattr(module, "__file__", "")) == str(WAYS):
            module.SEEN.clear()


def used_by(ran: GraphRun) -> dict[str, int]:
    return dict(ran.rows("SELECT trainer, COUNT(*) FROM uses GROUP BY trainer"))


@pytest.mark.parametrize("kind", ["tap", "grouped_tap"])
def test_what_a_tap_drops_is_nothing_to_sample_ticket_and_steps(tmp_path: Path, kind: str) -> None:
    ran = ways(tmp_path, kind, steps=12)
    assert ran.steps == list(range(1, 13))
    assert ran.states() == {"trained": 48}
    assert max(record["staleness_max"] for record in ran.view.records) <= 1
    assert ran.rows("SELECT state, COUNT(*) FROM tickets GROUP BY state") == [("trained", 24)]
    assert ran.audit().ok, str(ran.audit())


def test_a_tap_that_groups_hears_of_every_group(tmp_path: Path) -> None:
    ways(tmp_path, "grouped_tap", num_groups=6)
    assert seen() == []  # the filter before it keeps nothing: every member is lost, and no group comes


@pytest.mark.parametrize("slow_s", [0.0, 0.05])
def test_a_trainer_that_leaves_groups_out_holds_nobody_up(tmp_path: Path, slow_s: float) -> None:
    ran = ways(tmp_path, "two", steps=8, slow_s=slow_s)
    assert ran.steps == list(range(1, 9))
    assert ran.states() == {"trained": 32}
    left_out = ran.rows("SELECT COUNT(*), MIN(reason) FROM losses WHERE trainer = 'value_trainer'")[0]
    assert left_out[1] == "unsure" and used_by(ran) == {"trainer": 32, "value_trainer": 32 - left_out[0]}
    assert ran.rows("SELECT MAX(version - oldest_version) FROM uses")[0][0] <= 1
    assert ran.audit().ok, str(ran.audit())


def test_what_the_main_trainer_leaves_out_is_admitted_again_and_trained_by_the_other(tmp_path: Path) -> None:
    ran = ways(tmp_path, "two", steps=8, swapped=True)
    assert ran.steps == list(range(1, 9))
    used = used_by(ran)
    assert used["trainer"] == 32 and used["value_trainer"] > 32
    assert ran.states() == {"trained": used["value_trainer"]}


def test_each_of_two_trainers_gets_the_groups_that_are_sent_to_it(tmp_path: Path) -> None:
    ran = ways(tmp_path, "routed_groups", num_groups=20)
    assert used_by(ran) == {"trainer": 20 - 2, "value_trainer": 20 - 2}  # two groups of each lost a member
    assert ran.states() == {"trained": 36, "failed: no_answer": 4}
    reasons = ran.rows("SELECT reason, trainer, COUNT(*) FROM losses GROUP BY 1, 2 ORDER BY 1, 2")
    assert reasons == [
        ("no_answer", "trainer", 4),
        ("no_answer", "value_trainer", 4),
        ("not_routed", "trainer", 18),
        ("not_routed", "value_trainer", 18),
    ]


def test_losses_are_told_through_messages_of_a_users_own(tmp_path: Path) -> None:
    ran = ways(tmp_path, "wrapped", size=4, num_groups=8)
    assert ran.states() == {"trained": 28, "failed: no_verdict": 4}
    assert used_by(ran) == {"trainer": 28}
    assert ran.audit().ok, str(ran.audit())


@pytest.mark.parametrize("size", [1, 2, 4])
def test_ways_that_meet_again_bring_each_sample_once(tmp_path: Path, size: int) -> None:
    ran = ways(tmp_path, "router", size=size, num_groups=40)
    assert ran.states() == {"trained": 40 * size - 8, "failed: no_answer": 8}
    assert ran.audit().ok, str(ran.audit())


def test_a_sample_that_comes_by_two_ways_at_once_is_an_error_of_the_graph(tmp_path: Path) -> None:
    ran = run_graph(WAYS, tmp_path / "run", {"kind": "both"}, steps=3, timeout_s=40, must_succeed=False)
    assert "collect.samples received member" in str(ran.error) and "over two paths" in str(ran.error)


def test_what_one_way_to_a_join_loses_is_lost(tmp_path: Path) -> None:
    ran = ways(tmp_path, "joined", num_groups=12)
    assert ran.states() == {"trained": 20, "filtered: unsure": 4}
    assert ran.audit().ok, str(ran.audit())


def test_what_is_sent_and_then_fails_goes_its_way(tmp_path: Path) -> None:
    ran = ways(tmp_path, "after_send", num_groups=10)
    assert ran.states() == {"trained": 20}
    assert ran.audit().ok, str(ran.audit())


def test_tokens_that_a_node_masks_are_neither_trained_nor_stale(tmp_path: Path) -> None:
    ran = ways(tmp_path, "masked", num_groups=8, staleness=0)
    assert ran.states() == {"trained": 14, "filtered: masked": 2}
    sums = "SELECT SUM(trained_tokens), SUM(stale_tokens), SUM(masked_tokens), SUM(response_tokens) FROM samples"
    assert ran.rows(sums) == [(14 * 7, 0, 14 + 2 * 8, 16 * 8)]
    assert ran.audit().ok, str(ran.audit())


def test_members_that_a_group_is_made_from_and_does_not_hold_are_left_out(tmp_path: Path) -> None:
    ran = ways(tmp_path, "best_two", size=4, num_groups=6)
    assert ran.states() == {"trained": 12, "filtered: left_out": 12}
    assert ran.audit().ok, str(ran.audit())


@pytest.mark.parametrize("swapped", [False, True])
def test_what_one_port_leaves_out_is_lost_behind_that_port_only(tmp_path: Path, swapped: bool) -> None:
    ran = ways(tmp_path, "best_and_all", size=4, num_groups=6, swapped=swapped)
    assert used_by(ran) == {"trainer": 12, "value_trainer": 24}
    assert ran.rows("SELECT trainer, reason, COUNT(*) FROM losses GROUP BY 1, 2") == [("trainer", "left_out", 12)]
    assert ran.states() == {"trained": 24}
    assert ran.audit().ok, str(ran.audit())


def test_a_take_with_a_time_limit_loses_nothing(tmp_path: Path) -> None:
    ran = ways(tmp_path, "impatient", num_groups=12)
    assert ran.states() == {"trained": 24}
    assert "late" in seen()


def test_members_of_one_number_are_refused_when_they_are_admitted(tmp_path: Path) -> None:
    ran = run_graph(WAYS, tmp_path / "run", {"kind": "twins"}, steps=3, timeout_s=40, must_succeed=False)
    assert "admitted group 'group0' with 2 members that have the number 0" in str(ran.error)


@pytest.mark.parametrize("num_groups", [2, 0])
def test_a_trainer_that_books_one_rank_of_its_gang_is_told(tmp_path: Path, num_groups: int) -> None:
    """At the end of its data; and where the tickets that do not return stop the run, beside the deadlock."""
    config = {"kind": "forgetful", "ranks": 2, "num_groups": num_groups}
    error = run_graph(WAYS, tmp_path / "run", config, timeout_s=40, must_succeed=False).error
    assert isinstance(error, FlowrlError)
    assert str(error).startswith("trainer 'trainer' finished batches with ")
    assert "in a gang those of all ranks" in str(error)
    assert ("the run is deadlocked" in str(error)) is (not num_groups)


def test_the_end_of_the_data_can_be_resumed(tmp_path: Path) -> None:
    """Five groups, two a batch: the last one waits alone while a checkpoint is made."""
    ran = run_graph(WAYS, tmp_path / "run", {"num_groups": 5, "per_batch": 2}, save_every=1, keep=0)
    assert ran.steps == [1, 2, 3]
    for last in (1, 2):
        killed = Path(shutil.copytree(tmp_path / "run", tmp_path / f"killed-{last}"))
        for path in (killed / "checkpoints").iterdir():
            if int(path.name[5:]) > last:
                shutil.rmtree(path)
        config = {"num_groups": 5, "per_batch": 2}
        again = run_graph(WAYS, killed, config, resume=True, save_every=1)
        assert again.steps == list(range(last + 1, 4))
        assert again.states() == {"trained": 10}
        assert again.audit().ok, str(again.audit())


# What the check says


def problems(**config: Any) -> tuple[str, ...]:
    loaded = load_file(WAYS)
    return check(loaded.build(loaded.config_type(**config)), EIGHT_CORES).problems


def test_a_mask_has_no_meaning_for_a_trainer_of_other_batches() -> None:
    (problem,) = problems(kind="two", on_limit="mask")
    assert problem.startswith("value_trainer trains on other batches than trainer") and 'on_limit="wait"' in problem


def test_tickets_that_two_trainers_can_hold_between_them_are_too_few() -> None:
    (problem,) = problems(kind="two", staleness=0)
    assert "trainer and value_trainer train on different batches and can hold 2 groups" in problem
    assert "there are only 2 tickets" in problem and "raise staleness by 1" in problem
    assert problems(kind="two", staleness=0, per_batch=1) == ()


def test_the_graphs_of_these_tests_are_legal() -> None:
    for kind in ("plain", "tap", "grouped_tap", "two", "routed_groups", "wrapped", "router", "joined", "masked"):
        assert problems(kind=kind) == (), kind
    with pytest.raises(GraphError):
        loaded = load_file(WAYS)
        check(loaded.build(loaded.config_type(staleness=-1)), EIGHT_CORES).raise_for_problems()


def test_ways_that_were_joined_are_one_and_groups_of_two_ways_are_two() -> None:
    loaded = load_file(WAYS)
    graph = loaded.build(loaded.config_type(kind="joined"))
    second = graph.add("second", loaded.module.Collect(2))
    meet, batcher = graph.nodes["meet"], graph.nodes["batcher"]
    graph.connect(meet.ports["out"], second.samples)  # type: ignore[arg-type]
    graph.connect(second.groups, batcher.ports["groups"])  # type: ignore[arg-type]
    (problem,) = check(graph, EIGHT_CORES).problems
    assert "batcher.groups receives every message of meet.out 2 times" in problem


@pytest.mark.parametrize("swapped", [False, True])
def test_trainers_of_different_batches_are_saved_and_resumed_each_at_its_own_version(
    tmp_path: Path, swapped: bool
) -> None:
    config = {"kind": "two", "swapped": swapped, "ranks": 2}
    first = run_graph(WAYS, tmp_path / "run", config, steps=6, save_every=2)
    made = dict(first.rows("SELECT trainer, MAX(step) FROM uses GROUP BY trainer"))
    assert made["trainer"] == 6 and made["value_trainer"] != 6
    again = run_graph(WAYS, tmp_path / "run", config, steps=12, save_every=2, resume=True)
    assert again.steps == list(range(7, 13))
    for trainer in ("trainer", "value_trainer"):
        steps = [step for (step,) in again.rows("SELECT DISTINCT step FROM uses WHERE trainer = ? ORDER BY 1", trainer)]
        assert steps == list(range(1, len(steps) + 1))
    assert again.rows("SELECT MAX(version - oldest_version) FROM uses")[0][0] <= 1


def test_a_group_that_is_given_up_ends_its_members_wherever_they_are(tmp_path: Path) -> None:
    ran = ways(tmp_path, "gives_up", size=3, num_groups=9)
    assert seen() == ["group1", "group4", "group7"], "the generator works on them until they are cancelled"
    assert ran.states() == {"trained": 18, "filtered: hopeless": 9}
    assert ran.audit().ok, str(ran.audit())


def test_a_group_that_another_branch_may_want_is_not_given_up(tmp_path: Path) -> None:
    config = {"kind": "gives_up", "size": 3, "beside": True}
    ran = run_graph(WAYS, tmp_path / "run", config, steps=3, timeout_s=40, must_succeed=False)
    assert "trainer can still receive samples of this group over branches that do not pass this node" in str(ran.error)
