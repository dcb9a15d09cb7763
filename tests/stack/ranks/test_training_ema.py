"""The moving average under ZeRO stage 1 with bfloat16, whose master weights DeepSpeed keeps in another place."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from flowrl.errors import FlowrlError
from flowrl.training.engine.training_state import master_weights
from tests.stack.ranks.ema_rank import OPTION
from tests.stack.ranks.options_cases import DECAY
from tests.stack.ranks.ranks import run_ranks
from tests.training.training_cases import make_model


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_average_is_that_of_the_master_weights(tmp_path: Path) -> None:
    make_model(tmp_path / OPTION.base, tied=True)
    run_ranks("tests.stack.ranks.ema_rank", tmp_path, timeout_s=300)
    history = torch.load(tmp_path / "masters.pt")
    found = load_file(tmp_path / "end" / "ema" / "model.safetensors")
    assert found
    for name, tensor in found.items():
        average = history[0][name]
        for weights in history[1:]:
            average = DECAY * average + (1 - DECAY) * weights[name]
        assert tensor.dtype == torch.bfloat16
        assert torch.allclose(tensor.float(), average, rtol=2**-8, atol=1e-6), name
        assert not torch.equal(tensor, history[-1][name].to(torch.bfloat16)), "the last weights are no average"


def test_masters_that_are_not_found_are_not_guessed() -> None:
    with pytest.raises(FlowrlError, match="DeepSpeed's SimpleNamespace keeps its fp32 weights where"):
        master_weights(SimpleNamespace(optimizer=SimpleNamespace()))
