"""Stalls: who counts as deadlocked, how its cycle is named, and when a standstill is told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flowrl.runtime.driver.lookout import (
    STALL_S,
    Standstill,
    Topology,
    describe_reports,
    find_deadlocked,
    wait_for_cycle,
)

TOPOLOGY = Topology(
    producers={"b.inputs": ("a",), "a.replies": ("b",), "c.inputs": ("a",)},
    consumers={"a.items -> b.inputs": ("b",)},
    servers={"c.ask": ("b",)},
    ticket_holders=("trainer",),
)
CREDIT = ("credit", "a.items -> b.inputs", 9.0)


def report(
    node: str, *waits: tuple[str, str, float], moves: int = 0, alive: Sequence[str] = (), ended: bool = False
) -> dict[str, Any]:
    return {"replica_id": node, "moves": moves, "alive": list(alive), "waits": list(waits), "ended": ended}


def stuck(*reports: dict[str, Any], driver: Sequence[str] = ()) -> set[str]:
    return find_deadlocked(reports, TOPOLOGY, driver=driver)


def test_a_cycle_is_named_edge_by_edge() -> None:
    waits = {"a": [("credit", "a.items -> b.inputs")], "b": [("item", "b.inputs")]}
    assert wait_for_cycle(waits, TOPOLOGY) == [
        "a waits for credit of a.items -> b.inputs, held up by b",
        "b waits for item of b.inputs, held up by a",
    ]


def test_a_chain_is_no_cycle() -> None:
    assert wait_for_cycle({"a": [("credit", "a.items -> b.inputs")], "b": [("reply", "x")]}, TOPOLOGY) == []


def test_nodes_that_wait_for_each_other_are_deadlocked_whatever_the_others_do() -> None:
    a, b = report("a/0", CREDIT), report("b/0", ("item", "b.inputs", 9.0))
    busy = report("heart/0", alive=["Heart.beat (heart.py:1)"])
    assert stuck(a, b) == {"a/0", "b/0"}
    assert stuck(a, b, busy, driver=["a checkpoint"]) == {"a/0", "b/0"}


def test_what_one_of_them_waits_for_besides_may_free_them_all() -> None:
    b = report("b/0", ("item", "b.inputs", 9.0))
    for way_out in (("ticket", "a.items", 9.0), ("barrier", "the end of a checkpoint", 9.0)):
        a = report("a/0", CREDIT, way_out)
        assert stuck(a, b) == {"a/0", "b/0"}, "the driver has nothing to do either"
        assert stuck(a, b, driver=["a checkpoint"]) == set()
        assert stuck(a, b, report("c/0", alive=["a timer"])) == set(), "c may drop a group"
    assert stuck(report("a/0", CREDIT, ("reply", "a.unknown", 1.0)), b, driver=["set-up"]) == set()


def test_who_waits_for_one_that_works_is_not_deadlocked() -> None:
    b = report("b/0", ("item", "b.inputs", 9.0))
    assert stuck(report("a/0", CREDIT, alive=["a call in a thread"]), b) == set()
    assert stuck(report("a/0", CREDIT), report("a/1", alive=["a timer"]), b) == set(), "a's other replica sends too"
    assert stuck(report("a/0"), b) == set(), "of a node that names no wait nothing is known"
    assert stuck(report("b/0", alive=["x"]), report("c/0", ("reply", "c.ask", 1.0))) == set()


def test_nodes_that_have_ended_end_no_wait() -> None:
    b = report("b/0", ("item", "b.inputs", 9.0))
    assert stuck(report("a/0", ended=True), b) == {"b/0"}
    assert stuck(report("a/0", ended=True), report("b/0", ended=True)) == set()


def test_a_standstill_is_told_again_when_it_has_become_twice_as_long() -> None:
    still, busy = Standstill(), [report("trainer/0", moves=7, alive=["Trainer.run (trainer.py:9)"])]
    times = [0.0, STALL_S - 1, STALL_S, STALL_S + 5, 2 * STALL_S - 1, 2 * STALL_S, 3 * STALL_S, 4 * STALL_S]
    told = [still.look_for_standstill(busy, at_s) for at_s in times]
    assert told == [None, None, STALL_S, None, None, 2 * STALL_S, None, 4 * STALL_S]
    assert still.look_for_standstill([report("trainer/0", moves=8)], 5 * STALL_S) is None
    assert still.look_for_standstill([report("trainer/0", moves=8)], 5 * STALL_S + 1) is None


def test_who_tells_of_progress_does_not_stand_still() -> None:
    still, busy = Standstill(), [report("generator/0", moves=1, alive=["its set-up"])]
    assert still.look_for_standstill(busy, 0.0) is None
    still.note_move(STALL_S - 1)
    assert [still.look_for_standstill(busy, at_s) for at_s in (STALL_S, 2 * STALL_S - 2, 2 * STALL_S - 1)] == [
        None,
        None,
        STALL_S,
    ]


def test_a_cycle_is_of_nodes_that_do_nothing_else() -> None:
    """In a run that goes on, nodes wait for each other for moments, and one of them works."""
    b = report("b/0", ("item", "b.inputs", 0.0))
    assert describe_reports([report("a/0", CREDIT), b], TOPOLOGY).startswith("wait-for cycle:")
    assert describe_reports([report("a/0", CREDIT, alive=["a step"]), b], TOPOLOGY).startswith("every node:")
    assert describe_reports([report("a/0", CREDIT), report("a/1", alive=["a step"]), b], TOPOLOGY).startswith(
        "every node:"
    )


def test_what_each_node_does_is_told() -> None:
    text = describe_reports(
        [
            report("a/0", CREDIT),
            report("b/0", ("item", "b.inputs", 3.0), alive=["Judge.ask (judge.py:21)", "a timer"]),
            report("c/0", ended=True),
        ],
        TOPOLOGY,
    )
    assert text.splitlines()[-3:] == [
        "  a/0 waits: credit of a.items -> b.inputs for 9 s",
        "  b/0 works: Judge.ask (judge.py:21); a timer (waits: item of b.inputs for 3 s)",
        "  c/0 has ended",
    ]
