"""Rows that stay on disk are the rows in memory: the same ones, in the same order and the same part."""

from __future__ import annotations

import json
import os
import pickle
import random
import resource
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from flowrl.errors import ConfigError
from flowrl.models import Policy
from flowrl.nodes import Demonstrations, DemonstrationSource, HeldOutBatch, PromptSource, Reward
from flowrl.tasks import Rows, Task, check_answers, load_demonstrations, load_preferences, load_rows
from flowrl.tasks.row_reading import row_loading, rows_on_disk
from flowrl.tasks.row_reading.columns import Keys, make_row
from flowrl.tasks.row_reading.record_formats import Reading
from flowrl.tasks.row_reading.row_loading import all_rows
from flowrl.tasks.row_reading.rows_on_disk import IndexedRows, prompt_ids, rows_by_id
from flowrl.tasks.rows import word_row
from flowrl.testing import run_node
from tests.tasks.row_compare import both, require_same

LOADERS = (load_rows, load_demonstrations)


def written(path: Path, seed: int = 0, rows: int = 60) -> str:
    """Two files with repeated prompts, equal and different scores, empty lines and a line that is none."""
    rng = random.Random(seed)
    for name in ("b", "a"):
        lines = [
            json.dumps({"prompt": f"q \u00e9 {rng.randrange(60)}", "answer": f"{n}", "score": rng.randrange(3)})
            for n in range(rows)
        ]
        lines[7:7] = ["", "   ", "no row"]
        ending = "\r\n" if name == "a" else "\n"
        (path / f"{name}.jsonl").write_bytes((b"\xef\xbb\xbf" if name == "a" else b"") + ending.join(lines).encode())
    return f"{path}/*.jsonl:malformed=skip"


@pytest.mark.parametrize("load", LOADERS)
@pytest.mark.parametrize("options", [{}, {"template": "Solve {prompt}"}])
@pytest.mark.parametrize("seed", range(4))
def test_rows_are_the_same(load: Callable[..., Rows], options: dict[str, str], seed: int, tmp_path: Path) -> None:
    name = f"{written(tmp_path, seed)},min_score=1"
    memory, disk = both(name, partial(load, whole=True), **options)
    require_same(memory, disk)
    assert len(disk.skipped) == 2
    with pytest.raises(KeyError):
        rows_by_id(disk.train)["0" * 16]


def test_a_source_sends_the_same_in_the_same_order_and_goes_on_after_either(tmp_path: Path) -> None:
    name = written(tmp_path)
    sent = [
        run_node(PromptSource(Task(f"{name},rows={where}"), Policy("tiny"), repeat=2, epochs=2), name="prompts")
        for where in ("memory", "disk")
    ]
    ids = [[prompt.sample_id for prompt in one.sent("prompts")] for one in sent]
    assert ids[0] == ids[1] and len(ids[0]) > 40
    sources = [PromptSource(Task(f"{name},rows={where}"), Policy("tiny"), seed=3) for where in ("memory", "disk")]
    digests = []
    for source in sources:
        source._rows, source._seed = source.rows(), 3
        digests.append([source._digest_of_order(source._epoch_order(epoch)) for epoch in (0, 1)])
    assert digests[0] == digests[1] and digests[0][0] != digests[0][1]


@pytest.mark.parametrize("part", ["train", "all"])
def test_demonstrations_are_the_same(part: Any, tmp_path: Path) -> None:
    samples = []
    for where in ("memory", "disk"):
        task = Task(f"{written(tmp_path)},rows={where}")
        asked = run_node(DemonstrationSource(task, Policy("tiny"), epochs=1, part=part), name="prompts").sent("prompts")
        node = Demonstrations(task, Policy("tiny"), part=part)
        node.preflight()
        samples.append([group.samples[0] for group in run_node(node, {"prompts": asked}).sent("groups")])
        if part == "train":
            (batch,) = run_node(HeldOutBatch(node, num_rows=3), name="held_out").sent("batch")
            samples[-1] += batch.samples
    texts = [[(one.prompt_id, one.token_ids.tolist()) for one in found] for found in samples]
    assert texts[0] == texts[1] and len(texts[0]) > 20


def test_checks_before_a_run_read_every_row(tmp_path: Path) -> None:
    written(tmp_path)
    rows = [{"prompt": f"q {number}", "answer": str(number)} for number in range(63)]
    rows.append({"prompt": "last", "answer": "none"})
    (tmp_path / "c.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = Task(f"{tmp_path}/c.jsonl:check=gsm8k,rows=disk")
    with pytest.raises(ConfigError, match=r"c.jsonl:64: the answer is 'none', and check=gsm8k needs a number"):
        PromptSource(task, Policy("tiny"), part="all").preflight()
    check_answers(Task(task.name.replace("gsm8k", "exact")), load_rows(task, whole=True).train)
    left = load_rows(Task(f"{task.name},malformed=skip"))
    assert len(left.train) + len(left.held_out) == 63 and len(left.skipped) == 1
    Reward(Task(f"{tmp_path}/b.jsonl:malformed=skip,rows=disk")).preflight()


def test_rows_can_be_handed_to_another_process(tmp_path: Path) -> None:
    _, disk = both(written(tmp_path), load_rows)
    first = disk.train[0]
    assert pickle.loads(pickle.dumps(disk)).train[0] == first


CHANGED = "the file has changed while it was used; start again"


def test_a_file_that_has_changed_is_named(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"q {n:02}"}) + "\n" for n in range(20)))
    rows = load_rows(Task(f"{file}:rows=disk")).train
    with file.open("r+") as opened:  # rows of the same length
        opened.write("".join(json.dumps({"prompt": f"q {n % 20:02}"}) + "\n" for n in range(1, 21)))
    first = rows.places[0, 1]  # type: ignore[attr-defined]
    for read in (lambda: rows[0], lambda: rows_by_id(rows)[next(prompt_ids(rows))], lambda: list(rows)):
        with pytest.raises(ConfigError, match=rf"a.jsonl:{first}: {CHANGED}"):
            read()
    file.write_text("{}\n")
    with pytest.raises(ConfigError, match=rf"a.jsonl:{first}: {CHANGED}"):
        rows[0]


def test_a_preference_or_demonstration_that_has_changed_is_named(tmp_path: Path) -> None:
    pair = {"prompt": "q", "chosen": "a", "rejected": "b"}
    for load, records, changed in (
        (partial(load_preferences, kind="pairs"), [pair | {"prompt": f"{n}"} for n in range(10, 30)], ("b", "c")),
        (
            partial(load_demonstrations, whole=True),
            [{"prompt": "q", "answer": f"{n}"} for n in range(10, 14)],
            ("q", "o"),
        ),
    ):
        file = tmp_path / "a.jsonl"
        file.write_text(text := "".join(json.dumps(record) + "\n" for record in records))
        found = load(Task(f"{file}:rows=disk"))
        rows = [*found.train, *found.held_out]
        assert len(rows) == len(records)
        with file.open("r+") as opened:
            opened.write(text.replace(f'"{changed[0]}"', f'"{changed[1]}"'))
        for part in (found.train, found.held_out):
            for index in range(len(part)):
                with pytest.raises(ConfigError, match=rf"a.jsonl:\d+: {CHANGED}"):
                    part[index]


def test_a_file_that_is_gone_is_named_if_it_did_not_stay_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for n in range(6):
        (tmp_path / f"{n}.jsonl").write_text(json.dumps({"prompt": f"q {n}"}) + "\n")
    monkeypatch.setattr(rows_on_disk, "_kept_open", set())
    monkeypatch.setattr(rows_on_disk, "MOST_OPEN", 3)
    found = load_rows(Task(f"{tmp_path}/*.jsonl:rows=disk"), whole=True)
    for n in range(6):
        (tmp_path / f"{n}.jsonl").unlink()
    rows, said = [], []
    for part in (found.train, found.held_out):
        for index in range(len(part)):
            try:
                rows.append(part[index].prompt)
            except ConfigError as problem:
                said.append(str(problem))
    assert sorted(rows) == ["q 0", "q 1", "q 2"]
    gone = "the file cannot be read any more (No such file or directory); put it back as it was, and start again"
    assert sorted(said) == [f"{tmp_path}/{n}.jsonl:1: {gone}" for n in (3, 4, 5)]


def test_files_of_all_sources_are_within_what_a_process_may_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows_on_disk, "_kept_open", kept := set[int]())
    sources = []
    for name in "abc":
        (tmp_path / name).mkdir()
        for n in range(100):
            (tmp_path / name / f"{n:02}.jsonl").write_text(json.dumps({"prompt": f"{name} {n}"}) + "\n")
        sources.append(f"0.3*{tmp_path}/{name}/*.jsonl:rows=disk")
    limits, may = resource.getrlimit(resource.RLIMIT_NOFILE), max(256, 2 * len(os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (may, limits[1]))
    try:
        found = load_rows(Task(" + ".join(sources)))
        assert len({row.prompt for row in (*found.train, *found.held_out)}) == 300
        assert len(kept) == min(may // 4, rows_on_disk.MOST_OPEN)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    monkeypatch.setattr(rows_on_disk, "MOST_OPEN", most := len(kept) + 6)
    list(load_rows(Task(f"{tmp_path}/*/*.jsonl:rows=disk")).train)
    assert len(kept) == most, "with the files of other tasks"
    del found
    all_rows.cache_clear()
    assert not kept


def test_a_file_that_stays_open_is_read_whatever_becomes_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows_on_disk, "READ_BYTES", 100)
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"q {n}"}) + "\n" for n in range(40)))
    store = rows_on_disk.FileRows(
        file, "train", partial(make_row, Keys()), "", partial(word_row, source="", template="")
    )
    first = list(store.read_rows(Reading()))
    assert [row.prompt for _, row in first] == [f"q {n}" for n in range(40)]
    file.unlink()
    assert list(zip(store.read_rows(Reading()), store.read_rows(Reading()), strict=True)) == list(
        zip(first, first, strict=True)
    )
    monkeypatch.setattr(rows_on_disk, "MOST_OPEN", 0)
    with pytest.raises(ConfigError, match=r"a.jsonl cannot be read: .*No such file or directory.*; write it again"):
        list(pickle.loads(pickle.dumps(store)).read_rows(Reading()))


def test_large_files_of_json_lines_stay_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"{written(tmp_path)},min_score=0"
    monkeypatch.setattr(row_loading, "AUTO_BYTES", 1000)
    assert isinstance(load_rows(Task(name)).train, IndexedRows)
    monkeypatch.setattr(row_loading, "AUTO_BYTES", 1 << 20)
    assert isinstance(load_rows(Task(f"{name},check=exact")).train, tuple)


def test_what_is_no_place_of_rows_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("prompt\nq\n")
    with pytest.raises(ConfigError, match="option rows of a task is 'disc'; it needs auto, or memory, or disk"):
        load_rows(Task(f"{tmp_path}/a.csv:rows=disc"))
    with pytest.raises(ConfigError, match="has no option 'rows'"):
        load_rows(Task("arithmetic:rows=disk"))
