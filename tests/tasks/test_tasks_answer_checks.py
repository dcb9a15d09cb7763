"""Checks by name: which answer is found in a response, and which references are refused."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from flowrl.errors import ConfigError
from flowrl.models import Policy
from flowrl.nodes import Demonstrations, PromptSource, Reward
from flowrl.tasks import Task, load_rows
from flowrl.tasks.checks.answer_checks import CHECKS, box_of, boxed, choice, gsm8k, letter_of, number_of
from flowrl.tasks.checks.code_tests import program_of
from flowrl.tasks.checks.maths import is_equal
from flowrl.tasks.reasoning import extract_answer, find_numbers, find_tagged
from flowrl.tasks.reward_calls.judge import load_judge

SOLUTION = "She sells 16 - 3 - 4 = <<16-3-4=9>>9 eggs.\nShe makes 9 * 2 = $<<9*2=18>>18.\n#### 18"


@pytest.mark.parametrize(
    ("response", "reference", "score"),
    [
        ("The answer is 18.", SOLUTION, 1),
        ("#### 18", SOLUTION, 1),
        ("First 7, then 18.00 dollars", SOLUTION, 1),
        ("#### 18\nNow I add 5 more.", SOLUTION, 1),
        ("18, or rather 19", SOLUTION, 0),
        ("none", SOLUTION, 0),
        ("", SOLUTION, 0),
        ("It costs $1,234.50", "#### 1234.5", 1),
        ("1,2,3", "#### 123", 0),
        ("20-15=5", "5", 1),
        ("20-15", "-15", 0),
        ("It is -5", "-5", 1),
        ("It is 5", "-5", 0),
        (".5", "0.5", 1),
        ("#### Step 3: total\nShe has 18 eggs", SOLUTION, 1),
        ("#### 13. Total\nShe has 18 eggs", SOLUTION, 1),
        ("#### **18**\n\n#### Check\n3 + 4 + 9", SOLUTION, 1),
        ("#### \\boxed{18} of 20", SOLUTION, 1),
        ("It is -$5", "-5", 1),
        ("It is -$5", "5", 0),
        ("It is \u22125", "-5", 1),
        ("20\u221215", "15", 1),
        ("1/2", "2", 0),
        ("36/2 = 18", SOLUTION, 1),
        ("0.00001", "1e-05", 1),
        ("5", "1e-05", 0),
        ("10,000,000,000,000,000", "1e+16", 1),
    ],
)
def test_the_last_number_or_the_marked_one(response: str, reference: str, score: float) -> None:
    assert gsm8k([""], [response], answer=[reference]) == [score]


@pytest.mark.parametrize(
    ("response", "reference", "score"),
    [
        ("so \\boxed{42}", "42", 1),
        ("so \\boxed{ 42.0 }", "\\boxed{42}", 1),
        ("\\boxed{1} and then \\boxed{2}", "2", 1),
        ("\\boxed{1} and then \\boxed{2}", "1", 0),
        ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}", 1),
        ("\\boxed{7} then \\boxed{8", "7", 1),
        ("\\boxed{\\text{Evelyn}}", "Evelyn", 1),
        ("\\boxed{1,000}", "1000", 1),
        ("\\boxed{50\\%}", "50%", 1),
        ("\\boxed{3, 100}", "3100", 0),
        ("\\boxed{3,\\;100}", "3, 100", 1),
        ("\\boxed{10{,}000}", "10000", 1),
        ("\\boxed{10,\\! 000}", "10000", 1),
        ("\\boxed{0.00001}", "1e-05", 1),
        ("42", "42", 0),
        ("\\boxed{}", "42", 0),
        ("\\boxed{\\boxed{1} + 2}", "1", 1),
        ("} \\boxed{1} } {", "1", 1),
        ("\\boxed{{1} \\boxed{2", "2", 0),
        ("{\\boxed{1} \\boxed{2}", "2", 1),
    ],
)
def test_the_last_box(response: str, reference: str, score: float) -> None:
    assert boxed([""], [response], answer=[reference]) == [score]


@pytest.mark.parametrize(
    ("response", "reference", "score"),
    [
        ("B", "B", 1),
        ("(b)", "B", 1),
        ("B. Paris", "B", 1),
        ("The answer is (C).", "C", 1),
        ("Answer: **D**", "D", 1),
        ("\\boxed{A}", "0", 1),
        ("\\boxed{\\text{C}}", "2", 1),
        ("The answer is A. No: the answer is B.", "B", 1),
        ("the answer is a question", "A", 0),
        ("A good question", "A", 0),
        ("I'm not sure", "I", 0),
        ("", "A", 0),
        ("C", "B", 0),
        ("C", "(C)", 1),
        ("\\boxed{7}", "B", 0),
        ("The answer is B. Option A is too large.", "B", 1),
        ("B. Option A is too large.", "B", 1),
        ("The answer is B. So the option I chose is right.", "B", 1),
        ("I take option C. So the option I chose is right.", "C", 1),
        ("The answer is option C, not choice D.", "C", 1),
        ("The answer is I because the others are too large.", "I", 1),
        ("**Answer**: B", "B", 1),
        ("**Final Answer**: (B) Paris", "B", 1),
        ("**B**", "B", 1),
        ("\\boxed{\\textbf{(B)}}", "B", 1),
        ("\\boxed{\\textbf{(B)}\\ 12}", "B", 1),
        ("\\boxed{B. Paris}", "B", 1),
        ("\\boxed{f(x)}", "F", 0),
    ],
)
def test_the_letter_that_is_chosen(response: str, reference: str, score: float) -> None:
    assert choice([""], [response], answer=[reference]) == [score]


@pytest.mark.parametrize(
    ("response", "number"),
    [
        ("The answer is 1,234", "1234"),
        ("-1,234,567.5 in all", "-1234567.5"),
        ("12-5", "-5"),
        ("12 - 5 = 7", "7"),
        ("It is -7", "-7"),
        ("7.", "7"),
        ("1,2,3", "3"),
        ("1,2345", "2345"),
        ("3,100,20", "20"),
        ("0,123 and 12,3456", "3456"),
        ("none", ""),
    ],
)
def test_the_last_number_of_a_response_is_extracted(response: str, number: str) -> None:
    assert extract_answer("reasoning_gym/chain_sum:extract=number", response) == number


@pytest.mark.parametrize("check", sorted(CHECKS.keys() - {"code"}))  # its programs are in test_code_answers.py
def test_every_check_is_the_verifier_of_its_task_and_scores(check: str) -> None:
    task = Task(f"t.jsonl:check={check}")
    assert task.own_verifier == CHECKS[check]
    answer = "A" if check == "choice" else "7"
    said = f"\\boxed{{{answer}}}" if check != "exact" else answer
    columns = [{"answer": answer}, {"answer": answer}]
    assert load_judge(task.own_verifier)(["", ""], [said, "nothing"], columns).rewards == (1.0, 0.0)


def rows_of(path: Path, *answers: object) -> str:
    path.write_text(
        "".join(json.dumps({"prompt": f"{path.stem} {n}", "answer": a}) + "\n" for n, a in enumerate(answers))
    )
    return str(path)


def test_references_that_the_check_cannot_use_are_refused_before_anything_starts(tmp_path: Path) -> None:
    file = rows_of(tmp_path / "rows.jsonl", "1", "two", "3", "four")
    PromptSource(Task(f"{file}:check=boxed"), Policy("tiny"), part="all").preflight()
    with pytest.raises(
        ConfigError, match=r"rows.jsonl:4: the answer is 'four', .* needs a number .* \(2 of 4 have none\)"
    ):
        PromptSource(Task(f"{file}:check=gsm8k"), Policy("tiny"), part="all").preflight()
    with pytest.raises(ConfigError, match=r"check=choice needs a letter, .* \(2 of 4 have none\)"):
        PromptSource(Task(f"{file}:check=choice"), Policy("tiny"), part="all").preflight()
    with pytest.raises(ConfigError, match="option check of a task is 'gsm8'; it needs exact, or math"):
        PromptSource(Task(f"{file}:check=gsm8"), Policy("tiny"), part="all").preflight()


@pytest.mark.parametrize(
    ("check", "answers", "used"),
    [
        ("gsm8k", ["1", "two", "#### 3", "1/2"], 2),
        ("choice", ["A", "42 apples", "C", ""], 2),
        ("math", ["\\sqrt{2}", "Evelyn", "7", "1/2"], 3),
        ("code", ["assert f(1) == 2", "def f(): pass", "assert", '["assert f(2) == 3"]'], 2),
    ],
)
def test_references_that_the_check_cannot_use_are_left_out_like_other_malformed_rows(
    check: str, answers: list[str], used: int, tmp_path: Path
) -> None:
    file = rows_of(tmp_path / "rows.jsonl", *answers)
    rows = load_rows(Task(f"{file}:check={check},malformed=skip"), whole=True)
    assert len(rows.train) + len(rows.held_out) == used
    assert len(rows.skipped) == 4 - used
    assert all(f"the answer is {answers[1]!r}, and check={check} needs" in told for told in rows.skipped[:1])


LISTS = ("12", ["12", "13"], {"a": "b"}, "13")


def num_rows(task: Task) -> int:
    """Rows that a source of its prompts takes, whose answers are checked before the run."""
    PromptSource(task, Policy("tiny"), part="all").preflight()
    rows = load_rows(task, whole=True)
    return len(rows.train) + len(rows.held_out)


@pytest.mark.parametrize("check", ["exact", "math", "gsm8k", "boxed"])
def test_lists_are_left_out_where_the_check_compares_with_them(check: str, tmp_path: Path) -> None:
    file = rows_of(tmp_path / "rows.jsonl", *LISTS)
    skipping = f"{file}:check={check},malformed=skip"
    assert num_rows(Task(skipping)) == num_rows(Task(skipping, "verifier + 0.1*rules.py:short")) == 2
    said = f'rows.jsonl:2: the answer is \'["12", "13"]\', and check={check} needs a text'
    assert load_rows(Task(skipping), whole=True).skipped[0].endswith(said)
    with pytest.raises(ConfigError, match=f"check={check} compares with a text; .* with malformed=skip"):
        num_rows(Task(f"{file}:check={check}"))
    assert num_rows(Task(skipping, "rules.py:short")) == num_rows(Task(skipping, "reward_model")) == 4


def test_lists_in_a_source_of_a_mixture_are_left_out_by_the_reward_of_the_whole(tmp_path: Path) -> None:
    one, other = rows_of(tmp_path / "a.jsonl", *LISTS), rows_of(tmp_path / "b.jsonl", "A", ["B"])
    mixture = f"{one}:check=gsm8k,malformed=skip + {other}:check=choice,malformed=skip"
    assert num_rows(Task(mixture)) == 3
    assert num_rows(Task(mixture, "rules.py:short")) == 6


def test_rows_without_an_answer_are_kept_and_named_where_it_is_needed(tmp_path: Path) -> None:
    """Distillation and reward models use them."""
    task = Task(f"{rows_of(tmp_path / 'rows.jsonl', '12', None, '13')}:check=gsm8k,malformed=skip")
    assert num_rows(task) == 3
    with pytest.raises(ConfigError, match=r"rows.jsonl:2: the row has no answer .* \(malformed=skip does not\)"):
        Reward(task).preflight()
    with pytest.raises(ConfigError, match=r"1 of 3 training rows .* \(malformed=skip does not\)"):
        Demonstrations(task, Policy("tiny"), part="all").preflight()


def test_each_source_of_a_mixture_has_its_own_check(tmp_path: Path) -> None:
    one, other = rows_of(tmp_path / "a.jsonl", *map(str, range(40))), rows_of(tmp_path / "b.jsonl", *["B"] * 40)
    PromptSource(Task(f"{one}:check=gsm8k + {other}:check=choice"), Policy("tiny")).preflight()
    with pytest.raises(ConfigError, match="check=gsm8k needs a number"):
        PromptSource(Task(f"{one} + {other}:check=gsm8k"), Policy("tiny")).preflight()


@pytest.mark.parametrize("answer", ["1/2", "#### 1/2", "2 1/2", "#### Evelyn", "5 apples\n#### none"])
def test_an_answer_whose_number_is_no_plain_one_is_refused(tmp_path: Path, answer: str) -> None:
    file = rows_of(tmp_path / "rows.jsonl", answer)
    with pytest.raises(ConfigError, match="check=gsm8k needs a number"):
        PromptSource(Task(f"{file}:check=gsm8k"), Policy("tiny"), part="all").preflight()


def test_letters_in_some_rows_and_numbers_in_others_are_refused(tmp_path: Path) -> None:
    """ARC has numbers that count from 1 in some rows; an answer 1 would be B."""
    file = rows_of(tmp_path / "arc.jsonl", "A", "(C)", "1", "D")
    said = r"arc.jsonl:3: the answer is '1', and that of \S+arc.jsonl:1 is 'A'; .* \(1 of 4 have numbers\)"
    with pytest.raises(ConfigError, match=said):
        PromptSource(Task(f"{file}:check=choice"), Policy("tiny"), part="all").preflight()
    PromptSource(
        Task(f"{rows_of(tmp_path / 'n.jsonl', '0', '1')}:check=choice"), Policy("tiny"), part="all"
    ).preflight()


LONG = {
    "boxes that are not closed": (box_of, "\\boxed{", None),
    "boxes": (box_of, "\\boxed{1}", "1"),
    "blanks after the word": (letter_of, " ", None),
    "words of an answer": (letter_of, "answer is ", None),
    "blanks and stars after the word": (letter_of, " *", None),
    "brackets after the word": (letter_of, "(", None),
    "digits with commas": (number_of, "1,", 1),
    "blanks after a number": (number_of, " ", 1),
    "blanks after a mark": (number_of, " ", None),
    "marks": (number_of, "####", None),
    "fractions": (number_of, "1 1/", None),
    "thousands": (find_numbers, "123,", ["123" * 50_000]),
    "tags that are not closed": (find_tagged, "<answer>", []),
    "blanks of a fence": (program_of, " ", None),
    "fences that are not closed": (program_of, "```python\n", None),
}


BEGINS = {
    "blanks after the word": "answer",
    "blanks and stars after the word": "answer is",
    "brackets after the word": "answer",
    "blanks after a number": "1",
    "blanks after a mark": "####",
    "blanks of a fence": "```",
}


@pytest.mark.parametrize("name", LONG)
def test_a_response_that_repeats_itself_is_checked_in_time_proportional_to_its_length(name: str) -> None:
    find, piece, expected = LONG[name]
    text = BEGINS.get(name, "") + piece * (200_000 // len(piece))
    began = time.process_time()
    found = find(text)
    assert time.process_time() - began < 2.0
    assert expected is None or found == expected


@pytest.mark.parametrize(
    ("said", "letter"),
    [
        ("Answer: b", "B"),
        ("answer: (b)", "B"),
        ("The answer is (b).", "B"),
        ("**Answer:** b", "B"),
        ("Answer: b) Paris", "B"),
        ("Answer: b. Paris", "B"),
        ("Answer = $b$", "B"),
        ("The answer is: c\nfor it is blue", "C"),
        ("Answer: A\nAnswer: d", "D"),
        ("Answer: a dog", None),
        ("Answer: e.g. a dog", None),
        ("the answer is a", None),
        ("Answer: b, c", None),
    ],
)
def test_a_small_letter_is_chosen_where_it_can_be_nothing_else(said: str, letter: str | None) -> None:
    assert letter_of(said) == letter


@pytest.mark.parametrize(
    "said", ["1 234", "1\u202f234", "it is 1 234 m", "#### 1 234", r"\boxed {1234}", r"\boxed{1 234}"]
)
def test_blanks_between_thousands_and_before_a_box(said: str) -> None:
    assert gsm8k([""], [said], answer=["1234"]) == [1.0]
    if "boxed" in said:
        assert boxed([""], [said], answer=["1,234"]) == [1.0]


@pytest.mark.parametrize(
    ("said", "number"), [("2 12", "12"), ("in 2024 100 came", "100"), ("1.5 100", "100"), ("1 2345", "2345")]
)
def test_other_numbers_beside_each_other_are_two(said: str, number: str) -> None:
    assert gsm8k([""], [said], answer=[number]) == [1.0]


def test_math_verify_is_shown_a_box_without_the_blank() -> None:
    pytest.importorskip("math_verify")
    assert is_equal(r"so \boxed {42}, or 7", "42") and not is_equal(r"so \boxed {42}, or 7", "7")
