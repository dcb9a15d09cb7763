"""Tasks: names and options, rows from every source, and a split that the prompt alone decides."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl.errors import ConfigError
from flowrl.tasks import Row, Rows, Task, load_preferences, load_rows
from flowrl.tasks.rows import MOST_TEXT_BYTES
from flowrl.tasks.toy_tasks import careless_answer


def test_a_name_carries_options_as_python_literals() -> None:
    task = Task("reasoning_gym/chain_sum:max_terms=3,allow_negation=True,weights=[1, 2],note=a b")
    assert task.source == "reasoning_gym/chain_sum"
    assert task.options == {"max_terms": 3, "allow_negation": True, "weights": [1, 2], "note": "a b"}


@pytest.mark.parametrize("name", ["", ":max_value=3", "arithmetic:max_value", "arithmetic:9=3"])
def test_a_malformed_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError):
        Task(name)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("aritmetic", "Did you mean arithmetic?"),
        ("arithmetic:max=3", "no option 'max'; it has max_value, operators, seed"),
        ("arithmetic:max_value=x", "max_value is 'x' and needs int"),
        ("arithmetic:operators=*", "it may hold"),
        ("arithmetic:min_value=-1", "min_value is -1 and needs at least 0"),
        ("arithmetic:max_value=9,min_value=9", "less than max_value, which is 9"),
        ("reasoning_gym/chain_sums", "try chain_sum"),
        ("reasoning_gym/chain_sum:max_term=3", "refuses these options"),
        ("reasoning_gym/chain_sum:extract=numbers", "it has to be one of number, tag"),
        ("nowhere.jsonl", "there is no task 'nowhere.jsonl'"),
    ],
)
def test_a_task_that_cannot_be_read_says_what_is_wrong(name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says.replace("?", r"\?")):
        load_rows(Task(name))


def test_arithmetic_holds_every_sum_once() -> None:
    rows = load_rows(Task("arithmetic"))
    everything = {row.prompt: row.answer for row in (*rows.train, *rows.held_out)}
    assert everything == {f"{a}+{b}=": str(a + b) for a in range(100) for b in range(100)}
    assert len(rows.train) + len(rows.held_out) == 10_000
    assert 1100 < len(rows.held_out) < 1400


def test_differences_are_never_negative() -> None:
    rows = load_rows(Task("arithmetic:operators=-,max_value=9"))
    assert all(int(row.answer or "") >= 0 for row in rows.train)
    assert len(rows.train) + len(rows.held_out) == 55


def test_small_numbers_can_be_left_out() -> None:
    rows = load_rows(Task("arithmetic:min_value=7,max_value=9,operators=+-"))
    found = {row.prompt for row in (*rows.train, *rows.held_out)}
    sums = {f"{a}+{b}=" for a in (7, 8, 9) for b in (7, 8, 9)}
    assert found == sums | {"7-7=", "8-7=", "8-8=", "9-7=", "9-8=", "9-9="}


@pytest.mark.parametrize(
    ("question", "answer"), [("36+47=", "73"), ("97+70=", "67"), ("12+30=", "42"), ("99+1=", "90"), ("52-17=", "45")]
)
def test_careless_answers_forget_carries_and_borrows(question: str, answer: str) -> None:
    assert careless_answer(question) == answer


@given(st.lists(st.text(min_size=1), max_size=60), st.randoms(use_true_random=False))
def test_the_split_does_not_depend_on_order_or_repetition(prompts: list[str], rng: object) -> None:
    first = Rows.split(Row.ask(prompt) for prompt in prompts)
    again = Rows.split(Row.ask(prompt) for prompt in sorted(prompts * 2))
    assert {row.prompt for row in first.train} == {row.prompt for row in again.train}
    assert {row.prompt for row in first.held_out} == {row.prompt for row in again.held_out}
    assert not {row.prompt_id for row in first.train} & {row.prompt_id for row in first.held_out}
    assert len(first.train) + len(first.held_out) == len(set(prompts))


def test_of_equal_prompts_the_first_row_stays() -> None:
    rows = Rows.split([Row.ask("a", answer="1"), Row.ask("b", answer="2"), Row.ask("a", answer="3")])
    assert {row.prompt: row.answer for row in (*rows.train, *rows.held_out)} == {"a": "1", "b": "2"}


@pytest.mark.parametrize(
    ("extract", "response", "seen"),
    [
        ("number", "12 - 5 is 7, so the answer is 7.", "7"),
        ("number", "It is -3.50 in the end", "-3.50"),
        ("number", "I do not know", ""),
        ("tag", "<answer>4</answer>, no: <answer>\n5 </answer>", "5"),
        ("tag", "5", ""),
        ("tag", "<answer>4</answer><answer></answer>", ""),
        ("tag", "<answer>4 or <answer>5</answer> or <answer>6", "4 or <answer>5"),
    ],
)
def test_a_verifier_sees_what_was_extracted(extract: str, response: str, seen: str) -> None:
    from flowrl.tasks.reasoning import extract_answer

    assert extract_answer(f"reasoning_gym/chain_sum:extract={extract}", response) == seen
    assert extract_answer("reasoning_gym/chain_sum", f" {response} ") == response.strip()


def test_a_reasoning_gym_entry_is_scored_by_its_own_verifier() -> None:
    from flowrl.tasks.reasoning import score

    row = load_rows(Task("reasoning_gym/chain_sum:size=20,max_terms=2")).train[3]
    columns = {name: [row.columns[name]] * 2 for name in ("task", "entry")}
    assert score(["", ""], [f" {row.answer}\n", "no idea"], **columns)[0] == 1.0
    assert score(["", ""], [f" {row.answer}\n", "no idea"], **columns)[1] < 1.0


def write_lines(path: Path, *rows: object) -> Task:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return Task(str(path))


def test_json_lines_give_rows_with_their_other_columns(tmp_path: Path) -> None:
    written = [{"prompt": f"question {n}", "answer": n, "level": [1, {"a": None}]} for n in range(40)]
    rows = load_rows(write_lines(tmp_path / "rows.jsonl", *written))
    row = next(row for row in rows.train if row.prompt == rows.train[0].prompt)
    assert row.answer == row.prompt.removeprefix("question ")
    assert row.columns["level"] == (1, {"a": None})
    assert len(rows.train) + len(rows.held_out) == 40


def test_a_prompt_may_be_a_conversation(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    path = tmp_path / "rows.jsonl"
    rows = load_rows(
        write_lines(path, *({"prompt": [*turns[:2], {"role": "user", "content": f"{n}"}]} for n in range(9)))
    )
    assert [turn["role"] for turn in rows.train[0].turns] == ["user", "assistant", "user"]
    assert rows.train[0].answer is None


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "rows.jsonl:2: invalid JSON"),
        ('["a"]', "rows.jsonl:2: a list where an object was needed"),
        ({"promt": "x"}, "rows.jsonl:2: no column 'prompt'; did you mean prompt=promt?"),
        ({"question": "x", "id": 3}, "set prompt= to one of question, id"),
        ({"prompt": ""}, "rows.jsonl:2: the prompt is ''"),
        ({"prompt": [{"role": "user"}]}, "rows.jsonl:2: the prompt is"),
    ],
)
def test_a_malformed_row_is_named_with_its_line(tmp_path: Path, line: object, says: str) -> None:
    task = write_lines(tmp_path / "rows.jsonl", {"prompt": "good"}, line)
    with pytest.raises(ConfigError) as error:
        load_rows(task)
    assert says in str(error.value)


LONG = ["x" * 1000] * (8 << 10)


@pytest.mark.parametrize("kind", ["rows", "pairs", "labelled"])
def test_a_row_that_fits_into_no_message_is_refused_before_training(tmp_path: Path, kind: str) -> None:
    """Its samples failed a lane in the middle of the run."""
    path = tmp_path / "tests.jsonl"
    answers = {"rows": {"answer": "1"}, "pairs": {"chosen": "a", "rejected": "b"}, "labelled": {"completion": "a"}}
    rows = [
        {"prompt": f"case {n}", "label": True, **answers[kind], "inputs": LONG if n == 2 else ["1"]} for n in range(40)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def load(name: str) -> Rows:
        return load_rows(Task(name)) if kind == "rows" else load_preferences(Task(name), kind)  # type: ignore[arg-type]

    with pytest.raises(ConfigError) as refused:
        load(str(path))
    assert str(refused.value) == (
        f"{path}:3: the columns hold 7.8 MiB of text, most of it in 'inputs', and a message has room for 7; leave out "
        "columns that no reward reads, shorten them, or drop such rows with malformed=skip"
    )
    found = load(f"{path}:malformed=skip")
    assert len(found.skipped) == 1 and len(found.train) + len(found.held_out) == 39
    assert len(LONG[0]) * len(LONG) > MOST_TEXT_BYTES, "and a message takes what is left"
    Row(({"role": "user", "content": "q"},), {"inputs": "é" * (MOST_TEXT_BYTES // 2 - 8)}).require_short()


@pytest.mark.slow
def test_a_saved_dataset_is_read_by_split_and_column(tmp_path: Path) -> None:
    from datasets import Dataset, DatasetDict

    data = Dataset.from_dict({"problem": [f"p{n}" for n in range(30)], "solution": list(range(30))})
    DatasetDict({"main": data}).save_to_disk(str(tmp_path / "data"))
    rows = load_rows(Task(f"{tmp_path}/data:split=main,prompt=problem,answer=solution"))
    assert all(row.prompt == f"p{row.answer}" for row in rows.train)
    with pytest.raises(ConfigError, match="has no split 'train'; it has main"):
        load_rows(Task(f"{tmp_path}/data:prompt=problem"))
    with pytest.raises(ConfigError, match="no dataset directory"):
        load_rows(Task(str(tmp_path)))
