"""What a run says once if a node idles and another placement would be faster."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from flowrl import Cluster
from flowrl.commands.tune.faster_placement import PlacementAdvice, faster_placement
from flowrl.commands.tune.tuned_graph import TunedGraph
from flowrl.graph.load import load_file

GRPO = load_file("grpo")


def advice(*options: str, cores: int = 4, fixed: tuple[str, ...] = ()) -> PlacementAdvice:
    cluster = Cluster.parse(f"1x cpus={cores} memory=64")
    return PlacementAdvice(TunedGraph(GRPO, GRPO.parse(options, prog="test"), cluster, fixed=frozenset(fixed)))


def lines(*busy: tuple[float, float], step_s: float = 10.0) -> Iterator[Mapping[str, Any]]:
    """Lines of metrics; `busy` has the busy seconds of generator and trainer in each step."""
    for number, (generator_s, trainer_s) in enumerate([(0.0, 0.0), *busy], start=1):
        yield {"time_s": number * step_s, "generator_busy_s": generator_s, "trainer_busy_s": trainer_s}


def told(one: PlacementAdvice, found: Iterator[Mapping[str, Any]]) -> list[str]:
    return [one.after_step(line) for line in found]


def test_after_three_idle_steps_a_faster_placement_is_named_once() -> None:
    said = told(advice(), lines(*[(2.0, 9.8)] * 6))
    assert [bool(text) for text in said] == [False, False, False, True, False, False, False]
    (text,) = filter(None, said)
    assert text.startswith("generator was idle for 80% of the last 3 steps, of 10 s each; with --")
    assert "--trainer.cpus 3" in text and "generator 1 x 1 core, trainer 1 x 3 cores" in text
    assert text.endswith("That is an estimate: flowrl tune measures it")


@pytest.mark.parametrize(
    "busy",
    [
        [(6.0, 9.8)] * 6,
        [*[(2.0, 9.8)] * 2, (6.0, 9.8), *[(2.0, 9.8)] * 2],
    ],
    ids=["busy for more than half", "not in three steps in a row"],
)
def test_nothing_is_said_of_nodes_that_work(busy: list[tuple[float, float]]) -> None:
    assert not any(told(advice(), lines(*busy)))


def test_nothing_is_said_where_no_placement_is_faster() -> None:
    options = ("--generator.cpus", "1", "--trainer.cpus", "3")
    fixed = ("generator.cpus", "trainer.cpus", "time_share", "staleness", "look_ahead")
    assert not any(told(advice(*options, fixed=fixed), lines(*[(2.0, 9.8)] * 6)))
    offline = load_file("sft")
    one = PlacementAdvice(TunedGraph(offline, offline.parse((), prog="test"), Cluster.parse("1x cpus=4 memory=64")))
    assert not any(told(one, lines(*[(2.0, 1.0)] * 6))), "one stage has no other to give cores to"


def test_a_step_that_took_no_time_is_left_out() -> None:
    one, same = advice(), itertools.repeat({"time_s": 3.0, "generator_busy_s": 0.0, "trainer_busy_s": 0.0}, 6)
    assert not any(told(one, iter(same)))


def test_steps_in_which_no_node_worked_tell_nothing() -> None:
    assert not any(told(advice(), lines(*[(0.0, 0.0)] * 6)))
    said = told(advice(), lines(*[(0.0, 0.0)] * 4, *[(2.0, 9.8)] * 4))
    assert [bool(text) for text in said].index(True) == 7, "the third step with work"
    found = advice()
    assert faster_placement(found._tuned, 10.0, {"generator": 0.0, "trainer": 0.0}) is None


def test_a_synchronous_step_has_all_cores_already_and_one_that_was_divided_is_told() -> None:
    synchronous = ("--staleness", "0")
    assert not any(told(advice(*synchronous, cores=2), lines(*[(4.0, 5.8)] * 6)))
    divided = (*synchronous, "--generator.cpus", "1", "--trainer.cpus", "1")
    (text,) = filter(None, told(advice(*divided, cores=2), lines(*[(4.0, 5.8)] * 6)))
    assert text.startswith("generator was idle for 60%") and "in turns, staleness 0" in text
