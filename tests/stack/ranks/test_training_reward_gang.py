"""A reward model on two real ZeRO ranks against a plain loop with transformers' own class."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from flowrl.messages import Trainable
from tests.models.word_policy import EOS, make_policy
from tests.stack.ranks.ranks import run_ranks
from tests.stack.ranks.scalar_rank import LR, OBJECTIVE, STAGES, STEPS, make_pairs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def gang_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where two ranks left what each stage gave. The policy's pad token is its end token."""
    directory = tmp_path_factory.mktemp("reward")
    make_policy(directory / "policy", pad="<eos>")
    run_ranks("tests.stack.ranks.scalar_rank", directory)
    return directory


def load(path: Path) -> Any:
    from transformers import AutoModelForSequenceClassification

    return AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32)


def score(model: Any, sample: Trainable) -> torch.Tensor:
    return model(input_ids=torch.tensor(sample.token_ids)[None].long()).logits[0, 0]


def plain_loop(path: Path) -> tuple[Any, list[float], list[float]]:
    """The model after the same steps, with the loss and the accuracy before each."""
    model = load(path)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    losses, accuracies = [], []
    for step in range(STEPS):
        samples = make_pairs(step)
        parts, right = [], 0
        for chosen, rejected in zip(samples[::2], samples[1::2], strict=True):
            c, r = score(model, chosen), score(model, rejected)
            right += int(c > r)
            margin = chosen.columns["margin"]
            parts.append(torch.log1p(torch.exp(-(c - r - margin))) + OBJECTIVE.centring * (c + r) ** 2)
        loss = torch.stack(parts).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        accuracies.append(right / len(parts))
    return model, losses, accuracies


@pytest.mark.parametrize("stage", STAGES)
def test_weights_and_losses_equal_the_plain_loop(gang_dir: Path, stage: int) -> None:
    model, losses, accuracies = plain_loop(gang_dir / f"start-{stage}")
    told = torch.load(gang_dir / f"told-{stage}.pt")
    assert [update["loss"] for update in told] == pytest.approx(losses, abs=1e-5)
    assert [update["preference_accuracy"] for update in told] == pytest.approx(accuracies)
    found = load(gang_dir / f"end-{stage}")
    moved = load(gang_dir / f"start-{stage}").state_dict()
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(found.state_dict()[name], tensor, rtol=0, atol=1e-5)
    assert float((moved["score.weight"] - found.score.weight).abs().max()) > 1e-3


def test_the_head_is_drawn_the_same_whatever_is_sharded(gang_dir: Path) -> None:
    """Under gathered parameters, from N(0, 1/(h+1)): 16 numbers of that size."""
    heads = [load(gang_dir / f"start-{stage}").score.weight for stage in STAGES]
    assert torch.equal(*heads)
    assert 0.5 < float(heads[0].detach().std()) * 17**0.5 < 1.6


def test_the_policys_own_weights_are_where_it_starts(gang_dir: Path) -> None:
    from transformers import AutoModelForCausalLM

    policy = AutoModelForCausalLM.from_pretrained(gang_dir / "policy", dtype=torch.float32).state_dict()
    start = load(gang_dir / "start-3").state_dict()
    rows = policy["model.embed_tokens.weight"].shape[0]
    assert start["model.embed_tokens.weight"].shape[0] == rows + 1, "one row for the pad token"
    assert torch.equal(start["model.embed_tokens.weight"][:rows], policy["model.embed_tokens.weight"])
    assert torch.equal(start["model.norm.weight"], policy["model.norm.weight"])


def test_the_export_tells_of_its_scores_and_its_pad_token(gang_dir: Path) -> None:
    from transformers import AutoTokenizer

    config = json.loads((gang_dir / "end-3" / "config.json").read_text())
    assert (config["reward_mean"], config["reward_std"]) == (0.25, 1.5)
    assert config["architectures"] == ["LlamaForSequenceClassification"]
    assert AutoTokenizer.from_pretrained(gang_dir / "end-3").pad_token_id == config["pad_token_id"] != EOS
