"""Models that only score, sharded over processes by ZeRO-3: two ranks over gloo against the whole model in one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from flowrl.training import scoring_models
from flowrl.training.model.value_model import ScalarModel, load_scalar_model
from flowrl.training.scoring_models import (
    LocalModel,
    ModelLoad,
    ShardedModel,
    ShardFailed,
    judgements_of,
    logprobs_of,
    score_items,
    scores_of_pass,
    values_of_pass,
)
from flowrl.weights.publish import Publisher
from flowrl.weights.receive import SegmentReceiver, load_published
from tests import warm
from tests.nodes.test_nodes_critic import Source
from tests.training.training_cases import VOCABULARY, make_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
LENGTHS = (12, 7, 3, 16, 9)
ON_CPUS = ("", "")


def items(*, shared: int = 0) -> list[tuple[Any, Any]]:
    """Sequences, the first `shared` tokens of which are the same."""
    draw = np.random.default_rng(3)
    start = draw.integers(0, VOCABULARY, shared)
    found = [np.concatenate([start, draw.integers(0, VOCABULARY, n)]).astype(np.int32) for n in LENGTHS]
    return [(tokens, np.arange(len(tokens)) >= 2) for tokens in found]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> ModelLoad:
    path = tmp_path_factory.mktemp("policy")
    make_model(path, tied=True)
    return ModelLoad(str(path))


@pytest.fixture(scope="module")
def sharded(policy: ModelLoad) -> Iterator[ShardedModel]:
    model = ShardedModel(policy, ON_CPUS)
    yield model
    model.close()


@pytest.mark.parametrize("shared", [0, 20], ids=["rows", "trees"])
@pytest.mark.parametrize("token_budget", [16, 40, 1000], ids=["5 passes on 2 ranks", "some", "1 pass on 2 ranks"])
def test_a_sharded_reference_equals_the_whole(
    policy: ModelLoad, sharded: ShardedModel, token_budget: int, shared: int
) -> None:
    whole, asked = LocalModel(policy.load_model()), items(shared=shared)
    for one in (logprobs_of, judgements_of):
        expected = score_items(whole, one, asked, 0.7, token_budget=token_budget)
        found = score_items(sharded, one, asked, 0.7, token_budget=token_budget)
        for mine, theirs in zip(found, expected, strict=True):
            for a, b in zip(parts(mine), parts(theirs), strict=True):
                np.testing.assert_allclose(a, b, atol=1e-5)


def parts(result: Any) -> tuple[Any, ...]:
    return result if isinstance(result, tuple) else (result,)


def test_each_rank_has_a_part_of_every_weight(sharded: ShardedModel) -> None:
    sharded.call_everywhere(require_shards)


def require_shards(model: Any) -> None:
    """Runs in the ranks."""
    parameters = list(model.network.parameters())
    assert all(p.numel() == 0 and 2 * p.ds_tensor.numel() >= p.ds_numel for p in parameters)
    assert sum(p.ds_tensor.numel() for p in parameters) < 0.51 * sum(p.ds_numel for p in parameters)


def test_a_sharded_critic_takes_published_weights(policy: ModelLoad, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring_models, "sys", SimpleNamespace(executable=warm.python()))
    trained = load_scalar_model(policy.path, start="policy", seed=11).eval()
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    load = ModelLoad(policy.path, "scalar")
    critic = ShardedModel(load, ON_CPUS)
    publisher = Publisher(Source(trained), "critic", run_id="sharded", probe_every=0)
    try:
        before = score_items(critic, values_of_pass, items(), token_budget=30)
        manifest = publisher.publish_version(0)
        assert manifest is not None
        fetched = SegmentReceiver("sharded").fetch_version(manifest)
        critic.call_everywhere(load_published, fetched.update)
        fetched.close()
        critic.move_away()
        critic.come_back()
        for one, scoring, asked in (
            (values_of_pass, trained, items()),
            (scores_of_pass, trained, [t for t, _ in items()]),
        ):
            expected = score_items(scoring, one, asked, token_budget=30)  # type: ignore[arg-type]
            found = score_items(critic, one, asked, token_budget=30)  # type: ignore[arg-type]
            for mine, theirs in zip(found, expected, strict=True):
                np.testing.assert_allclose(mine, theirs, atol=1e-5)
        assert not np.allclose(before[0], score_items(critic, values_of_pass, items(), token_budget=30)[0], atol=1e-3)
        assert isinstance(trained, ScalarModel)
    finally:
        publisher.close()
        critic.close()


def test_a_rank_that_dies_ends_the_others_and_the_wait(sharded: ShardedModel) -> None:
    """The last test with this model."""
    processes = [rank.process for rank in sharded._ranks]
    with pytest.raises(ShardFailed, match=r"rank 1 of 2 .* died"):
        sharded.call_everywhere(die_as_rank_1)
    assert [process.poll() is not None for process in processes] == [True, True]


def die_as_rank_1(model: Any) -> None:
    """Runs in the ranks; rank 0 waits for the other in a collective."""
    if torch.distributed.get_rank():
        os._exit(3)
    torch.distributed.barrier()
