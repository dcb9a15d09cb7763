"""The scalar head: its scores are those of transformers' own class, whatever the padding and the layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flowrl.errors import ConfigError
from flowrl.training.layouts import Placing
from flowrl.training.model.policy_model import load_policy_model, read_config
from flowrl.training.model.row_layout import lay_out, lay_out_ends
from flowrl.training.model.scalar_head import has_scalar_head
from flowrl.training.model.value_model import (
    ScalarModel,
    draw_head,
    load_scalar_model,
)
from tests.models.word_policy import EOS, make_policy
from tests.models.write_model import write_model

SEQUENCES = [np.array([*body, EOS], np.int32) for body in ([3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5, 8, 9, 7], [9])]


@pytest.fixture(scope="module", params=["<pad>", "<eos>", None], ids=["pad", "pad_is_eos", "no_pad"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[ScalarModel, Path]:
    """A scalar model made of a policy, and the directory it was written to."""
    policy = make_policy(tmp_path_factory.mktemp("policy"), pad=request.param)
    model = load_scalar_model(policy, start="policy", seed=1)
    path = tmp_path_factory.mktemp("scalar")
    write_model(model, policy, path)
    return model, path


def scores_of(model: ScalarModel, *, layout: Placing) -> list[float]:
    rows = lay_out_ends(SEQUENCES, layout=layout)
    with torch.no_grad():
        return [float(x) for x in rows.spread_values(model(rows)).squeeze(-1)]


def their_scores(path: Path, side: str | None) -> list[float]:
    """Scores by transformers' class, rows padded on that side, or one by one."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model: Any = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(path)
    assert tokenizer.pad_token_id == model.config.pad_token_id != tokenizer.eos_token_id
    assert model.config.num_labels == 1 and model.score.bias is None
    items = [{"input_ids": s.tolist()} for s in SEQUENCES]
    batches = [[item] for item in items] if side is None else [items]
    found: list[float] = []
    for batch in batches:
        inputs = tokenizer.pad(batch, padding_side=side or "right", return_tensors="pt")
        with torch.no_grad():
            found += [float(x) for x in model(**inputs).logits.squeeze(-1)]
    return found


@pytest.mark.parametrize("side", ["left", "right", None])
def test_scores_equal_those_of_transformers_own_class(saved: tuple[ScalarModel, Path], side: str | None) -> None:
    model, path = saved
    ours = scores_of(model, layout="padded")
    assert ours == pytest.approx(their_scores(path, side), abs=1e-5)
    assert len({round(score, 3) for score in ours}) == len(SEQUENCES), "equal scores would prove nothing"


def test_packed_rows_give_the_same_scores(saved: tuple[ScalarModel, Path]) -> None:
    assert scores_of(saved[0], layout="packed") == pytest.approx(scores_of(saved[0], layout="padded"), abs=1e-5)


def test_a_saved_head_comes_back_and_a_new_one_does_not(saved: tuple[ScalarModel, Path]) -> None:
    model, path = saved
    assert has_scalar_head(path)
    again = load_scalar_model(path, start="reward_model")
    assert scores_of(again, layout="padded") == pytest.approx(scores_of(model, layout="padded"), abs=1e-6)
    fresh = load_scalar_model(path, start="policy", seed=2)
    assert not torch.allclose(fresh.classifier.score.weight, model.classifier.score.weight)
    assert torch.equal(fresh.classifier.model.embed_tokens.weight, model.classifier.model.embed_tokens.weight)


def test_values_are_read_before_each_policy_token(saved: tuple[ScalarModel, Path]) -> None:
    model = saved[0]
    tokens, mask = SEQUENCES[0], np.array([False, False, True, False, True, True])
    with torch.no_grad():
        values_N = model(lay_out([tokens], [mask], layout="padded"))
        prefixes = [model(lay_out_ends([tokens[:t]], layout="padded")) for t in (2, 4, 5)]
    assert values_N.tolist() == pytest.approx([float(v) for v in prefixes], abs=1e-5)


def test_the_head_is_drawn_with_variance_one_by_width_plus_one() -> None:
    weight = torch.nn.Parameter(torch.zeros(1, 100_000))
    draw_head(weight, seed=0)
    assert float(weight.detach().std()) == pytest.approx((1 / 100_001) ** 0.5, rel=0.02)
    assert abs(float(weight.detach().mean())) < 1e-4
    other = torch.nn.Parameter(torch.zeros(1, 100_000))
    draw_head(other, seed=0)
    assert torch.equal(weight, other)


def test_dropout_is_off(saved: tuple[ScalarModel, Path]) -> None:
    model = saved[0]
    model.train()
    assert scores_of(model, layout="padded") == scores_of(model, layout="padded")


def test_dropout_of_a_part_of_the_configuration_is_off(tmp_path: Path) -> None:
    text = {"model_type": "gemma3_text", "attention_dropout": 0.1}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    assert read_config(tmp_path).text_config.attention_dropout == 0.0


@pytest.mark.parametrize("pad", ["<pad>", "<eos>"])
def test_the_end_tokens_embedding_learns_although_it_is_the_pad_token(tmp_path: Path, pad: str) -> None:
    tokens, mask = np.array([1, EOS, 2, EOS], np.int32), np.array([False, False, True, True])
    make_policy(tmp_path, pad=pad)
    policy, scalar = load_policy_model(tmp_path), load_scalar_model(tmp_path, start="policy")
    policy(lay_out([tokens], [mask], layout="padded"))[0].sum().backward()
    scalar(lay_out_ends([tokens], layout="padded")).sum().backward()
    for model in (policy, scalar):
        gradient = model.network.get_input_embeddings().weight.grad
        assert float(gradient[EOS].abs().max()) > 1e-3


def test_the_head_computes_in_float32(saved: tuple[ScalarModel, Path]) -> None:
    half = load_scalar_model(saved[1], start="reward_model", dtype="bfloat16")
    values_N = half(lay_out_ends(SEQUENCES, layout="padded"))
    assert values_N.dtype == torch.float32
    assert values_N.tolist() == pytest.approx(scores_of(saved[0], layout="padded"), abs=0.2)


def test_a_policy_is_no_reward_model(tmp_path: Path) -> None:
    make_policy(tmp_path, pad="<pad>")
    with pytest.raises(ConfigError, match=r"is not a reward model: its config.json names LlamaForCausalLM, not a"):
        load_scalar_model(tmp_path, start="reward_model")


def test_a_head_with_a_bias_is_refused() -> None:
    classifier = torch.nn.Module()
    classifier.score = torch.nn.Linear(4, 1)
    with pytest.raises(ConfigError, match="no linear layer `score` without bias"):
        ScalarModel(classifier)


def test_the_added_pad_token_is_saved_once(saved: tuple[ScalarModel, Path], tmp_path: Path) -> None:
    """Written, loaded and written again, the vocabulary stays as large as it is."""
    model, path = saved
    again = load_scalar_model(path, start="reward_model")
    write_model(again, path, tmp_path)
    sizes = [json.loads((p / "config.json").read_text())["vocab_size"] for p in (path, tmp_path)]
    assert sizes[0] == sizes[1] <= EOS + 2
    assert model.network.get_input_embeddings().weight.shape[0] == sizes[0]
