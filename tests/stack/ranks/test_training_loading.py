"""Ranks of ZeRO-3 load a model without a copy of it each: a rank has its share, and what it gathers at a time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.stack.ranks.loading_rank import weighted_sum
from tests.stack.ranks.ranks import run_ranks
from tests.training.test_memory_formulas import configuration

RANKS = 4
MIB = 1 << 20
SLACK = 24 * MIB
"""Of what the loading itself takes: names, modules, DeepSpeed's groups."""
RETURNED = {"MALLOC_MMAP_THRESHOLD_": "65536"}
"""glibc gives freed memory of any size back: else it keeps some of what was gathered, which is free and counted."""


SIZES = {"hidden_size": 512, "num_hidden_layers": 16, "num_attention_heads": 8, "vocab_size": 8000}
MODELS = {
    "Qwen2": {"intermediate_size": 2048, "tie_word_embeddings": True},
    "Qwen3Moe": {
        "intermediate_size": 64,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 256,
        "mlp_only_layers": [],
    },
}
"""The second one has all experts of a layer in two parameters, and a tensor for each matrix in its files."""


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("name", MODELS)
def test_a_rank_of_zero_3_loads_its_share_and_no_copy_of_the_model(name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(configuration(name, **SIZES, **MODELS[name]))
    model.save_pretrained(tmp_path / "model")
    AutoModelForCausalLM.from_config(configuration("Qwen2", vocab_size=64)).save_pretrained(tmp_path / "small")
    whole = sum(p.numel() * p.element_size() for p in model.parameters())
    largest = max(p.numel() * p.element_size() for p in model.parameters())
    sums = {name: weighted_sum(parameter) for name, parameter in model.named_parameters()}
    del model
    run_ranks("tests.stack.ranks.loading_rank", tmp_path, size=RANKS, env=RETURNED)
    for rank in range(RANKS):
        found = json.loads((tmp_path / f"loading-{rank}.json").read_text())
        assert found["held"] == pytest.approx(whole / RANKS, rel=0.01)
        assert found["most"] <= whole / RANKS + 2 * largest + SLACK, (found["most"], whole, largest)
        assert whole / RANKS + 2 * largest + SLACK < 0.6 * whole
        assert found["sums"].keys() == sums.keys()
        assert all(found["sums"][name] == pytest.approx(sums[name], rel=1e-9, abs=1e-9) for name in sums)
