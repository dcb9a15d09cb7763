"""Files of every format keep their rows on disk: the same rows, places and errors as in memory."""

from __future__ import annotations

import bz2
import csv
import datetime
import errno
import gzip
import io
import json
import lzma
import os
import pickle
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from filelock import FileLock
from hypothesis import example, given
from hypothesis import strategies as st

from flowrl.errors import ConfigError
from flowrl.machine import disk
from flowrl.machine.cache import cache_dir
from flowrl.machine.disk import DiskRoom
from flowrl.tasks import Rows, Task, load_rows
from flowrl.tasks.row_reading import record_formats, rows_on_disk
from flowrl.tasks.row_reading.record_formats import ArrayScan
from flowrl.tasks.row_reading.rows_on_disk import IndexedRows, plain_file

RECORDS = [
    {"prompt": f"q \u00e9 {n % 50}\nand", "answer": f'"{n}", \t\u4e2d', "score": n % 3, "level": "x" * (n % 7)}
    for n in range(150)
]


def zstd(content: bytes) -> bytes:
    import pyarrow

    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(content)
    return sink.getvalue().to_pybytes()  # type: ignore[no-any-return]


PACKED: dict[str, Callable[[bytes], bytes]] = {
    "": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zstd,
}  # fmt: skip


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOWRL_CACHE", str(tmp_path / "cache"))


def lines() -> bytes:
    broken = ["", "  ", "no row", '{"prompt": 3}']
    return "\ufeff".encode() + "\n".join([*map(json.dumps, RECORDS), *broken, '{"prompt": "last"}']).encode()


def table(delimiter: str, ending: str = "\r\n") -> bytes:
    """Cells of several lines, an empty line, and a row with a cell too many."""
    text = io.StringIO(newline="")
    rows = csv.writer(text, delimiter=delimiter, lineterminator=ending)
    rows.writerows([list(RECORDS[0]), *(list(record.values()) for record in RECORDS)])
    text.write(ending)
    rows.writerows([["a", "b", "1", "", "more"], ["last", "b", "5", ""]])
    return text.getvalue().encode()


def array() -> bytes:
    return json.dumps([*RECORDS, 7, {"prompt": "last", "nested": [{"a": "]"}]}], ensure_ascii=False, indent=1).encode()


def parquet(path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    days = [datetime.date(2026, 1, 1) + datetime.timedelta(days=n) for n in range(len(RECORDS))]
    made = pyarrow.Table.from_pylist(
        [{**record, "raw": b"\x00\xff", "day": day} for record, day in zip(RECORDS, days, strict=True)]
    )
    sort = pyarrow.array(["easy", "hard"] * 75).dictionary_encode()
    pyarrow.parquet.write_table(made.append_column("sort", sort), path, row_group_size=40)


TEXTS = {
    ".jsonl": lines(), ".csv": table(","), ".tsv": table("\t", "\n"), ".json": array(),
}  # fmt: skip
NAMES = [kind + packing for kind in TEXTS for packing in (PACKED if kind == ".jsonl" else ("", ".gz"))]


def written(path: Path, name: str) -> Path:
    file = path / f"rows{name}"
    if name == ".parquet":
        parquet(file)
    else:
        kind, _, packing = name[1:].partition(".")
        file.write_bytes(PACKED[f".{packing}" if packing else ""](TEXTS[f".{kind}"]))
    return file


def both(file: Path, options: str = "malformed=skip") -> tuple[Rows, Rows]:
    memory, disk = (load_rows(Task(f"{file}:{options},rows={where}"), whole=True) for where in ("memory", "disk"))
    assert isinstance(disk.train, IndexedRows) and isinstance(memory.train, tuple)
    return memory, disk


@pytest.mark.parametrize("name", [*NAMES, ".parquet"])
def test_rows_are_those_in_memory(name: str, tmp_path: Path) -> None:
    memory, disk = both(written(tmp_path, name))
    for kept, read in ((memory.train, disk.train), (memory.held_out, disk.held_out)):
        assert tuple(read) == kept and [row.place for row in read] == [row.place for row in kept]
        assert tuple(pickle.loads(pickle.dumps(read)))[::-1] == kept[::-1]
    assert (disk.repeated, disk.skipped) == (memory.repeated, memory.skipped)
    assert len(disk.skipped) == {".jsonl": 2, ".csv": 1, ".tsv": 1, ".json": 1, ".parquet": 0}[f".{name.split('.')[1]}"]


def test_a_table_may_end_its_lines_as_old_computers_did(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_bytes(table(",", "\r").replace(b"\nand", b" and"))
    memory, disk = both(tmp_path / "rows.csv")
    assert tuple(disk.train) == memory.train and len(memory.train) > 30


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.json", b'[{"prompt": "x"},\n {"prompt": "y"\n]'),
        ("a.json", b'[{"prompt": "x"}\n{"prompt": "y"}]'),
        ("a.json", b'[{"prompt": "x"},\n]'),
        ("a.json", b'[{"prompt": "x"}]\n[]'),
        ("a.json", b'\n[{"prompt": "x"},\n{"prompt": "unclosed'),
        ("a.json", b'[{"prompt": "x"}'),
        ("a.json", b"[" + b"[" * 5000),
        ("a.json", b'[{"prompt": "x", "level": ' + b"1" * 5000 + b"}]"),
        ("a.csv", b"prompt,answer\na,b\nc,\"d\n"),
        ("a.csv", b"prompt,prompt\na,b\n"),
        ("a.csv", b""),
        ("a.csv", b"prompt\n\xff\n"),
        ("a.jsonl", b'{"prompt": "x"}\n{"prompt": "\xff"}\n'),
        ("a.jsonl.gz", gzip.compress(lines())[:-9]),
        ("a.parquet", b"PAR1 nothing PAR1"),
    ],
)  # fmt: skip
def test_errors_are_those_of_rows_in_memory(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    said = []
    for where in ("memory", "disk"):
        with pytest.raises(ConfigError) as caught:
            load_rows(Task(f"{tmp_path / name}:rows={where}"), whole=True)
        said.append(str(caught.value))
    assert said[0].partition(":")[0] == said[1].partition(":")[0]
    assert said[1].count("; ") == 1 and "\n" not in said[1]
    if name != "a.json":
        assert said[0] == said[1]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(
    values=st.lists(JSON, max_size=6), ascii_only=st.booleans(), indent=st.none() | st.just(1), chunk=st.integers(1, 40)
)
@example(values=[1.5, 2], ascii_only=True, indent=None, chunk=3)  # has read as far as "[1."
@example(values=[1e-7, 2], ascii_only=True, indent=None, chunk=4)  # "[1e-"
def test_elements_are_those_of_the_array(values: list[Any], ascii_only: bool, indent: int | None, chunk: int) -> None:
    text = json.dumps(values, ensure_ascii=ascii_only, indent=indent)
    content = text.encode("utf-8", errors="surrogatepass")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(record_formats, "CHUNK_BYTES", chunk)
        found = list(ArrayScan(Path("a.json"), io.BytesIO(content)).find_elements())
    assert [json.loads(part.decode("utf-8", errors="surrogatepass")) for _, part in found] == values
    assert all(content[offset : offset + len(part)] == part for offset, part in found)


def test_an_array_is_never_held_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_formats, "CHUNK_BYTES", 1000)
    content = io.BytesIO(b"[" + b",".join([b'{"prompt": "0123456789"}'] * 4000) + b"]")
    ahead = [content.tell() - offset - len(part) for offset, part in ArrayScan(Path("a.json"), content).find_elements()]
    assert len(ahead) == 4000 and max(ahead) <= 2000


def test_a_copy_is_made_once_and_anew_for_a_file_that_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path, ".jsonl.gz")
    copy = plain_file(file)
    assert copy.read_bytes() == lines() and cache_dir() in copy.parents
    said = capsys.readouterr().err
    assert "writing its rows into" in said and "0.0 MB of rows in" in said
    with monkeypatch.context() as patched:
        patched.setattr(rows_on_disk, "copy_parts", None)
        assert plain_file(file) == copy
    for text in (b'{"prompt": "other"}', b'{"prompt": "these"}'):
        file.write_bytes(gzip.compress(text, compresslevel=0))
        os.utime(file, ns=(1, int.from_bytes(text[-4:-2])))
        assert plain_file(file) != copy and plain_file(file).read_bytes() == text
    assert plain_file(written(tmp_path, ".csv")) == tmp_path / "rows.csv", "what can be read as it is, is not copied"


def test_copies_that_no_run_has_used_for_a_month_are_removed_when_another_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    days = {".jsonl.gz": 31, ".jsonl.xz": 29, ".jsonl.bz2": 31}
    homes = [plain_file(written(tmp_path, name)).parent for name in days]
    for home, number in zip(homes, days.values(), strict=True):
        os.utime(home / "flowrl.json", (then := time.time() - number * 86400, then))
    assert plain_file(tmp_path / "rows.jsonl.bz2").parent == homes[2], "asked for again"
    with FileLock(f"{homes[0]}.lock"):
        plain_file(written(tmp_path, ".jsonl.zst"))
    assert all(home.is_dir() for home in homes), "the first is locked, the second was used lately, the third just now"
    plain_file(written(tmp_path, ".parquet"))
    assert [home.is_dir() for home in homes] == [False, True, True]
    assert f"{homes[0]} is removed: nobody has asked for it in 30 days" in capsys.readouterr().err


def test_a_disk_that_is_too_small_is_said_and_nothing_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = written(tmp_path, ".jsonl.xz")
    free = iter([10 << 30, 1 << 30])
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=next(free)))
    monkeypatch.setattr(disk, "CHECKED_BYTES", 1000)
    monkeypatch.setattr(rows_on_disk, "COPY_BYTES", 1000)
    with pytest.raises(ConfigError, match=r"rows.jsonl.xz: its rows cannot be kept .* after 0.0 MB .1.1 GB are free"):
        load_rows(Task(f"{file}:rows=disk"))
    assert [path.suffix for path in (cache_dir() / "rows").iterdir()] == [".lock"]


def test_a_cache_that_cannot_be_written_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = written(tmp_path, ".parquet")
    (tmp_path / "file").touch()
    monkeypatch.setenv("FLOWRL_CACHE", str(tmp_path / "file"))
    said = f"{tmp_path}/file/rows cannot be read or written (Not a directory); name a directory of yours in "
    with pytest.raises(ConfigError, match=re.escape(said)) as caught:
        load_rows(Task(f"{file}:rows=disk"))
    assert str(caught.value).endswith("FLOWRL_CACHE, or write rows.parquet:rows=memory")


@pytest.mark.parametrize("problem", [errno.ENOSPC, errno.EDQUOT])
def test_only_a_full_disk_asks_for_a_larger_one(problem: int, tmp_path: Path) -> None:
    room = DiskRoom("rows", tmp_path)
    room.num_bytes = 3_000_000
    assert str(room.describe_refused(OSError(problem, "no space"))) == (
        f"rows cannot be kept in {tmp_path} after 3.0 MB (no space); name a directory on a larger disk in FLOWRL_CACHE"
    )
    assert str(room.describe_refused(OSError(errno.EIO, "I/O error", "a/b"))) == (
        f"rows cannot be kept in {tmp_path}, for a/b cannot be read or written (I/O error); name a directory of yours "
        "in FLOWRL_CACHE"
    )


def test_a_file_that_cannot_be_read_is_named_and_no_disk_is_blamed(tmp_path: Path) -> None:
    file = written(tmp_path, ".jsonl.gz")
    file.unlink()
    with pytest.raises(ConfigError, match=r"rows.jsonl.gz cannot be read: .*No such file.*; write it again"):
        plain_file(file)


def test_a_row_of_parquet_that_is_not_utf8_is_malformed_and_the_others_are_not(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    texts = pyarrow.array([b"one", b"t\xffo", b"three"], pyarrow.binary()).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"prompt": texts}), tmp_path / "rows.parquet")
    memory, disk = both(tmp_path / "rows.parquet")
    assert (*disk.train, *disk.held_out) == (*memory.train, *memory.held_out) and disk.skipped == memory.skipped
    assert len(disk.skipped) == 1 and "row 2: the column 'prompt' has the byte 0xff" in disk.skipped[0]


def test_rows_of_parquet_are_read_without_the_library_that_reads_parquet(tmp_path: Path) -> None:
    """It starts a thread, and a process that forks episodes may have none."""
    _, disk = both(written(tmp_path, ".parquet"))
    (tmp_path / "rows").write_bytes(pickle.dumps(disk.train))
    code = (
        "import pickle, sys; rows = pickle.load(open(sys.argv[1], 'rb')); print(rows[3].prompt.splitlines()[0], "
        "'pyarrow' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code, tmp_path / "rows"], capture_output=True, text=True, check=True)
    assert found.stdout.split()[-1] == "False" and disk.train[3].prompt.startswith(found.stdout.split("\n")[0][:-6])
