"""Declaring a graph: what `Graph` keeps, and the mistakes it can see at once."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from flowrl import Facts, Graph, GraphError, In, Node, Sample, check
from tests.graph.graph_nodes import MACHINE, Advantage, Evaluation, Generator, Idle, Prompts, Reward, Trainer, grpo


def test_add_returns_the_node_and_names_it() -> None:
    g = Graph("one")
    node = Prompts()
    assert g.add("prompts", node, replicas=3, cpus=0.5) is node
    assert node.name == "prompts"
    assert (g.placed["prompts"].replicas, g.placed["prompts"].cpus_each, g.placed["prompts"].gpus_each) == (3, 0.5, 0)


def test_the_class_gives_the_resources_that_add_does_not() -> None:
    g = Graph("one")
    g.add("generator", Generator())
    assert g.placed["generator"].cpus_each == 1
    assert g.placed["generator"].heavy
    g.add("reward", Reward())
    assert not g.placed["reward"].heavy


def test_edges_are_named_after_their_ports() -> None:
    assert [edge.name for edge in grpo().graph.edges] == [
        "prompts.prompts -> generator.prompts",
        "generator.rollouts -> reward.rollouts",
        "reward.scored -> advantage.scored",
        "advantage.groups -> batcher.groups",
        "batcher.batches -> trainer.batches",
        "trainer.weights -> generator.weights",
    ]


def test_a_good_graph_has_no_problems() -> None:
    parts = grpo()
    check(parts.graph, MACHINE).raise_for_problems()
    assert parts.problems == ()


def test_check_raises_with_all_problems() -> None:
    parts = grpo(staleness=-1, token_budget=10)
    with pytest.raises(GraphError) as error:
        check(parts.graph, MACHINE).raise_for_problems()
    assert len(error.value.problems) == 2
    assert str(error.value).count("\n- ") == 1


def mistake(act: Any) -> str:
    """What one wrong call leaves behind in an otherwise good graph."""
    parts = grpo()
    act(parts)
    (text,) = parts.graph.mistakes
    return str(text)


WRONG_CALLS = {
    "g.add was called twice with the name 'reward'": lambda p: p.graph.add("reward", Reward()),
    "already in a graph as 'reward'; create a second": lambda p: p.graph.add("reward_b", p.reward),
    "the node name 'My Node' is not allowed": lambda p: p.graph.add("My Node", Reward()),
    "the node name 'core' is not allowed": lambda p: p.graph.add("core", Reward()),
    "replicas=0; it needs at least 1": lambda p: p.graph.add("more", Reward(), replicas=0),
    "cpus=-1; it needs 0 or more": lambda p: p.graph.add("more", Reward(), cpus=-1),
    "got 'reward', which is not a Node": lambda p: p.graph.add("more", "reward"),
    "reward.rollouts, which is an In port, where an Out port was needed (reward has scored)": (
        lambda p: p.graph.connect(p.reward.rollouts, p.advantage.scored)
    ),
    "which is an In port, where a Serve port was needed (generator has requests)": (
        lambda p: p.graph.call(p.graph.add("evaluation", Evaluation()).generate, p.generator.prompts)
    ),
    "g.connect got a Reward where a port was needed": lambda p: p.graph.connect(p.reward, p.advantage.scored),
    "Trainer.weights, whose node is not in this graph": (
        lambda p: p.graph.latest(Trainer().weights, p.generator.weights)
    ),
    "g.together got a Advantage, which is not in this graph": lambda p: p.graph.together(
        p.reward, p.trainer, Advantage()
    ),
    "g.time_share got 1 node(s) and needs at least two": lambda p: p.graph.time_share(p.trainer),
    "dispatch='random'": lambda p: p.graph.connect(p.reward.scored, p.advantage.scored, dispatch="random"),
    "a graph has one admission": (lambda p: p.graph.admit(p.prompts.prompts, until=p.generator.weights, staleness=0)),
}


@pytest.mark.parametrize("expected", WRONG_CALLS, ids=lambda text: text[:40])
def test_a_wrong_call_is_told_and_does_not_raise(expected: str) -> None:
    assert expected in mistake(WRONG_CALLS[expected])


def test_a_misspelt_port_is_pythons_own_error() -> None:
    with pytest.raises(AttributeError, match="rollout"):
        _ = grpo().generator.rollout  # type: ignore[attr-defined]


def test_ports_belong_to_instances() -> None:
    class Two(Idle):
        samples: In[Sample]

    one, other = Two(), Two()
    assert one.samples is not other.samples
    assert one.samples.types == (Sample,)


class Declaring(Reward):
    """Declares these facts."""

    def __init__(self, **facts: Any) -> None:
        self._facts = facts

    def facts(self) -> Facts:
        return Facts(**self._facts)


class Locked(Reward):
    gang = "yes"  # type: ignore[assignment]


def more(parts: Any, node: Node, **placed: Any) -> None:
    """Add a node that stays unconnected."""
    parts.graph.ignore(parts.graph.add("more", node, **placed).rollouts)


def connected(parts: Any, capacity: Any) -> None:
    parts.graph.edges.pop(1)
    parts.graph.connect(parts.generator.rollouts, parts.reward.rollouts, capacity=capacity)


def admitted(parts: Any, **numbers: Any) -> None:
    parts.graph.admission = replace(parts.graph.admission, **numbers)


@pytest.mark.parametrize(
    ("act", "told"),
    [
        (lambda p: more(p, Reward(), replicas=2.0), "node more has replicas=2.0; it needs a whole number."),
        (lambda p: more(p, Reward(), replicas="2"), "node more has replicas='2'; it needs a whole number."),
        (lambda p: more(p, Reward(), replicas=True), "node more has replicas=True; it needs a whole number."),
        (lambda p: more(p, Reward(), cpus="1"), "node more has cpus='1'; it needs a number."),
        (lambda p: more(p, Reward(), gpus=math.nan), "node more has gpus=nan; it needs a number."),
        (lambda p: more(p, Locked()), "node more has gang='yes'; it needs True or False."),
        (
            lambda p: connected(p, "8"),
            "generator.rollouts -> reward.rollouts has capacity='8'; it needs a whole number, or None.",
        ),
        (
            lambda p: connected(p, 2.5),
            "generator.rollouts -> reward.rollouts has capacity=2.5; it needs a whole number, or None.",
        ),
        (lambda p: admitted(p, staleness="1"), "g.admit has staleness='1'; it needs a whole number."),
        (lambda p: admitted(p, look_ahead=1.5), "g.admit has look_ahead=1.5; it needs a whole number."),
        (
            lambda p: more(p, Declaring(group_size="4")),
            "node more has group_size='4'; it needs a whole number, or None.",
        ),
        (
            lambda p: more(p, Declaring(concurrency=2.5)),
            "node more has concurrency=2.5; it needs a whole number, or None.",
        ),
        (lambda p: more(p, Declaring(expected_s="1")), "node more has expected_s='1'; it needs a number, or None."),
        (lambda p: more(p, Declaring(drops="no")), "node more has drops='no'; it needs True or False."),
    ],
)
def test_a_value_of_another_kind_is_named(act: Any, told: str) -> None:
    parts = grpo()
    act(parts)
    assert told in check(parts.graph, MACHINE).problems


def test_facts_that_are_none_are_named() -> None:
    class Silent(Reward):
        def facts(self) -> Facts:
            return None  # type: ignore[return-value]

    parts = grpo()
    more(parts, Silent())
    assert "node more has facts() that return None; return Facts(...)." in check(parts.graph, MACHINE).problems
