"""The critic: values at the right places whatever the micro-batches, of the weights it was given last."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from flowrl.errors import FlowrlError
from flowrl.messages import Sample, ValueQuestion, Values, Weights
from flowrl.models import Policy
from flowrl.nodes.scoring.critic import Critic
from flowrl.testing import NodeRecord, NodeRig, sample
from flowrl.training.model.row_layout import lay_out
from flowrl.training.model.value_model import ScalarModel, load_scalar_model
from flowrl.training.scoring_models import score_items, values_of_pass
from flowrl.weights.probe import ProbeMismatch
from flowrl.weights.publish import Publisher
from tests.models.tiny_policy import make_policy
from tests.wire.test_channel_table import through


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("policy")
    make_policy(path, tied=True)
    return path


@pytest.fixture(scope="module")
def trained(policy: Path) -> ScalarModel:
    """What the critic's trainer holds: another head than the one a critic begins with."""
    return load_scalar_model(policy, start="policy", seed=11).eval()


def alone(model: ScalarModel, one: Sample) -> list[float]:
    """V before each policy token, from a pass over this sample alone, read off by position."""
    ids = torch.from_numpy(one.token_ids.astype(np.int64))[None]
    with torch.no_grad():
        hidden = model.classifier.base_model(input_ids=ids, use_cache=False)[0][0]
        by_position = model.classifier.score(hidden)
    return [float(by_position[t - 1]) for t in np.flatnonzero(one.policy_mask)]


SAMPLES = [sample(m, response=1 + 3 * m) for m in range(4)]


@pytest.mark.parametrize("token_budget", [13, 26, 1000])
def test_values_stand_before_their_tokens_whatever_the_micro_batches(trained: ScalarModel, token_budget: int) -> None:
    items = [(s.token_ids, s.policy_mask) for s in SAMPLES]
    for one, values in zip(
        SAMPLES, score_items(trained, values_of_pass, items, token_budget=token_budget), strict=True
    ):
        np.testing.assert_allclose(values[one.policy_mask], alone(trained, one), atol=1e-5)
        assert not values[~one.policy_mask].any()


class Source:
    """Stands for the trainer's engine."""

    rank = 0

    def __init__(self, model: ScalarModel) -> None:
        self._model = model
        self.vocab_size = int(model.network.config.vocab_size)

    def buckets(self, max_bytes: int) -> Iterator[tuple[Sequence[str], Sequence[torch.Tensor]]]:
        named = list(self._model.network.named_parameters())
        yield [name for name, _ in named], [parameter.detach() for _, parameter in named]

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        ids = [np.array(tokens, np.int32) for tokens in sequences]
        rows = lay_out(ids, [np.ones(len(t), np.bool_) for t in ids], layout="padded")
        with torch.no_grad():
            values_N = self._model(rows)
        return [part.tolist() for part in values_N.split([len(t) - 1 for t in ids])]


def lived(policy: Path, manifests: Sequence[Weights], asked: ValueQuestion) -> tuple[Values, NodeRecord]:
    """The reply of a critic that was given these weights one after the other."""
    node = Critic(Policy(str(policy)))

    async def life() -> tuple[Values, NodeRecord]:
        async with NodeRig(node, name="critic", preflight=False) as rig:
            for manifest in manifests:
                rig.feed(node.weights, manifest)
                await rig.taken(node.weights)
            rig.end(node.weights)
            await rig.until(lambda record: any(event[2] == manifest.version for event in record.events("holds")))
            reply = await rig.ask(node.requests, asked)
            return reply, await rig.finished()

    return asyncio.run(life())


@pytest.fixture
def publisher(trained: ScalarModel) -> Iterator[Publisher]:
    made = Publisher(Source(trained), "critic_trainer", run_id=uuid.uuid4().hex[:8])
    yield made
    made.close()


def published(publisher: Publisher, version: int, kind: str = "full") -> Weights:
    manifest = publisher.publish_version(version, kind)
    assert manifest is not None
    return manifest


def test_it_answers_with_the_trainers_values_and_their_version(
    policy: Path, trained: ScalarModel, publisher: Publisher
) -> None:
    manifests = [published(publisher, 3), published(publisher, 4, "unchanged")]
    reply, record = lived(policy, manifests, ValueQuestion.of(SAMPLES))
    assert reply.version == 4, "an unchanged version is a version"
    ends = np.cumsum([one.num_tokens for one in SAMPLES])
    assert reply.values.size == ends[-1]
    for one, values in zip(SAMPLES, np.split(reply.values, ends[:-1]), strict=True):
        np.testing.assert_allclose(values[one.policy_mask], alone(trained, one), atol=1e-5)
    assert record.ledger == [
        ("holds", "critic/0", "critic_trainer", 3),
        ("holds", "critic/0", "critic_trainer", 4),
    ]
    (mismatch,) = record.gauges["value_mismatch"]
    assert mismatch < 1e-5


def test_a_version_that_is_gone_is_passed_over(policy: Path, publisher: Publisher) -> None:
    gone = [published(publisher, version) for version in range(3)]
    reply, _ = lived(policy, gone, ValueQuestion.of(SAMPLES[:1]))
    assert reply.version == 2


def test_values_unlike_the_trainers_end_the_run(policy: Path, publisher: Publisher) -> None:
    manifest = published(publisher, 0)
    wrong = replace(manifest, probe_logprobs=tuple(tuple(v + 0.5 for v in row) for row in manifest.probe_logprobs))
    with pytest.raises(ProbeMismatch, match=r"differ from the trainer's by 0\.5 on average"):
        lived(policy, [wrong], ValueQuestion.of(SAMPLES))


def test_weights_of_another_model_are_refused(tmp_path: Path, publisher: Publisher) -> None:
    make_policy(tmp_path, tied=True, layers=1)
    with pytest.raises(FlowrlError, match="do not fit this node's model: 12 tensors differ"):
        lived(tmp_path, [published(publisher, 0)], ValueQuestion.of(SAMPLES))


def test_a_weights_edge_that_ends_before_its_first_message_is_an_error(policy: Path) -> None:
    with pytest.raises(FlowrlError, match="ended before its first message"):
        lived(policy, [], ValueQuestion.of(SAMPLES))


@pytest.mark.parametrize(("number", "tokens"), [(4_096, 512), (65_536, 16)])
def test_a_question_of_any_number_of_samples_is_one_message(number: int, tokens: int) -> None:
    """With whole samples it was refused from some 14,000 on: for their texts, columns and metrics, and each array."""
    one = sample(0, response_text="a long text " * 64, metrics={f"m{n}": 0.5 for n in range(20)})
    ids, mask = np.arange(tokens, dtype=np.int32), np.arange(tokens) > tokens // 2
    whole = replace(one, token_ids=ids, policy_mask=mask)
    asked = through(ValueQuestion.of([whole] * number))
    assert isinstance(asked, ValueQuestion) and len(asked.sequences) == number
    for found_ids, found_mask in (asked.sequences[0], asked.sequences[-1]):
        assert np.array_equal(found_ids, ids) and np.array_equal(found_mask, mask)
    reply = through(Values(3, np.zeros(number * tokens, np.float32)))
    assert isinstance(reply, Values) and reply.values.size == number * tokens
