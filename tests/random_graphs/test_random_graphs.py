"""Random graphs hold what flowrl promises; and what watches over them can tell when they do not.

FLOWRL_RANDOM_SEED and FLOWRL_RANDOM_GRAPHS give other seeds and more of them; the long form is
`python -m tests.random_graphs --graphs 2000`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from flowrl import Cluster, Machine, check
from flowrl.runtime.ledger import accounting
from flowrl.runtime.ledger.ledger_client import LedgerClient
from flowrl.wire.tickets import Tickets
from tests.random_graphs.drawing import draw
from tests.random_graphs.graph import Config, graph
from tests.random_graphs.kinds import KINDS
from tests.random_graphs.life import live
from tests.random_graphs.nodes import Passing, Source
from tests.random_graphs.oracle import violations
from tests.random_graphs.record import Record
from tests.random_graphs.run import judge, smaller
from tests.random_graphs.shape import FEATURES

FIRST = int(os.environ.get("FLOWRL_RANDOM_SEED", "0"))
GRAPHS = int(os.environ.get("FLOWRL_RANDOM_GRAPHS", "40"))
FAST, AT_ONCE = 5, 5
DRAWN = 100
"""Graphs that are not run."""
PLAIN = "taps,routers,parted,second,late,later,wraps"
"""Left out where any graph will do."""


DERIVING = (6, 13, 16)
"""Seeds of graphs in which samples are derived: by several nodes, before a crash, where ways meet."""
STRETCHES = [
    pytest.param(first, marks=[pytest.mark.slow] if first >= FIRST + FAST else [])
    for first in range(FIRST, FIRST + GRAPHS, AT_ONCE)
]
"""First seeds: the fast tests have the first of them."""


@pytest.mark.parametrize("first", STRETCHES)
def test_random_graphs_hold_what_is_promised(first: int) -> None:
    verdicts = [judge(seed) for seed in range(first, first + AT_ONCE)]
    told = "\n".join(verdict.told() for verdict in verdicts if verdict.outcome == "failed")
    assert not told, f"seeds {first} to {first + AT_ONCE - 1}:\n{told}"


@pytest.mark.parametrize("seed", DERIVING)
def test_graphs_in_which_samples_are_derived_hold_what_is_promised(seed: int, tmp_path: Path) -> None:
    config = Config(seed)
    endings = live(config, tmp_path)
    assert endings[-1].record.derived, "nothing was derived"
    found = violations(config.shape, endings)
    assert not found, "\n".join([config.shape.describe(), *(f"{one.kind}: {one.text}" for one in found)])


# What watches over them


def _more_tickets() -> Any:
    begin = Tickets.__init__

    def init(tickets: Tickets, per_batch: int, ahead: int, *args: Any, **others: Any) -> None:
        begin(tickets, per_batch, ahead + 2, *args, **others)

    return mock.patch.object(Tickets, "__init__", init)


def _never_return_tickets() -> Any:
    return mock.patch.object(Tickets, "holds", lambda *_: None)


def _one_step_more() -> Any:
    begin = Tickets.__init__

    def init(tickets: Tickets, per_batch: int, *args: Any, max_groups: int | None = None, **others: Any) -> None:
        more = None if max_groups is None else max_groups + per_batch
        begin(tickets, per_batch, *args, max_groups=more, **others)

    return mock.patch.object(Tickets, "__init__", init)


def _tell_of_fewer_uses() -> Any:
    step = LedgerClient.step
    return mock.patch.object(
        LedgerClient, "step", lambda self, record, uses, **rest: step(self, record, uses[1:], **rest)
    )


def _lose_nothing() -> Any:
    return mock.patch.object(Passing, "fate", lambda *_: "pass")


def _see_twice() -> Any:
    see = Record.see
    return mock.patch.object(Record, "see", lambda self, *what: (see(self, *what), see(self, *what)))


def _tell_of_no_rollout() -> Any:
    return mock.patch.object(LedgerClient, "generated", lambda *_: None)


def _begin_with_the_first_prompt() -> Any:
    return mock.patch.object(Source, "load_state", lambda *_: None)


@contextmanager
def _by_the_record_alone(fault: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """Without what the engine itself finds of it, while the run goes on."""
    with (
        mock.patch.object(accounting, "require_fresh", lambda *_: None),
        mock.patch.object(accounting.Accounting, "describe_unbooked", lambda _: ""),
        fault(),
    ):
        yield


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (partial(_by_the_record_alone, _more_tickets), "bound"),
        (_more_tickets, "end"),
        (_never_return_tickets, "end"),
        (_one_step_more, "steps"),
        (partial(_by_the_record_alone, _tell_of_fewer_uses), "ledger"),
        (_tell_of_fewer_uses, "end"),
        (_tell_of_no_rollout, "audit"),
        (_lose_nothing, "fate"),
        (_see_twice, "seen"),
        (_begin_with_the_first_prompt, "end"),
    ],
)
def test_a_fault_is_found(fault: Callable[[], AbstractContextManager[Any]], kind: str) -> None:
    with fault():
        verdicts = [judge(seed, PLAIN) for seed in range(5)]
    assert kind in {violation.kind for verdict in verdicts for violation in verdict.violations}


def test_a_bound_that_the_last_step_breaks_is_what_the_run_ends_with() -> None:
    with _more_tickets():
        (violation,) = judge(3, PLAIN).violations
    assert "'actor' updates version 4 with tokens of" in violation.text


@pytest.mark.slow
def test_a_failure_is_told_with_its_graph_and_the_features_it_needs() -> None:
    with _see_twice():
        verdict = smaller(judge(1, PLAIN))
    assert {"crash", "taps", "hosts"} <= set(verdict.without.split(","))
    told = verdict.told()
    assert "prompts: source x1" in told and "seen: actor_group saw g0 2 times, g1 2 times, instead of (1, 1)" in told
    assert f"again: python -m tests.random_graphs --only 1 --without {verdict.without}" in told


def test_a_seed_is_one_graph_and_a_feature_left_out_changes_nothing_else() -> None:
    assert draw(5).describe() == draw.__wrapped__(5).describe()
    whole, less = draw(5), draw(5, ("crash", "interrupt"))
    assert (less.parts, less.links) == (whole.parts, whole.links)
    assert not any(life.end for life in less.lives)
    with pytest.raises(ValueError, match="no such features: tap; there are taps"):
        draw(5, ("tap",))


def test_every_kind_of_node_and_every_feature_is_drawn() -> None:
    shapes = [draw(seed) for seed in range(DRAWN)]
    assert {part.kind for shape in shapes for part in shape.parts.values()} == set(KINDS)
    for feature in FEATURES:
        assert any(draw(seed, (feature,)).describe() != draw(seed).describe() for seed in range(DRAWN)), feature


def test_graphs_are_legal() -> None:
    cluster = Cluster((Machine(tuple(range(8)), memory_bytes=64 << 30),))
    refused = [check(graph(Config(seed)), cluster).problems for seed in range(30)]
    assert refused == [()] * 30
