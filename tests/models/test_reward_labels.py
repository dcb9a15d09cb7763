"""Reward models with several labels: one of them, or a weighted sum, is the score, and each is logged."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flowrl.errors import ConfigError
from flowrl.graph.load import load_file
from flowrl.models import Policy, check_model
from flowrl.models.scorer import Scorer, check_reward_model, label_weights, load_scorer, weighted_sum
from flowrl.nodes import ProcessReward, RewardModel
from flowrl.nodes.scoring.reward_service import AskModel, ServeOptions, serve_until_interrupted
from flowrl.tasks import Task
from flowrl.testing import run_node, sample
from flowrl.training.model.scalar_head import head_labels
from flowrl.training.model.trainable import check_scalar
from tests.models.word_policy import EOS, make_policy

NAMES = ("helpfulness", "correctness", "verbosity")


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_policy(tmp_path_factory.mktemp("policy"), pad="<pad>")


@pytest.fixture(scope="module")
def model(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(policy, tmp_path_factory.mktemp("labels"), NAMES)


@pytest.fixture
def task(tmp_path: Path) -> Task:
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"prompt": "w{n}", "answer": "w2"}}\n' for n in range(9)))
    return Task(str(tmp_path / "rows.jsonl"))


def saved(policy: Path, place: Path, names: tuple[str, ...], **config: Any) -> Path:
    """A classifier of the policy's size, as transformers saves it."""
    from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

    made = AutoConfig.from_pretrained(policy)
    made.id2label, made.pad_token_id = dict(enumerate(names)), AutoTokenizer.from_pretrained(policy).pad_token_id
    torch.manual_seed(3)
    AutoModelForSequenceClassification.from_config(made).save_pretrained(place)
    AutoTokenizer.from_pretrained(policy).save_pretrained(place)
    if config:
        content = json.loads((place / "config.json").read_text())
        (place / "config.json").write_text(json.dumps(content | config))
    return place


def logits(model: Path, ids: list[int]) -> list[float]:
    """What transformers' own class says."""
    from transformers import AutoModelForSequenceClassification

    with torch.no_grad():
        found = AutoModelForSequenceClassification.from_pretrained(model)(torch.tensor([ids])).logits[0]
    return found.tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("text", "weights"),
    [
        ("correctness", (0, 1, 0)),
        ("2", (0, 0, 1)),
        ("helpfulness=0.8,verbosity=-0.2", (0.8, 0, -0.2)),
        ("0=1,1=2", (1, 2, 0)),
    ],
)
def test_the_score_is_what_the_option_makes_of_the_labels(model: Path, text: str, weights: tuple[float, ...]) -> None:
    ids = np.array([1, 2, 3, EOS], np.int32)
    own = logits(model, ids.tolist())
    scorer = load_scorer(model, label=text)
    assert scorer.labels == dict(zip(NAMES, weights, strict=True))
    assert scorer.sum_labels(scorer.label_scores([ids, ids[:2]])[0]) == pytest.approx(np.dot(weights, own), abs=1e-5)
    assert scorer.label_scores([ids])[0] == pytest.approx(own, abs=1e-5)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", r"scores 3 labels \(0 helpfulness, 1 correctness, 2 verbosity\); choose one with --reward-model.label"),
        ("tone", "names 'tone', but .* has the labels 0 helpfulness, 1 correctness, 2 verbosity"),
        ("3", "names '3', but"),
        ("tone=1", "names 'tone', but"),
        ("helpfulness=x", "write NAME=WEIGHT,NAME=WEIGHT"),
        ("helpfulness=0", "weighs every label 0"),
    ],
)
def test_a_missing_or_unknown_choice_is_refused_with_the_labels(model: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        check_reward_model(model, label=text)


def test_names_come_from_the_config_only_if_they_are_those_of_the_head(policy: Path, tmp_path: Path) -> None:
    assert head_labels(saved(policy, tmp_path / "named", ("a", "b"))) == ("a", "b")
    two = {"id2label": {"0": "x", "1": "y"}}
    assert head_labels(saved(policy, tmp_path / "three", ("a", "b", "c"), **two)) == ("LABEL_0", "LABEL_1", "LABEL_2")
    same = {"id2label": {"0": "x", "1": "x"}}
    assert head_labels(saved(policy, tmp_path / "same", ("a", "b"), **same)) == ("LABEL_0", "LABEL_1")
    one = saved(policy, tmp_path / "one", ("quality",), id2label={})
    assert head_labels(one) == ("LABEL_0",), "transformers' config alone would say two"
    check_reward_model(one, label="0")
    with pytest.raises(ConfigError, match="has the labels 0 LABEL_0"):
        check_reward_model(one, label="quality")


def test_the_head_of_armo_is_found_by_its_name(policy: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file as read
    from safetensors.torch import save_file

    path = saved(policy, tmp_path / "armo", NAMES, architectures=["LlamaForRewardModelWithGating"])
    ids = np.array([1, 2, EOS], np.int32)
    own = logits(path, ids.tolist())
    state = read(path / "model.safetensors")
    state["regression_layer.weight"] = state.pop("score.weight")
    save_file(state, path / "model.safetensors", metadata={"format": "pt"})
    second = load_scorer(path, label="1")
    assert second.sum_labels(second.label_scores([ids])[0]) == pytest.approx(own[1], abs=1e-5)


def test_such_a_model_is_no_start_of_a_critic(model: Path) -> None:
    check_model(Policy(str(model)))
    with pytest.raises(ConfigError, match=r"scores 3 labels \(helpfulness, correctness, verbosity\), but a critic"):
        check_scalar(model)


def test_the_node_logs_each_label_and_trains_on_the_chosen(policy: Path, model: Path, task: Task) -> None:
    node = RewardModel(str(model), Policy(str(policy)), task, label="correctness=2,verbosity=-1")
    node.preflight()
    given = sample(0, token_ids=np.array([1, 2, 3, EOS], np.int32))
    (out,) = run_node(node, {"rollouts": [given]}, preflight=False).sent("scored")
    own = logits(model, given.token_ids.tolist())
    assert out.reward == out.raw_reward == pytest.approx(2 * own[1] - own[2], abs=1e-5)
    logged = {f"reward_model/{name}": pytest.approx(value, abs=1e-5) for name, value in zip(NAMES, own, strict=True)}
    assert out.reward_parts == logged | {"reward_model": pytest.approx(out.reward)}


def test_a_label_that_is_no_number_fails_its_sample(
    policy: Path, model: Path, task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Scorer, "label_scores", lambda self, ids: [(1.0, float("nan"), 1.0)] * len(ids))
    node = RewardModel(str(model), Policy(str(policy)), task, label="0")
    assert run_node(node, {"rollouts": [sample(0)]}, preflight=False).reasons() == [("failed", "reward_not_finite")]


def test_steps_are_scored_by_the_chosen_labels(policy: Path, tmp_path: Path, task: Task) -> None:
    """Of two labels the difference is the logit of their softmax."""
    path = saved(policy, tmp_path / "steps", ("bad", "good"))
    from flowrl.tasks import load_rows

    row = load_rows(task).train[0]
    given = sample(0, prompt_id=row.prompt_id, response_text="w1 w2", token_ids=np.array([1, EOS], np.int32))
    node = ProcessReward(str(path), Policy(str(policy)), task, separator=" w5", label="good=1,bad=-1")
    (out,) = run_node(node, {"rollouts": [given]}).sent("scored")
    ids, mask = node.read_tokens(node.question_of(given))
    (place,) = np.flatnonzero(mask)
    bad, good = np.exp(logits(path, ids[:place].tolist()))
    assert out.reward == pytest.approx(good / (bad + good), abs=1e-5)


def test_every_graph_with_a_reward_model_has_the_option(model: Path) -> None:
    for name in ("grpo", "ppo", "raft", "score"):
        file = load_file(name)
        made = file.build(file.parse(["--reward-model.model", str(model), "--reward-model.label", "verbosity"]))
        assert [node.label for node in made.nodes.values() if isinstance(node, RewardModel)] == ["verbosity"]
    with pytest.raises(ConfigError, match="name its directory with --reward-model"):
        load_file("grpo").parse(["--reward-model.label", "verbosity"])


def test_a_server_answers_every_label_with_its_weight(model: Path) -> None:
    scorer = load_scorer(model, label="helpfulness=0.5,correctness=0.5")
    found = asyncio.run(AskModel(scorer).ask(["w1"], ["w2"], [{}]))
    values = [found.logs[name][0] for name in NAMES]
    assert found.heads == {"helpfulness": 0.5, "correctness": 0.5, "verbosity": 0.0}
    assert list(found.rewards) == pytest.approx([0.5 * values[0] + 0.5 * values[1]])
    assert list(found.weighted({"verbosity": 1.0}).rewards) == pytest.approx([found.rewards[0] + values[2]])
    with pytest.raises(ConfigError, match=re.escape("choose one with --label helpfulness, or a sum with --label")):
        serve_until_interrupted(str(model), ServeOptions())
    with pytest.raises(ConfigError, match="--weights is for the values of a function"):
        serve_until_interrupted(str(model), ServeOptions(weights="helpfulness=1"))


def test_a_label_whose_name_looks_like_weights_is_that_label() -> None:
    assert label_weights("a=1", ("a=1", "b"), model="m") == (1.0, 0.0)
    assert weighted_sum((float("inf"), 2.0), (0.0, 3.0)) == 6.0
