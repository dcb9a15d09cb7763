"""Every kind of rows stays on disk as prompts do: preferences, mixtures, saved datasets, steps and texts."""

from __future__ import annotations

import gzip
import json
import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from flowrl.errors import ConfigError
from flowrl.models import Policy, references, token_store
from flowrl.nodes import (
    HeldOutBatch,
    PreferenceDataset,
    Preferences,
    PreferenceSource,
    PromptSource,
    TextDataset,
    Texts,
    TextSource,
)
from flowrl.nodes.sources.demonstrations import StepDataset
from flowrl.nodes.sources.plain_text import CutBy
from flowrl.tasks import Rows, Task, load_demonstrations, load_preferences, load_rows, load_texts
from flowrl.tasks.row_reading import row_loading, rows_on_disk
from flowrl.tasks.row_reading.preference_rows import Kind
from flowrl.tasks.row_reading.record_formats import ArrayElements, format_records
from flowrl.tasks.row_reading.row_loading import all_rows
from flowrl.tasks.row_reading.rows_on_disk import IndexedRows, num_bytes_of
from flowrl.tasks.toy_tasks import Arithmetic
from flowrl.testing import run_node
from tests.tasks.row_compare import both, require_same, rows_in

TINY = Policy("tiny")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOWRL_CACHE", str(tmp_path / "cache"))


def lines(path: Path, records: list[Any]) -> Path:
    path.write_bytes(b"\n".join(r if isinstance(r, bytes) else json.dumps(r).encode() for r in records))
    return path


def preferences(path: Path, kind: Kind, seed: int = 0) -> Path:
    """Repeated prompts and rows, texts and turns, pairs in between for labelled completions, and broken rows."""
    rng = random.Random(seed)
    records: list[Any] = []
    for n in range(140):
        asked = f"q é {rng.randrange(60)}"
        prompt: Any = asked if n % 3 else [{"role": "user", "content": asked}]
        pair = {"chosen": f"a {n % 20}", "rejected": [{"role": "assistant", "content": f"b {n % 7}"}]}
        labelled = {"completion": f"c {n % 20}", "label": n % 2 == 0, "level": n}
        records.append({"prompt": prompt} | (labelled if kind == "labelled" and n % 4 else pair))
    records[5:5] = [b"no row", b"", {"prompt": "q", "chosen": "same", "rejected": "same"}, b'{"prompt": "\xff"}', {}]
    return lines(path, [*records, *records[-3:]])


@pytest.mark.parametrize("options", [{}, {"template": "Solve {prompt}"}])
@pytest.mark.parametrize("kind", ["pairs", "labelled"])
def test_preferences_are_the_same(kind: Kind, options: dict[str, str], tmp_path: Path) -> None:
    file = preferences(tmp_path / "rows.jsonl", kind)
    memory, disk = both(f"{file}:malformed=skip", load_preferences, kind, **options)
    require_same(memory, disk)
    assert len(disk.skipped) == 4 and disk.repeated > 0
    said = []
    for where in ("memory", "disk"):
        with pytest.raises(ConfigError) as caught:
            load_preferences(Task(f"{file}:rows={where}"), kind)
        said.append(str(caught.value))
    assert said[0] == said[1] == f"{file}:6: invalid JSON (Expecting value); write one object per line"


@pytest.mark.parametrize("kind", ["pairs", "labelled"])
def test_trained_and_held_out_preferences_are_the_same(kind: Kind, tmp_path: Path) -> None:
    file = preferences(tmp_path / "rows.jsonl", kind)
    found = []
    for where in ("memory", "disk"):
        data = Preferences(Task(f"{file}:malformed=skip,rows={where}"), TINY, kind=kind)
        node = PreferenceDataset(data)
        node.preflight()
        asked = run_node(PreferenceSource(data, epochs=2), name="prompts").sent("prompts")
        groups = run_node(node, {"prompts": asked}).sent("groups")
        (batch,) = run_node(HeldOutBatch(data, num_rows=20), name="held_out").sent("batch")
        samples = [sample for group in groups for sample in group.samples] + list(batch.samples)
        found.append(
            [
                (s.sample_id, s.token_ids.tolist(), s.label, s.mismatched and s.mismatched.token_ids.tolist())
                for s in samples
            ]
        )
    assert found[0] == found[1] and len(found[0]) > 60
    assert (found[0][0][3] is None) == (kind == "pairs")


def sources(path: Path) -> str:
    """Rows that two sources have alike, with other scores, a compressed one, and one that is held."""
    rng = random.Random(1)
    rows = [{"prompt": f"q {rng.randrange(60)}", "answer": f"{n}", "score": rng.randrange(3)} for n in range(160)]
    lines(path / "a.jsonl", [*rows[:80], b"no row"])
    (path / "b.jsonl.gz").write_bytes(gzip.compress("\n".join(map(json.dumps, rows[60:])).encode()))
    return f"0.5*{path}/a.jsonl:malformed=skip + 0.3*{path}/b.jsonl.gz:min_score=1 as more"


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("load", [load_rows, load_demonstrations])
@pytest.mark.parametrize("options", [{}, {"template": "Of {of_task}: {prompt}"}])
@pytest.mark.parametrize("held", ["", " + 0.2*arithmetic:max_value=3", " + 0.2*sticks:most=9"])
def test_mixtures_are_the_same(load: Callable[..., Rows], options: dict[str, str], held: str, tmp_path: Path) -> None:
    memory, disk = both(sources(tmp_path) + held, load, **options)
    require_same(memory, disk)
    assert len(disk.skipped) == 1 and disk.repeated > 0
    assert any(row.columns["of_task"].startswith(f"{tmp_path}/b.jsonl.gz") for row in disk.train)


def test_an_array_of_one_line_is_not_read_whole(tmp_path: Path) -> None:
    """What `rows=disk` is for: the file may be larger than the memory."""
    file = tmp_path / "rows.json"
    file.write_text("\ufeff \n" + json.dumps([{"prompt": f"{n}+1=", "answer": "x" * 1000} for n in range(8000)]))
    tracemalloc.start()
    try:
        assert isinstance(format_records(file, file), ArrayElements)
        assert tracemalloc.get_traced_memory()[1] < file.stat().st_size // 8
    finally:
        tracemalloc.stop()
    file.write_text(" \n" * 100_000 + '{"prompt": "1"}\n[')
    assert not isinstance(format_records(file, file), ArrayElements)


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_every_answer_of_a_file_is_learnt_beside_what_is_generated(tmp_path: Path, where: str) -> None:
    chat = tmp_path / "chat.jsonl"
    lines(chat, [{"prompt": f"q{n % 10}", "answer": f"{n}"} for n in range(30)])
    task = Task(f"0.5*{chat}:rows={where} + 0.5*arithmetic:max_value=3")
    found = load_demonstrations(task, whole=True)
    of_file = [row.answer for row in (*found.train, *found.held_out) if row.prompt.startswith("q")]
    assert sorted(map(int, of_file)) == [*range(30)]
    assert len(found.train) + len(found.held_out) - 30 == len([*Arithmetic(max_value=3).rows()])
    asked = load_rows(task, whole=True)
    assert asked.repeated == 20, "those that repeat a prompt of their own source are counted"


def test_rows_are_held_once_for_both_ways_to_ask_for_them(tmp_path: Path) -> None:
    lines(tmp_path / "a.jsonl", [{"prompt": f"q{n}", "answer": "1", "text": "t"} for n in range(20)])
    for load in (load_rows, load_demonstrations, load_texts):
        assert load(Task(f"{tmp_path}/a.jsonl")) is load(Task(f"{tmp_path}/a.jsonl"), whole=True)


@pytest.mark.usefixtures("cache")
def test_an_epoch_of_a_mixture_is_the_same_and_no_row_is_read_for_its_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders, texts = [], []
    for where in ("memory", "disk"):
        with rows_in(where):
            source = PromptSource(Task(sources(tmp_path)), TINY, repeat=2, epochs=2)
            texts.append([p.text for p in run_node(source, name="prompts").sent("prompts")])
            source._rows, source._seed = source.rows(), 3
        if where == "disk":
            monkeypatch.setattr(IndexedRows, "__getitem__", None)
        orders.append([source._digest_of_order(source._epoch_order(epoch)) for epoch in (0, 1)])
    assert orders[0] == orders[1] and orders[0][0] != orders[0][1]
    assert texts[0] == texts[1] and len(texts[0]) > 100


@pytest.mark.usefixtures("cache")
def test_sources_of_a_mixture_are_large_in_sum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = sources(tmp_path).replace("skip", "skip,rows={}").replace("min_score=1", "min_score=1,rows={}")
    sizes = [(tmp_path / file).stat().st_size for file in ("a.jsonl", "b.jsonl.gz")]
    for where, most, expected in (
        (("auto", "auto"), sum(sizes) - 1, IndexedRows),
        (("auto", "auto"), sum(sizes), tuple),
        (("auto", "memory"), sizes[0], tuple),
        (("memory", "disk"), sum(sizes), IndexedRows),
    ):
        monkeypatch.setattr(row_loading, "AUTO_BYTES", most)
        all_rows.cache_clear()
        assert isinstance(load_rows(Task(name.format(*where))).train, expected)


def test_mixtures_of_preferences_are_the_same(tmp_path: Path) -> None:
    files = [preferences(tmp_path / f"{n}.jsonl", "pairs", n) for n in range(2)]
    name = " + ".join(f"0.4*{file}:malformed=skip" for file in files) + " + 0.2*arithmetic:max_value=19"
    memory, disk = both(name, load_preferences, "labelled")
    require_same(memory, disk)
    assert {row.columns["of_task"][:10] for row in disk.train} >= {"arithmetic"} and len(disk.skipped) == 8


def test_a_source_of_a_mixture_without_rows_is_named(tmp_path: Path) -> None:
    (tmp_path / "none.jsonl").touch()
    for where in ("memory", "disk"):
        with pytest.raises(ConfigError, match=r"task '.*none.jsonl:rows=\w+' has no rows at all; add rows"):
            load_rows(Task(f"0.5*{tmp_path}/none.jsonl:rows={where} + 0.5*arithmetic"))


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("splits", [False, True])
def test_saved_datasets_are_the_same(splits: bool, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    records = [{"prompt": f"q {n % 60}", "answer": f"{n}", "more": [{"a": n}]} for n in range(80)]
    made = datasets.Dataset.from_list(records)
    (datasets.DatasetDict(test=made, train=made.select(range(9))) if splits else made).save_to_disk(tmp_path / "saved")
    part = ":split=test" if splits else ""
    memory, disk = both(f"{tmp_path}/saved{part}", load_rows)
    require_same(memory, disk)
    assert disk.train[0].place.startswith(f"{tmp_path}/saved, row ")
    home = tmp_path / "saved" / ("test" if splits else "")
    assert num_bytes_of(tmp_path / "saved", "test") == sum(file.stat().st_size for file in home.glob("*.arrow")) > 0
    if splits:
        with pytest.raises(ConfigError, match="has no split 'dev'; it has "):
            load_rows(Task(f"{tmp_path}/saved:rows=disk,split=dev"))
    else:
        datasets.Dataset.from_list(records[:30]).save_to_disk(tmp_path / "saved")
        require_same(*both(f"{tmp_path}/saved", load_rows))


@pytest.mark.usefixtures("cache")
def test_images_of_a_saved_dataset_are_bytes_as_in_parquet(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    records = [{"prompt": f"q {n}", "seen": {"bytes": b"P6 1 1 255 abc", "path": None}} for n in range(20)]
    features = datasets.Features(prompt=datasets.Value("string"), seen=datasets.Image())
    made = datasets.Dataset.from_list(records, features=features)
    made.save_to_disk(tmp_path / "saved")
    made.to_parquet(tmp_path / "rows.parquet")
    memory, disk = both(f"{tmp_path}/saved", load_rows)
    require_same(memory, disk)
    assert memory == load_rows(Task(f"{tmp_path}/rows.parquet:rows=memory"))
    assert disk.train[0].columns["seen"] == records[0]["seen"]


def test_steps_are_the_same(tmp_path: Path) -> None:
    records = [{"prompt": f"q {n % 50}", "steps": [f"s {n}", "t"], "labels": [1, n % 2]} for n in range(80)]
    file = lines(tmp_path / "rows.jsonl", records)
    found = []
    for where in ("memory", "disk"):
        node = StepDataset(task := Task(f"{file}:rows={where}"), TINY)
        node.preflight()
        asked = run_node(PromptSource(task, TINY, epochs=1), name="prompts").sent("prompts")
        groups = run_node(node, {"prompts": asked}).sent("groups")
        (batch,) = run_node(HeldOutBatch(node, num_rows=4), name="held_out").sent("batch")
        samples = [*(group.samples[0] for group in groups), *batch.samples]
        found.append([(s.prompt_id, s.token_ids.tolist(), s.returns.tolist()) for s in samples])
    assert found[0] == found[1] and len(found[0]) > 20


def texts(path: Path) -> Path:
    """Texts of which some are repeated, one is empty and one is long."""
    found = [f"text {n % 30}: " + "abc" * (n % 30) for n in range(70)]
    return lines(path, [{"text": text} for text in [*found, " ", "long " * 90]])


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("cut", ["split", "wrapped"])
def test_texts_and_their_sequences_are_the_same(cut: CutBy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = texts(tmp_path / "rows.jsonl")
    monkeypatch.setattr(token_store, "PART_TOKENS", 100)
    require_same(*both(str(file), load_texts))
    found = []
    for where in ("memory", "disk"):
        cutting = Texts(Task(f"{file}:rows={where}"), TINY, max_tokens=16, cut=cut)
        source = TextSource(cutting, epochs=2)
        run = run_node(source, name="prompts")
        data = TextDataset(cutting)
        groups = run_node(data, {"prompts": run.sent("prompts")}).sent("groups")
        (batch,) = run_node(HeldOutBatch(data, num_rows=9), name="held_out").sent("batch")
        samples = [*(group.samples[0] for group in groups), *batch.samples]
        found.append([(s.sample_id, s.token_ids.tolist()) for s in samples] + run.progress)
    assert found[0] == found[1] and len(found[0]) > 100
    assert not list((tmp_path / "cache").rglob("tmp*")), "the file of the tokens has no name"


def test_text_files_stay_on_disk_each_as_one_text(tmp_path: Path) -> None:
    for n in range(40):
        (tmp_path / f"{n}.txt").write_bytes(b"\xef\xbb\xbf" * (n % 2) + f"text {n}\r\nand\n".encode())
    (tmp_path / "none.txt").touch()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(rows_on_disk, "MOST_OPEN", 8)
        require_same(*both(f"{tmp_path}/*.txt", load_texts))
    (tmp_path / "bad.txt").write_bytes(b"one\ntwo \xe9\n")
    with pytest.raises(ConfigError, match=r"bad.txt:2: the byte 0xe9 at position 4 is not UTF-8"):
        load_texts(Task(f"{tmp_path}/*.txt:rows=disk"))


@pytest.mark.usefixtures("cache")
def test_a_disk_without_room_for_tokens_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = token_store.TokenFile()
    tokens.add_tokens(np.arange(5, dtype=np.int32))
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1 << 30))
    with pytest.raises(ConfigError, match=r"tokens cannot be kept in .*tokens after 0.0 MB .1.1 GB are free, of which"):
        tokens.read_tokens(0, 5)


@pytest.mark.usefixtures("cache")
def test_sequences_of_a_reference_are_read_back_each_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(references, "BLOCK_TOKENS", 40)
    rng = np.random.default_rng(0)
    given = []
    for n in (7, 3, 12, 9, 20, 4, 11, 11):
        given.append((rng.integers(0, 9, n).astype(np.int32), rng.random(n) < 0.5))
    given += given[:3]
    known = references.SpooledSequences(given)
    assert [(ids.tolist(), mask.tolist()) for ids, mask in known] == [(a.tolist(), b.tolist()) for a, b in given[:8]]
    assert list(known.keys) == [references.key_of(*one).rstrip(b"\0") for one in given[:8]]
    assert [block.tolist() for block in known.iter_blocks()] == [[4, 2, 3, 0, 1], [6, 7, 5]]
