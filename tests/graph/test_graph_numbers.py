"""Derived numbers: tickets, window and bound by their formulas, capacities and sizes by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl.graph.analysis.numbers import (
    Numbers,
    derive_numbers,
    in_flight,
    lane_capacity,
    longest_asked,
    message_bytes,
)
from flowrl.graph.node import Facts
from flowrl.messages import Batch, Group, Sample
from tests.graph.graph_nodes import Evaluation, grpo


class LimitedEvaluation(Evaluation):
    def __init__(self, most: int) -> None:
        self.most = most

    def facts(self) -> Facts:
        return Facts(longest_context=self.most)


@pytest.mark.parametrize(
    ("groups", "staleness", "look_ahead", "ahead", "tickets", "bound"),
    [
        (8, 0, 1, 0, 8, 0),
        (8, 1, 1, 1, 16, 1),
        (8, 4, 1, 4, 40, 4),
        (8, 1, 9, 0, 8, 0),  # S = 0: whatever is overtaken is of the same batch
        (8, 2, 9, 1, 16, 2),
        (8, 2, 2, 1, 16, 2),
        (1, 3, 3, 1, 2, 3),
    ],
)
def test_tickets_and_bound(groups: int, staleness: int, look_ahead: int, ahead: int, tickets: int, bound: int) -> None:
    numbers = derive_numbers(grpo(groups=groups, staleness=staleness, look_ahead=look_ahead).graph)
    assert (numbers.ahead, numbers.tickets, numbers.window, numbers.max_staleness) == (
        ahead,
        tickets,
        look_ahead,
        bound,
    )


@given(st.integers(1, 64), st.integers(0, 16), st.integers(1, 256))
def test_the_bound_is_never_above_what_was_declared(groups: int, staleness: int, look_ahead: int) -> None:
    numbers = derive_numbers(grpo(groups=groups, staleness=staleness, look_ahead=look_ahead).graph)
    assert numbers.ahead == staleness - math.ceil((look_ahead - 1) / groups)
    assert numbers.tickets == (numbers.ahead + 1) * groups
    assert numbers.max_staleness is not None
    assert numbers.max_staleness == (staleness if numbers.ahead > 0 else 0)


def test_mask_has_no_window() -> None:
    numbers = derive_numbers(grpo(staleness=2, on_limit="mask").graph)
    assert (numbers.ahead, numbers.tickets, numbers.window, numbers.max_staleness) == (2, 12, 0, 2)


def test_without_admission_there_are_no_tickets() -> None:
    numbers = derive_numbers(grpo(admit=False).graph)
    assert (numbers.tickets, numbers.window, numbers.max_staleness) == (None, None, None)
    assert (numbers.group_size, numbers.groups_per_batch, numbers.longest_sample) == (4, 4, 192)


def test_in_flight_counts_what_a_message_holds() -> None:
    numbers = Numbers(group_size=4, groups_per_batch=8, ahead=1, tickets=16)
    assert [in_flight(kind, numbers) for kind in (Sample, Group, Batch)] == [64, 16, 2]
    assert in_flight(Sample, Numbers()) is None


def test_derived_capacities() -> None:
    parts = grpo(group_size=4, groups=4, staleness=1)
    parts.graph.call(parts.graph.add("evaluation", Evaluation()).generate, parts.generator.requests)
    numbers = derive_numbers(parts.graph)
    assert {edge.name.split(" ")[0]: lane_capacity(parts.graph, edge, numbers) for edge in parts.graph.edges} == {
        "prompts.prompts": 32,
        "generator.rollouts": 32,
        "reward.scored": 32,
        "advantage.groups": 4,
        "batcher.batches": 2,  # as declared
        "trainer.weights": 1,
        "evaluation.generate": 16,  # what the generator works on at a time
    }


def test_the_longest_prompt_is_known_if_all_who_ask_say_theirs() -> None:
    parts = grpo()
    assert longest_asked(parts.graph, "generator") == 64
    assert longest_asked(parts.graph, "prompts") is None
    evaluation = parts.graph.add("evaluation", LimitedEvaluation(100))
    parts.graph.call(evaluation.generate, parts.generator.requests)
    assert longest_asked(parts.graph, "generator") == 100
    assert derive_numbers(parts.graph).longest_sample == 192, "held-out prompts are not trained on"
    parts.graph.call(parts.graph.add("any", Evaluation()).generate, parts.generator.requests)
    assert longest_asked(parts.graph, "generator") is None


@pytest.mark.parametrize(("group_size", "groups", "expected"), [(4, 1, 4), (2, 8, 16), (64, 8, 128)])
def test_a_lane_holds_two_groups_but_no_more_than_is_in_flight(group_size: int, groups: int, expected: int) -> None:
    graph = grpo(group_size=group_size, groups=groups, staleness=0).graph
    assert lane_capacity(graph, graph.edges[0], derive_numbers(graph)) == expected


def test_message_sizes_follow_from_the_token_lengths() -> None:
    graph = grpo().graph
    numbers = derive_numbers(graph)
    sizes = [message_bytes(graph, edge, numbers) for edge in graph.edges]
    sample, trained = 1024 + 24 * 192, 1024 + 32 * 192
    assert sizes == [1024 + 8 * 192, sample, sample, 4 * trained, 16 * trained, 64 << 10]
