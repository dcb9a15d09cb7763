"""What `flowrl check` derives from nodes that derive samples, and what it refuses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from flowrl import Facts, In, Out, Sample
from flowrl.graph.analysis.branches import Branches, PortPlan
from flowrl.graph.analysis.check import check
from flowrl.graph.analysis.plan import Plan, make_plan
from flowrl.graph.analysis.report import number_lines
from tests.graph.graph_nodes import MACHINE, Advantage, Grpo, Idle, JoinedAdvantage, Teacher, grpo


class Branching(Idle):
    rollouts: In[Sample]
    done: Out[Sample]

    def __init__(self, derives: Mapping[str, int], **facts: Any) -> None:
        self.stated = {"derives": derives, **facts}

    def facts(self) -> Facts:
        return Facts(**self.stated)


def ports_of(plan: Plan) -> dict[str, PortPlan]:
    return {port.name: port for port in plan.ports}


def branching(derives: Mapping[str, int] | None = None, replicas: int = 1, **facts: Any) -> Grpo:
    """The usual graph with a node between generator and reward."""
    parts = grpo(groups=2)
    node = Branching({"branch": 3} if derives is None else derives, **facts)
    parts.graph.add("branching", node, replicas=replicas)
    parts.cut(parts.generator.rollouts)
    parts.graph.connect(parts.generator.rollouts, node.rollouts)
    parts.graph.connect(node.done, parts.reward.rollouts)
    return parts


def test_groups_lanes_bytes_and_samples_in_flight_count_what_may_be_derived() -> None:
    parts, plain = branching(), grpo(groups=2)
    assert parts.problems == ()
    plan, without = make_plan(parts.graph, MACHINE), make_plan(plain.graph, MACHINE)
    numbers = plan.numbers
    assert (numbers.group_size, numbers.most_members, numbers.samples_in_flight) == (4, 16, 4 * 16)
    assert (numbers.tickets, numbers.window) == (without.numbers.tickets, without.numbers.window)
    members = {name: port.members for name, port in ports_of(plan).items()}
    assert (members["branching.rollouts"], members["reward.rollouts"], members["advantage.scored"]) == (1, 4, 4)
    edges, before = ({edge.name: edge for edge in one.edges} for one in (plan, without))
    name = "advantage.groups -> batcher.groups"
    assert edges[name].message_bytes == 4 * before[name].message_bytes
    name = "reward.scored -> advantage.scored"
    assert edges[name].retained_bytes == 4 * before[name].retained_bytes and edges[name].capacity == 32
    assert plan.to_json()["derives"] == {"branch": 3} and without.to_json()["derives"] == {}
    assert dict(number_lines(plan))["derives"] == "branch: 3 (up to 16 members in a group)"
    assert "derives" not in dict(number_lines(without))


def test_what_is_derived_from_derived_samples_multiplies() -> None:
    parts = branching({"branch": 1, "twig": 1})
    again = parts.graph.add("again", Branching({"leaf": 2}))
    parts.cut(parts.reward.scored)
    second = parts.graph.add("second", Teacher())
    parts.graph.edges = [edge for edge in parts.graph.edges if edge.into is not parts.reward.rollouts]
    parts.graph.connect(parts.graph.nodes["branching"].ports["done"], again.rollouts)  # type: ignore[arg-type]
    parts.graph.connect(again.done, parts.reward.rollouts)
    parts.graph.connect(parts.reward.scored, parts.advantage.scored)
    parts.graph.connect(parts.reward.scored, second.rollouts)  # type: ignore[arg-type]
    parts.graph.ignore(second.rated)
    assert make_plan(parts.graph, MACHINE).numbers.most_members == 4 * 3 * 3
    assert Branches(parts.graph).derivers(parts.advantage.scored) == {("branching", "again")}


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"derives": {"a b": 1}}, "branching derives samples under 'a b'; a label is an identifier, such as branch."),
        ({"derives": {"branch": 0}}, "branching derives 0 samples under 'branch'; it needs a whole number of at least"),
        ({"keeps_lineage": False}, "branching derives samples and merges or joins what it takes, so the samples that"),
    ],
)
def test_what_a_node_may_not_state(settings: dict[str, Any], text: str) -> None:
    assert any(text in problem for problem in branching(**settings).problems)


def test_two_nodes_may_not_share_a_label() -> None:
    parts = branching()
    other = parts.graph.add("other", Branching({"branch": 1}))
    parts.graph.connect(parts.generator.rollouts, other.rollouts)
    parts.graph.ignore(other.done)
    assert "branching and other both derive samples under 'branch', so their ids could be the same; " in (
        "\n".join(parts.problems)
    )


def test_a_branch_that_leads_to_no_trainer_derives_nothing() -> None:
    parts = grpo()
    tap = parts.graph.add("tap", Branching({"branch": 1}))
    parts.graph.connect(parts.generator.rollouts, tap.rollouts)
    parts.graph.ignore(tap.done)
    assert parts.problem().startswith("tap derives samples, but no branch leads from it to a trainer, so nothing would")


def test_without_admission_there_is_no_ticket_for_derived_samples() -> None:
    parts = branching()
    parts.graph.admission = None
    assert "branching derives samples, but no source is admitted, so there is no ticket for them; write g.admit" in (
        "\n".join(parts.problems)
    )


class TwoPorts(Branching):
    others: In[Sample]


def test_samples_to_derive_from_come_by_one_port() -> None:
    parts = grpo()
    node = parts.graph.add("node", TwoPorts({"branch": 1}))
    parts.cut(parts.generator.rollouts)
    parts.graph.connect(parts.generator.rollouts, node.rollouts)
    parts.graph.connect(parts.generator.rollouts, node.others)
    parts.graph.connect(node.done, parts.reward.rollouts)
    text = "node derives samples, so it needs one In port of samples to derive them from; it has node.roll"
    assert any(text in problem for problem in parts.problems)


def test_where_samples_are_counted_all_have_come_past_the_same_deriving_nodes() -> None:
    parts = grpo()
    node = parts.graph.add("branching", Branching({"branch": 1}))
    joined = parts.graph.add("joined", JoinedAdvantage())
    parts.cut(parts.reward.scored)
    parts.cut(parts.advantage.groups)
    parts.graph.ignore(parts.advantage.scored)
    parts.graph.ignore(parts.advantage.groups)
    parts.graph.connect(parts.reward.scored, joined.scored)
    parts.graph.connect(parts.generator.rollouts, node.rollouts)
    parts.graph.connect(node.done, joined.rated)
    parts.graph.connect(joined.groups, parts.batcher.groups)
    assert any(
        "some samples come to joined.scored, joined.rated past branching, which derives further samples, and others do "
        "not, so a group there would have no known size" in problem
        for problem in parts.problems
    )


class Router(Idle):
    rollouts: In[Sample]
    left: Out[Sample]
    right: Out[Sample]


@pytest.mark.parametrize(("replicas", "dispatch"), [(1, "share"), (2, "share"), (2, "key")])
def test_copies_of_a_sample_meet_in_one_replica(replicas: int, dispatch: Any) -> None:
    parts = grpo()
    router = parts.graph.add("router", Router())
    node = parts.graph.add("branching", Branching({"branch": 1}), replicas=replicas)
    parts.cut(parts.generator.rollouts)
    parts.graph.connect(parts.generator.rollouts, router.rollouts)
    parts.graph.connect(router.left, node.rollouts, dispatch=dispatch)
    parts.graph.connect(router.right, node.rollouts, dispatch=dispatch)
    parts.graph.connect(node.done, parts.reward.rollouts)
    refused = replicas == 2 and dispatch == "share"
    assert [
        problem.startswith("branching derives samples and has several replicas, but of") for problem in parts.problems
    ] == ([True, True] if refused else [])
    plan = make_plan(parts.graph, MACHINE)
    ports = ports_of(plan)
    assert (ports["branching.rollouts"].arrivals, ports["advantage.scored"].arrivals) == (2, 1)


def test_a_group_of_its_own_is_what_comes_by_a_port() -> None:
    """A second trainer that gets the derived samples alone: its groups have the same places."""
    parts = branching()
    branch = parts.graph.nodes["branching"]
    advantage = parts.graph.add("other_advantage", Advantage())
    reward = parts.graph.add("other_reward", type(parts.reward)())
    parts.graph.connect(branch.ports["done"], reward.rollouts)  # type: ignore[arg-type]
    parts.graph.connect(reward.scored, advantage.scored)
    parts.graph.ignore(advantage.groups)
    assert check(parts.graph, MACHINE).problems == ()
    members = {name: port.members for name, port in ports_of(make_plan(parts.graph, MACHINE)).items()}
    assert members["other_advantage.scored"] == members["advantage.scored"] == 4
