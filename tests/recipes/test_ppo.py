"""PPO's parts without models: branches that meet, a batch valued at once, the value objective, the graph's numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flowrl import Graph, check
from flowrl.errors import ConfigError, FlowrlError
from flowrl.graph.load import load_file
from flowrl.graph.machine import Cluster, Machine
from flowrl.messages import Batch, Group, Scored, ValueQuestion, Values
from flowrl.models import Policy
from flowrl.nodes import AdaptiveKL, JoinedAdvantage, TokenBatch, Trainer
from flowrl.runtime.telemetry.metrics import node_roles
from flowrl.testing import run_node, sample, scored
from flowrl.training.advantages import Estimate, compute_advantages
from flowrl.training.loss.objective import LossInputs, Totals
from flowrl.training.loss.token_objectives import ValueObjective
from tests.nodes.groups import members

GAE = Estimate("gae", gamma=0.9, lam=0.8, kl_coef=0.1)


class Critic:
    """Answers with V = 0.25 · position before every policy token."""

    def __init__(self, version: int = 3) -> None:
        self.version = version
        self.asked: list[ValueQuestion] = []

    def __call__(self, request: ValueQuestion) -> Values:
        self.asked.append(request)
        return Values(self.version, np.concatenate([_values(mask) for _, mask in request.sequences]))


def values_of(one: Scored) -> Any:
    return _values(one.policy_mask)


def _values(mask: Any) -> Any:
    return np.where(mask, 0.25 * np.arange(len(mask)), 0.0).astype(np.float32)


def referenced(member: int, reward: float, group: str, response: int) -> Scored:
    one = scored(member, reward, group=group, response=response)
    return dataclasses.replace(one, ref_logprobs=np.where(one.policy_mask, -0.9, 0.0).astype(np.float32))


def groups(names: str = "ab") -> list[Group]:
    node = JoinedAdvantage(GAE, size=2)
    return [
        node.make_group(members([referenced(m, float(m), name, 2 + m) for m in range(2)], size=2)) for name in names
    ]


def batches(node: TokenBatch, arrivals: Sequence[Group], critic: Critic) -> list[Batch]:
    return run_node(node, {"groups": arrivals}, answers={"values": critic}).sent("batches")


def test_a_batch_is_valued_at_once_and_whitened_as_a_whole() -> None:
    critic = Critic()
    (batch,) = batches(TokenBatch(2, estimate=GAE, whiten="full"), groups(), critic)
    assert [len(asked.sequences) for asked in critic.asked] == [4]
    length = max(len(s.token_ids) for s in batch.samples)

    def rows(arrays: Sequence[Any]) -> Any:
        return np.stack([np.pad(a, (0, length - len(a))) for a in arrays])

    expected, returns = compute_advantages(
        [s.reward for s in batch.samples],
        [s.group_id for s in batch.samples],
        rows([s.policy_mask for s in batch.samples]),
        estimator="gae",
        values_BT=rows([values_of(s) for s in batch.samples]),
        kl_BT=rows([s.behavior_logprobs - s.ref_logprobs for s in batch.samples]),
        kl_coef=0.1,
        gamma=0.9,
        lam=0.8,
    )
    for one, advantages_T, returns_T in zip(batch.samples, expected, returns, strict=True):
        n = len(one.token_ids)
        np.testing.assert_allclose(one.advantages, advantages_T[:n], atol=1e-5)
        assert one.returns is not None and one.values_version == 3
        np.testing.assert_allclose(one.returns, returns_T[:n], atol=1e-5)
    assert batch.metrics["values_version"] == 3


def test_the_kl_of_the_reward_is_steered_batch_by_batch() -> None:
    node = TokenBatch(1, estimate=GAE, adaptive_kl=AdaptiveKL(0.1))
    first, second = batches(node, groups(), Critic())
    assert first.metrics["kl_coef"] == 0.1
    assert first.metrics["reward_kl"] == pytest.approx(0.4 * 2.5), "log π − log π_ref = 0.4 at 2 and at 3 tokens"
    assert second.metrics["kl_coef"] == pytest.approx(0.1 * 1.02)


def test_advantages_that_nobody_made_are_an_error() -> None:
    with pytest.raises(ConfigError, match=r"reached the batcher without advantages.*join its port values to a Critic"):
        run_node(TokenBatch(2), {"groups": groups()})
    with pytest.raises(ConfigError, match=r"'gae' needs a critic's values.*with g.call"):
        run_node(TokenBatch(2, estimate=GAE), {"groups": groups()})


def test_a_critic_that_nothing_would_be_asked_of_is_an_error() -> None:
    with pytest.raises(ConfigError, match="estimate is not 'gae', so the critic would never be asked"):
        batches(TokenBatch(2), groups(), Critic())


def test_values_of_two_versions_in_one_batch_are_refused() -> None:
    node = JoinedAdvantage(GAE, size=1)

    def valued(name: str, version: int) -> Group:
        one = referenced(0, 1.0, name, 2)
        return node.make_group(
            members([dataclasses.replace(one, values=values_of(one), values_version=version)], size=1)
        )

    arrivals = [valued("a", 1), valued("b", 2)]
    with pytest.raises(FlowrlError, match="values of the critic's versions 1 to 2"):
        run_node(TokenBatch(2, estimate=GAE), {"groups": arrivals})


def test_both_branches_of_a_sample_meet_in_its_group() -> None:
    firsts = [scored(m, float(m)) for m in (0, 1)]
    seconds = [dataclasses.replace(sample(m), ref_logprobs=np.full(5, m, np.float32)) for m in (1, 0)]
    node = JoinedAdvantage(Estimate("dr_grpo"), size=2)
    record = run_node(node, {"scored": firsts, "referenced": seconds})
    (group,) = record.sent("groups")
    assert [one.ref_logprobs[0] for one in group.samples] == [0.0, 1.0]
    assert [list(one.advantages[3:]) for one in group.samples] == [[-0.5, -0.5], [0.5, 0.5]]
    (made_from,) = record.made_from("groups")
    received = [firsts[0], seconds[1], firsts[1], seconds[0]]
    assert list(map(id, made_from)) == list(map(id, received)), "what was received, not the copies"


# The objective

OLD, RETURNS = [0.0, 1.0], [1.0, 0.0]


def seen(values: list[float]) -> LossInputs:
    def row(numbers: Sequence[float]) -> torch.Tensor:
        return torch.tensor([numbers], dtype=torch.float64)

    return LossInputs(
        logprobs_BT=torch.zeros(1, 0),
        entropies_BT=torch.zeros(1, 0),
        old_logprobs_BT=torch.zeros(1, 0),
        mask_BT=torch.ones(1, 2, dtype=torch.bool),
        columns={"old_values": row(OLD), "returns": row(RETURNS)},
        totals=Totals(num_tokens=4, num_sequences=2),
        values_BT=row(values).requires_grad_(),
        labels_B=torch.zeros(1),
        pairs_P2=torch.zeros(0, 2, dtype=torch.long),
    )


def test_the_value_loss_is_clipped_around_the_old_values() -> None:
    # The first token went 0.5 towards its return, 0.2 of it count: 0.5·0.8²; the second 0.1: 0.5·0.9².
    micro_batch = seen([0.5, 0.9])
    loss, stats = ValueObjective(clip=0.2).loss(micro_batch)
    assert loss.item() == pytest.approx((0.5 * 0.64 + 0.5 * 0.81) / 4)
    assert float(stats["clip_fraction"]) == pytest.approx(1 / 4)
    loss.backward()
    assert micro_batch.values_BT.grad is not None
    assert micro_batch.values_BT.grad[0].tolist() == pytest.approx([0.0, 0.9 / 4])
    free, _ = ValueObjective(clip=None).loss(seen([0.5, 0.9]))
    assert free.item() == pytest.approx((0.5 * 0.25 + 0.5 * 0.81) / 4)


def test_the_value_objective_says_what_it_misses() -> None:
    with pytest.raises(FlowrlError, match=r"no old values and returns.*estimator 'gae'"):
        ValueObjective().columns(groups()[0].samples[0])
    with pytest.raises(ConfigError, match="the value clip is -1"):
        ValueObjective(clip=-1)


# The graph

PPO_FILE = Path(__file__).parents[2] / "graphs" / "ppo.py"


def ppo(*options: str) -> Graph:
    file = load_file(PPO_FILE)
    return file.build(file.parse(options))


def test_tickets_wait_for_both_versions() -> None:
    plan = check(ppo("--groups-per-step", "8"), Cluster((Machine(cores=(0, 1)),))).plan
    assert plan.consumers == (("generator/0", "actor"), ("critic/0", "critic_trainer"))
    assert (plan.numbers.tickets, plan.numbers.max_staleness) == (16, 1)


def test_two_cores_are_enough() -> None:
    assert check(ppo("--trainer.replicas", "2"), Cluster((Machine(cores=(0, 1)),))).problems == ()


def test_the_critic_reads_weights_from_host_memory_on_gpus_too() -> None:
    plan = check(ppo("--trainer.gpus", "1"), Cluster((Machine(cores=tuple(range(16)), gpus=8),))).plan
    assert {way.consumer: way.transport for way in plan.weights} == {"generator/0": "nccl", "critic/0": "shm"}


def test_the_actor_has_the_trainers_place_in_the_metrics() -> None:
    assert node_roles(ppo()) == {"generator": "generator", "actor": "trainer"}


def test_two_models_need_two_names() -> None:
    g = Graph("twins")
    g.add("one", Trainer(Policy("tiny")))
    g.add("two", Trainer(Policy("tiny")))
    found = check(g).problems
    assert any("one and two would both save their model as 'policy'" in text for text in found)


def test_a_critic_that_admission_does_not_wait_for_is_found() -> None:
    g = ppo()
    assert g.admission is not None
    g.admission = dataclasses.replace(g.admission, until=g.admission.until[:1])
    found = check(g, Cluster((Machine(cores=(0, 1)),))).problems
    assert found == (
        "critic_trainer.weights -> critic.weights makes a feedback loop, but g.admit does not wait for it; write "
        "until=(generator.weights, critic.weights).",
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--critic-warmup", "-1"), "start_after is -1; it has to be 0 or more"),
        (("--lam", "2"), "lam is 2.0; it has to be in [0, 1]"),
        (("--kl-target", "0"), "adaptive_kl.target is 0.0; it has to be above 0"),
        (("--critic-lr", "-1"), "lr is -1.0"),
    ],
)
def test_wrong_options_are_found_by_check(options: tuple[str, ...], words: str) -> None:
    assert any(words in text for text in check(ppo(*options), Cluster((Machine(cores=(0, 1)),))).problems)


def test_a_target_without_a_kl_is_found_when_the_options_are_read() -> None:
    with pytest.raises(ConfigError, match="--kl-target: --kl-coef is 0; raise it, or leave this out"):
        ppo("--kl-coef", "0", "--kl-target", "1")


def test_a_wrong_value_clip_is_found_when_the_graph_is_made() -> None:
    with pytest.raises(ConfigError, match=r"the value clip is -0\.5"):
        ppo("--value-clip", "-0.5")
