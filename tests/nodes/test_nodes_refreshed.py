"""A reference that follows the policy: which weights, for which samples, and what a checkpoint keeps of them."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flowrl import Cluster, Machine, check
from flowrl.errors import ConfigError
from flowrl.graph.graph import Graph, port_name
from flowrl.graph.load import load_file
from flowrl.graph.machine import GB
from flowrl.messages import Sample, Weights
from flowrl.models import Policy
from flowrl.nodes import Reference
from flowrl.nodes.scoring.reference import KeptReferences, newest_version, num_kept
from flowrl.testing import NodeRecord, NodeRig, run_graph, sample
from flowrl.weights.publish import Publisher
from tests.models.tiny_policy import ModelSource, make_policy, perturb

CLUSTER = Cluster((Machine(cores=(0, 1, 2, 3), memory_bytes=16 * GB),))


def kept(*, every: int, mixup: float, number: int = 3) -> tuple[KeptReferences, torch.nn.Linear]:
    layer = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.constant_(layer.weight, 8.0)
    return KeptReferences(layer, every=every, mixup=mixup, kept=number), layer


def test_each_reference_is_mixed_of_the_policy_and_the_one_before() -> None:
    references, layer = kept(every=4, mixup=0.25)
    references.add_reference(4, {"weight": torch.zeros(1, 2)})
    references.add_reference(8, {"weight": torch.full((1, 2), 2.0)})
    for number, expected in ((8, 0.25 * 2 + 0.75 * 6.0), (4, 6.0), (0, 8.0)):
        assert references.load_reference(number) == number
        assert layer.weight.tolist() == [[expected, expected]]
    assert [references.number_for(version) for version in (0, 3, 4, 7, 8)] == [0, 0, 4, 4, 8]


def test_as_many_are_kept_as_samples_in_progress_may_need() -> None:
    assert [num_kept(4, staleness) for staleness in (None, 0, 1, 4, 5)] == [1, 1, 2, 2, 3]
    references, layer = kept(every=1, mixup=1.0, number=2)
    for version in (1, 2, 3):
        references.add_reference(version, {"weight": torch.full((1, 2), float(version))})
    assert references.load_reference(0) == 2 and layer.weight.tolist() == [[2.0, 2.0]]


def test_a_checkpoint_keeps_them(tmp_path: Path) -> None:
    references, _ = kept(every=2, mixup=0.5)
    references.add_reference(2, {"weight": torch.zeros(1, 2)})
    references.save_references(tmp_path / "state")
    again, layer = kept(every=2, mixup=0.5)
    again.restore_references(tmp_path / "state")
    assert again.newest_number == 2 and layer.weight.tolist() == [[4.0, 4.0]]
    again.add_reference(4, {"weight": torch.zeros(1, 2)})
    again.load_reference(4)
    assert layer.weight.tolist() == [[2.0, 2.0]]


# The node


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("policy")
    make_policy(found, tied=True)
    return found


class Versions:
    """The versions of a policy that changes with each, as a trainer publishes them."""

    def __init__(self, path: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(path).eval()
        self.publisher = Publisher(ModelSource(self.model), "trainer", run_id=uuid.uuid4().hex[:8])
        self.expected: dict[int, Any] = {}

    def publish(self, version: int, one: Sample) -> Weights:
        if version:
            perturb(self.model, 0.3, seed=version)
        self.expected[version] = self.logprobs(one)
        manifest = self.publisher.publish_version(version)
        assert manifest is not None
        return manifest

    def logprobs(self, one: Sample) -> Any:
        ids = torch.from_numpy(one.token_ids.astype(np.int64))[None]
        with torch.no_grad():
            found = self.model(ids).logits[0].log_softmax(-1)[:-1].gather(1, ids[0, 1:, None])[:, 0].numpy()
        return np.where(one.policy_mask, np.concatenate([[0.0], found]), 0.0)


@pytest.fixture
def versions(path: Path) -> Iterator[Versions]:
    made = Versions(path)
    yield made
    made.publisher.close()


def of_version(member: int, version: int) -> Sample:
    one = sample(member, response=4)
    return sample(member, response=4, versions=np.where(one.policy_mask, version, -1).astype(np.int32))


def test_a_sample_is_compared_with_the_reference_of_its_version(path: Path, versions: Versions, tmp_path: Path) -> None:
    one = of_version(0, 0)

    async def life() -> NodeRecord:
        node = Reference(Policy(str(path)), refresh_every=2)
        async with NodeRig(node, name="reference", preflight=False, max_staleness=1) as rig:
            for version in range(3):
                rig.feed(node.weights, versions.publish(version, one))
                await rig.taken(node.weights)
            # One that waited for its reward comes after the refresh; the first of version 4 before that.
            rig.feed(node.rollouts, of_version(4, 4), of_version(1, 1), of_version(2, 2), of_version(3, 3))
            for _ in range(3):
                await rig.receive("referenced")
            for version in (3, 4):
                rig.feed(node.weights, versions.publish(version, one))
                await rig.taken(node.weights)
            await rig.receive("referenced")
            rig.end(node.weights)
            return await rig.finished()

    record = asyncio.run(life())
    found = {one.member: one.ref_logprobs for one in record.sent("referenced")}
    for member, version in ((1, 0), (2, 2), (3, 2), (4, 4)):
        np.testing.assert_allclose(found[member], versions.expected[version], atol=1e-4, err_msg=str(member))
    assert [event[-1] for event in record.events("holds")] == [0, 1, 2, 3, 4]
    assert record.metrics["reference_refreshed"] == 2 and sorted(record.gauges["reference_version"]) == [0, 2, 2, 4]


def test_the_newest_token_decides() -> None:
    one = sample(0, response=4)
    mixed = np.where(one.policy_mask, np.arange(one.token_ids.size), -1).astype(np.int32)
    assert newest_version(sample(0, response=4, versions=mixed)) == one.token_ids.size - 1
    assert newest_version(sample(0, response=0)) == 0


GRAPH = """
import asyncio
from dataclasses import dataclass

from benchmarks.runs.stages import Collect, Numbers, SleepingGenerator, SleepingTrainer
from flowrl import Graph, In, Node, Weights
from flowrl.graph.node import Facts
from flowrl.nodes import TokenBatch


class SlowReader(Node):
    weights: In[Weights]

    cpus = 0.5

    def facts(self): return Facts(takes_every=3, without_devices=("weights",))

    async def run(self):
        async for weights in self.weights:
            await asyncio.sleep(0.05)  # a reader slower than the trainer
            self.context.progress(f"takes {weights.version}")
            self.context.ledger.holds(f"{self.name}/0", weights.policy, weights.version)


@dataclass(frozen=True)
class Config:
    time_shared: bool = False


def graph(cfg: Config) -> Graph:
    g = Graph("steady")
    source, generator = g.add("prompts", Numbers(2)), g.add("generator", SleepingGenerator(0.0, 8))
    collect, batcher = g.add("collect", Collect(2)), g.add("batcher", TokenBatch(1, token_budget=4096))
    trainer, reader = g.add("trainer", SleepingTrainer(0.0)), g.add("reader", SlowReader())
    if cfg.time_shared:
        g.time_share(trainer, reader)
    g.connect(source.prompts, generator.prompts)
    g.connect(generator.samples, collect.samples)
    g.connect(collect.groups, batcher.groups)
    g.connect(batcher.batches, trainer.batches, dispatch="gang")
    g.latest(trainer.weights, generator.weights)
    g.latest(trainer.weights, reader.weights)
    g.admit(source.prompts, until=(generator.weights, reader.weights), staleness=4)
    return g
"""


@pytest.mark.parametrize("time_shared", [False, True])
def test_the_trainer_waits_until_a_version_that_counts_is_held(tmp_path: Path, time_shared: bool) -> None:
    (tmp_path / "steady.py").write_text(GRAPH)
    ran = run_graph(tmp_path / "steady.py", tmp_path / "run", {"time_shared": time_shared}, steps=14, save_every=3)
    taken = [int(line.split()[-1]) for line in ran.view.lines if line.startswith("reader/0: takes")]
    assert {3, 6, 9, 12} <= set(taken), taken
    assert len(taken) < 14, "others may be missed"
    assert ran.audit().ok


# Graphs

GIVES_ONE = {
    "grpo": "--objective.kl-coef 0.01",
    "rloo": "--kl-coef 0.01",
    "reinforce_pp": "--kl-coef 0.01",
    "ppo": "",
    "iterative_dpo": "--reference.weights initial",
}


def built(name: str, *options: str) -> Graph:
    file = load_file(name)
    return file.build(file.parse([word for option in options for word in option.split()]))


@pytest.mark.parametrize("name", GIVES_ONE)
def test_every_graph_with_a_reference_refreshes_it(name: str) -> None:
    g = built(name, GIVES_ONE[name], "--reference.refresh-every 5 --reference.mixup 0.6")
    assert check(g, CLUSTER).problems == ()
    reference = g.nodes["reference"]
    assert isinstance(reference, Reference) and (reference.refresh_every, reference.mixup) == (5, 0.6)
    assert g.admission is not None
    assert "reference.weights" in [port_name(port) for port in g.admission.until]


@pytest.mark.parametrize("name", [name for name, option in GIVES_ONE.items() if option and name != "rloo"])
def test_a_run_without_a_reference_has_none_to_refresh(name: str) -> None:
    options = "--kl-coef 0" if name == "reinforce_pp" else ""
    with pytest.raises(ConfigError, match="this run has no reference; "):
        built(name, options, "--reference.refresh-every 5")


def test_mistakes_are_told() -> None:
    for options, problem in (
        ("--reference.refresh-every -1", "--reference.refresh-every is -1"),
        ("--reference.mixup 0.5", "give --reference.refresh-every too"),
        ("--reference.refresh-every 2 --reference.mixup 0", "above 0, and at most 1"),
    ):
        with pytest.raises(ConfigError, match=problem):
            built("ppo", options)
    adapters = check(built("ppo", "--reference.refresh-every 2 --lora.rank 4"), CLUSTER).problems
    assert any("takes whole weights" in problem for problem in adapters)
    g = built("ppo", "--reference.refresh-every 3")
    g.nodes["actor"].publish_every = 2  # type: ignore[attr-defined]
    assert any("takes one version in 3" in problem for problem in check(g, CLUSTER).problems)
