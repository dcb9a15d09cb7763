"""Process reward: where the scores of steps are read, the loss, the data, and the reward made of steps."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flowrl.errors import ConfigError
from flowrl.graph.load import load_file
from flowrl.messages import Prompt
from flowrl.models import Chat, Policy, load_tokenizer
from flowrl.models.scorer import load_scorer
from flowrl.models.tokens.text_tokens import separator_of, split_steps, step_tokens
from flowrl.nodes import ProcessReward, StepDataset
from flowrl.nodes.scoring.reward_model import reward_of_steps, score_question
from flowrl.nodes.scoring.reward_service import ServeOptions, open_scorer
from flowrl.nodes.sources.demonstrations import labelled_steps
from flowrl.nodes.sources.row_checks import TooLong
from flowrl.tasks import Row, Task, load_demonstrations
from flowrl.testing import run_node, sample
from flowrl.training.model.value_model import load_scalar_model
from flowrl.training.scoring_models import score_items, values_of_pass
from tests.models.word_policy import EOS, make_policy
from tests.models.write_model import write_model
from tests.nodes.test_nodes_reward_model import answered


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_policy(tmp_path_factory.mktemp("policy"), pad="<pad>")


@pytest.fixture
def task(tmp_path: Path) -> Task:
    rows: list[dict[str, Any]] = [
        {"prompt": f"w{n}", "steps": ["w1 w2", "w3"], "labels": [True, n % 2 == 0]} for n in range(12)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return Task(str(tmp_path / "rows.jsonl"))


def test_steps_are_split_by_the_separator() -> None:
    assert split_steps("a\nb\n\nc\n", "\n") == ["a", "b", "c"] and split_steps("", "\n") == [""]
    assert separator_of("\\n\\n") == "\n\n"
    with pytest.raises(ConfigError, match="separator of steps is empty"):
        separator_of("")


def test_each_step_has_one_place_behind_its_separator(policy: Path) -> None:
    chat = Chat(load_tokenizer(policy))
    ids, mask = step_tokens(chat, [{"role": "user", "content": "w9"}], ["w1 w2", "w3"], " w5")
    assert ids.tolist() == [9, 1, 2, 5, 3, 5, EOS] and np.flatnonzero(mask).tolist() == [4, 6]


def test_rows_become_samples_with_a_label_at_each_step(policy: Path, task: Task) -> None:
    row = load_demonstrations(task).train[0]
    prompt = Prompt("s", "g", row.prompt_id, 0, 0, 1, 0, row.prompt, np.zeros(1, np.int32), row.columns)
    record = run_node(StepDataset(task, Policy(str(policy)), separator=" w5"), {"prompts": [prompt]})
    (group,) = record.sent("groups")
    (made,) = group.samples
    assert made.returns is not None
    assert made.returns[made.policy_mask].tolist() == [float(label) for label in row.columns["labels"]]
    assert made.response_tokens == 2 and (made.sample_id, made.response_text) == ("s", "w1 w2 w5w3")


def test_what_becomes_of_long_rows_is_an_option(policy: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"w1 w2 w3 w{n}", "steps": ["w6", "w7"], "labels": [1, 0]} for n in range(9)]
    (tmp_path / "one.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    long = Task(str(tmp_path / "one.jsonl"))
    row = load_demonstrations(long).train[0]
    asked = Prompt("s", "g", row.prompt_id, 0, 0, 1, 0, row.prompt, np.zeros(1, np.int32), row.columns)

    def made(too_long: TooLong, most: int) -> list[list[int]]:
        node = StepDataset(long, Policy(str(policy)), separator=" w5", max_tokens=most, too_long=too_long)
        groups = run_node(node, {"prompts": [asked]}).sent("groups")
        assert all(group.samples[0].returns[group.samples[0].policy_mask].tolist() == [1, 0] for group in groups)
        return [group.samples[0].token_ids.tolist() for group in groups]

    ((*whole,),) = made("drop", 9)
    assert len(whole) == 9 and made("drop", 8) == []
    assert made("truncate", 8) == [whole[1:]] and made("truncate", 6) == [whole[3:]]
    assert made("truncate", 5) == [], "nothing of the prompt would be left"
    with pytest.raises(
        ConfigError, match=r"9 of 9 conversations of .* are longer than max_length = 8, the longest has 9"
    ):
        StepDataset(long, Policy(str(policy)), separator=" w5", max_tokens=8, too_long="error").preflight()
    train = load_demonstrations(long).train
    all_long = [
        replace(asked, sample_id=f"s{n}", group_id=f"g{n}", prompt_id=one.prompt_id) for n, one in enumerate(train)
    ]
    node = StepDataset(long, Policy(str(policy)), separator=" w5", max_tokens=8)
    with pytest.raises(
        ConfigError, match=rf"all {len(train)} conversations of .* are longer than max_length = 8; raise"
    ):
        run_node(node, {"prompts": all_long})
    file = load_file("process_reward_model")
    built: Any = file.build(file.parse(["--too-long", "truncate"]))
    assert [built.nodes[name].too_long for name in ("dataset", "prompts")] == ["truncate", "truncate"]


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({"steps": ["a", "b"], "labels": [1]}, "as many `labels`"),
        ({"answer": "4"}, "it has answer"),
        ({"steps": ["a"], "labels": ["right"]}, "they are 0 to 1"),
    ],
)
def test_rows_without_labelled_steps_are_told(columns: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        labelled_steps(Row.ask("1+1=", **columns), "\n")


def test_steps_may_be_one_text_or_have_trls_name() -> None:
    assert labelled_steps(Row.ask("q", steps="a\nb", labels=(1, 0)), "\n") == (["a", "b"], [1.0, 0.0])
    assert labelled_steps(Row.ask("q", completions=("a",), labels=(True,)), "\n") == (["a"], [1.0])


def test_the_loss_is_the_mean_cross_entropy_over_steps() -> None:
    import torch

    from flowrl.training.loss.objective import LossInputs, Totals
    from flowrl.training.loss.token_objectives import StepCorrectness

    values = torch.tensor([[2.0, -1.0, 7.0], [0.5, 3.0, 9.0]], requires_grad=True)
    labels = torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    mask = torch.tensor([[True, True, False], [True, False, False]])
    none = torch.zeros(2, 0)
    inputs = LossInputs(
        none, none, none, mask, {"labels": labels}, Totals(3, 2), values, torch.zeros(2), torch.zeros(0, 2)
    )
    loss, stats = StepCorrectness().loss(inputs)
    likely = 1 / (1 + np.exp(-np.array([2.0, -1.0, 0.5])))
    expected = -(np.log(likely[0]) + np.log(likely[1]) + np.log(1 - likely[2])) / 3
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-6)
    assert float(stats["step_accuracy"]) == pytest.approx(1 / 3)
    loss.backward()  # type: ignore[no-untyped-call]
    assert values.grad is not None and values.grad[0, 2] == 0


def test_the_reward_is_made_of_the_scores_of_the_steps() -> None:
    scores = [0.5, 0.2, 0.8]
    found = [reward_of_steps(scores, of_steps) for of_steps in ("min", "mean", "product", "last")]  # type: ignore[arg-type]
    assert found == pytest.approx([0.2, 0.5, 0.08, 0.8])


def test_the_node_scores_every_step_where_training_reads_it(policy: Path, task: Task, tmp_path: Path) -> None:
    path = tmp_path / "process"
    model = load_scalar_model(policy, start="policy", seed=1)
    write_model(model, policy, path)
    row = load_demonstrations(task).train[0]
    given = sample(0, prompt_id=row.prompt_id, response_text="w1 w2 w5 w3 w5", token_ids=np.array([1, EOS], np.int32))
    node = ProcessReward(str(path), Policy(str(policy)), task, separator=" w5", of_steps="product")
    (out,) = run_node(node, {"rollouts": [given]}).sent("scored")
    again = ProcessReward(str(path), Policy(str(policy)), task, separator=" w5", of_steps="product")
    (held_out,) = answered(again, [score_question(given, row)])
    assert (held_out.reward, held_out.parts["steps"]) == (pytest.approx(out.reward), 2.0)
    chat = Chat(load_tokenizer(path))
    ids, mask = step_tokens(chat, row.turns, ["w1 w2", " w3"], " w5")
    model = load_scalar_model(path, start="reward_model").eval()
    values = score_items(model, values_of_pass, [(ids, mask)], token_budget=64)[0][mask]
    expected = 1 / (1 + np.exp(-values))
    assert [out.reward_parts["step_0"], out.reward_parts["step_1"]] == pytest.approx(expected.tolist(), abs=1e-5)
    assert out.reward_parts["steps"] == 2.0
    assert out.reward == pytest.approx(float(np.prod(expected)), abs=1e-5)


def test_a_server_scores_the_steps_as_the_node_does(policy: Path, tmp_path: Path) -> None:
    path = tmp_path / "process"
    write_model(load_scalar_model(policy, start="policy", seed=1), policy, path)
    client = open_scorer(str(path), ServeOptions(step_separator=" w5", of_steps="mean"))
    asked = [{"role": "user", "content": "w9"}]
    found = asyncio.run(client.ask(["w9", "?"], ["w1 w2 w5w3", "w4"], [{}, {"messages": asked}]))
    scorer, texts = load_scorer(path), (["w1 w2", "w3"], ["w4"])
    tokens = [step_tokens(scorer.chat, asked, steps, " w5") for steps in texts]
    expected = [sum(scores) / len(scores) for scores in scorer.step_scores(tokens)]
    assert list(found.rewards) == pytest.approx(expected) and found.rewards[0] != found.rewards[1]
    assert found.logs == {"steps": (2.0, 1.0)} and found.heads == {}
    with pytest.raises(ConfigError, match="--step-separator is for a process reward model"):
        open_scorer("rules.py:short", ServeOptions(step_separator=";"))
    with pytest.raises(ConfigError, match="--of-steps: responses are scored as a whole"):
        ServeOptions(of_steps="mean")


def test_responses_that_share_a_prompt_are_scored_each(policy: Path, tmp_path: Path) -> None:
    rows = [{"prompt": "w1", "response": f"w{n}"} for n in range(3)]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    task, path = Task(str(tmp_path / "rows.jsonl")), tmp_path / "process"
    model = load_scalar_model(policy, start="policy", seed=1)
    write_model(model, policy, path)
    found = load_demonstrations(task, whole=True)
    given: list[Any] = [
        sample(n, group=f"g{n}", prompt_id=row.prompt_id, response_text=row.columns["response"])
        for n, row in enumerate((*found.train, *found.held_out))
    ]
    node = ProcessReward(str(path), Policy(str(policy)), task, separator=" w5")
    assert len({out.reward for out in run_node(node, {"rollouts": given}).sent("scored")}) == 3


def test_a_separator_without_a_model_is_refused() -> None:
    from flowrl.graph.load import load_file

    with pytest.raises(ConfigError, match="--step-separator is for a process reward model"):
        load_file("grpo").parse(["--step-separator", ";"])
