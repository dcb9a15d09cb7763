"""check=math: which answer is read in references and responses, and that it is told without a parse if there is one."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from flowrl.models import Policy
from flowrl.nodes import PromptSource
from flowrl.tasks import Task, load_rows
from flowrl.tasks.checks.maths import _read_right, is_equal, is_readable
from flowrl.tasks.row_reading import row_loading
from flowrl.testing import run_node

TWELVE = [
    "**12**",
    "**12**.",
    "**12**!",
    "*12*",
    "__12__",
    "`12`",
    "#### **12**",
    "€12",
    "£12",
    "12 €",
    "$12/h",
    "€12/kg",
    "12 m/s",
    "12m/s",
    "v = 12 m/s",
    "12 m/s^2",
    "12 m/s²",
    "12 N",
    "12 km/h",
    "12 cm²",
    "x: 12",
    "A: 12",
    "f(x): 12",
    "(a) 12",
    "A. 12",
    "~12",
    "5\t12",
    "12 个",
]
"""Ways to write it that are no LaTeX."""


@pytest.mark.parametrize("text", TWELVE)
def test_what_is_written_around_a_number_does_not_count(text: str) -> None:
    assert is_equal(text, "12") and is_equal(text, f"9 + 3 = 12\n#### {text.removeprefix('#### ')}")
    assert is_equal("So \\boxed{12}", text) and is_equal("The answer is 12 euros.", text)
    assert not is_equal(text, "13") and not is_equal("\\boxed{13}", text)


@pytest.mark.parametrize(
    ("response", "answer", "right"),
    [
        ("2**3", "8", True),
        ("\\boxed{8}", "2**3", True),
        ("The answer is 2**3", "2**3", True),
        ("x**2 + 1", "x^2+1", True),
        ("2**3**2", "512", True),
        ("Hence it is **12** apples", "12", True),
        ("5²", "25", True),
        ("So \\boxed{x²}", "x^2", True),
        ("\\boxed{\\sqrt{2}}", "√2", True),
        ("2 1/2", "2.5", True),
        ("The answer is 2 1/2.", "\\frac{5}{2}", True),
        ("½", "0.5", True),
        ("\\boxed{1 234}", "1,234", True),
        ("\\boxed{3V}", "3 V", True),
        ("\\boxed{12 m/s}", "12 m/s", True),
        ("\\boxed{12 个}", "12", True),
        ("The price is \\$12.", "12", True),
        ("3V/h", "3", False),
        ("12 x", "12", False),
        ("12!", "479001600", True),
        ("12!", "12", False),
        ("x > 12", "12 < x", True),
        ("5 < 12", "12", False),
        ("- 12", "12", True),
        ("- €12", "12", True),
        ("- 12", "- 12", True),
        ("-12", "- 12", True),
        ("12", "- 12", False),
        ("6 - 5i", "6-5i", True),
        ("#### - 12", "-12", True),
        ("A \\cup B", "A \\cup B", True),
        ("\\boxed{A \\cup B}", "A \\cup B", True),
        ("#5", "5", False),
    ],
)
def test_formulas_and_what_looks_like_them(response: str, answer: str, right: bool) -> None:
    assert is_equal(response, answer) is right


@pytest.mark.parametrize(
    ("response", "answer", "right"),
    [
        ("#### 1\nfirst\n#### 2\nsecond\nSo \\boxed{7}", "7", True),
        ("#### 1\nfirst\n#### 2\nsecond\nSo \\boxed{7}", "2", False),
        ("#### a)\nfirst\n\\boxed{5}", "5", True),
        ("#### 1.\nfirst\n\\boxed{5}", "5", True),
        ("#### $x=1$\nfirst\n\\boxed{5}", "5", True),
        ("#### 1\n#### Answer\n\\boxed{5}", "5", True),
        ("#### 1\nEither \\boxed{5} or \\boxed{6}", "5, 6", True),
        ("\\boxed{5}\n#### 6", "6", True),
        ("#### 5\nA box \\boxed{6 that is not closed", "5", True),
        ("#### \\boxed{5} of 6\nas was said", "5", True),
        ("5", "#### 1\nfirst\n\\boxed{5}", True),
    ],
)
def test_a_box_after_the_last_mark_comes_first(response: str, answer: str, right: bool) -> None:
    assert is_equal(response, answer) is right


REFERENCES = [
    *TWELVE,
    *("- 12", "12!", "5 < 12", "2**3", "5 12", "1 234", "#5", "№5", "@3", "~~5~~", "5}", "x_{1", "\\frac{1", "\\left("),
    *("\\left(1,2\\right)", "(1,2]", "½", "√2", "5²", "∞", "∅", "π", "x ≥ 3", "A \\cup B", "_5C_2", "{x | x>3}", "H2O"),
    *(
        "\\text{Monday}",
        "The capital is Paris",
        "The capital is \\text{Paris}",
        "巴黎",
        "Москва",
        "“12”",
        "costs \\$12",
    ),
    *(
        "So \\boxed{}",
        "So \\boxed{7}",
        "Therefore \\boxed{\\text{even}}",
        "it is $x$",
        "it is $ $",
        "it is \\(x\\)",
        "-",
    ),
    *("it is \\(\\)", "half: \\frac{1}{2} of it", "\\frac{x}{2} of it", "room B12", "x=12 apples", "No", "Yes", "1e-3"),
    *(
        "5 to 6",
        "10 a.m.",
        "2024-01-05",
        "90^\\circ",
        "50\\%",
        "3,0,6",
        "x=1 or x=2",
        "\\begin{pmatrix}1\\\\2\\end{pmatrix}",
    ),
]


@pytest.mark.parametrize("answer", REFERENCES)
def test_whether_an_answer_is_found_is_told_as_a_parse_would(answer: str) -> None:
    assert is_readable(answer) is bool(_read_right(answer))


def test_whether_there_is_an_answer_is_told_in_time_proportional_to_the_length() -> None:
    for piece in ("#### ", "$ ", "\\(", "\\boxed{", "1 1/", "a**", "√(", "1 234 "):
        began = time.process_time()
        is_readable(piece * (200_000 // len(piece)))
        assert time.process_time() - began < 5.0


@pytest.fixture
def half_readable(tmp_path: Path) -> Task:
    """Thirty rows, and three of which one has a formula."""
    answers = [*map(str, range(30)), "The capital is Paris", "\\infty is the limit", "it is $x$"]
    rows = [json.dumps({"prompt": f"{n}?", "answer": answer}) for n, answer in enumerate(answers)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    return Task(f"{tmp_path}/rows.jsonl:check=math,malformed=skip")


def forget() -> None:
    """What this process has read: nodes are in others."""
    row_loading.all_rows.cache_clear()
    _read_right.cache_clear()


def test_rows_without_a_formula_are_left_out_in_any_thread_alike(half_readable: Task) -> None:
    """A node loads its rows outside of the main thread, where math-verify parses nothing."""
    here = load_rows(half_readable)
    forget()
    with ThreadPoolExecutor(1) as thread:
        there = thread.submit(load_rows, half_readable).result()
    assert (len(here.train) + len(here.held_out), len(here.skipped)) == (31, 2)
    assert (there.train, there.held_out, there.skipped) == (here.train, here.held_out, here.skipped)


def test_a_source_of_prompts_leaves_them_out_as_the_check_before_the_run_said(half_readable: Task) -> None:
    PromptSource(half_readable, Policy("tiny"), part="all", epochs=1).preflight()
    forget()
    record = run_node(PromptSource(half_readable, Policy("tiny"), part="all", epochs=1), name="prompts")
    assert len(record.groups("prompts")) == 31
