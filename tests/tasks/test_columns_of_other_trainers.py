"""The table of docs/data.md: what becomes of each column that other trainers read, by what is done with the rows."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from flowrl.errors import ConfigError
from flowrl.models import Chat, Policy
from flowrl.nodes import (
    Demonstrations,
    DemonstrationSource,
    PreferenceDataset,
    Preferences,
    PreferenceSource,
    PromptSource,
    TaskSource,
)
from flowrl.tasks import Row, Task, load_demonstrations, load_preferences, load_rows
from flowrl.tasks.row_reading.row_loading import REFUSED
from tests.tasks.row_compare import rows_in

PAGE = Path(__file__).parents[2] / "docs" / "data.md"
TINY = Policy("tiny")
USES = ("responses", "completions", "prompts")
TOOL = {"name": "add", "parameters": {"type": "object", "properties": {}}}

VALUES: dict[str, Any] = {
    "completion beside answer": {"completion": "a b c", "answer": "4"},
    "tools": {"tools": [TOOL]},
    "system": {"system": "Be brief."},
    "score": {"score": 1.0},
    "weight": {"weight": 0.5},
    "label, false, beside completion": {"completion": "a b c", "label": False},
    "margin": {"margin": 1.5},
    "chat_template_kwargs": {"chat_template_kwargs": {"enable_thinking": False}},
    "functions": {"functions": [TOOL]},
    "parallel_tool_calls": {"parallel_tool_calls": True},
    **{name: {name: ["x.png"]} for name in ("image", "images", "video", "videos", "audio", "audios")},
    **{name: {name: [1, 0]} for name in ("completion_mask", "assistant_masks")},
    **{name: {name: -1.5} for name in ("ref_chosen_logps", "ref_rejected_logps")},
    **{name: {name: {"a": 1}} for name in ("reward_model", "extra_info")},
    **{name: {name: "x"} for name in ("data_source", "solution", "ground_truth", "labels", "name", "id", "source")},
}
OF_MESSAGE: dict[str, dict[str, Any]] = {
    "weight of a message": {"weight": 0},
    "train of a message, false": {"train": False},
    "training of a message, false": {"training": False},
    "reasoning_content of a message": {"reasoning_content": "hm"},
    "name of a message": {"name": "Ann"},
}


def lines_of_table() -> dict[str, tuple[str, ...]]:
    """What is in the first cell, without the marks of code, -> the other cells; each column has a line of its own."""
    found: dict[str, tuple[str, ...]] = {}
    table = PAGE.read_text().partition("<!-- columns: begin -->")[2].partition("<!-- columns: end -->")[0]
    for line in table.strip().splitlines()[2:]:
        first, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        *names, last = re.findall(r"`\w+`[^`]*(?:beside `\w+`)?", first)
        rest = last.partition("` ")[2] or last.partition("`, ")[2]
        for name in (*names, last) if all(one.endswith("`, ") for one in names) else (first,):
            plain = name.strip(", ").replace("`", "")
            found[plain if not rest or rest in name else f"{plain} {rest}"] = tuple(cells)
    return found


TABLE = lines_of_table()


def record(column: str, use: str, n: int) -> dict[str, Any]:
    """A row with this column."""
    fields = OF_MESSAGE.get(column)
    earlier = [{"role": "user", "content": f"q{n}"}, {"role": "assistant", "content": "so", **(fields or {})}]
    prompt: Any = [*earlier, {"role": "user", "content": "on"}] if fields is not None else f"q{n}"
    replies = {
        "responses": {"completion": "a b c"},
        "completions": {"chosen": "a b c", "rejected": "d"},
        "prompts": {"answer": "4"},
    }
    return {"prompt": prompt, **replies[use], **VALUES.get(column, {})}


def written(tmp_path: Path, column: str, use: str) -> Task:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(record(column, use, n)) + "\n" for n in range(20)))
    return Task(str(path))


def preflight(task: Task, use: str, *, labelled: bool = False) -> None:
    if use == "responses":
        DemonstrationSource(task, TINY).preflight()
        Demonstrations(task, TINY).preflight()
    elif use == "completions":
        data = Preferences(task, TINY, kind="labelled" if labelled else "pairs")
        PreferenceSource(data).preflight()
        PreferenceDataset(data).preflight()
    else:
        PromptSource(task, TINY).preflight()


def first_row(task: Task, use: str) -> Row:
    load: dict[str, Callable[[Task], Any]] = {
        "responses": load_demonstrations,
        "completions": lambda task: load_preferences(task, "pairs"),
        "prompts": load_rows,
    }
    return load[use](task).train[0]  # type: ignore[no-any-return]


def test_the_table_has_every_column_that_is_refused_and_every_case_here() -> None:
    assert {*TABLE} == {*VALUES, *OF_MESSAGE}
    assert {name.split(",")[0] for name, cells in TABLE.items() if "refused" in cells and name in VALUES} == {*REFUSED}
    assert {cell for cells in TABLE.values() for cell in cells} <= {"read", "refused", "rewards", "needless"}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("column", TABLE)
def test_each_cell_of_the_table_is_what_happens(tmp_path: Path, column: str, use: str) -> None:
    cell, task = TABLE[column][USES.index(use)], written(tmp_path, column, use)
    name = column.replace(",", "").split()[0]
    with rows_in("memory"):
        if cell == "refused":
            with pytest.raises(ConfigError, match=rf"rows.jsonl:\d+: .*\b{name}\b.* not read here"):
                preflight(task, use)
            return
        if column == "reasoning_content of a message":  # `tiny` does not show it: another test trains it
            with pytest.raises(ConfigError, match=r"--task\.reasoning inline"):
                preflight(task, use)
            return
        if name == "tools":  # nor definitions of tools
            with pytest.raises(ConfigError, match="the data have definitions of tools"):
                preflight(task, use)
            return
        preflight(task, use, labelled=use == "completions" and name == "label")
        row = first_row(task, use)
    if cell == "rewards":
        assert name in row.columns
    if column == "completion beside answer" and use == "responses":
        assert row.response[0]["content"] == "a b c" and row.columns["answer"] == "4"  # type: ignore[index]
    if name == "system":
        assert row.turns[0] == {"role": "system", "content": "Be brief."}
    if column == "name of a message":
        assert row.turns[1]["name"] == "Ann"
    if column == "weight of a message" and use == "responses":
        from flowrl.models import tokenizer_of

        tokenizer = tokenizer_of(TINY)
        ids, mask = Chat(tokenizer).encode_demonstration(row.turns, row.response)
        assert "so" not in tokenizer.decode(ids[mask]) and "so" in tokenizer.decode(ids)


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("column", [name for name in REFUSED if name != "label"])
@pytest.mark.parametrize("empty", [None, "", [], {}])
def test_a_column_without_a_value_is_not_refused(tmp_path: Path, column: str, use: str, empty: Any) -> None:
    path = tmp_path / "rows.jsonl"
    records = [{**record("id", use, n), column: empty} for n in range(20)]
    path.write_text("".join(json.dumps(one) + "\n" for one in records))
    with rows_in("memory"):
        preflight(Task(str(path)), use)


def test_what_the_messages_advise_helps(tmp_path: Path) -> None:
    labelled = written(tmp_path, "label, false, beside completion", "responses")
    with rows_in("memory"):
        preflight(Task(f"{labelled.name}:answer=completion"), "responses")
        functions = written(tmp_path, "functions", "prompts")
        preflight(Task(f"{functions.name}:tools=none"), "prompts")
        (row, *_) = load_rows(Task(f"{functions.name}:tools=functions")).train
    assert row.tools[0]["function"]["name"] == "add"


def test_agents_and_evaluations_refuse_them_too(tmp_path: Path) -> None:
    task = written(tmp_path, "images", "prompts")
    with rows_in("memory"), pytest.raises(ConfigError, match=r"the row has images = .* not read here"):
        TaskSource(task).preflight()


def has_option(options: type, name: str) -> bool:
    """Whether these options, or a block of them, have one of this name."""
    hints = get_type_hints(options)
    blocks = [hints[field.name] for field in fields(options) if is_dataclass(hints[field.name])]
    return any(field.name == name for field in fields(options)) or any(has_option(block, name) for block in blocks)


@pytest.mark.parametrize(
    "name", ["sft", "dpo", "kto", "reward_model", "process_reward_model", "distill", "grpo", "generate", "evaluate"]
)
def test_too_long_is_an_option_for_every_use(name: str) -> None:
    module = importlib.import_module(f"flowrl.recipes.{name}")
    assert has_option(next(iter(get_type_hints(module.graph).values())), "too_long")
