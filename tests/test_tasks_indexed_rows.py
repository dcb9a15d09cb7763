"""Rows that stay on disk are the rows in memory: the same ones, in the same order and the same part."""

from __future__ import annotations

import json
import pickle
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from flowrl.errors import ConfigError
from flowrl.models import Policy
from flowrl.nodes import Demonstrations, DemonstrationSource, HeldOutDemonstrations, PromptSource, Reward
from flowrl.tasks import Rows, Task, check_answers, load_demonstrations, load_rows, row_loading
from flowrl.tasks.indexed_rows import IndexedRows, by_id
from flowrl.testing import run_node
from tests.row_compare import both, require_same

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
        by_id(disk.train)["0" * 16]


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
        digests.append([source._digest(source._order(epoch)) for epoch in (0, 1)])
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
            (batch,) = run_node(HeldOutDemonstrations(node, num_rows=3), name="held_out").sent("batch")
            samples[-1] += batch.samples
    texts = [[(one.prompt_id, one.token_ids.tolist()) for one in found] for found in samples]
    assert texts[0] == texts[1] and len(texts[0]) > 20


def test_checks_before_a_run_read_every_row(tmp_path: Path) -> None:
    written(tmp_path)
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write('\n{"prompt": "last", "answer": "none", "score": 3}\n')
    task = Task(f"{tmp_path}/*.jsonl:malformed=skip,check=gsm8k,rows=disk")
    with pytest.raises(ConfigError, match=r"a.jsonl:64: the answer is 'none', and check=gsm8k needs a number"):
        PromptSource(task, Policy("tiny"), part="all").preflight()
    check_answers(Task(task.name.replace("gsm8k", "exact")), load_rows(task, whole=True).train)
    Reward(Task(f"{tmp_path}/b.jsonl:malformed=skip,rows=disk")).preflight()


def test_rows_can_be_handed_to_another_process(tmp_path: Path) -> None:
    _, disk = both(written(tmp_path), load_rows)
    first = disk.train[0]
    assert pickle.loads(pickle.dumps(disk)).train[0] == first


def test_a_file_that_has_changed_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"prompt": f"q {n}"}) + "\n" for n in range(20)))
    rows = load_rows(Task(f"{tmp_path}/a.jsonl:rows=disk")).train
    (tmp_path / "a.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match=r"a.jsonl:1: the file has changed while it was used; start again"):
        rows[0]


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
