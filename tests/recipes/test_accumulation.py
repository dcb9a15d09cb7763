"""Which graphs accumulate gradients while a batch forms, what they say of it, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flowrl import Graph
from flowrl.graph.analysis.check import Report, check
from flowrl.graph.load import load_file
from flowrl.graph.machine import Cluster, Machine
from flowrl.graph.ports import In
from flowrl.messages import Batch
from flowrl.models import Policy
from flowrl.nodes import TokenBatch, Trainer
from flowrl.nodes.trainer import explain_whole_batches
from flowrl.testing.rig_nodes import RigNode
from flowrl.training.loss.function_objective import FunctionObjective
from flowrl.training.loss.preference_objectives import DPOObjective, KTOObjective
from flowrl.training.loss.token_objectives import SFTObjective
from flowrl.training.settings import ZeroSettings

GRAPHS = Path(__file__).parents[2] / "graphs"
CLUSTER = Cluster((Machine(tuple(range(16)), memory_bytes=64 << 30),))
ACCUMULATES = "it accumulates gradients of a batch's groups before the others have arrived"


def report(name: str, *options: str) -> Report:
    file = load_file(GRAPHS / f"{name}.py")
    return check(file.build(file.parse(options, prog="flowrl")), CLUSTER)


def notes(found: Report, trainer: str = "trainer") -> list[str]:
    return [note.removeprefix(f"{trainer}: ") for note in found.notes if note.startswith(f"{trainer}: it ")]


@pytest.mark.parametrize("name", ["grpo", "dapo", "raft", "custom_node", "agent_tools"])
def test_graphs_that_sample_accumulate_by_default(name: str) -> None:
    found = report(name)
    assert notes(found) == [ACCUMULATES]
    assert found.plan.in_pieces == ("batcher",)
    assert found.plan.to_json()["in_pieces"] == ["batcher"]


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("grpo", ("--epochs", "2"), "it makes 2 passes over each batch"),
        ("grpo", ("--optimizer-steps", "2"), "a batch is split into 2 optimizer steps"),
        ("grpo", ("--groups-per-step", "1"), "a batch is one group"),
        ("grpo", ("--normalise-rewards",), "rewards are normalised with those of the whole batch"),
        ("grpo", ("--zero.optimizer", "muon"), "muon averages gradients of several steps before they can be divided"),
        ("grpo", ("--time-share", "generator", "trainer"), "it shares its devices in time with generator"),
        ("reinforce_pp", (), "advantages are whitened over the whole batch"),
        ("sft", (), "its batches come from data and are ready before it asks for them"),
        ("dpo", (), "its batches come from data and are ready before it asks for them"),
        ("process_reward_model", (), "its batches come from data and are ready before it asks for them"),
        ("rloo", (), "it shares its devices in time with reference"),
        ("iterative_dpo", (), "a batch is split into 4 optimizer steps"),
        ("distill", (), "it shares its devices in time with teacher"),
    ],
)
def test_batches_come_whole_for_a_reason_that_is_told_and_that_refuses_on(
    name: str, options: tuple[str, ...], reason: str
) -> None:
    found = report(name, *options)
    assert found.ok, found.problems
    assert notes(found) == [f"it begins when a batch is whole: {reason}"]
    assert found.plan.in_pieces == ()
    refused = report(name, *options, "--accumulate", "on")
    assert refused.problems == (
        f"node trainer: accumulate is 'on', but batches come whole, because {reason}; set it to 'auto' or 'off'",
    )
    assert report(name, *options, "--accumulate", "off").ok


def test_ppo_asks_its_critic_for_whole_batches() -> None:
    found = report("ppo")
    why = "it begins when a batch is whole: the critic is asked for the values of a whole batch"
    assert (notes(found, "actor"), notes(found, "critic_trainer")) == ([why], [why])


def test_off_says_nothing_and_on_accumulates() -> None:
    assert (notes(report("grpo", "--accumulate", "off")), report("grpo", "--accumulate", "off").plan.in_pieces) == (
        [],
        (),
    )
    assert notes(report("grpo", "--accumulate", "on")) == [ACCUMULATES]


class Tap(RigNode):
    """Takes batches, as a node of one's own."""

    batches: In[Batch]

    def __init__(self) -> None: ...


def joined(*consumers: Any) -> Graph:
    g = Graph("joined")
    batcher = g.add("batcher", TokenBatch(4))
    for number, consumer in enumerate(consumers):
        node = g.add(f"consumer{number}", consumer)
        g.connect(batcher.batches, node.batches, dispatch="gang" if node.gang else "share")
    return g


def test_every_node_behind_the_batcher_has_to_take_pieces() -> None:
    policies = [Policy("tiny", name=f"policy{number}") for number in range(2)]
    assert check(joined(*map(Trainer, policies)), CLUSTER).plan.in_pieces == ("batcher",)
    beside_a_tap = check(joined(Trainer(policies[0]), Tap()), CLUSTER)
    assert beside_a_tap.plan.in_pieces == ()
    assert notes(beside_a_tap, "consumer0") == ["it begins when a batch is whole: consumer1 takes whole batches"]
    off = check(joined(Trainer(policies[0]), Trainer(policies[1], accumulate="off")), CLUSTER)
    assert notes(off, "consumer0") == ["it begins when a batch is whole: consumer1 has accumulate='off'"]


def test_a_strange_choice_is_a_problem() -> None:
    (problem,) = [one for one in Trainer(Policy("tiny"), accumulate="yes").check(None) if "accumulate" in one]  # type: ignore[arg-type]
    assert problem == "accumulate is 'yes'; choose one of auto, on, off"


def test_objectives_that_need_the_batch_whole() -> None:
    def why(objective: Any) -> str:
        return explain_whole_batches(objective, ZeroSettings(), epochs=1)

    assert why(DPOObjective(online=True)) == ""
    assert why(KTOObjective()) == "the baseline of KTOObjective is a mean over the whole batch"
    assert why(SFTObjective()).startswith("its batches come from data")
    own = FunctionObjective(lambda inputs: inputs.logprobs_BT.sum())
    assert why(own) == "FunctionObjective does not say what its loss is a mean over (mean_over)"
    assert why(FunctionObjective(lambda inputs: inputs.logprobs_BT.sum(), mean_over="tokens")) == ""


def test_a_loss_of_ones_own_may_only_be_a_mean_over_what_is_counted() -> None:
    own = FunctionObjective(lambda inputs: inputs.logprobs_BT.sum(), mean_over="rows")  # type: ignore[arg-type]
    assert own.problems() == ["the loss <lambda> has mean_over='rows'; it takes tokens, sequences, pairs, or None"]
