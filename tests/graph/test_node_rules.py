"""What `flowrl check` says of the classes of nodes, messages and objectives, with the line of the user's file."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from flowrl import Graph, Group, In, Message, Node, Out, Sample, Scored, check
from flowrl.graph.analysis.numbers import Numbers
from flowrl.messages import Trainable
from flowrl.models import Policy
from flowrl.nodes import Trainer
from flowrl.training.loss.objective import Objective
from flowrl.training.loss.policy_objective import PolicyObjective
from flowrl.training.loss.preference_objectives import DPOObjective, KTOObjective
from flowrl.training.loss.token_objectives import SFTObjective
from tests.graph.graph_nodes import MACHINE, Idle, grpo


class Between(Idle):
    rollouts: In[Sample]
    kept: Out[Sample]


class NoRun(Node):
    rollouts: In[Sample]
    kept: Out[Sample]


class PlainRun(Between):
    def run(self) -> None:  # type: ignore[override]
        pass


class YieldingRun(Between):
    async def run(self) -> Any:
        yield 1


class PlainSetup(Between):
    def setup(self) -> None:  # type: ignore[override]
        pass


class AsyncFacts(Between):
    async def state(self) -> Mapping[str, Any]:  # type: ignore[override]
        return {}


class HidesState(Between):
    def __init__(self) -> None:
        self.state = {}  # type: ignore[method-assign, assignment]


class HidesCheck(Between):
    check = ("a", "b")  # type: ignore[assignment]


class TakenMetric(Between):
    async def run(self) -> None:
        self.context.metric("reward_mean", 7.0)
        self.context.gauge("middle_busy_s", 1.0)
        self.context.metric("mine", 1.0)


def line_of(thing: Any, further: int = 0) -> str:
    return f"{Path(__file__).name}:{inspect.getsourcelines(thing)[1] + further}"


def problems_with(middle: Node) -> list[str]:
    """The problems of a graph in which `middle` stands between generator and reward, but for those of its edges."""
    g = grpo().graph
    g.add("middle", middle)
    return [problem for problem in check(g, MACHINE).problems if " port, is not connected" not in problem]


MISTAKES = {
    NoRun: (
        "node middle: NoRun ({place}) has no run; write `async def run(self) -> None:` with its body.",
        NoRun,
        0,
    ),
    PlainRun: (
        "node middle: PlainRun.run ({place}) is a plain function; write `async def run`.",
        PlainRun.run,
        0,
    ),
    YieldingRun: (
        "node middle: YieldingRun.run ({place}) has a yield, which makes it a generator; send what it yields through "
        "an Out port.",
        YieldingRun.run,
        0,
    ),
    PlainSetup: (
        "node middle: PlainSetup.setup ({place}) is a plain function; write `async def setup`.",
        PlainSetup.setup,
        0,
    ),
    AsyncFacts: (
        "node middle: AsyncFacts.state ({place}) is async, but nobody awaits it; write `def state`.",
        AsyncFacts.state,
        0,
    ),
    HidesState: (
        "node middle: HidesState ({place}) has an attribute state, which hides a method that the engine calls; give "
        "the attribute another name.",
        HidesState,
        0,
    ),
}


@pytest.mark.parametrize("kind", MISTAKES)
def test_a_class_that_the_engine_cannot_call(kind: type[Node]) -> None:
    text, thing, further = MISTAKES[kind]
    assert problems_with(kind()) == [text.format(place=line_of(thing, further))]


def test_an_attribute_of_the_class_that_hides_a_method() -> None:
    assert problems_with(HidesCheck()) == [
        f"node middle: HidesCheck ({line_of(HidesCheck)}) has an attribute check, which hides a method that the engine "
        "calls; give the attribute another name."
    ]


def test_a_figure_of_flowrls_own_is_no_name_for_a_counter() -> None:
    first, second = problems_with(TakenMetric())
    assert first == (
        f"node middle: it reports the metric 'reward_mean' ({line_of(TakenMetric.run, 1)}), which is a figure of "
        "flowrl's own and would replace yours in metrics.jsonl; choose another name."
    )
    assert "the gauge 'middle_busy_s'" in second


def test_an_attribute_called_name_is_not_taken_for_a_node_of_another_graph() -> None:
    node = Between()
    node.name = "mine"
    g = Graph("g")
    g.add("middle", node)
    assert g.mistakes == [
        "Between sets self.name = 'mine', but `name` is a node's name in its graph; give the attribute another name."
    ]
    assert node.name == "middle" and g.nodes == {"middle": node}


class NotFrozen(Message):
    x: int = 0


@dataclass(frozen=True)
class Frozen(Message):
    x: int = 0


class Renamed(Frozen):
    """No field of its own."""


@pytest.mark.parametrize(
    ("carried", "refused"), [(NotFrozen, True), (Frozen, False), (Renamed, False), (Sample, False)]
)
def test_messages_are_frozen_dataclasses(carried: type[Message], refused: int) -> None:
    class Sends(Idle):
        out: Out[carried]  # type: ignore[valid-type]

    Sends.__annotations__ = {"out": Out[carried]}  # type: ignore[valid-type]
    expected = (
        f"NotFrozen ({line_of(NotFrozen)}) is a message but no frozen dataclass, so its fields would not be sent; "
        "write @dataclass(frozen=True) above the class."
    )
    assert problems_with(Sends()) == [expected] * refused


class Collects(Node):
    scored: In[Scored]
    groups: Out[Group]

    def __init__(self, size: int) -> None:
        self.size = size

    async def run(self) -> None:
        async for _ in self.scored.groups(self.size):
            pass


class CollectsThree(Node):
    scored: In[Scored]

    async def run(self) -> None:
        async for _ in self.scored.groups(3):
            pass


def test_groups_of_another_size_than_the_graphs() -> None:
    assert problems_with(Collects(4)) == []
    for node, size in ((Collects(5), 5), (CollectsThree(), 3)):
        assert problems_with(node) == [
            f"node middle: it waits for groups of {size} samples ({line_of(type(node).run, 1)}), but a group has 4: "
            "the node would fail at the first group; pass the group size of the graph."
        ]


# Objectives


class Mean(Objective):
    stats = ("a",)

    def columns(self, sample: Trainable) -> Mapping[str, Any]:
        return {"advantages": sample.advantages}

    def loss(self, inputs: Any) -> Any:
        return -(inputs.columns["advantages"] * inputs.logprobs_BT)[inputs.mask_BT].sum() / inputs.totals.num_tokens, {}


class NoSuchColumn(Mean):
    def columns(self, sample: Trainable) -> Mapping[str, Any]:
        return {"nothing": sample.nothing}  # type: ignore[attr-defined]


class ShortColumn(Mean):
    def columns(self, sample: Trainable) -> Mapping[str, Any]:
        return {"advantages": sample.advantages[:1]}


class NoDict(Mean):
    def columns(self, sample: Trainable) -> Any:
        return [sample.advantages]


class UnknownStatistic(Mean):
    def loss(self, inputs: Any) -> Any:
        loss, _ = super().loss(inputs)
        return loss, {"b": loss.detach()}


class OnlyLoss(Mean):
    def loss(self, inputs: Any) -> Any:
        return super().loss(inputs)[0]


class MeanOfMicroBatch(Mean):
    def loss(self, inputs: Any) -> Any:
        return inputs.logprobs_BT.mean(), {}


class Scalar(Mean):
    head = "scalar"

    def columns(self, sample: Trainable) -> Mapping[str, Any]:
        return {}

    def loss(self, inputs: Any) -> Any:
        return inputs.values_BT[inputs.mask_BT].sum() / inputs.totals.num_tokens, {}


class ScalarAtEnd(Scalar):
    at_end = True


class ScalarWithoutMask(Scalar):
    def loss(self, inputs: Any) -> Any:
        return inputs.values_BT.sum() / inputs.totals.num_tokens, {}


OBJECTIVES = {
    NoSuchColumn: f"has a method columns that raised AttributeError: 'Trainable' object has no attribute 'nothing' in "
    f"{line_of(NoSuchColumn.columns, 1)}, on made-up data of the right shapes",
    ShortColumn: "has a method columns that returned advantages of shape [1] for a sample of 5 tokens; a column has "
    "one number for each token, or what `needed_columns` declares",
    NoDict: "has a method columns that returned a list; it has to return a dict of arrays by name",
    UnknownStatistic: "returned the stats b, which stats= does not name; name them there",
    OnlyLoss: "returned a tensor; the method loss has to return (loss, stats), with {} if it has no stats",
    MeanOfMicroBatch: "depends on tokens outside mask_BT; leave these out, as by values_BT[inputs.mask_BT].sum()",
    ScalarWithoutMask: "depends on tokens outside mask_BT; leave these out, as by values_BT[inputs.mask_BT].sum()",
}


@pytest.mark.parametrize("kind", OBJECTIVES)
def test_an_objective_is_tried_before_a_run(kind: type[Objective]) -> None:
    node = Trainer(Policy("tiny"), objective=kind())
    assert [text for text in node.check(Numbers()) if kind.__name__ in text] == [
        f"the objective {kind.__name__} {OBJECTIVES[kind]}"
    ]


@pytest.mark.parametrize("kind", [Mean, Scalar, ScalarAtEnd])
def test_a_right_objective_passes(kind: type[Objective]) -> None:
    assert "the objective" not in str(Trainer(Policy("tiny"), objective=kind()).check(Numbers()))


@pytest.mark.parametrize("kind", [PolicyObjective, DPOObjective, KTOObjective, SFTObjective])
def test_the_trial_accepts_what_flowrl_ships(kind: Any) -> None:
    class Mine(kind):  # type: ignore[misc]
        """A user's class."""

    assert "the objective" not in str(Trainer(Policy("tiny"), objective=Mine()).check(Numbers()))
