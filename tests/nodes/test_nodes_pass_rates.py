"""The choices of a curriculum follow their definition, and cost no more where many prompts are known."""

from __future__ import annotations

import random
import sys
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl.nodes import Curriculum, curriculum
from flowrl.nodes.curriculum import AT, HEARD, RATE, GroupOutcome, PassRates, RisingQueue, WeightedDraw


@given(st.lists(st.integers(0, 8), min_size=1, max_size=20))
def test_a_number_is_drawn_exactly_as_often_as_its_weight_says(eighths: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(curriculum, "UNIT", 8)
        draw = WeightedDraw(len(eighths))
        for number, weight in enumerate(eighths):
            draw.set_weight(number, weight / 8)
        every = [draw.draw_number(SimpleNamespace(randrange=lambda total, at=at: at)) for at in range(sum(eighths))]  # type: ignore[arg-type]
    assert every == [number for number, weight in enumerate(eighths) for _ in range(weight)]
    if not sum(eighths):
        assert draw.draw_number(random.Random(0)) is None


@given(st.lists(st.tuples(st.integers(0, 6), st.floats(0, 0.25)), max_size=30), st.randoms())
def test_sums_do_not_depend_on_the_order_of_changes(changes: list[tuple[int, float]], rng: random.Random) -> None:
    first, again = WeightedDraw(7), WeightedDraw(7)
    for number, weight in changes:
        first.set_weight(number, weight)
    last = list(dict(changes).items())
    rng.shuffle(last)
    for number, weight in last:
        again.set_weight(number, weight)
    assert first._sums == again._sums
    assert all((weight > 0) == (first._weights[number] > 0) for number, weight in last)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), max_size=60))
def test_the_first_of_a_queue_is_the_lowest_that_is_there(steps: list[tuple[int, int]]) -> None:
    keys: dict[int, int | None] = dict.fromkeys(range(6))
    queue = RisingQueue(lambda number: None if (key := keys[number]) is None else (key, number))
    highest = Counter[int]()
    for number, step in steps:
        highest[number] += step
        keys[number] = highest[number] if step else None
        queue.put_number(number)
        there = [(key, number) for number, key in keys.items() if key is not None]
        assert queue.first_number() == (min(there)[1] if there else None)
        assert len(queue._heap) <= len(keys)


def history(rates: PassRates, rng: random.Random, *, groups: int, names: list[str]) -> None:
    """Groups of rows, some of them chosen; their outcomes come late, in any order, and not all."""
    late: list[GroupOutcome] = []
    for _ in range(groups):
        found = rates.choose_row()
        row = rng.randrange(len(names)) if found is None else found.row
        rates.note_asked(row)
        rewards = tuple(float(rng.random() < (row % 5) / 4) for _ in range(4))
        late.append(GroupOutcome(names[row], rates.num_visits(row) - 1, rewards))
        if len(late) > 6:
            rates.note_outcome(late.pop(rng.randrange(len(late))))


@pytest.mark.parametrize("levels", [None, 3])
@pytest.mark.parametrize("seed", range(3))
def test_choices_are_those_of_the_definition(levels: int | None, seed: int) -> None:
    names = [f"p{index}" for index in range(30)]
    buckets = None if levels is None else [f"level {index % levels}" for index in range(30)]
    settings = Curriculum(chosen=0.4, replayed=0.3, replay_after=5)
    rates, rng = PassRates(settings, names, buckets, seed=seed), random.Random(seed)
    for _ in range(20):
        history(rates, rng, groups=10, names=names)
        again = PassRates(settings, names, buckets, seed=seed)
        again.load_state(rates.state())
        assert again.choose_row() == rates.choose_row() and again.num_at(0.0) == rates.num_at(0.0)
        check_against_definition(rates, buckets or names)
        check_against_definition(again, buckets or names)


def check_against_definition(rates: PassRates, names: list[str]) -> None:
    free = {row for row in range(len(names)) if not rates._is_open(row)}
    inner: Any = rates._buckets
    for number, name in enumerate(inner.names):
        rows = [row for row in range(len(names)) if names[row] == name and row in free]
        rate = inner.pass_rate(number)
        assert inner.learnability(number) == (rate * (1 - rate) if rows else 0)
        assert (rates._draw._weights[number] > 0) == (inner.learnability(number) > 0)
        if rows:
            turn = inner.next_row(number)
            assert turn in rows and rates.num_visits(turn) == min(map(rates.num_visits, rows))
    waiting = [
        (known[AT], name)
        for name, known in rates._known.items()
        if known[HEARD] >= 0 and known[RATE] == 0 and rates._rows[name] in free
    ]
    first = rates._unsolved_rows.first_number()
    assert first == (rates._rows[min(waiting)[1]] if waiting else None)
    for rate in (0.0, 1.0):
        assert rates.num_at(rate) == sum(k[HEARD] >= 0 and k[RATE] == rate for k in rates._known.values())


def lines_of(call: Any) -> int:
    """How many lines of Python `call` executes."""
    count = 0

    def trace(frame: Any, event: str, arg: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def costs(known: int, levels: int | None) -> int:
    """Lines of 60 groups, each with choice and outcome, where so many prompts are known; as many again are not."""
    names = [f"p{index}" for index in range(2 * known)]
    buckets = None if levels is None else [f"level {index % levels}" for index in range(2 * known)]
    rates = PassRates(Curriculum(chosen=0.5, replayed=0.4, replay_after=1), names, buckets, seed=1)
    rng = random.Random(1)
    for row in range(known):
        rates.note_asked(row)
        rates.note_outcome(GroupOutcome(names[row], 0, tuple(float(rng.random() < row % 3 / 2) for _ in range(4))))
    return lines_of(lambda: history(rates, rng, groups=60, names=names))


@pytest.mark.parametrize("levels", [None, 3])
def test_a_group_costs_hardly_more_where_ten_thousand_prompts_are_known(levels: int | None) -> None:
    few, many = costs(10, levels), costs(10_000, levels)
    assert many < few + 60 * 8 * 14, "each of some eight steps up or down a tree has log2(20,000) ≈ 14 levels"
