"""Chunked logprobs against full logits, and the two row layouts against each other."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from flowrl.errors import ConfigError
from flowrl.training.layouts import Placing
from flowrl.training.model import logprobs as cached
from flowrl.training.model.logprobs import chunked_logprobs
from flowrl.training.model.policy_model import PolicyModel, load_policy_model
from flowrl.training.model.row_layout import lay_out, policy_places
from tests.training.training_cases import CASES, make_batch, make_model

N, H, V = 7, 5, 11


def inputs(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (
        torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for shape in ((N, H), (V, H), (V,))
    )
    return hidden, weight, bias, torch.randint(0, V, (N,), generator=generator)


@pytest.mark.parametrize("rows_a_chunk", [1, 3, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_and_gradients_equal_full_logits(rows_a_chunk: int, temperature: float) -> None:
    hidden, weight, bias, targets = inputs()
    upstream = torch.randn(N, dtype=torch.float64), torch.randn(N, dtype=torch.float64)
    log_p = torch.log_softmax((hidden @ weight.T + bias) / temperature, -1)
    expected = log_p.gather(-1, targets[:, None]).squeeze(-1), -(log_p.exp() * log_p).sum(-1)
    sum((value * up).sum() for value, up in zip(expected, upstream, strict=True)).backward()
    gradients = [x.grad.clone() for x in (hidden, weight, bias)]
    for x in (hidden, weight, bias):
        x.grad = None
    found = chunked_logprobs(
        hidden,
        weight,
        bias,
        targets,
        temperature=temperature,
        entropy_gradient=True,
        logits_bytes=rows_a_chunk * V * 8,
    )
    sum((value * up).sum() for value, up in zip(found, upstream, strict=True)).backward()
    for ours, plain in zip([*found, hidden.grad, weight.grad, bias.grad], [*expected, *gradients], strict=True):
        torch.testing.assert_close(ours, plain, rtol=0, atol=1e-12)


def test_without_entropy_gradient_only_the_logprobs_are_differentiable() -> None:
    hidden, weight, _, targets = inputs()
    logprobs, entropies = chunked_logprobs(hidden, weight, None, targets)
    assert logprobs.requires_grad and not entropies.requires_grad
    logprobs.sum().backward()
    assert hidden.grad is not None and weight.grad is not None


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("kept_places", [0, 3, 100])
@pytest.mark.parametrize("cached_places", [1, 2, 100])
def test_cached_places_give_the_same_as_full_logits(
    kept_places: int, cached_places: int, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cached, "CACHE_BYTES", 2 * cached_places * V * 8)
    hidden, weight, bias, targets = inputs()
    upstream = torch.randn(N, dtype=torch.float64)
    log_p = torch.log_softmax((hidden @ weight.T + bias) / temperature, -1)
    expected = log_p.gather(-1, targets[:, None]).squeeze(-1), -(log_p.exp() * log_p).sum(-1)
    wanted = torch.autograd.grad((expected[0] * upstream).sum(), (hidden, weight, bias))
    found = cached.cached_logprobs(
        hidden,
        weight,
        bias,
        targets,
        temperature=temperature,
        kept_bytes=kept_places * V * 8,
        product_bytes=2 * V * 8,
    )
    gradients = torch.autograd.grad((found[0] * upstream).sum(), (hidden, weight, bias))
    for ours, plain in zip([*found, *gradients], [*expected, *wanted], strict=True):
        torch.testing.assert_close(ours, plain, rtol=0, atol=1e-12)


def test_frozen_weights_keep_only_what_the_hidden_states_need() -> None:
    hidden, weight, bias, targets = inputs()
    wanted = torch.autograd.grad(chunked_logprobs(hidden, weight, bias, targets)[0].sum(), hidden)[0]
    frozen = chunked_logprobs(hidden, weight.detach(), bias.detach(), targets)[0]
    torch.testing.assert_close(torch.autograd.grad(frozen.sum(), hidden)[0], wanted)


def test_a_pass_without_gradients_keeps_no_slopes(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, _, targets = inputs()
    wanted = chunked_logprobs(hidden, weight, None, targets)[0].detach()
    monkeypatch.delattr(cached._CachedRows, "_write_slopes")
    with torch.no_grad():
        torch.testing.assert_close(chunked_logprobs(hidden, weight, None, targets)[0], wanted, rtol=0, atol=0)


def test_what_is_returned_may_be_changed_before_the_backward() -> None:
    hidden, weight, _, targets = inputs()
    wanted = torch.autograd.grad(chunked_logprobs(hidden, weight, None, targets)[0].sum(), hidden)[0]
    logprobs, entropies = chunked_logprobs(hidden, weight, None, targets)
    entropies.zero_()
    torch.testing.assert_close(torch.autograd.grad(logprobs.mul_(2.0).sum(), hidden)[0], 2 * wanted)


@pytest.mark.parametrize("kept_places", [0, 100])
def test_the_gradient_of_a_likely_token_is_not_lost_in_bfloat16(kept_places: int) -> None:
    """1 - p is about 1e-4: the difference of onehot and p, each rounded to 8 bits, would be 0 or 0.004."""
    hidden = torch.ones(1, 1, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.tensor([[9.0], [0.0]], dtype=torch.bfloat16, requires_grad=True)
    logprobs, _ = cached.cached_logprobs(
        hidden, weight, None, torch.tensor([0]), kept_bytes=kept_places * 4, product_bytes=100
    )
    logprobs.sum().backward()
    expected = float(1 - torch.tensor(9.0, dtype=torch.float64).sigmoid())
    assert weight.grad.flatten().tolist() == pytest.approx([expected, -expected], rel=0.01)


@pytest.mark.parametrize("rows_a_chunk", [2, 100])
def test_bfloat16_softmax_is_computed_wide(rows_a_chunk: int) -> None:
    hidden, weight, _, targets = inputs(torch.bfloat16)
    logprobs, _ = chunked_logprobs(hidden, weight, None, targets, logits_bytes=rows_a_chunk * V * 4)
    assert logprobs.dtype == torch.float32
    expected = torch.log_softmax((hidden @ weight.T).float(), -1).gather(-1, targets[:, None]).squeeze(-1)
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-6)
    logprobs.sum().backward()
    assert hidden.grad.dtype == weight.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("way", ["cached", "chunked"])
def test_without_a_policy_token_the_output_layer_has_a_gradient_of_0(way: str) -> None:
    """ZeRO reduces it from every rank: one without would leave the others waiting."""
    hidden, weight, bias, targets = inputs()
    if way == "cached":
        logprobs, _ = cached.cached_logprobs(hidden[:0], weight, bias, targets[:0], kept_bytes=99, product_bytes=99)
    else:
        logprobs, _ = chunked_logprobs(hidden[:0], weight, bias, targets[:0], entropy_gradient=True)
    logprobs.sum().backward()
    for tensor in (hidden, weight, bias):
        assert tensor.grad is not None and tensor.grad.shape == tensor.shape and not tensor.grad.any()


def test_no_policy_token_at_all() -> None:
    hidden, weight, _, targets = inputs()
    logprobs, entropies = chunked_logprobs(hidden[:0], weight, None, targets[:0])
    assert logprobs.shape == entropies.shape == (0,)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PolicyModel:
    path = tmp_path_factory.mktemp("model")
    make_model(path, tied=True)
    return load_policy_model(path)


def logprobs_of(model: PolicyModel, *, layout: Placing, change: int | None = None) -> list[np.ndarray]:
    samples = make_batch(0, CASES[0]).samples
    token_ids = [s.token_ids.copy() for s in samples]
    if change is not None:
        token_ids[change] = (token_ids[change] + 1) % 40
    rows = lay_out(token_ids, [s.policy_mask for s in samples], layout=layout)
    logprobs_BT = rows.spread_values(model(rows)[0])
    return [
        row[: len(policy_places(s.policy_mask))].detach().numpy() for row, s in zip(logprobs_BT, samples, strict=True)
    ]


def test_packed_equals_padded_equals_one_by_one(model: PolicyModel) -> None:
    padded, packed = logprobs_of(model, layout="padded"), logprobs_of(model, layout="packed")
    for row, (sample, ours, theirs) in enumerate(zip(make_batch(0, CASES[0]).samples, padded, packed, strict=True)):
        alone = model(lay_out([sample.token_ids], [sample.policy_mask], layout="padded"))[0].detach().numpy()
        assert ours == pytest.approx(alone, abs=1e-5), row
        assert theirs == pytest.approx(alone, abs=1e-5), row


@pytest.mark.parametrize("layout", ["padded", "packed", "tree"])
def test_a_neighbour_changes_nothing(model: PolicyModel, layout: Placing) -> None:
    before, after = logprobs_of(model, layout=layout), logprobs_of(model, layout=layout, change=2)
    differences = [float(np.abs(a - b).max()) for a, b in zip(before, after, strict=True)]
    assert differences.pop(2) > 0.1
    assert max(differences) < 1e-5


def test_a_first_token_is_no_policy_place() -> None:
    assert policy_places(np.array([True, True, False, True])).tolist() == [1, 3]
    assert policy_places(np.array([False, True])).tolist() == [1]
    assert policy_places(np.array([False, False])).tolist() == []


def test_a_directory_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a Hugging Face model directory"):
        load_policy_model(tmp_path)


def test_the_benchmark_compares_two_ways_with_the_same_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.training.logprobs import WAYS, difference, make_pass
    from flowrl.training.model import logprobs

    monkeypatch.setattr(logprobs, "CACHED_ON", logprobs.CACHED_ON)
    run = make_pass(9, 8, 31, torch.float32)
    found = {way: run(way) for way in WAYS}
    assert all(difference(*pair) < 1e-6 for pair in zip(found["chunks"], found["cached"], strict=True))
    assert WAYS["cached"] == logprobs.CACHED_ON
