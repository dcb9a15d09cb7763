"""Evaluation: the same held-out prompts and seeds each time, one version, every answer in the books."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flowrl.errors import ConfigError, FlowrlError, SampleFailed
from flowrl.graph.analysis.check import check
from flowrl.graph.graph import Graph
from flowrl.messages import Prompt, Sample
from flowrl.models import Policy
from flowrl.models.policy import CHARACTER_CONTEXT
from flowrl.nodes import Evaluation, Generator
from flowrl.nodes.evaluation import draws_of, pass_at_k
from flowrl.nodes.sources.row_checks import PromptLimit, TooLong
from flowrl.runtime.ledger.ledger_client import EvaluationRow
from flowrl.tasks import Row, Task, load_rows
from flowrl.tasks.evaluation_set import EvaluationSet
from flowrl.testing import NodeRecord, NodeRig, sample

TASK = Task("arithmetic:max_value=9")


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLOWRL_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


class Answers:
    """Answers prompts: right for members below `right`, by the versions in turn."""

    def __init__(self, *, right: int = 99, versions: tuple[int, ...] = (3,)) -> None:
        self.asked: list[Prompt] = []
        self._right = right
        self._versions = versions

    async def __call__(self, prompt: Prompt) -> Sample:
        self.asked.append(prompt)
        version = self._versions[len(self.asked) % len(self._versions)]
        answer = prompt.columns["answer"] if prompt.member < self._right else "?"
        base = sample(prompt.member, response_text=answer, columns=prompt.columns)
        return sample(
            prompt.member,
            response_text=answer,
            columns=prompt.columns,
            versions=np.where(base.policy_mask, version, -1).astype(np.int32),
        )


def evaluate(
    answers: Answers, phase: str = "before", tasks: Task | tuple[Task, ...] = TASK, **options: Any
) -> tuple[dict[str, float], NodeRecord]:
    node = Evaluation(tasks, Policy("tiny"), **options)

    async def life() -> tuple[dict[str, float], NodeRecord]:
        async with NodeRig(node, name="evaluation", answers={"generate": answers}, preflight=False) as rig:
            figures = await node.evaluate(phase=phase, step=0)
            await node.finish()
            return figures, await rig.finished()

    return asyncio.run(life())


def rows(record: NodeRecord) -> list[list[EvaluationRow]]:
    """What was booked of each evaluation."""
    return [[EvaluationRow(*row[:-1]) for row in table] for (table,) in record.events("evaluation")]


def test_only_held_out_prompts_are_asked_with_seeds_that_stay() -> None:
    first, again = Answers(), Answers()
    evaluate(first, num_prompts=5, num_samples=2)
    evaluate(again, phase="after", num_prompts=5, num_samples=2)
    held_out = {row.prompt_id for row in load_rows(TASK).held_out}
    assert {prompt.prompt_id for prompt in first.asked} <= held_out
    assert len(first.asked) == len({prompt.seed for prompt in first.asked}) == 10
    assert [(p.prompt_id, p.seed) for p in first.asked] == [(p.prompt_id, p.seed) for p in again.asked]
    assert not {p.sample_id for p in first.asked} & {p.sample_id for p in again.asked}


def test_a_prompt_that_is_refused_has_no_score_and_is_counted() -> None:
    class Refusing(Answers):
        """As a generator whose --engine.max-model-len some prompts exceed."""

        async def __call__(self, prompt: Prompt) -> Sample:
            if len(self.asked) == 1:
                self.asked.append(prompt)
                raise SampleFailed("prompt_too_long")
            return await super().__call__(prompt)

    answers = Refusing()
    figures, record = evaluate(answers, num_prompts=5)
    assert (len(answers.asked), figures["num_answers"]) == (5, 4)
    assert record.metrics["evaluation_prompt_too_long"] == 1


def of_lengths(path: Path, lengths: Sequence[int]) -> Task:
    """A file that is asked whole; prompts of these lengths in characters."""
    lines = [json.dumps({"prompt": f"{n:03d}".ljust(length, "x"), "answer": "1"}) for n, length in enumerate(lengths)]
    path.write_text("\n".join(lines))
    return Task(str(path))


def ask_long(
    task: Task, *, most: int | None, too_long: TooLong = "drop"
) -> tuple[Answers, dict[str, float], NodeRecord]:
    answers = Answers()
    whole = EvaluationSet("long", task, whole=True)
    limit = PromptLimit(most, too_long)
    return answers, *evaluate(answers, tasks=(), sets=(whole,), prompt_limit=limit)


def test_long_prompts_are_not_asked_and_counted(tmp_path: Path) -> None:
    task = of_lengths(tmp_path / "rows.jsonl", [5, 5, 60, 5, 70])
    answers, figures, record = ask_long(task, most=20)
    assert len(answers.asked) == figures["num_answers"] == 3
    assert record.metrics == {"evaluation_prompts_too_long": 2}
    answers, figures, record = ask_long(task, most=None)
    assert len(answers.asked) == 5 and record.metrics == {}


def test_long_prompts_lose_their_beginning_if_asked_for(tmp_path: Path) -> None:
    task = of_lengths(tmp_path / "rows.jsonl", [5, 60])
    answers, figures, record = ask_long(task, most=20, too_long="truncate")
    whole = ask_long(task, most=None)[0]
    assert figures["num_answers"] == 2 and record.metrics == {"evaluation_prompts_too_long": 1}
    for cut, other in zip(answers.asked, whole.asked, strict=True):
        assert cut.token_ids.tolist() == other.token_ids[-20:].tolist() and cut.text == other.text


@pytest.mark.parametrize(
    ("lengths", "too_long", "message"),
    [
        (
            [5, 60],
            "error",
            r"1 of 2 held-out prompts of 'long' are longer than evaluate_max_prompt_tokens = 20, the long",
        ),
        ([50, 60], "drop", r"2 of 2 held-out prompts .* the longest has 6\d; raise it, or set too_long to truncate"),
    ],
)
def test_long_prompts_are_an_error_if_asked_for_or_if_nothing_is_left(
    tmp_path: Path, lengths: list[int], too_long: TooLong, message: str
) -> None:
    with pytest.raises(FlowrlError, match=message):
        ask_long(of_lengths(tmp_path / "rows.jsonl", lengths), most=20, too_long=too_long)


def test_the_limit_of_prompts_is_checked() -> None:
    node = Evaluation(TASK, Policy("tiny"), prompt_limit=PromptLimit(0, "cut"))  # type: ignore[arg-type]
    assert node.check(None) == [
        "evaluate_max_prompt_tokens is 0; it needs at least 1",
        "too_long is 'cut'; choose one of drop, truncate, error",
    ]


def test_without_a_limit_prompts_leave_room_for_an_answer_in_the_context(tmp_path: Path) -> None:
    task = of_lengths(tmp_path / "rows.jsonl", [5, CHARACTER_CONTEXT])
    answers, _, record = ask_long(task, most=None)
    assert len(answers.asked) == 1 and record.metrics == {"evaluation_prompts_too_long": 1}


def test_without_a_limit_prompts_leave_room_for_an_answer_in_the_engine(tmp_path: Path) -> None:
    """Longer ones were asked, refused by vLLM, and had no score."""
    whole = EvaluationSet("long", of_lengths(tmp_path / "rows.jsonl", [5, 60, 5]), whole=True)
    answers = Answers()
    _, record = evaluate(answers, tasks=(), sets=(whole,), prompt_limit=PromptLimit(engine=20))
    assert len(answers.asked) == 2 and record.metrics == {"evaluation_prompts_too_long": 1}
    limit = PromptLimit(None, "error", engine=20)
    with pytest.raises(ConfigError, match=r"the 19 tokens that --engine.max-model-len 20 has room for.*; raise it"):
        evaluate(Answers(), tasks=(), sets=(whole,), prompt_limit=limit)


def test_figures_and_books_say_the_same() -> None:
    figures, record = evaluate(Answers(right=1), num_prompts=6, num_samples=4)
    assert figures["exact_match"] == figures["score"] == 0.25
    assert (figures["num_answers"], figures["mean_at_4"], figures["pass_at_4"]) == (24, 0.25, 1.0)
    assert figures["pass_at_2"] == pytest.approx(0.5), "one of four is right: half of all pairs have it"
    (booked,) = rows(record)
    assert len(record.ledger) == 1
    assert [row.correct for row in booked] == [row.member == 0 for row in booked]
    assert {(row.phase, row.step, row.oldest_version, row.newest_version) for row in booked} == {("before", 0, 3, 3)}


def test_fewer_held_out_prompts_than_asked_for_are_refused() -> None:
    found = len(load_rows(TASK).held_out)
    with pytest.raises(ConfigError, match=f"has {found} held-out rows .* ask for at most {found}"):
        Evaluation(TASK, Policy("tiny"), num_prompts=1000).preflight()


@pytest.mark.parametrize("phase", ["before", "during", "after"])
def test_several_versions_are_an_error(phase: str) -> None:
    with pytest.raises(FlowrlError, match=f"{phase} training saw the versions 3 to 4"):
        evaluate(Answers(versions=(3, 4)), phase)


def test_every_task_has_figures_and_rows_under_its_name() -> None:
    other = Task("arithmetic:max_value=12,operators=-")
    figures, record = evaluate(Answers(right=1), tasks=(TASK, other), num_prompts=3, num_samples=2)
    assert (figures["score"], figures[f"{other.name}/score"]) == (0.5, 0.5)
    assert (figures["num_answers"], figures[f"{other.name}/num_answers"]) == (6, 6)
    (booked,) = rows(record)  # all at once, at the end: an evaluation that is cut off has no rows
    assert [row.task for row in booked] == [TASK.name] * 6 + [other.name] * 6


def test_further_tasks_are_asked_in_the_same_way_and_judged_by_their_own_verifiers() -> None:
    first = Task("arithmetic", reward="rules.py:score", system_prompt="Add.")
    node = Evaluation(first, Policy("tiny"), also=["arithmetic:operators=-"])
    assert node.tasks == (first, Task("arithmetic:operators=-", system_prompt="Add."))


def test_tasks_have_to_be_different_ones() -> None:
    assert Evaluation(TASK, Policy("tiny"), also=[TASK.name]).check(None) == [
        "it needs one or more tasks or environments, each once"
    ]
    assert Evaluation((TASK, TASK), Policy("tiny")).check(None) == [
        "it needs one or more tasks or environments, each once"
    ]
    assert len(Evaluation((), Policy("tiny")).check(None)) == 1


def problems_of_two(second: EvaluationSet) -> tuple[str, ...]:
    """The problems of a graph in which one evaluation asks TASK and another one `second`."""
    policy, g = Policy("tiny"), Graph("two")
    generator = g.add("generator", Generator(policy, trained=False))
    for name, node in {
        "evaluation": Evaluation(TASK, policy, num_prompts=5),
        "second": Evaluation((), policy, sets=(second,)),
    }.items():
        g.call(g.add(name, node).generate, generator.requests)
    for port in (generator.prompts, generator.rollouts, generator.weights):
        g.ignore(port)
    return check(g).problems


def test_two_evaluations_that_ask_one_set_are_refused() -> None:
    """The ledger would have two answers to each prompt, and the audit of the run would fail."""
    (problem,) = problems_of_two(EvaluationSet(TASK.name, TASK, num=3))
    assert f"evaluation and second both ask the held-out set {TASK.name!r}" in problem
    assert problems_of_two(EvaluationSet("other", TASK, num=3)) == ()


@pytest.mark.parametrize(("answers", "ks"), [(1, []), (2, [2]), (3, [2, 3]), (4, [2, 4]), (6, [2, 4, 6])])
def test_pass_at_k_is_told_for_powers_of_two_and_for_all(answers: int, ks: list[int]) -> None:
    assert draws_of(answers) == ks


def test_an_answer_without_a_verdict_counts_as_wrong() -> None:
    figures, record = evaluate(Answers(), num_prompts=3, function="tests.nodes.test_nodes_evaluation:judge_of_nothing")
    assert figures["score"] == 0.0
    assert record.metrics == {"evaluation_reward_raised": 3}


async def judge_of_nothing(prompts: list[str], responses: list[str]) -> list[float]:
    raise ValueError("no verdict")


@pytest.mark.parametrize(("n", "c", "k"), [(4, 0, 2), (4, 1, 2), (5, 3, 3), (4, 4, 1), (6, 2, 6)])
def test_pass_at_k_is_the_share_of_draws_with_a_right_answer(n: int, c: int, k: int) -> None:
    draws = list(combinations(range(n), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(min(draw) < c for draw in draws) / len(draws))


def test_preflight_needs_held_out_rows(tmp_path: Path) -> None:
    question = next(text for text in map(str, range(99)) if not Row.ask(text).held_out)
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": question, "answer": "1"}))
    with pytest.raises(ConfigError, match="has no held-out rows"):
        Evaluation(Task(str(path)), Policy("tiny")).preflight()
    Evaluation(TASK, Policy("tiny"), num_prompts=1).preflight()


def test_settings_out_of_range_are_problems() -> None:
    node = Evaluation(TASK, Policy("tiny"), num_prompts=0, num_samples=0, every=-1, concurrency=0)
    assert [text.split()[0] for text in node.check(None)] == ["num_prompts", "num_samples", "every", "concurrency"]
