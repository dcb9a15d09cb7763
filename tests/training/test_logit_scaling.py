"""Logprobs of families that scale or cap their logits: equal to transformers' own, forward and backward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from flowrl.errors import ConfigError
from flowrl.training.model.logprobs import LogitScaling, chunked_logprobs, find_scaling
from flowrl.training.model.policy_model import PolicyModel
from flowrl.training.model.row_layout import lay_out

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES: dict[str, tuple[dict[str, Any], LogitScaling]] = {
    "gemma2": ({"final_logit_softcapping": 3.0, "query_pre_attn_scalar": 8}, LogitScaling(1.0, 3.0)),
    "gemma3_text": ({"final_logit_softcapping": 2.0, "query_pre_attn_scalar": 8}, LogitScaling(1.0, 2.0)),
    "cohere": ({"logit_scale": 0.25}, LogitScaling(0.25)),
    "cohere2": ({"logit_scale": 0.0625}, LogitScaling(0.0625)),
    "granite": ({"logits_scaling": 8.0}, LogitScaling(0.125)),
    "nanochat": ({"final_logit_softcapping": 15.0}, LogitScaling(1.0, 15.0)),
    "hyperclovax": ({"logits_scaling": 0.5}, LogitScaling(0.5)),
    "qwen2": ({"tie_word_embeddings": True}, LogitScaling()),
}


def built(family: str) -> Any:
    """A tiny random model of the real architecture, whose logits are far from 0."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(3)
    config = AutoConfig.for_model(family, **SIZES, **FAMILIES[family][0])
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def expected(model: Any, sequences: list[torch.Tensor], temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(logprobs, entropies) of all tokens but the first, from transformers' own logits."""
    logprobs, entropies = [], []
    for ids in sequences:
        table = torch.log_softmax(model(ids[None], use_cache=False).logits[0, :-1].float() / temperature, -1)
        logprobs.append(table.gather(-1, ids[1:, None])[:, 0])
        entropies.append(-(table.exp() * table).sum(-1))
    return torch.cat(logprobs), torch.cat(entropies)


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_and_gradients_equal_those_of_transformers(family: str) -> None:
    """Two lengths in padded rows, a temperature, and the entropy in the loss; all to 1e-5."""
    model = built(family)
    assert find_scaling(model) == FAMILIES[family][1]
    sequences = [torch.randint(3, 61, (length,)) for length in (11, 7)]
    weights = torch.linspace(-1, 2, 16)
    theirs = expected(model, sequences, 0.7)
    (theirs[0] * weights + 0.3 * theirs[1]).sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()

    arrays = [ids.to(torch.int32).numpy() for ids in sequences]
    rows = lay_out(arrays, [ids > 0 for ids in arrays], layout="padded")
    ours = PolicyModel(model)(rows, 0.7, True)
    torch.testing.assert_close(ours[0], theirs[0].detach(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ours[1], theirs[1].detach(), atol=1e-5, rtol=1e-5)
    (ours[0] * weights + 0.3 * ours[1]).sum().backward()
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    for name, parameter in model.named_parameters():
        if name in gradients:
            torch.testing.assert_close(parameter.grad, gradients[name], atol=1e-5 * largest, rtol=1e-5)


def test_a_soft_cap_of_attention_scores_is_not_lost_with_the_default_attention(tmp_path: Path) -> None:
    from flowrl.training.model.policy_model import load_policy_model

    model = built("gemma2")
    model.config.attn_logit_softcapping = 0.5
    model.save_pretrained(tmp_path)
    ids = torch.randint(3, 61, (12,))
    loaded = load_policy_model(tmp_path)
    rows = lay_out([ids.to(torch.int32).numpy()], [ids.numpy() > 0], layout="padded")
    theirs = expected(type(model).from_pretrained(tmp_path, attn_implementation="eager"), [ids], 1.0)[0]
    torch.testing.assert_close(loaded(rows)[0], theirs, atol=1e-5, rtol=1e-5)


def test_chunks_give_the_same_as_one_piece() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(9, 8, requires_grad=True), torch.randn(31, 8, requires_grad=True)
    targets, scaling = torch.randint(31, (9,)), LogitScaling(0.5, 4.0)

    def gradients(num_bytes: int) -> tuple[torch.Tensor, ...]:
        logprobs, entropies = chunked_logprobs(
            hidden, weight, None, targets, scaling=scaling, entropy_gradient=True, logits_bytes=num_bytes
        )
        return torch.autograd.grad((logprobs + entropies).sum(), (hidden, weight))

    for whole, chunked in zip(gradients(1 << 20), gradients(2 * 31 * 4), strict=True):
        torch.testing.assert_close(whole, chunked, atol=1e-6, rtol=1e-5)


def test_a_head_behind_another_layer_is_refused_by_family_and_reason() -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model("bert", **{**SIZES, "is_decoder": True})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ConfigError, match=r"bert models \(BertLMHeadModel\) cannot be trained: its output layer does"):
        find_scaling(model)


def test_logits_that_are_another_function_are_refused() -> None:
    class Odd(type(built("qwen2"))):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            found = super().forward(*args, **kwargs)
            found.logits = found.logits.clamp(-5, 5)
            return found

    model = built("qwen2")
    model.__class__ = Odd
    with pytest.raises(ConfigError, match="by more than a factor and a soft cap"):
        PolicyModel(model)


def test_a_teacher_that_scales_its_logits_is_compared_by_them(tmp_path: Path) -> None:
    from flowrl.training.model.policy_model import load_output_layer

    model = built("granite")
    model.save_pretrained(tmp_path)
    layer = load_output_layer(tmp_path, vocab_size=61, dtype="float32", device=torch.device("cpu"))
    assert layer.scaling == LogitScaling(0.125)
