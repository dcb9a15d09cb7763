"""What lies in a model directory beside the weights: every checkpoint of a run has it, a resumed run's too."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flowrl.runtime.ledger.accounting import LEDGER
from flowrl.training.engine.zero import ModelWriter
from flowrl.training.model import policy_model
from flowrl.training.model.policy_model import read_companions


@dataclass(frozen=True)
class Wrapped:
    network: Any


def network() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2))


def write(path: Path, *names: str) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    for name in names:
        (path / name).write_text(f"the old {name}")
    return path


def test_a_run_whose_checkpoint_is_gone_goes_on_writing_whole_models(tmp_path: Path) -> None:
    """`--keep 2` removes the checkpoint that a run was resumed from when it writes its second."""
    source = write(tmp_path / "step_000008", "config.json", "tokenizer.json", "chat_template.jinja")
    beside = read_companions(source)
    shutil.rmtree(source)
    for step in (12, 16, 20):
        writer = ModelWriter(Wrapped(network()), beside, tmp_path / f"step_{step:06d}")
        writer.add_tensors(["a"], [torch.zeros(1)])
        writer.close()
    written = tmp_path / "step_000020"
    assert (written / "tokenizer.json").read_text() == "the old tokenizer.json"
    assert (written / "chat_template.jinja").read_text() == "the old chat_template.jinja"
    assert json.loads((written / "config.json").read_text())["model_type"] == "llama", "what the model writes stands"


def test_weights_and_the_runs_own_files_are_no_companions(tmp_path: Path, monkeypatch: Any) -> None:
    write(tmp_path, "tokenizer.model", "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin")
    write(tmp_path, LEDGER, "state.msgpack", "manifest.json")
    write(tmp_path / "adapter", "adapter_config.json")
    (tmp_path / "huge.weird").write_bytes(b"w" * 100)
    monkeypatch.setattr(policy_model, "LARGEST_COMPANION_BYTES", 99)
    assert read_companions(tmp_path) == {"tokenizer.model": b"the old tokenizer.model"}
