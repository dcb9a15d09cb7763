"""A model is written shard by shard: the same files' content as at once, and never more in memory than one file has."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from flowrl.training.engine import zero
from flowrl.training.engine.zero import ModelWriter
from flowrl.training.model.tensors import whole_weights

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SMALL, tie_word_embeddings=True))


def mixture() -> Any:
    """Its experts are one tensor in memory, and a file has one for each."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(**SMALL, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, head_dim=8)
    return Qwen3MoeForCausalLM(config)


def written(network: Any, path: Path, **options: Any) -> Path:
    writer = ModelWriter(
        SimpleNamespace(network=network), {"tokenizer.json": b"{}", "config.json": b""}, path, **options
    )
    for entry in whole_weights(network):
        writer.add_tensors([entry.name], [entry.make(*(parameter.detach() for parameter in entry.parameters))])
    writer.close()
    return path


def content(path: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(path.glob("*.safetensors")) for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("made", [llama, mixture])
def test_shards_have_what_one_file_has(made: Callable[[], Any], tmp_path: Path) -> None:
    network = made()
    network.save_pretrained(tmp_path / "theirs")
    one, several = written(network, tmp_path / "one"), written(network, tmp_path / "several", shard_bytes=20_000)
    expected = content(tmp_path / "theirs")
    for path in (one, several):
        found = content(path)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        assert not list(path.glob(".*")) and (path / "tokenizer.json").read_bytes() == b"{}"
        assert json.loads((path / "config.json").read_text()) == json.loads(
            (tmp_path / "theirs/config.json").read_text()
        )
    assert [file.name for file in one.glob("*.safetensors*")] == ["model.safetensors"]
    files = sorted(file.name for file in several.glob("*.safetensors"))
    assert len(files) > 3 and files == [f"model-{n + 1:05d}-of-{len(files):05d}.safetensors" for n in range(len(files))]
    loaded = type(network).from_pretrained(several)
    theirs = dict(network.named_parameters())
    assert all(torch.equal(parameter, theirs[name]) for name, parameter in loaded.named_parameters())
    again = written(loaded, tmp_path / "again", shard_bytes=20_000)
    assert content(again).keys() == expected.keys(), "a model that was loaded knows how its files were"


def test_no_more_is_held_than_a_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    network, sizes = llama(), list[int]()
    save = type(network).save_pretrained

    def seen(self: Any, folder: Any, *, state_dict: Any, **options: Any) -> None:
        sizes.append(sum(tensor.nbytes for tensor in state_dict.values()))
        save(self, folder, state_dict=state_dict, **options)

    monkeypatch.setattr(type(network), "save_pretrained", seen)
    written(network, tmp_path / "found", shard_bytes=20_000)
    assert max(sizes) <= 20_000 and sum(sizes) == sum(parameter.nbytes for parameter in network.parameters())
    index = json.loads((tmp_path / "found" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(sizes) and len(set(index["weight_map"].values())) == len(sizes)


def test_what_is_made_of_several_tensors_is_written_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zero, "needs_whole_state", lambda network: True)
    path = written(llama(), tmp_path / "found", shard_bytes=20_000)
    assert [file.name for file in path.glob("*.safetensors*")] == ["model.safetensors"]
