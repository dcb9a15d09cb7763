"""The shapes of data and the ways to break them, of which `benchmarks.data.data_shapes` makes its table.

A shape is a record of some columns, written in some format. A case changes the record in the middle, or the file.
"""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from flowrl.hub import forget_commits

COUNT, BROKEN = 20, 4
"""Number of records, and the index of the one that a case changes: line 5 of JSON lines."""
HUGE = "x" * (8 * 2**20)
LATIN = "ÿLATINÿ"
"""Stands for two bytes that are not UTF-8, which are put in when the bytes of a file are made."""
COMMIT = "0123456789abcdef0123456789abcdef01234567"

Record = Mapping[str, Any]
Write = Callable[[Sequence[Record]], bytes]
Use = Literal["prompts", "demonstrations", "pairs", "labelled", "texts"]


@dataclass(frozen=True)
class Case:
    """One way to break the data; `change` makes another of the record that it is about, None if it is about a file."""

    name: str
    change: Callable[[Record, Shape], Record] | None = None
    empty: bool = False


@dataclass(frozen=True)
class Shape:
    """Records of one kind in one format."""

    name: str
    record: Callable[[int], Record]
    key: str
    """The column that a case takes away, or gives a value of another type."""
    file: str = "rows.jsonl"
    write_all: Write = lambda records: lines(records)
    use: Use = "prompts"
    options: str = ""
    named: str = ""
    """What the task names, if it is not the file."""
    policy: str = "tiny"

    def write(self, home: Path, case: Case) -> str:
        """Write the data below `home`; the name of the task without its options."""
        records = [] if case.empty else [self.record(n) for n in range(COUNT)]
        if records and case.change is not None:
            records[BROKEN] = case.change(records[BROKEN], self)
        path = home / self.file
        path.parent.mkdir(parents=True, exist_ok=True)
        if self.file.endswith("*.jsonl"):
            for number, part in enumerate((records[:12], records[12:])):
                path.with_name(f"part-{number}.jsonl").write_bytes(self.write_all(part))
        else:
            path.write_bytes(self.write_all(records))
        return self.named or str(path)


def without_key(record: Record, shape: Shape) -> Record:
    return {"other": "x", **{name: value for name, value in record.items() if name != shape.key}}


def of_another_type(record: Record, shape: Shape) -> Record:
    return {**record, shape.key: {"deep": [1]}}


def huge(record: Record, shape: Shape) -> Record:
    return _with_text(record, shape, HUGE)


def of_other_bytes(record: Record, shape: Shape) -> Record:
    return _with_text(record, shape, LATIN)


def _with_text(record: Record, shape: Shape, text: str) -> Record:
    """The record with the text in its key: in a conversation, in its last message."""
    value = record[shape.key]
    if isinstance(value, str | bool):
        return {**record, shape.key: text}
    if isinstance(value[0], str):
        return {**record, shape.key: [*value[:-1], f"{value[-1]}  # {text}"]}
    field = next(name for name in ("content", "value", "type") if name in value[-1])
    return {**record, shape.key: [*value[:-1], {**value[-1], field: text}]}


CASES = (
    Case("good"),
    Case("a row without its key", without_key),
    Case("a value of another type", of_another_type),
    Case("empty", empty=True),
    Case("a value of 8 MiB", huge),
    Case("bytes that are not UTF-8", of_other_bytes),
)


# Formats


def _bytes(text: str) -> bytes:
    return text.encode().replace(LATIN.encode(), b"\xe9\xff")


def lines(records: Sequence[Record]) -> bytes:
    return _bytes("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))


def array(records: Sequence[Record]) -> bytes:
    return _bytes(json.dumps(list(records), ensure_ascii=False, indent=1))


def table(records: Sequence[Record], delimiter: str = ",") -> bytes:
    """A record without a column has a cell less, as a row that was cut off has."""
    header = list(records[0]) if records else ["prompt", "answer"]
    text = io.StringIO()
    writer = csv.writer(text, delimiter=delimiter)
    writer.writerow(header)
    for record in records:
        given = [record[name] for name in header if name in record]
        writer.writerow([value if isinstance(value, str) else json.dumps(_in_cell(value)) for value in given])
    return _bytes(text.getvalue())


def _in_cell(value: Any) -> Any:
    """A cell is text, so a value of another type is a list of messages, of which one has another type of content."""
    return [{"role": "user", "content": value}]


def parquet(records: Sequence[Record]) -> bytes:
    """A column has one type, so a value of another type makes it a column of numbers; a missing one is missing in all.

    Bytes are put into a column of text without a look at them, as other writers do.
    """
    import pyarrow
    import pyarrow.parquet

    out = io.BytesIO()
    names = [name for name in (records[0] if records else ("prompt", "answer")) if all(name in r for r in records)]
    columns = {name: _column([record[name] for record in records]) for name in names}
    pyarrow.parquet.write_table(pyarrow.table(columns), out)
    return out.getvalue()


def _column(values: Sequence[Any]) -> Any:
    import pyarrow

    if not all(isinstance(value, str) for value in values):
        return pyarrow.array(range(len(values)), pyarrow.int64())
    raw = pyarrow.array([_bytes(value) for value in values], pyarrow.binary())
    return pyarrow.StringArray.from_buffers(len(values), *raw.buffers()[1:])


def zst(content: bytes) -> bytes:
    import pyarrow

    packed: bytes = pyarrow.Codec("zstd").compress(content, asbytes=True)
    return packed


@contextmanager
def cache_of_the_hub(home: Path) -> Iterator[None]:
    """Within this context the cache of the Hub is below `home`, and the network is not asked."""
    from huggingface_hub import constants

    kept = constants.HF_HUB_CACHE, constants.HF_HUB_OFFLINE
    constants.HF_HUB_CACHE, constants.HF_HUB_OFFLINE = str(home / "hub"), True
    forget_commits()
    refs = home / "hub" / "datasets--acme--rows" / "refs"
    refs.mkdir(parents=True)
    (refs / "main").write_text(COMMIT)
    try:
        yield
    finally:
        constants.HF_HUB_CACHE, constants.HF_HUB_OFFLINE = kept
        forget_commits()


# Records


def plain(n: int) -> Record:
    return {"prompt": f"question {n}, or more", "answer": str(n)}


def asked_in_turns(n: int) -> Record:
    return {"prompt": [{"role": "system", "content": "Add."}, {"role": "user", "content": f"q {n}"}], "answer": str(n)}


def in_turns(n: int) -> Record:
    return {"messages": [{"role": "user", "content": f"q {n}"}, {"role": "assistant", "content": f"a {n}"}]}


def sharegpt(n: int) -> Record:
    return {"conversations": [{"from": "human", "value": f"q {n}"}, {"from": "gpt", "value": f"a {n}"}]}


def alpaca(n: int) -> Record:
    return {"instruction": f"Add {n}.", "input": "To 1." if n % 2 else "", "output": str(n + 1)}


def of_tools(n: int) -> Record:
    call = {"function": {"name": "add", "arguments": {"a": n}}}
    told: list[Record] = [
        {"role": "user", "content": f"q {n}"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    definition = {"name": "add", "description": "", "parameters": {"type": "object", "properties": {}}}
    return {"messages": told, "tools": [{"type": "function", "function": definition}]}


def pair(n: int) -> Record:
    return {"prompt": f"q {n}", "chosen": f"right {n}", "rejected": f"wrong {n}"}


def pair_in_turns(n: int) -> Record:
    asked = {"role": "user", "content": f"q {n}"}
    return {
        name: [asked, {"role": "assistant", "content": f"{text} {n}"}]
        for name, text in (("chosen", "right"), ("rejected", "wrong"))
    }


def labelled(n: int) -> Record:
    return {"prompt": f"q {n}", "completion": f"a {n}", "label": n % 2 == 0}


def gsm8k(n: int) -> Record:
    return {"question": f"How much is {n} and 1?", "answer": f"It is {n} + 1.\n#### {n + 1}"}


def mbpp(n: int) -> Record:
    return {"prompt": f"Write f, which adds {n}.", "test_list": [f"assert f(1) == {n + 1}"]}


def text(n: int) -> Record:
    return {"text": f"Text {n}."}


def text_files(records: Sequence[Record]) -> bytes:
    """One text, whatever the number of records."""
    return _bytes("\n".join(record["text"] for record in records if isinstance(record.get("text"), str)))


SNAPSHOT = f"hub/datasets--acme--rows/snapshots/{COMMIT}"
SHAPES = (
    Shape("JSON lines", plain, "prompt"),
    Shape("JSON array", plain, "prompt", "rows.json", array),
    Shape("CSV", plain, "prompt", "rows.csv", table),
    Shape("TSV", plain, "prompt", "rows.tsv", lambda records: table(records, "\t")),
    Shape("JSON lines, gzip", plain, "prompt", "rows.jsonl.gz", lambda records: gzip.compress(lines(records))),
    Shape("CSV, bzip2", plain, "prompt", "rows.csv.bz2", lambda records: bz2.compress(table(records))),
    Shape("JSON array, xz", plain, "prompt", "rows.json.xz", lambda records: lzma.compress(array(records))),
    Shape("JSON lines, zstandard", plain, "prompt", "rows.jsonl.zst", lambda records: zst(lines(records))),
    Shape("Parquet", plain, "prompt", "rows.parquet", parquet),
    Shape("pattern of files", plain, "prompt", "part-*.jsonl"),
    Shape("dataset of the Hub, offline", plain, "prompt", f"{SNAPSHOT}/train.jsonl", named="acme/rows"),
    Shape("Hub, Parquet", plain, "prompt", f"{SNAPSHOT}/data/train-00000-of-00001.parquet", parquet, named="acme/rows"),
    Shape("prompts as messages", asked_in_turns, "prompt"),
    Shape("messages for SFT", in_turns, "messages", use="demonstrations"),
    Shape("ShareGPT", sharegpt, "conversations", use="demonstrations"),
    Shape("Alpaca", alpaca, "instruction", use="demonstrations"),
    Shape("answers of SFT", plain, "answer", use="demonstrations"),
    Shape("calls of tools", of_tools, "messages", use="demonstrations", policy="tiny_agent"),
    Shape("definitions of tools", of_tools, "tools", use="demonstrations", policy="tiny_agent"),
    Shape("pairs", pair, "chosen", use="pairs"),
    Shape("pairs as messages", pair_in_turns, "rejected", use="pairs"),
    Shape("labelled completions", labelled, "completion", use="labelled"),
    Shape("labels", labelled, "label", use="labelled"),
    Shape("GSM8K, its questions", gsm8k, "question", options="prompt=question,check=gsm8k"),
    Shape("GSM8K, its answers", gsm8k, "answer", options="prompt=question,check=gsm8k"),
    Shape("MBPP, its tests", mbpp, "test_list", options="answer=test_list,check=code"),
    Shape("texts", text, "text", use="texts"),
    Shape("texts in CSV", text, "text", "rows.csv", table, use="texts"),
    Shape("text file, one text", text, "text", "rows.txt", text_files, use="texts"),
)
