"""Packed rows by torch's variable-length attention, whose kernel needs a GPU: here a plain one of the same contract."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flowrl.errors import ConfigError
from flowrl.training.model.policy_model import PolicyModel, choose_attention, load_policy_model, require_varlen
from flowrl.training.model.row_layout import lay_out
from flowrl.training.settings import Attention, ZeroSettings

LENGTHS = (9, 4, 13)
SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> Tensor:
    """`torch.nn.attention.varlen.varlen_attn` as its docstring has it, sequence by sequence."""
    assert q.shape[1] == k.shape[1] or enable_gqa
    assert cu_seq_q.dtype == torch.int32 and max_q == max_k == int(cu_seq_q.diff().max())
    assert int(cu_seq_k[-1]) == len(k) and window_size[1] == 0
    parts = []
    for start, end in zip(cu_seq_q[:-1].tolist(), cu_seq_q[1:].tolist(), strict=True):
        place = torch.arange(end - start)
        back = place[:, None] - place[None]
        seen = (back >= 0) & (back <= window_size[0] if window_size[0] >= 0 else back >= 0)
        heads = [tensor[start:end].transpose(0, 1)[None] for tensor in (q, k, v)]
        found = torch.nn.functional.scaled_dot_product_attention(
            *heads, attn_mask=seen, scale=scale, enable_gqa=enable_gqa
        )
        parts.append(found[0].transpose(0, 1))
    return torch.cat(parts)


@pytest.fixture
def bounds(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The bounds with which each layer called the kernel."""
    from torch.nn.attention import varlen

    seen: list[Tensor] = []

    def recording(q: Tensor, k: Tensor, v: Tensor, cu_seq_q: Tensor, *rest: Any, **options: Any) -> Tensor:
        seen.append(cu_seq_q)
        return plain(q, k, v, cu_seq_q, *rest, **options)

    monkeypatch.setattr(varlen, "varlen_attn", recording)
    return seen


def made(tmp_path: Path, kind: str, attention: Attention, **sizes: int) -> PolicyModel:
    import transformers

    if not (tmp_path / "config.json").exists():
        torch.manual_seed(0)
        config = getattr(transformers, f"{kind}Config")(**SIZES, **sizes)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    return load_policy_model(tmp_path, attention=attention, layout="rows")


def gradients(model: PolicyModel, layout: Any) -> list[Tensor]:
    draw = np.random.default_rng(1)
    tokens = [draw.integers(0, 40, length).astype(np.int32) for length in LENGTHS]
    rows = lay_out(tokens, [np.ones(len(t), np.bool_) for t in tokens], layout=layout)
    logprobs_N, _ = model(rows)
    (logprobs_N * torch.linspace(0, 1, len(logprobs_N))).sum().backward()
    return [logprobs_N.detach(), *(p.grad for p in model.network.parameters() if p.grad is not None)]


@pytest.mark.parametrize(("kind", "sizes"), [("Qwen2", {}), ("Mistral", {"sliding_window": 3})])
def test_packed_rows_give_what_padded_ones_give(
    tmp_path: Path, bounds: list[Tensor], kind: str, sizes: dict[str, int]
) -> None:
    packed = gradients(made(tmp_path, kind, "varlen", **sizes), "packed")
    padded = gradients(made(tmp_path, kind, "sdpa", **sizes), "padded")
    for found, expected in zip(packed, padded, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    assert bounds[0].tolist() == [0, 8, 11, 23], "a sequence's last token is no input"
    assert len(bounds) == 2 and all(one is bounds[0] for one in bounds), "computed once, not in every layer"


def test_all_variable_length_kernels_are_given_the_bounds() -> None:
    tokens = [np.arange(length, dtype=np.int32) for length in LENGTHS]
    masks = [np.ones(length, np.bool_) for length in LENGTHS]
    given = lay_out(tokens, masks, layout="packed").model_input
    assert given["cu_seq_lens_q"] is given["cu_seq_lens_k"] and given["max_length_q"] == given["max_length_k"] == 12
    assert "cu_seq_lens_q" not in lay_out(tokens, masks, layout="padded").model_input
    assert "cu_seq_lens_q" not in lay_out(tokens, masks, layout="tree").model_input


def test_where_the_kernel_does_not_run_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="runs on GPUs only"):
        choose_attention("varlen", torch.device("cpu"), "bfloat16")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(ConfigError, match=r"8\.0, and this one has 7\.5"):
        require_varlen(torch.device("cuda"))
    with pytest.raises(ConfigError, match="16 bits only"):
        choose_attention("varlen", torch.device("cuda"), "float32")
    with pytest.raises(ConfigError, match="for packed rows"):
        ZeroSettings(attention="varlen", packing=False)
    with pytest.raises(ConfigError, match=r"soft cap .*, which gemma2 has"):
        made(tmp_path, "Gemma2", "varlen", head_dim=4)


def test_it_is_chosen_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert choose_attention("varlen", torch.device("cuda"), "bfloat16") == "varlen"
