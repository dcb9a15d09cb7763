"""Held-out answers that a reward model scores: the reward of training, right answers beside it, and who is asked."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flowrl.errors import ConfigError, FlowrlError, SampleFailed
from flowrl.models import Policy
from flowrl.nodes import Evaluation, RewardModel
from flowrl.nodes.scoring.reward_model import ModelScore, ScoreQuestion
from flowrl.tasks import Task, load_rows
from flowrl.tasks.evaluation_set import EvaluationSet
from flowrl.testing import NodeRecord, NodeRig
from tests.nodes.test_nodes_evaluation import TASK, Answers, rows
from tests.recipes.test_shared_options import ABSENT, CLUSTER, ONLINE, graph, nodes, problems


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLOWRL_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


class Model:
    """A reward model whose scores are 2, and 0.5 as they enter a reward."""

    def __init__(self, *, fails: int = 0) -> None:
        self.asked: list[ScoreQuestion] = []
        self._fails = fails

    def __call__(self, asked: ScoreQuestion) -> ModelScore:
        self.asked.append(asked)
        if len(self.asked) <= self._fails:
            raise SampleFailed("reward_not_finite")
        return ModelScore(2.0, 0.5, {"reward_model/kind": 3.0})


def evaluate(
    node: Evaluation, model: Model | None = None, answers: Answers | None = None
) -> tuple[dict[str, float], NodeRecord]:
    given: Any = {"generate": answers or Answers(right=1)} | ({} if model is None else {"score": model})

    async def life() -> tuple[dict[str, float], NodeRecord]:
        async with NodeRig(node, name="evaluation", answers=given, preflight=False) as rig:
            figures = await node.evaluate(phase="before", step=0)
            await node.finish()
            return figures, await rig.finished()

    return asyncio.run(life())


def asking(task: Task, **options: Any) -> Evaluation:
    return Evaluation(task, Policy("tiny"), num_prompts=3, num_samples=2, **options)


@pytest.mark.parametrize(
    ("reward", "score", "parts"),
    [
        ("", 0.5, {}),
        ("verifier + 0.5*reward_model", 0.75, {"verifier": 0.5}),
        ("2*verifier as right + reward_model", 1.5, {"right": 0.5}),
        ("tests.nodes.test_held_out_model:three + 2*reward_model", 4.0, {"three": 3.0}),
    ],
)
def test_the_score_is_the_reward_of_training_and_right_answers_are_told_beside_it(
    reward: str, score: float, parts: dict[str, float]
) -> None:
    model = Model()
    figures, record = evaluate(asking(replace(TASK, reward=reward).by_model), model)
    assert (figures["score"], figures["exact_match"], figures["pass_at_2"]) == (score, 0.5, 1.0)
    told = {name.removeprefix("reward/"): value for name, value in figures.items() if name.startswith("reward/")}
    assert told == parts | {"reward_model": 2.0, "reward_model/kind": 3.0}
    (booked,) = rows(record)
    assert [row.correct for row in booked] == [row.member == 0 for row in booked]
    assert len(model.asked) == 6 and all(asked.token_ids.size for asked in model.asked)


def three(prompt: str, response: str) -> float:
    return 3.0


def prompts_alone(path: Path) -> Task:
    """Conversations without an answer, as for RLHF."""
    turns = [[{"role": "system", "content": "Be kind."}, {"role": "user", "content": f"Hello {n}"}] for n in range(40)]
    path.write_text("".join(json.dumps({"prompt": one}) + "\n" for one in turns))
    return Task(str(path))


class Greetings(Answers):
    """Answers to prompts that have no answer."""

    async def __call__(self, prompt: Any) -> Any:
        return await super().__call__(replace(prompt, columns={"answer": "Hi"}))


def test_rows_without_answers_have_the_models_score_alone(tmp_path: Path) -> None:
    task = prompts_alone(tmp_path / "rows.jsonl").by_model
    node, model = asking(task), Model()
    assert node.preflight() is None or "prompts" in str(node.preflight())
    figures, _ = evaluate(node, model, Greetings())
    assert figures["score"] == 0.5 and figures["reward/reward_model"] == 2.0
    assert not {"exact_match", "mean_at_2", "pass_at_2"} & set(figures)
    turns = {json.dumps([dict(turn) for turn in row.turns]) for row in load_rows(task).held_out}
    assert {json.dumps([dict(turn) for turn in asked.turns]) for asked in model.asked} <= turns
    assert {asked.response for asked in model.asked} == {"Hi"}


def test_without_answers_and_a_reward_model_what_to_do_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no answer to compare .*--reward-model.*--evaluate 0"):
        asking(prompts_alone(tmp_path / "rows.jsonl")).preflight()


def test_an_answer_without_a_score_does_not_count() -> None:
    figures, record = evaluate(asking(TASK.by_model), Model(fails=2))
    assert (figures["num_answers"], figures["score"]) == (4, 0.5)
    assert record.metrics == {"evaluation_reward_not_finite": 2}
    with pytest.raises(FlowrlError, match=r"none of 6 held-out answers .* has a score"):
        evaluate(asking(TASK.by_model), Model(fails=6))


def test_sets_and_further_tasks_with_their_own_checks_do_not_ask_the_model(tmp_path: Path) -> None:
    like = replace(TASK, reward="verifier + reward_model")
    task = prompts_alone(tmp_path / "rows.jsonl")
    found = {
        text: EvaluationSet.parse(f"{task.name}:{text}", like=like, samples=1).task.reward
        for text in ("num=3", "check=gsm8k", "reward=reward_model", "reward=a.py:f")
    }
    assert list(found.values()) == [like.reward, "", "reward_model", "a.py:f"]
    node = asking(TASK.by_model, also=["arithmetic:operators=-"])
    assert [by.by_model for by in node.scored_by.values()] == [True, False]


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("grpo", ("--evaluate-task", "arithmetic:reward=reward_model")),
        ("sft", ("--evaluate", "4", "--task.reward", "verifier + 0.5*reward_model")),
        ("distill", ("--task.reward", "reward_model")),
        ("dpo", ("--task.reward", "reward_model")),
    ],
)
def test_a_reward_model_that_is_not_there_is_a_problem(name: str, given: tuple[str, ...]) -> None:
    (problem,) = problems(name, *given)
    assert "names reward_model, but no reward model is there to score held-out answers" in problem
    assert "--reward-model" in problem and "--evaluate 0" in problem


def test_agents_have_rewards_of_their_own() -> None:
    (problem,) = problems("agent_openai", "--evaluate-task", "arithmetic:reward=reward_model")
    assert "episodes have rewards of their own; leave it out" in problem


@pytest.mark.parametrize("name", sorted({*ONLINE} - ABSENT["reward-model"]))
def test_every_graph_with_a_reward_model_asks_it_about_held_out_answers(name: str) -> None:
    from flowrl import check

    evaluated = ("--evaluate", "4", "--reward-model", "a/model", "--reward-away-s", "9")
    for task_reward, weight in ((), 1.0), (("--task.reward", "verifier + 0.5*reward_model"), 0.5):
        made = graph(name, *evaluated, *task_reward)
        (node,), (model,) = nodes(made, Evaluation), nodes(made, RewardModel)
        assert {(edge.out.node, edge.into.node) for edge in made.edges if edge.out.name == "score"} == {(node, model)}
        assert [by.weight for by in node.scored_by.values()] == [weight]
        assert node.away_s == 9.0
    assert not [text for text in check(made, CLUSTER).problems if "a/model" not in text]
    (node,) = nodes(graph(name, "--evaluate", "4"), Evaluation)
    assert not node.asks_model


def test_evaluation_alone_takes_a_reward_model_with_its_options() -> None:
    given = ("--reward-model", "a/model", "--reward-model.label", "2", "--reward-model.normalise", "True")
    made = graph("evaluate", *given, "--task.reward", "verifier + 0.5*reward_model", "--evaluate-also", "sticks")
    (node,), (model,) = nodes(made, Evaluation), nodes(made, RewardModel)
    assert {(edge.out.node, edge.into.node) for edge in made.edges if edge.out.name == "score"} == {(node, model)}
    assert [by.weight for by in node.scored_by.values()] == [0.5, None]
    assert (model.label, model.normalise, model.weight) == ("2", True, 1.0), "the evaluation asks the functions"
    assert [text for text in problems("evaluate", *given) if "a/model" not in text] == []
    with pytest.raises(ConfigError, match="--reward-model scores nothing, for each set"):
        graph("evaluate", *given, "--evaluate-task", "arithmetic:check=exact")
    (problem,) = problems("evaluate", "--evaluate-task", "arithmetic:reward=reward_model")
    assert "no reward model is there" in problem
