"""Flash attention computes in 16 bits: for float32 it is not chosen, and refused before anything starts."""

from __future__ import annotations

import pytest
import torch

from flowrl import ConfigError, Graph, check
from flowrl.models import Policy
from flowrl.nodes import Trainer
from flowrl.training.model.policy_model import choose_attention
from flowrl.training.settings import ZeroSettings

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


def test_flash_attention_is_chosen_for_bfloat16_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.utils.is_flash_attn_2_available", lambda: True)
    assert choose_attention(None, GPU, "bfloat16") == "flash_attention_2"
    assert choose_attention(None, GPU, "float32") == "sdpa"
    assert choose_attention(None, CPU, "bfloat16") == "sdpa"


@pytest.mark.parametrize("attention", ["flash_attention_2", "flash_attention_3"])
def test_flash_attention_for_float32_is_refused(attention: str) -> None:
    with pytest.raises(ConfigError, match="computes in 16 bits only, but dtype is float32; set bfloat16, or sdpa"):
        choose_attention(attention, GPU, "float32")
    assert choose_attention(attention, GPU, "bfloat16") == attention
    g = Graph("one")
    g.add("trainer", Trainer(Policy("tiny"), zero=ZeroSettings(attention=attention)))  # type: ignore[arg-type]
    assert any("computes in 16 bits only" in text for text in check(g).problems)
