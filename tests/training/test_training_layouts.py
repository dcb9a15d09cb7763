"""Which models and settings take trees, as `flowrl check` says it, and what it does where they do not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flowrl import ConfigError, Graph, check
from flowrl.graph.analysis.report import render_report
from flowrl.messages import Batch
from flowrl.models import Policy
from flowrl.models.model_layout import trainer_layout
from flowrl.nodes import TokenBatch, Trainer
from flowrl.training.layouts import decide_layout, find_tree_obstacle
from flowrl.training.model.policy_model import PolicyModel, load_policy_model
from flowrl.training.model.row_layout import RowLayout, lay_out, require_trees
from flowrl.training.model.tree_attention import TreeAttention, register_trees
from flowrl.training.settings import ZeroSettings
from tests.training.training_cases import VOCABULARY, make_model

ABLE: tuple[dict[str, Any], ...] = (
    {},
    {"model_type": "llama"},
    {"model_type": "qwen2", "sliding_window": 131072, "use_sliding_window": False},
    {"model_type": "qwen3", "layer_types": ["full_attention", "full_attention"]},
    {"model_type": "mistral", "sliding_window": None},
    {"model_type": "falcon_like", "alibi": False},
)
UNABLE: tuple[tuple[dict[str, Any], str], ...] = (
    ({"model_type": "mistral", "sliding_window": 4096}, "sliding-window"),
    ({"model_type": "mistral"}, "unless its config.json says otherwise"),
    ({"model_type": "gemma3", "text_config": {"layer_types": ["sliding_attention", "full_attention"]}}, "sliding"),
    ({"model_type": "qwen3_next"}, "recurrent"),
    ({"model_type": "lfm", "layer_types": ["conv", "full_attention"]}, "layers with conv"),
    ({"model_type": "minimax", "layer_types": ["linear_attention"]}, "linear attention"),
    ({"model_type": "mamba2"}, "state-space"),
    ({"model_type": "new", "mamba_d_state": 16}, "state-space"),
    ({"model_type": "bloom"}, "ALiBi"),
    ({"model_type": "old", "alibi": True}, "ALiBi"),
    ({"model_type": "gptj"}, "attention interface"),
    ({"model_type": "own", "auto_map": {}}, "attention interface"),
    ({"model_type": "gpt_neo", "attention_types": [[["global", "local"], 12]], "layer_types": []}, "local"),
    ({"model_type": "gemma2", "layer_types": ["full_attention"], "attn_logit_softcapping": 50.0}, "soft cap"),
    ({"model_type": "chunked", "attention_chunk_size": 8192}, "chunked"),
    ({"model_type": "stablelm"}, "no keyword"),
    ({"model_type": "nemotron"}, "no keyword"),
    ({"model_type": "gpt_oss", "layer_types": ["full_attention"], "sliding_window": None}, "sinks"),
)


@pytest.mark.parametrize("config", ABLE, ids=str)
def test_full_attention_takes_trees(config: dict[str, Any]) -> None:
    assert find_tree_obstacle(config) == ""
    assert decide_layout("auto", config).layout == "auto" and decide_layout("tree", config).layout == "tree"


@pytest.mark.parametrize(("config", "reason"), UNABLE, ids=str)
def test_other_attention_keeps_rows(config: dict[str, Any], reason: str) -> None:
    assert reason in find_tree_obstacle(config)
    assert decide_layout("auto", config).layout == decide_layout("tree", config).layout == "rows"


@pytest.mark.parametrize(
    ("settings", "layout"),
    [
        ({}, "auto"),
        ({"layout": "tree"}, "tree"),
        ({"layout": "rows"}, "rows"),
        ({"packing": True}, "rows"),
        ({"packing": False}, "auto"),
        ({"attention": "sdpa"}, "auto"),
        ({"attention": "eager"}, "rows"),
        ({"attention": "flash_attention_2", "dtype": "bfloat16"}, "rows"),
    ],
    ids=str,
)
def test_settings_with_kernels_of_their_own_keep_rows(settings: dict[str, Any], layout: str) -> None:
    assert trainer_layout(Policy("tiny"), ZeroSettings(**settings), "ulysses").layout == layout


def test_a_model_that_cannot_be_read_here_keeps_rows(tmp_path: Path) -> None:
    assert trainer_layout(Policy(str(tmp_path)), ZeroSettings(), "ulysses").layout == "rows"


def trained(packed_as: str, **settings: Any) -> Graph:
    g = Graph("one")
    batcher = g.add("batcher", TokenBatch(2, layout=packed_as))  # type: ignore[arg-type]
    trainer = g.add("trainer", Trainer(Policy("tiny"), zero=ZeroSettings(**settings)))
    g.connect(batcher.batches, trainer.batches, dispatch="gang")
    return g


def test_check_refuses_trees_for_a_trainer_of_rows() -> None:
    told = [text for text in check(trained("auto", packing=True)).problems if "packs trees" in text]
    assert told == ["batcher packs trees of shared prefixes (layout='auto'), but trainer computes rows; "
                    "give batcher layout='rows'."]  # fmt: skip
    for fine in (trained("auto"), trained("tree", layout="tree"), trained("rows", packing=True)):
        assert not any("packs trees" in text for text in check(fine).problems)
    assert any("layout is 'roots'" in text for text in check(trained("roots")).problems)


def test_trees_that_cannot_be_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mistral", "sliding_window": 9}))
    g = Graph("one")
    g.add("trainer", Trainer(Policy(str(tmp_path)), zero=ZeroSettings(layout="tree")))
    (told,) = (text for text in check(g).problems if "layout is" in text)
    assert told == (
        "node trainer: layout is 'tree', but mistral has sliding-window attention; set layout to auto, which keeps "
        "rows where it has to"
    )


def test_check_says_in_one_line_which_models_take_trees() -> None:
    from flowrl.options import PolicyOptions, TrainerOptions
    from flowrl.recipes.ppo import PPO, graph

    trainer = TrainerOptions(zero=ZeroSettings(layout="rows"))
    text = render_report(check(graph(PPO(trainer=trainer, policy=PolicyOptions("tiny_teacher")))))
    trees, rows = (line.strip() for line in text.splitlines() if "computed" in line)
    assert trees.startswith(
        "note: critic, critic_trainer: prefixes that sequences share are computed once (on a CPU one "
    )
    assert rows == "note: actor, reference: a row is computed for each sequence, because layout is rows"


def test_a_trial_finds_a_model_whose_config_says_too_little(tmp_path: Path) -> None:
    """A model that takes its positions from the order in a row."""
    from transformers import CodeGenConfig, CodeGenForCausalLM

    torch.manual_seed(0)
    config = CodeGenConfig(vocab_size=40, n_embd=16, n_layer=1, n_head=4, n_positions=64, rotary_dim=4)
    model = PolicyModel(CodeGenForCausalLM(config))
    with pytest.raises(ConfigError, match=r"codegen gives other results if prefixes .* set layout to rows"):
        require_trees(
            lambda rows: model(rows)[0], name="codegen", vocab_size=40, dtype="float32", device=torch.device("cpu")
        )


def test_a_trial_finds_a_model_whose_layers_keep_the_tree_to_themselves() -> None:
    """With a mask over all places, as small trees have, its results are right; larger trees have none."""
    from transformers import StableLmConfig, StableLmForCausalLM

    config = StableLmConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation=register_trees(),
    )
    model = PolicyModel(StableLmForCausalLM(config))
    with pytest.raises(ConfigError, match=r"stablelm cannot .* do not pass the keyword `tree` .* set layout to rows"):
        require_trees(
            lambda rows: model(rows)[0], name="stablelm", vocab_size=40, dtype="float32", device=torch.device("cpu")
        )


def test_attention_that_no_kernel_computes_is_refused_in_rows_and_trees() -> None:
    from transformers import GptOssConfig, GptOssForCausalLM

    config = GptOssConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=16,
        head_dim=4,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=2,
        num_experts_per_tok=1,
        layer_types=["full_attention"],
        attn_implementation=register_trees(),
    )
    model = PolicyModel(GptOssForCausalLM(config))
    tokens = np.arange(9, dtype=np.int32)
    for layout in ("padded", "tree"):
        with pytest.raises(ConfigError, match="its attention has s_aux"):
            model(lay_out([tokens, tokens[:5]], [tokens > 3, tokens[:5] > 3], layout=layout))
    with pytest.raises(ConfigError, match=r"gpt_oss cannot compute .* its attention has s_aux, .* set layout to rows"):
        require_trees(
            lambda rows: model(rows)[0], name="gpt_oss", vocab_size=40, dtype="float32", device=torch.device("cpu")
        )


def test_a_trial_refuses_results_that_are_no_numbers(tmp_path: Path) -> None:
    make_model(tmp_path, tied=True)
    model = load_policy_model(tmp_path, layout="tree")

    def score(rows: RowLayout) -> Tensor:
        broken = rows.tree is not None and rows.tree.kernel == "cascade"
        return model(rows)[0] * (torch.nan if broken else 1.0)

    with pytest.raises(ConfigError, match="differ by nan"):
        require_trees(score, name="broken", vocab_size=VOCABULARY, dtype="float32", device=torch.device("cpu"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_trial_finds_siblings_that_see_each_other(tmp_path: Path, dtype: Any) -> None:
    make_model(tmp_path, tied=False)
    model = load_policy_model(tmp_path, dtype=dtype, layout="tree")
    for weight in model.parameters():
        weight.data.mul_(3.0)  # a trained model's logits differ, those of random weights hardly do

    def score(rows: RowLayout) -> Tensor:
        if leaks and rows.tree is not None:
            forest = rows.tree.forest
            seen = replace(forest, ends=np.full_like(forest.ends, len(forest)))
            rows = replace(rows, tree=TreeAttention(seen, torch.device("cpu"), "dense"))
        return model(rows)[0]

    facts: dict[str, Any] = {"name": "leaky", "vocab_size": VOCABULARY, "device": torch.device("cpu")}
    leaks = False
    require_trees(score, dtype=dtype, **facts)
    leaks = True
    with pytest.raises(ConfigError, match="leaky gives other results"):
        require_trees(score, dtype=dtype, **facts)


def test_a_loaded_model_takes_what_was_decided(tmp_path: Path) -> None:
    make_model(tmp_path, tied=True)
    implementations = {
        layout: (model.layout, model.network.config._attn_implementation)
        for layout in ("auto", "tree", "rows")
        if (model := load_policy_model(tmp_path, layout=layout))  # type: ignore[arg-type]
    }
    assert implementations == {
        "auto": ("auto", register_trees()),
        "tree": ("tree", register_trees()),
        "rows": ("rows", "sdpa"),
    }


def test_batches_are_packed_as_rows_unless_a_graph_says_more(tmp_path: Path) -> None:
    """A trainer may compute trees in the room that rows leave, but not the other way round."""
    assert TokenBatch(2).layout == "rows" and Batch((), (), 0, 0, 0).layout == "rows"
