"""Every kind of rows stays on disk as prompts do: preferences, mixtures, saved datasets, steps and texts."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flowrl.errors import ConfigError
from flowrl.models import Policy
from flowrl.nodes import (
    HeldOutPreferences,
    PreferenceDataset,
    Preferences,
    PreferenceSource,
    PromptSource,
)
from flowrl.nodes.step_dataset import HeldOutSteps, StepDataset
from flowrl.tasks import Rows, Task, load_demonstrations, load_preferences, load_rows, row_loading
from flowrl.tasks.indexed_rows import IndexedRows
from flowrl.tasks.preference_rows import Kind
from flowrl.testing import run_node
from tests.row_compare import both, require_same, rows_in

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
        (batch,) = run_node(HeldOutPreferences(data, num_rows=20), name="held_out").sent("batch")
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
    assert len(disk.skipped) == 1 and (disk.repeated > 0) is not bool(options)
    assert any(row.columns["of_task"].startswith(f"{tmp_path}/b.jsonl.gz") for row in disk.train)


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
        orders.append([source._digest(source._order(epoch)) for epoch in (0, 1)])
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
        load_rows.cache_clear()
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
    if splits:
        with pytest.raises(ConfigError, match="has no split 'dev'; it has "):
            load_rows(Task(f"{tmp_path}/saved:rows=disk,split=dev"))


def test_steps_are_the_same(tmp_path: Path) -> None:
    records = [{"prompt": f"q {n % 50}", "steps": [f"s {n}", "t"], "labels": [1, n % 2]} for n in range(80)]
    file = lines(tmp_path / "rows.jsonl", records)
    found = []
    for where in ("memory", "disk"):
        node = StepDataset(task := Task(f"{file}:rows={where}"), TINY)
        node.preflight()
        asked = run_node(PromptSource(task, TINY, epochs=1), name="prompts").sent("prompts")
        groups = run_node(node, {"prompts": asked}).sent("groups")
        (batch,) = run_node(HeldOutSteps(node, num_rows=4), name="held_out").sent("batch")
        samples = [*(group.samples[0] for group in groups), *batch.samples]
        found.append([(s.prompt_id, s.token_ids.tolist(), s.returns.tolist()) for s in samples])
    assert found[0] == found[1] and len(found[0]) > 20
