"""Reward models that other programs have saved: TRL's, transformers' own, and OpenRLHF's with its names of the head."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from flowrl.errors import ConfigError
from flowrl.models.scorer import check_reward_model, load_scorer
from flowrl.training.model.scalar_head import renamed_head, scalar_head
from flowrl.training.model.trainable import check_scalar

TURNS = [{"role": "user", "content": "1+1="}]


def saved(place: Path, *, prefix: str = "score", pickled: bool = False, **config: Any) -> Any:
    """A tiny classifier as transformers saves it, or with a head and a config as OpenRLHF writes them."""
    from safetensors.torch import save_file
    from transformers import Qwen2Config, Qwen2ForSequenceClassification

    from flowrl.models.tokens.characters import character_tokenizer

    tokenizer = character_tokenizer()
    tokenizer.save_pretrained(place)
    torch.manual_seed(1)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    made = Qwen2Config(vocab_size=len(tokenizer), num_key_value_heads=2, num_labels=1, pad_token_id=0, **sizes)
    model = Qwen2ForSequenceClassification(made).eval()
    model.save_pretrained(place)
    if prefix != "score" or config:
        state = {
            name.replace("score.", f"{prefix}.") if name.startswith("score.") else name: tensor.clone()
            for name, tensor in model.state_dict().items()
        }
        (place / "model.safetensors").unlink()
        if pickled:
            torch.save(state, place / "pytorch_model.bin")
        else:
            save_file(state, place / "model.safetensors", metadata={"format": "pt"})
        content = json.loads((place / "config.json").read_text())
        (place / "config.json").write_text(json.dumps(content | {"architectures": ["RewardModel"]} | config))
    return model


def own_score(model: Any, scorer: Any) -> float:
    ids = torch.from_numpy(scorer.render_ids(TURNS, "2")).long()[None]
    with torch.no_grad():
        return float(model(ids).logits)


@pytest.mark.parametrize(
    ("prefix", "pickled", "config"),
    [
        ("score", False, {}),
        ("score", False, {"mean": 0.5, "std": 2.0, "value_head_prefix": "score"}),
        ("value_head", False, {"mean": 0.5, "std": 2.0}),
        ("value_head", True, {"mean": 0.5, "std": 2.0}),
        ("reward_head", False, {"value_head_prefix": "reward_head"}),
    ],
)
def test_a_reward_model_scores_as_where_it_was_trained(
    tmp_path: Path, prefix: str, pickled: bool, config: dict[str, Any]
) -> None:
    model = saved(tmp_path, prefix=prefix, pickled=pickled, **config)
    check_reward_model(tmp_path)
    scorer = load_scorer(tmp_path)
    (score,) = scorer.score([(TURNS, "2")])
    assert score == pytest.approx(own_score(model, scorer), abs=1e-6) and score != 0.0
    mean, std = config.get("mean", 0.0), config.get("std", 1.0)
    assert scorer.normalise_scores([score]) == [pytest.approx((score - mean) / std)]
    assert scalar_head(tmp_path) == prefix
    assert renamed_head(tmp_path) == (None if prefix == "score" else {f"^{prefix}\\.": "score."})


def test_a_language_model_is_no_reward_model(tmp_path: Path) -> None:
    saved(tmp_path, prefix="lm_head", architectures=["Qwen2ForCausalLM"])
    with pytest.raises(ConfigError, match=r"is not a reward model: its config\.json names Qwen2ForCausalLM"):
        check_reward_model(tmp_path)


def test_a_family_with_another_head_is_refused(tmp_path: Path) -> None:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    BertForSequenceClassification(BertConfig(vocab_size=32, num_labels=3, **sizes)).save_pretrained(tmp_path)
    for check in (check_reward_model, check_scalar):
        with pytest.raises(ConfigError, match="BertForSequenceClassification has no linear layer `score`"):
            check(tmp_path)


def test_a_family_without_a_scalar_class_is_refused(tmp_path: Path) -> None:
    saved(tmp_path, model_type="cohere", value_head_prefix="score")
    with pytest.raises(ConfigError, match="cohere model, which transformers cannot build for training"):
        check_reward_model(tmp_path)
