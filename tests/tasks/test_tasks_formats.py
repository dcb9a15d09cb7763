"""Each shape of data, good and broken: how many rows are used, and what is said."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from flowrl.errors import ConfigError
from flowrl.tasks import Rows, Task, conversation, load_preferences, load_rows
from flowrl.tasks.row_reading.row_files import files_of
from flowrl.tasks.row_reading.row_loading import all_rows

Records = list[dict[str, Any]]
COUNT = 20
HUGE = "x" * (8 * 2**20)
BAD_BYTES = b"\xe9\xff"


def lines(records: Records) -> bytes:
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def array(records: Records) -> bytes:
    return json.dumps(records, indent=1).encode()


def table(records: Records, delimiter: str = ",") -> bytes:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(key for record in records for key in record)), delimiter=delimiter)
    writer.writeheader()
    for record in records:
        writer.writerow({key: json.dumps(v) if isinstance(v, list) else v for key, v in record.items()})
    return text.getvalue().encode()


def tabs(records: Records) -> bytes:
    return table(records, "\t")


def zst(content: bytes) -> bytes:
    """Two frames, as a file has to which was appended."""
    first = len(content) // 3
    codec = pyarrow.Codec("zstd")
    return b"".join(codec.compress(part, asbytes=True) for part in (content[:first], content[first:]))


WRITERS: dict[str, Callable[[Records], bytes]] = {
    "rows.jsonl": lines,
    "rows.json": array,
    "rows.csv": table,
    "rows.tsv": tabs,
    "rows.jsonl.gz": lambda records: gzip.compress(lines(records)),
    "rows.csv.bz2": lambda records: bz2.compress(table(records)),
    "rows.json.xz": lambda records: lzma.compress(array(records)),
    "rows.jsonl.zst": lambda records: zst(lines(records)),
}
"""File name -> its bytes for records."""


def plain(n: int) -> dict[str, Any]:
    return {"prompt": f"question {n}, or more", "answer": str(n)}


def turns(n: int) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": f"q {n}"}, {"role": "assistant", "content": f"a {n}"}]}


def sharegpt(n: int) -> dict[str, Any]:
    return {"conversations": [{"from": "human", "value": f"q {n}"}, {"from": "gpt", "value": f"a {n}"}]}


def alpaca(n: int) -> dict[str, Any]:
    return {"instruction": f"Add {n}.", "input": "To 1." if n % 2 else "", "output": str(n + 1)}


SHAPES = {"plain": plain, "messages": turns, "sharegpt": sharegpt, "alpaca": alpaca}
FIRST = {"plain": "prompt", "messages": "messages", "sharegpt": "conversations", "alpaca": "instruction"}


def write(tmp_path: Path, name: str, content: bytes) -> Task:
    (tmp_path / name).write_bytes(content)
    return Task(str(tmp_path / name))


def skipping(task: Task) -> Rows:
    return load_rows(Task(f"{task.name}:malformed=skip"), whole=True)


def used(rows: Rows) -> int:
    return len(rows.train) + len(rows.held_out)


def message(task: Task) -> str:
    with pytest.raises(ConfigError) as refusal:
        load_rows(task)
    text = str(refusal.value)
    assert "\n" not in text and len(text) < 500
    return text


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("shape", SHAPES)
def test_good_rows_are_all_used(tmp_path: Path, name: str, shape: str) -> None:
    rows = load_rows(write(tmp_path, name, WRITERS[name]([SHAPES[shape](n) for n in range(COUNT)])))
    assert (used(rows), rows.skipped, rows.repeated) == (COUNT, (), 0)
    answers = {row.prompt: row.answer for row in (*rows.train, *rows.held_out)}
    expected = {
        "plain": ("question 7, or more", "7"),
        "messages": ("q 7", "a 7"),
        "sharegpt": ("q 7", "a 7"),
        "alpaca": ("Add 7.\n\nTo 1.", "8"),
    }
    prompt, answer = expected[shape]
    assert answers[prompt] == answer


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_without_its_key_is_named_or_skipped(tmp_path: Path, name: str, shape: str) -> None:
    records = [SHAPES[shape](n) for n in range(COUNT)]
    records[4] = {"other": "x"}
    task = write(tmp_path, name, WRITERS[name](records))
    assert name in message(task)
    rows = skipping(task)
    assert (used(rows), len(rows.skipped)) == (COUNT - 1, 1)
    assert "prompt" in rows.skipped[0] or FIRST[shape] in rows.skipped[0]


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_value_of_another_type_is_named_or_skipped(tmp_path: Path, name: str, shape: str) -> None:
    records = [SHAPES[shape](n) for n in range(COUNT)]
    wrong: Any = "" if shape == "plain" else 7 if shape != "alpaca" else " "
    records[4] = {**records[4], FIRST[shape]: wrong} | ({"input": ""} if shape == "alpaca" else {})
    if shape in ("messages", "sharegpt"):
        records[4][FIRST[shape]] = [{"role": "robot", "content": 1}]
    task = write(tmp_path, name, WRITERS[name](records))
    assert "it needs text, or a list of {'role'" in message(task)
    rows = skipping(task)
    assert (used(rows), len(rows.skipped)) == (COUNT - 1, 1)


@pytest.mark.parametrize("name", WRITERS)
def test_an_empty_file_says_that_it_has_no_rows(tmp_path: Path, name: str) -> None:
    packers: Any = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress, "zst": zst}
    packed = packers.get(name.rpartition(".")[2], bytes)
    said = message(write(tmp_path, name, packed(b"")))
    assert "has no rows at all" in said or "it has to name the columns" in said
    header = {"csv": b"prompt,answer\n", "tsv": b"prompt\tanswer\n", "json": b"[]"}.get(name.split(".")[1], b"\n\n")
    assert "has no rows at all" in message(write(tmp_path, f"none-{name}", packed(header)))


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_huge_row_is_a_row(tmp_path: Path, name: str, shape: str) -> None:
    records = [SHAPES[shape](n) for n in range(COUNT)]
    value = [{"role": "user", "content": HUGE}] if shape in ("messages", "sharegpt") else HUGE
    records[4] = {**records[4], FIRST[shape]: value}
    if shape in ("messages", "sharegpt"):
        records[4]["answer"] = "1"
    rows = load_rows(write(tmp_path, name, WRITERS[name](records)))
    assert used(rows) == COUNT
    assert max(len(row.prompt) for row in (*rows.train, *rows.held_out)) >= len(HUGE)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv", "rows.tsv"])
@pytest.mark.parametrize("shape", SHAPES)
def test_other_bytes_are_named_with_their_line_or_skipped(tmp_path: Path, name: str, shape: str) -> None:
    records = [SHAPES[shape](n) for n in range(COUNT)]
    marker = json.dumps(records[4]).replace("4", "4MARK")
    records[4] = json.loads(marker)
    task = write(tmp_path, name, WRITERS[name](records).replace(b"MARK", BAD_BYTES))
    said = message(task)
    assert "the byte 0xe9 at position" in said and f"{name}:{5 if name == 'rows.jsonl' else 6}: " in said
    rows = skipping(task)
    assert (used(rows), len(rows.skipped)) == (COUNT - 1, 1)


def test_other_bytes_in_what_is_read_whole(tmp_path: Path) -> None:
    content = array([plain(n) for n in range(COUNT)]).replace(b"question 4", BAD_BYTES)
    for name, packed in (("rows.json", content), ("rows.json.gz", gzip.compress(content))):
        assert "the byte 0xe9 at position" in message(write(tmp_path, name, packed))
    utf16 = "".join(json.dumps(plain(n)) + "\n" for n in range(3)).encode("utf-16")
    assert "the byte 0xff at position 0 is not UTF-8; save the file as UTF-8" in message(
        write(tmp_path, "a.jsonl", utf16)
    )


def test_a_byte_order_mark_is_no_part_of_the_first_column(tmp_path: Path) -> None:
    for name in ("rows.jsonl", "rows.csv"):
        content = b"\xef\xbb\xbf" + WRITERS[name]([plain(n) for n in range(COUNT)])
        assert used(load_rows(write(tmp_path, name, content))) == COUNT


@pytest.mark.parametrize("name", ["rows.jsonl.gz", "rows.csv.bz2", "rows.json.xz", "rows.jsonl.zst"])
def test_damaged_archives_are_named(tmp_path: Path, name: str) -> None:
    content = WRITERS[name]([plain(n) for n in range(COUNT)])
    for broken in (content[: len(content) // 2], b"no archive at all"):
        said = message(write(tmp_path, name, broken))
        assert name in said and "cannot be read" in said and "write it again" in said


BROKEN_TABLES = {
    b"": "its first line does not name every column",
    b"a,a\n1,2\n": "its first line has the column 'a' twice",
    b"a,,b\n1,2,3\n": "its first line does not name every column",
    b"prompt,answer\nq,1,2\n": "rows.csv:2: the row has 3 cells, the header 2; quote what holds a delimiter",
    b"prompt,answer\nq\n": "rows.csv:2: the row has 1 cells, the header 2",
    b'prompt,answer\n"q,1\nr,2\n': "invalid CSV (unexpected end of data)",
    b"question,answer\nq,1\n": "no column 'prompt'; set prompt= to one of question, answer",
}


@pytest.mark.parametrize("content", BROKEN_TABLES)
def test_broken_tables(tmp_path: Path, content: bytes) -> None:
    assert BROKEN_TABLES[content] in message(write(tmp_path, "rows.csv", content))


def test_values_of_tables_that_are_no_text(tmp_path: Path) -> None:
    scored = b"prompt,answer,score\n" + b"".join(b"q%d,good,0.9\nq%d,bad,.1\n" % (n, n) for n in range(COUNT))
    rows = load_rows(write(tmp_path, "scored.csv", scored))
    assert {row.answer for row in rows.train} == {"good"}
    labelled = b"prompt,completion,label\n" + b"".join(b"q%d,a,true\nq%d,b,0\n" % (n, n) for n in range(COUNT))
    found = load_preferences(write(tmp_path, "labelled.csv", labelled), "labelled")
    assert {(row.columns["completion"], row.columns["label"]) for row in found.train} == {("a", True), ("b", False)}


def test_arrays_of_something_else(tmp_path: Path) -> None:
    assert "rows.json, row 2: a int where an object was needed" in message(
        write(tmp_path, "rows.json", b'[{"prompt": "q"}, 3]')
    )
    assert "rows.json:3: invalid JSON" in message(write(tmp_path, "rows.json", b'\n[{"prompt": "q"},\n{"prompt" 3}]'))
    mixed = b"\n" + lines([plain(n) for n in range(COUNT)])
    assert used(load_rows(write(tmp_path, "lines.json", mixed))) == COUNT, "lines in a .json file"


def test_patterns_read_every_file_that_matches(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    write(tmp_path, "part-1.jsonl", lines([plain(n) for n in range(10)]))
    write(tmp_path, "part-2.csv.bz2", bz2.compress(table([plain(n) for n in range(10, 15)])))
    write(tmp_path / "deep", "part-3.jsonl", lines([plain(n) for n in range(15, COUNT)]))
    assert used(load_rows(Task(f"{tmp_path}/part-*"))) == 15
    assert used(load_rows(Task(f"{tmp_path}/**/part-?.*"))) == COUNT
    assert used(load_rows(Task(f"{tmp_path}/part-[1].jsonl:prompt=prompt"))) == 10
    assert "no file matches" in message(Task(f"{tmp_path}/nothing-*.jsonl"))
    write(tmp_path, "part-4.md", b"")
    assert "part-4.md, which matches" in message(Task(f"{tmp_path}/part-?.*"))


def test_a_directory_may_hold_tables_and_descriptions(tmp_path: Path) -> None:
    write(tmp_path, "train.csv", table([plain(n) for n in range(COUNT)]))
    write(tmp_path, "dataset_infos.json", b'{"default": {}}')
    assert used(load_rows(Task(str(tmp_path)))) == COUNT


@pytest.mark.parametrize(
    ("names", "split", "found"),
    [
        (["data/train/0.jsonl", "data/test/0.jsonl"], "train", ["data/train/0.jsonl"]),
        (["data/train/0.jsonl", "data/test/0.jsonl"], "test", ["data/test/0.jsonl"]),
        (["gsm8k_train.jsonl", "gsm8k_test.jsonl"], "train", ["gsm8k_train.jsonl"]),
        (["train_sft.jsonl", "train_gen.jsonl"], "train_sft", ["train_sft.jsonl"]),
        (["dev.jsonl", "train.jsonl"], "validation", ["dev.jsonl"]),
        (["a.jsonl", "b.jsonl"], "train", ["a.jsonl", "b.jsonl"]),
        (["rows.jsonl", "test.jsonl"], "train", None),
        (["a.jsonl", "b.jsonl"], "test", None),
    ],
)
def test_a_directory_is_read_by_the_split_in_its_names(
    tmp_path: Path, names: list[str], split: str, found: list[str] | None
) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    if found is None:
        with pytest.raises(ConfigError, match=rf"has no file of the split '{split}', .* set the option split"):
            files_of(tmp_path, config="", split=split)
    else:
        assert files_of(tmp_path, config="", split=split) == [tmp_path / name for name in found]


# Shapes


def one(tmp_path: Path, record: dict[str, Any]) -> tuple[list[dict[str, str]], str | None, dict[str, Any]]:
    task = Task(write(tmp_path, "one.jsonl", lines([record])).name, system_prompt="the task's")
    rows = load_rows(task, whole=True)
    (row,) = (*rows.train, *rows.held_out)
    return conversation(task, row), row.answer, {k: v for k, v in row.columns.items() if k != "answer"}


def test_a_row_brings_its_own_system_message(tmp_path: Path) -> None:
    system = {"role": "system", "content": "row's"}
    asked, answer, _ = one(tmp_path, {**sharegpt(3), "system": "row's"})
    assert (asked, answer) == ([system, {"role": "user", "content": "q 3"}], "a 3")
    all_rows.cache_clear()
    asked, _, columns = one(tmp_path, {**plain(3), "system": "row's", "level": 2})
    assert asked[0] == system and columns == {"level": 2}
    all_rows.cache_clear()
    asked, _, _ = one(tmp_path, {**plain(3), "system": ""})
    assert asked[0] == {"role": "system", "content": "the task's"}


def test_rounds_before_the_last_are_kept(tmp_path: Path) -> None:
    told = [("human", "a"), ("gpt", "b"), ("human", "c"), ("gpt", "d")]
    asked, answer, _ = one(tmp_path, {"conversations": [{"from": who, "value": text} for who, text in told]})
    assert [turn["content"] for turn in asked[1:]] == ["a", "b", "c"] and answer == "d"
    all_rows.cache_clear()
    asked, answer, columns = one(tmp_path, {**alpaca(2), "history": [["x", "y"]], "source": "s"})
    assert [(t["role"], t["content"]) for t in asked[1:]] == [("user", "x"), ("assistant", "y"), ("user", "Add 2.")]
    assert (answer, columns) == ("3", {"source": "s"})


@pytest.mark.parametrize(("history", "turns"), [("[]", 2), ("", 2), ('[["x", "y"]]', 4), (None, 2)])
def test_a_history_may_be_written_as_json(tmp_path: Path, history: str | None, turns: int) -> None:
    asked, answer, columns = one(tmp_path, {**alpaca(2), "history": history})
    assert len(asked) == turns and asked[-1]["content"] == "Add 2."
    assert (answer, columns) == ("3", {})


def test_a_column_that_is_named_is_not_replaced_by_another_shape(tmp_path: Path) -> None:
    task = write(tmp_path, "one.jsonl", lines([alpaca(1), alpaca(2)]))
    assert "no column 'question'" in message(Task(f"{task.name}:prompt=question"))
    assert "no column 'prompt'" in message(write(tmp_path, "two.jsonl", lines([{"instruction": "x"}])))


def test_a_date_that_python_cannot_hold_is_named_or_skipped(tmp_path: Path) -> None:
    column = pyarrow.array([0, 10**8], pyarrow.int32()).cast(pyarrow.date32())
    table = pyarrow.table({"prompt": ["1+1=", "2+2="], "answer": ["2", "4"], "day": column})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    for rows in ("memory", "disk"):
        name = f"{tmp_path}/a.parquet:rows={rows}"
        assert "row 2: the column 'day' has a date outside the years 1 to 9999; write it as text" in message(Task(name))
        assert used(load_rows(Task(f"{name},malformed=skip"), whole=True)) == 1


def test_an_answer_with_bytes_is_text(tmp_path: Path) -> None:
    """An image's column named as the answer: it can be shown in the error of whoever needs another answer."""
    table = pyarrow.table({"prompt": ["1+1="], "image": [{"bytes": b"\x89PNG", "path": "a.png"}]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    rows = load_rows(Task(f"{tmp_path}/a.parquet:answer=image"), whole=True)
    (row,) = (*rows.train, *rows.held_out)
    assert row.answer is not None and "PNG" in row.answer and "a.png" in row.answer


def test_a_pattern_that_cannot_be_searched_is_one_sentence(tmp_path: Path) -> None:
    assert "**.jsonl cannot be searched" in message(Task(f"{tmp_path}/**.jsonl"))


def test_a_missing_answer_that_pandas_wrote_is_missing(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "1+1=", "answer": NaN}\n{"prompt": "2+2=", "answer": "4"}\n')
    rows = load_rows(Task(f"{tmp_path}/a.jsonl"))
    assert {one.prompt: one.answer for one in (*rows.train, *rows.held_out)} == {"1+1=": None, "2+2=": "4"}
