"""QLoRA: an adapter on a quantized base, and what leaves the trainer as whole weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flowrl.training.settings import LoRA, Quantize
from tests.models.tiny_policy import make_policy, score
from tests.models.write_model import write_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]
TOKENS = np.array([5, 60, 17, 8, 90, 33, 41, 12], np.int32)
TOLERANCE: dict[Quantize, float] = {"nf4": 1e-4, "int8": 0.05}
"""int8 rounds activations as well, which merged weights cannot show."""


def logprobs(model: Any) -> Any:
    from flowrl.training.model.row_layout import lay_out

    return model(lay_out([TOKENS], [np.ones(len(TOKENS), np.bool_)], layout="padded"))[0]


@pytest.mark.parametrize("quantize", ["nf4", "int8"])
def test_what_is_exported_is_what_was_trained(quantize: Quantize, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    import torch
    from transformers import AutoModelForCausalLM

    from flowrl.training.model.policy_model import load_policy_model
    from flowrl.training.model.tensors import whole_weights

    base = make_policy(tmp_path / "base", tied=True)
    model = load_policy_model(tmp_path / "base", lora=LoRA(rank=4, quantize=quantize, sync="merged"))
    assert {str(p.dtype) for n, p in model.named_parameters() if n.endswith("_proj.base_layer.weight")} <= {
        "torch.uint8",
        "torch.int8",
    }
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    before = float(logprobs(model).sum().detach())
    for _ in range(3):
        optimizer.zero_grad()
        (-logprobs(model).sum()).backward()
        optimizer.step()
    with torch.no_grad():
        trained = logprobs(model)
    assert float(trained.sum()) > before + 1

    state = {
        entry.name: entry.make(*(p.detach() for p in entry.parameters)) for entry in whole_weights(model.causal_lm)
    }
    assert state.keys() == {name for name, _ in base.named_parameters()}
    write_model(model, tmp_path / "base", tmp_path / "export", state)
    assert "quantization_config" not in json.loads((tmp_path / "export" / "config.json").read_text())
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float32)
    assert score(merged, [TOKENS])[0] == pytest.approx(trained.tolist(), abs=TOLERANCE[quantize])
