"""Stalls: a deadlock is told from work, and its cycle is named edge by edge."""

from __future__ import annotations

from typing import Any

from flowrl.runtime.stall import STALL_S, Topology, Watch, wait_for_cycle

TOPOLOGY = Topology(
    producers={"b.inputs": ("a",), "a.replies": ("b",)},
    consumers={"a.items -> b.inputs": ("b",)},
    ticket_holders=("trainer",),
)


def report(
    node: str, *, moves: int, working: int = 0, waits: tuple[tuple[str, str, float], ...] = ()
) -> dict[str, Any]:
    return {"node": node, "moves": moves, "working": working, "waits": list(waits)}


def test_a_cycle_is_named_edge_by_edge() -> None:
    waits = {"a": [("credit", "a.items -> b.inputs")], "b": [("item", "b.inputs")]}
    assert wait_for_cycle(waits, TOPOLOGY) == [
        "a waits for credit of a.items -> b.inputs, held up by b",
        "b waits for item of b.inputs, held up by a",
    ]


def test_a_chain_is_no_cycle() -> None:
    assert wait_for_cycle({"a": [("credit", "a.items -> b.inputs")], "b": [("reply", "x")]}, TOPOLOGY) == []


def test_two_looks_without_work_or_movement_are_a_deadlock() -> None:
    watch = Watch(TOPOLOGY)
    still = [report("a/0", moves=3, waits=(("item", "a.replies", 9.0),)), report("b/0", moves=4)]
    assert watch.look(still, 0.0) == ("", "")
    assert watch.look(still, 5.0) == ("", "")
    verdict, text = watch.look(still, 10.0)
    assert verdict == "deadlock"
    assert "a/0 waits: item of a.replies for 9 s" in text


def test_movement_clears_the_suspicion() -> None:
    watch = Watch(TOPOLOGY)
    for moves in (1, 1, 2, 2, 3):
        assert watch.look([report("a/0", moves=moves)], 0.0)[0] == ""


def test_long_work_is_a_stall_told_once() -> None:
    watch = Watch(TOPOLOGY)
    busy = [report("trainer/0", moves=7, working=1)]
    assert watch.look(busy, 0.0)[0] == ""
    assert watch.look(busy, STALL_S - 1)[0] == ""
    assert watch.look(busy, STALL_S + 1)[0] == "stall"
    assert watch.look(busy, STALL_S + 6)[0] == ""
