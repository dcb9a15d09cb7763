"""graphs/judge.py and graphs/teachers.py: what judges say, whom teachers teach, and what is trained on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flowrl import Group, Trainable
from flowrl.messages.episode import Reply, Turn
from flowrl.recipes.judge import Judged
from flowrl.recipes.teachers import AddTeachers, ByDomain
from flowrl.testing import run_node, said, sample, scored

ANSWERS = ("12", "7", "12", "3")


def rewards(way: Any, rubric: str, answer: Any) -> tuple[list[float], list[Turn]]:
    asked: list[Turn] = []

    def judge(turn: Turn) -> Reply:
        asked.append(turn)
        return said(turn, answer(turn))

    fed = [sample(member, response_text=text) for member, text in enumerate(ANSWERS)]
    (group,) = run_node(Judged(way, rubric, size=4), {"rollouts": fed}, answers={"judge": judge}).sent("groups")
    return [one.reward for one in group.samples], asked


def test_a_judge_without_a_rubric_answers_the_prompt_itself() -> None:
    found, asked = rewards("pointwise", "", lambda turn: "12")
    assert found == [1.0, 0.0, 1.0, 0.0]
    (turn,) = asked
    assert turn.token_ids.tolist() == [0, 1, 2] and not turn.messages and not turn.trained, "one ask for the group"
    found, _ = rewards("pairwise", "", lambda turn: "12")
    assert found == pytest.approx([5 / 6, 1 / 6, 5 / 6, 1 / 6]), "two wins and a tie, two losses and a tie"


def test_a_judge_reads_the_rubric_and_says_what_the_schema_allows() -> None:
    found, asked = rewards("pointwise", "{question} {first}", lambda turn: "5" if "12" in text_of(turn) else "2")
    assert found == [1.0, 0.25, 1.0, 0.25]
    assert {turn.schema.choice for turn in asked if turn.schema} == {("1", "2", "3", "4", "5")}
    better = lambda turn: "A" if text_of(turn).split() == ["12", "7"] else "B"  # noqa: E731
    found, asked = rewards("pairwise", "{first} {second}", better)
    assert found == pytest.approx([1 / 3, 0, 1 / 3, 0]) and len(asked) == 12, "each pair in both orders"


def text_of(turn: Turn) -> str:
    return str(turn.messages[0]["content"])


def test_each_sample_goes_to_the_teacher_of_its_domain() -> None:
    fed = [sample(n, columns={"of_task": name}) for n, name in enumerate(("sums", "words", "sums"))]
    record = run_node(ByDomain(("sums", "words")), {"rollouts": fed})
    assert [one.member for one in record.sent("first")] == [0, 2] and [one.member for one in record.sent("second")] == [
        1
    ]
    alone = [sample(n, prompt_id=f"p{n}") for n in range(40)]
    record = run_node(ByDomain(()), {"rollouts": alone})
    assert 10 < len(record.sent("first")) < 30 and len(record.sent("first")) + len(record.sent("second")) == 40


def test_advantages_are_those_of_the_formula() -> None:
    given = scored(0, 1.0, response=3, teacher_logprobs=np.array([0, 0, 0, -0.1, -0.5, -2.0], np.float32))
    group = Group("g", (Trainable.of(given, 0.7),), 1)
    (made,) = run_node(AddTeachers(0.25), {"rewarded": [group]}).sent("groups")
    (taught,) = made.samples
    gaps = [-0.1 + 0.5, -0.5 + 0.5, -2.0 + 0.5]
    assert taught.advantages.tolist() == pytest.approx([0, 0, 0, *(0.7 + 0.25 * gap for gap in gaps)])
    assert taught.token_ids is given.token_ids and taught.reward == 1.0
