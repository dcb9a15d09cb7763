"""What `check` says of graphs that train groups again, and of groups that ask for others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from flowrl.graph.analysis.check import check
from flowrl.graph.analysis.plan import make_plan
from flowrl.graph.analysis.report import render_report
from flowrl.graph.graph import Graph
from flowrl.nodes.groups.replay import Replay
from tests.runtime.checkpoints.graphs_resumed import asking
from tests.runtime.ledger.graphs_proof import replayed


def build(**config: object) -> Graph:
    return replayed.graph(replayed.Config(**config))  # type: ignore[arg-type]


def with_correction(correction: str | None) -> Graph:
    graph = build()
    trainer = graph.nodes["trainer"]
    facts = replace(trainer.facts(), correction=correction)
    trainer.facts = lambda: facts  # type: ignore[method-assign]
    return graph


def masking() -> Graph:
    graph = build()
    assert graph.admission is not None
    graph.admission = replace(graph.admission, on_limit="mask")
    return graph


def unbounded() -> Graph:
    graph = build()
    graph.admission = None
    return graph


def test_the_age_of_reuse_is_added_to_the_bound_and_printed() -> None:
    graph = build(staleness=2, replay=Replay(groups=1, max_uses=5, max_age=4))
    numbers = make_plan(graph).numbers
    assert (numbers.max_staleness, numbers.max_uses, numbers.max_reused_age) == (2, 5, 6)
    text = render_report(check(graph))
    assert "max_staleness     2, replay up to 4: no token older than 6" in text
    assert "trains a group up to 5 times; the loss weighs what older policies sampled by its weights" in text
    described = make_plan(graph).to_json()
    assert [described[name] for name in ("max_staleness", "max_uses", "max_reused_age")] == [2, 5, 6]


def test_a_graph_without_replay_has_no_numbers_of_it() -> None:
    numbers = make_plan(build(replay=Replay())).numbers
    assert (numbers.max_uses, numbers.max_reused_age) == (None, None)
    assert "replay up to" not in render_report(check(build(replay=Replay())))


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (lambda: with_correction(""), "takes every token for one of the newest policy, which in a reuse is up to 4"),
        (masking, 'on_limit="mask" masks every token older than the staleness, and a reuse is older'),
        (unbounded, "without g.admit nothing bounds their age, so reuse cannot be proven"),
    ],
)
def test_what_cannot_be_proven_is_refused_in_words_that_say_reuse(made: Callable[[], Graph], text: str) -> None:
    problems = check(made()).problems
    assert any(text in problem and "reuse" in problem for problem in problems), problems


def test_a_loss_that_does_not_depend_on_the_policy_that_sampled_may_reuse() -> None:
    assert check(with_correction(None)).problems == ()


def test_the_tickets_that_are_kept_are_told() -> None:
    report = check(asking.graph(asking.Config()))
    assert report.problems == ()
    assert "each group in flight keeps up to 2 tickets for the groups that its samples ask for" in render_report(report)
