"""Data on disk: formats, malformed rows that stop or are counted, mixtures, answers compared as mathematics."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flowrl.errors import ConfigError
from flowrl.messages import Prompt
from flowrl.models import Chat, Policy, tokenizer_of
from flowrl.nodes import Demonstrations, GivenAnswers, PromptSource, Reward
from flowrl.tasks import Rows, Task, load_demonstrations, load_preferences, load_rows
from flowrl.tasks import mixture as mixture_module
from flowrl.tasks.checks.answer_checks import CHECKS
from flowrl.tasks.mixture import mixed_order, score
from flowrl.tasks.reward_calls.judge import Judge, load_judge
from flowrl.tasks.rewards import PROGRAMS, parse_reward, usual_processes
from flowrl.tasks.row_reading.message_shapes import reply_text
from flowrl.tasks.rows import OF_TASK
from flowrl.testing import run_node
from flowrl.wire.encoding.schema import freeze

RECORDS = [{"prompt": f"question {n}", "answer": str(n), "level": n % 3} for n in range(40)]


def jsonl(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(f"{record if isinstance(record, str) else json.dumps(record)}\n" for record in records))
    return path


def parquet(path: Path, records: list[dict[str, Any]]) -> Path:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path)
    return path


def everything(rows: Rows) -> dict[str, Any]:
    return {row.prompt: dict(row.columns) for row in (*rows.train, *rows.held_out)}


def test_json_lines_parquet_and_directories_of_them_give_the_same_rows(tmp_path: Path) -> None:
    expected = everything(load_rows(Task(str(jsonl(tmp_path / "rows.jsonl", RECORDS)))))
    assert expected["question 7"] == {"answer": "7", "level": 1} and len(expected) == 40
    assert everything(load_rows(Task(str(parquet(tmp_path / "rows.parquet", RECORDS))))) == expected
    data = tmp_path / "downloaded" / "data"
    data.mkdir(parents=True)
    parquet(data / "train-00000-of-00002.parquet", RECORDS[:25])
    parquet(data / "train-00001-of-00002.parquet", RECORDS[25:])
    parquet(data / "test-00000-of-00001.parquet", [{"prompt": f"other {n}", "answer": "1"} for n in range(9)])
    assert everything(load_rows(Task(str(tmp_path / "downloaded")))) == expected
    assert set(everything(load_rows(Task(f"{tmp_path}/downloaded:split=test")))) == {f"other {n}" for n in range(9)}


CONVERSATION = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": "c"},
    {"role": "assistant", "content": "d"},
]


def one(tmp_path: Path, record: dict[str, Any], options: str = "") -> Any:
    """The row of one record among others that make up a whole task."""
    rest = [{"prompt": f"filler {n}", "answer": "x"} for n in range(20)]
    rows = load_rows(Task(f"{jsonl(tmp_path / 'rows.jsonl', [record, *rest])}{options}"))
    return next(row for row in (*rows.train, *rows.held_out) if not row.prompt.startswith("filler"))


@pytest.mark.parametrize(
    ("record", "turns", "answer"),
    [
        ({"messages": CONVERSATION}, 4, "d"),
        ({"messages": CONVERSATION[:4]}, 4, None),
        ({"prompt": "c", "completion": "d"}, 1, "d"),
        ({"prompt": CONVERSATION[:2], "completion": [CONVERSATION[2]]}, 2, "b"),
        ({"prompt": "c", "answer": 12}, 1, "12"),
    ],
)
def test_shapes_of_a_record(tmp_path: Path, record: dict[str, Any], turns: int, answer: str | None) -> None:
    row = one(tmp_path, record)
    assert (len(row.turns), row.answer) == (turns, answer)
    assert not {"messages", "prompt"} & set(row.columns)


def test_of_scored_completions_the_best_is_taken(tmp_path: Path) -> None:
    scored = [{"prompt": f"q{n}", "completion": f"{n}/{s}", "score": s} for n in range(20) for s in (0.1, 0.9, 0.5)]
    path = jsonl(tmp_path / "rows.jsonl", scored)
    rows = load_rows(Task(str(path)))
    assert {row.answer for row in (*rows.train, *rows.held_out)} == {f"{n}/0.9" for n in range(20)}
    with pytest.raises(ConfigError, match="has no rows at all, 60 have a score below min_score=1; add rows"):
        load_rows(Task(f"{path}:min_score=1"))


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_rows_below_min_score_are_counted_and_said(tmp_path: Path, where: str) -> None:
    path = jsonl(tmp_path / "rows.jsonl", [{**record, "quality": int(record["answer"]) % 4} for record in RECORDS])
    task = Task(f"{path}:score=quality,min_score=1,rows={where}")
    assert load_rows(task).low_scores == 10
    record = run_node(PromptSource(task, Policy("tiny")), name="prompts", num_groups=0)
    assert record.metrics == {"rows_below_min_score": 10}
    assert record.progress[-1].endswith("10 with a score below min_score left out")
    with pytest.raises(
        ConfigError, match=r"rows.jsonl:1: no column 'qualty', which score= names; did you mean score=quality"
    ):
        load_rows(Task(f"{path}:score=qualty"))


NAMED = {"prompt": "p", "messages": CONVERSATION, "answer": "own", "completion": "c", "final": "f", "none": None}


@pytest.mark.parametrize(
    ("left_out", "options", "prompt", "answer"),
    [
        ("", "", "p", "own"),
        ("", ":messages=messages", "c", "d"),
        ("", ":messages=messages,answer=final", "c", "f"),
        ("", ":answer=final", "p", "f"),
        ("", ":answer=none", "p", None),
        ("answer", ":answer=completion", "p", "c"),
        ("prompt", ":answer=answer", "c", "own"),
        ("", ":answer=anser", "", "no column 'anser', which answer= names; did you mean answer=answer?"),
        ("answer", ":answer=gold", "", "no column 'gold', which answer= names; set answer= to one of prompt, messages"),
        ("prompt", ":prompt=question", "", "no column 'question'; set prompt= to one of messages"),
        ("", ":messages=mesages", "", "no column 'mesages'; did you mean messages=messages?"),
    ],
)
def test_what_an_option_names_is_taken_and_nothing_else(
    tmp_path: Path, left_out: str, options: str, prompt: str, answer: str | None
) -> None:
    record = {key: value for key, value in NAMED.items() if key != left_out}
    task = Task(f"{jsonl(tmp_path / 'rows.jsonl', [record])}{options}")
    if not prompt:
        with pytest.raises(ConfigError) as refused:
            load_rows(task, whole=True)
        assert str(answer) in str(refused.value)
        return
    found = load_rows(task, whole=True)
    (row,) = (*found.train, *found.held_out)
    assert (row.prompt, row.answer) == (prompt, answer)
    assert not {"prompt", "messages"} & set(row.columns)


MALFORMED = {
    '{"prompt": broken': "invalid JSON",
    '["a"]': "a list where an object was needed",
    '{"question": "x"}': "no column 'prompt'",
    '{"prompt": "x", "answer": "  "}': "the answer is empty",
    '{"prompt": "x", "completion": ""}': "the answer is empty",
    '{"prompt": [{"role": "robot", "content": "x"}]}': "with the roles system, user, assistant, tool",
    '{"prompt": [{"role": "assistant", "content": "x"}]}': "ends with the assistant's turn",
    '{"messages": [{"role": "assistant", "content": "x"}]}': "the column 'messages' holds only an answer",
    '{"messages": []}': "the column 'messages' is '[]'",
    '{"conversations": [{"from": ["human"], "value": "x"}]}': "the column 'conversations' is \"[{'from': ['human']",
    '{"instruction": "x", "output": "y", "history": 5}': "the history is '5'; it needs a list of rounds",
    '{"instruction": "x", "output": "y", "history": "User: hi"}': "the history is 'User: hi'; it needs a list of",
    '{"instruction": "x", "output": "y", "history": [["a", null]]}': "the history is \"[['a', None]]\"; it needs",
    r'{"prompt": "smile \ud83d please"}': r"the prompt holds text with '\ud83d' at 6, half of a surrogate pair",
    r'{"prompt": "x", "answer": "\ud83d"}': r"the column 'answer' holds text with '\ud83d' at 0",
    r'{"prompt": "x", "note": {"a": ["\udc00"]}}': r"the column 'note' holds text with '\udc00' at 0",
    r'{"prompt": "x", "\udc00": 1}': r"the column '\udc00' holds text with '\udc00' at 0",
    r'{"prompt": "x", "note": {"\udc00": 1}}': r"the column 'note' holds text with '\udc00' at 0",
    '{"prompt": "x", "n": 15511210043330985984000000}': "the column 'n' holds the integer 15511210043330985984000000, "
    "beyond 64 bits; write it as a string",
    f'{{"prompt": "x", "n": [{-(2**63) - 1}]}}': "the column 'n' holds the integer -9223372036854775809",
    f'{{"prompt": "x", "n": {"9" * 5000}}}': "Exceeds the limit (4300 digits) for integer string conversion",
    f'{{"prompt": "x", "n": {"[" * 40 + "]" * 40}}}': "the column 'n' holds values nested deeper than 32",
    f'{{"prompt": "x", "n": {"[" * 5000 + "]" * 5000}}}': "values nested too deep",
}


@pytest.mark.parametrize("line", MALFORMED)
def test_a_malformed_row_stops_before_training_or_is_skipped_and_counted(tmp_path: Path, line: str) -> None:
    path = jsonl(tmp_path / "rows.jsonl", [*RECORDS[:20], line, *RECORDS[20:]])
    with pytest.raises(ConfigError) as error:
        load_rows(Task(str(path)))
    assert "rows.jsonl:21: " in str(error.value) and MALFORMED[line] in str(error.value)
    rows = load_rows(Task(f"{path}:malformed=skip"))
    assert len(everything(rows)) == 40
    assert len(rows.skipped) == 1 and "rows.jsonl:21: " in rows.skipped[0]


def test_a_score_that_is_none_is_malformed_where_scores_are_asked_for(tmp_path: Path) -> None:
    records = [{**record, "score": "good"} for record in RECORDS]
    path = jsonl(tmp_path / "rows.jsonl", records)
    assert len(everything(load_rows(Task(str(path))))) == 40, "a column that happens to have this name"
    with pytest.raises(ConfigError, match=r"rows.jsonl:1: the score is 'good'; it needs a finite number"):
        load_rows(Task(f"{path}:min_score=0.5"))
    jsonl(path, [{**RECORDS[0], "level": 10**309}])
    with pytest.raises(ConfigError, match=r"rows.jsonl:1: the score is 1000000"):
        load_rows(Task(f"{path}:score=level"))


def test_rows_of_parquet_are_named_by_number(tmp_path: Path) -> None:
    path = parquet(tmp_path / "rows.parquet", [{"prompt": "a"}, {"prompt": ""}])
    with pytest.raises(ConfigError, match=r"rows.parquet, row 2: the prompt is ''"):
        load_rows(Task(str(path)))
    (tmp_path / "none.parquet").write_text("nothing of the kind")
    with pytest.raises(ConfigError, match="is no Parquet file"):
        load_rows(Task(f"{tmp_path}/none.parquet"))


def test_what_a_row_may_hold_can_be_sent(tmp_path: Path) -> None:
    deepest: Any = 0
    for _ in range(31):
        deepest = [deepest]
    record = {"prompt": "\U0001f600", "answer": str(2**64), "most": 2**64 - 1, "least": -(2**63), "deep": deepest}
    row = one(tmp_path, {**record, "nested": {"a": [1.5, None, True, {"b": [[]]}]}})
    freeze(Prompt("s", "g", row.prompt_id, 0, 0, 1, 1, row.prompt, np.zeros(1, np.int32), row.columns))


def test_the_columns_of_preferences_are_looked_at_too(tmp_path: Path) -> None:
    pairs = [{"prompt": f"q{n}", "chosen": "a", "rejected": "b", "n": 1 if n else 2**64} for n in range(20)]
    path = jsonl(tmp_path / "pairs.jsonl", pairs)
    with pytest.raises(ConfigError, match=r"pairs.jsonl:1: the column 'n' holds the integer 18446744073709551616"):
        load_preferences(Task(str(path)), "pairs")
    rows = load_preferences(Task(f"{path}:malformed=skip"), "labelled")
    assert len(rows.train) + len(rows.held_out) == 38 and len(rows.skipped) == 1


def test_the_run_is_told_of_skipped_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOWRL_CACHE", str(tmp_path / "cache"))
    path = jsonl(tmp_path / "rows.jsonl", [*RECORDS, "{", "["])
    source = PromptSource(Task(f"{path}:malformed=skip"), Policy("tiny"))
    record = run_node(source, name="prompts", num_groups=0)
    assert record.metrics == {"rows_skipped": 2}
    assert "2 malformed rows are skipped, the first: " in record.progress[-1]
    assert "rows.jsonl:41" in record.progress[-1]


@pytest.mark.parametrize("options", ["malformed=drop", "check=maths"])
def test_options_of_data_have_known_values(tmp_path: Path, options: str) -> None:
    with pytest.raises(ConfigError, match="it needs"):
        load_rows(Task(f"{jsonl(tmp_path / 'rows.jsonl', RECORDS)}:{options}"))


# Mixtures


@pytest.fixture
def mixture(tmp_path: Path) -> Task:
    """70 and 30 of a hundred by weight; the second source is the smaller one for its weight."""
    first = jsonl(tmp_path / "a.jsonl", [{"prompt": f"a{n}", "answer": "1"} for n in range(400)])
    second = jsonl(tmp_path / "b.jsonl", [{"prompt": f"b{n}", "answer": "1/2"} for n in range(40)])
    return Task(f"0.7*{first} + 0.3*{second}:check=math")


def test_an_epoch_of_a_mixture_has_its_shares_and_no_row_twice(mixture: Task) -> None:
    rows = load_rows(mixture).train
    whole = sum(row.prompt.startswith("b") for row in rows)
    epochs = [mixed_order(rows, mixture, 3, epoch) for epoch in range(4)]
    of_a = 0
    for number, order in enumerate(epochs, start=1):
        of = Counter(rows[index].prompt[0] for index in order)
        of_a += of["a"]
        assert of["b"] == whole and of_a == math.ceil(number * whole / 0.3 * 0.7 - 1e-9)
        assert len(order) == len(set(order))
    assert epochs[0] == mixed_order(rows, mixture, 3, 0)
    assert sum(rows[index].prompt[0] == "b" for index in mixed_order(rows, mixture, 3, 10**9)) == whole
    assert len({tuple(order) for order in epochs}) == 4
    first = {index for index in epochs[0] if rows[index].prompt.startswith("a")}
    assert first != {index for index in epochs[1] if rows[index].prompt.startswith("a")}


@pytest.mark.slow
def test_every_row_of_a_mixture_is_judged_by_its_own_verifier(mixture: Task) -> None:
    sources = [term.text for term in mixture.sources]
    of_task = [sources[0], sources[1], sources[1]]
    answers = score(["", "", ""], ["1", "0.5", "1"], of_task=of_task, answer=["1", "1/2", "1/2"])
    assert answers["rewards"] == [1.0, 1.0, 0.0]
    assert mixture.own_verifier == "flowrl.tasks.mixture:score"
    assert {row.columns[OF_TASK] for row in load_rows(mixture).train} == set(sources)
    Reward(mixture).preflight()


def test_a_mixture_with_a_source_without_answers_is_refused(tmp_path: Path) -> None:
    notes = jsonl(tmp_path / "notes.jsonl", [{"prompt": f"note {n}", "level": 1} for n in range(20)])
    task = Task(f"0.5*arithmetic:max_value=3 + 0.5*{notes}")
    with pytest.raises(ConfigError, match=r"notes.jsonl:\d+: the row has no answer to compare responses with"):
        Reward(task).preflight()


def test_a_mixture_runs_programs_as_its_source_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = jsonl(tmp_path / "code.jsonl", [{"prompt": f"write {n}", "answer": "assert f()"} for n in range(20)])
    task = Task(f"0.5*arithmetic:max_value=3 + 0.5*{code}:check=code")
    assert usual_processes(parse_reward(task.verifier)) == PROGRAMS
    assert usual_processes(parse_reward(Task(f"arithmetic + {code}").verifier)) == 1
    first, second = (term.text for term in task.sources)
    ran = Judge("", lambda *_, **columns: {"rewards": [1], "logs": {"tests_passed": [0.5]}}, False, None, frozenset())
    monkeypatch.setattr(mixture_module, "_judge_of", {first: load_judge(CHECKS["exact"]), second: ran}.__getitem__)
    columns = [{"of_task": first, "answer": "2"}, {"of_task": second, "answer": ""}]
    found = load_judge(task.own_verifier)(["", ""], ["2", "x"], columns)
    assert (found.rewards, found.logs) == ((1.0, 1.0), {"tests_passed": (0.0, 0.5)})


def test_a_column_called_as_that_of_mixtures_is_one_of_many(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "rows.jsonl", [{**record, "of_task": "a.jsonl"} for record in RECORDS])
    PromptSource(Task(str(path)), Policy("tiny")).preflight()


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("0*arithmetic + reasoning_gym/chain_sum", "the weight of arithmetic is 0"),
        ("arithmetic + 2*arithmetic", "names a source twice"),
        ("arithmetic + ", "has an empty summand"),
        ("arithmetic + aritmetic", "there is no task 'aritmetic'"),
    ],
)
def test_mixtures_that_are_none(name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_rows(Task(name))


def test_a_misspelt_file_is_named_with_the_nearest_one(tmp_path: Path) -> None:
    (tmp_path / "questions.jsonl").touch()
    with pytest.raises(ConfigError, match=r"does not exist; did you mean \S+/questions\.jsonl\?"):
        load_rows(Task(f"{tmp_path}/quesions.jsonl"))


# Mathematics


@pytest.mark.parametrize(
    ("response", "answer", "right"),
    [
        ("She sells 16 - 3 - 4 = 9 eggs.\n#### 18", "9 * 2 = 18\n#### 18", True),
        ("The answer is $18", "#### 18", True),
        ("the total is 1,234", "#### 1,234", True),
        ("so it is \\boxed{\\frac{1}{2}}", "0.5", True),
        ("#### 17", "#### 18", False),
        ("no number at all", "#### 18", False),
        ("", "#### 18", False),
        ("18 and then 19", "18", False),
        ("#### Step 3: total\nShe has 18 eggs", "18", True),
        ("#### 18\nNow 5 more", "18", True),
        ("\\boxed{3}", "3\\sqrt{13}", False),
        ("\\boxed{3\\sqrt{13}}", "3\\sqrt{13}", True),
        ("3\\sqrt{13}", "3\\sqrt{13}", True),
        ("\\boxed{(3, \\pi/2)}", "\\left( 3, \\frac{\\pi}{2} \\right)", True),
        ("\\boxed{5}", "6 - 5i", False),
        ("\\boxed{6-5i}", "6 - 5i", True),
        ("\\boxed{5}", "(-\\infty, 5)", False),
        ("\\boxed{[-2, 7]}", "[-2,7]", True),
        ("\\boxed{p - q}", "p - q", True),
        ("\\boxed{3}", "3xyz", False),
        ("\\boxed{\\text{Evelyn}}", "\\text{Evelyn}", True),
        ("12", "\\$12", True),
        ("12", "12 dollars", True),
        ("9", "16 - 3 - 4 = 9", True),
        ("\\boxed{5, 7}", "5 or 7", True),
        ("\\boxed{10\\,000}", "10{,}000", True),
        ("0.00001", "1e-05", True),
    ],
)
def test_answers_are_compared_as_mathematics(response: str, answer: str, right: bool) -> None:
    from flowrl.tasks.checks.maths import is_equal

    assert is_equal(response, answer) is right


@pytest.mark.parametrize(
    "answer",
    ["3\\sqrt{13}", "[-2,7]", "p - q", "\\emptyset", "5", "5 apples", "$", "", "Evelyn", "???", "\\left(", "x y"],
)
def test_an_answer_is_refused_where_nothing_is_found_in_it(answer: str) -> None:
    """Most answers are judged without a parse, which has to come to the same."""
    from flowrl.tasks.checks.maths import _read_right, check_formulas

    if _read_right(answer):
        check_formulas({"a": answer})
    else:
        with pytest.raises(ConfigError, match="no number or formula"):
            check_formulas({"a": answer})


def test_every_answer_of_a_check_by_mathematics_is_looked_at(tmp_path: Path) -> None:
    records = [{"prompt": f"{n}?", "answer": "Evelyn" if n == 19 else f"{n}\\pi"} for n in range(20)]
    task = Task(f"{jsonl(tmp_path / 'math.jsonl', records)}:check=math")
    said = r"math.jsonl:20: check=math finds no number or formula in the answer 'Evelyn' \(1 of 20 have none\)"
    with pytest.raises(ConfigError, match=said):
        PromptSource(task, Policy("tiny"), part="all").preflight()


@pytest.mark.slow
def test_a_file_of_worked_solutions_is_a_task(tmp_path: Path) -> None:
    records = [{"question": f"{n} eggs twice?", "answer": f"{n} * 2 = {2 * n}\n#### {2 * n}"} for n in range(40)]
    task = Task(f"{jsonl(tmp_path / 'gsm8k.jsonl', records)}:prompt=question,check=math")
    assert task.own_verifier == "flowrl.tasks.checks.maths:score"
    Reward(task).preflight()
    PromptSource(task, Policy("tiny")).preflight()
    words = [{**record, "answer": "words"} for record in records]
    task = Task(f"{jsonl(tmp_path / 'words.jsonl', words)}:prompt=question,check=math")
    with pytest.raises(ConfigError, match="finds no number or formula in the answer 'words'"):
        PromptSource(task, Policy("tiny")).preflight()


@pytest.mark.parametrize("where", ["memory", "disk"])
@pytest.mark.parametrize(
    ("record", "options", "learned", "compared"),
    [
        ({"prompt": "2+2?", "completion": "So it is 4.", "answer": "4"}, "", "So it is 4.", "4"),
        ({"prompt": "2+2?", "completion": "So it is 4.", "answer": 4}, "", "So it is 4.", 4),
        (
            {"prompt": "2+2?", "completion": "So it is 4.", "answer": ["assert f() == 4"]},
            "",
            "So it is 4.",
            ("assert f() == 4",),
        ),
        ({"prompt": "2+2?", "completion": "So it is 4.", "answer": None}, "", "So it is 4.", None),
        ({"prompt": "2+2?", "completion": [{"role": "assistant", "content": "So"}], "answer": "4"}, "", "So", "4"),
        ({"instruction": "2+2?", "input": "", "output": "So it is 4.", "answer": "4"}, "", "So it is 4.", "4"),
        ({"prompt": "2+2?", "completion": "So it is 4.", "answer": "4"}, ",answer=answer", "4", "4"),
        ({"prompt": "2+2?", "completion": "So it is 4."}, "", "So it is 4.", "So it is 4."),
        ({"prompt": "2+2?", "completion": None, "answer": "4"}, "", "4", "4"),
        ({"prompt": "2+2?", "completion": 3, "answer": "4"}, "", "4", "4"),
    ],
)
def test_sft_learns_from_the_completion_and_rewards_compare_with_the_answer(
    tmp_path: Path, record: dict[str, Any], options: str, learned: str, compared: Any, where: str
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({**record, "n": n}) + "\n" for n in range(3)))
    task, policy = Task(f"{path}:rows={where}{options}"), Policy("tiny")
    for found in (load_demonstrations(task, whole=True), load_rows(task, whole=True)):
        row = (*found.train, *found.held_out)[0]
        assert reply_text(row.response) == learned and row.columns.get("answer") == compared
        expected = Chat(tokenizer_of(policy)).encode_completion(row.turns, learned)
        assert (
            Demonstrations(task, policy).render_row(Chat(tokenizer_of(policy)), row)[0].tolist() == expected[0].tolist()
        )
    Demonstrations(task, policy, part="all").preflight()


def test_rows_with_prompt_and_messages_are_told_how_to_learn_from_the_messages(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"q{n}", "messages": CONVERSATION}) + "\n" for n in range(3)))
    for node in (
        Demonstrations(Task(str(path)), Policy("tiny"), part="all"),
        GivenAnswers(Task(str(path)), Policy("tiny"), share=0.5),
    ):
        with pytest.raises(ConfigError, match="or messages=messages to learn from the conversations in that column"):
            node.preflight()
    Demonstrations(Task(f"{path}:messages=messages"), Policy("tiny"), part="all").preflight()
