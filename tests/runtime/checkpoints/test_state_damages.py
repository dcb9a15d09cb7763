"""A damaged `state.msgpack`, under a manifest that fits it: a resume goes back to an older one, or says so."""

from __future__ import annotations

import random
import shutil
import threading
from pathlib import Path
from typing import Any

import msgpack
import pytest

from flowrl.errors import ConfigError
from flowrl.graph.analysis.plan import make_plan
from flowrl.graph.load import rebuild_graph
from flowrl.runtime.checkpoints import checkpoint, resume, snapshots
from flowrl.runtime.checkpoints.rundir import RunDir
from flowrl.runtime.checkpoints.snapshots import SEAL, STATE
from flowrl.testing import run_graph
from flowrl.testing.graph_run import EIGHT_CORES

GRAPH = str(Path(__file__).parents[1] / "driver" / "graphs_failing" / "faults.py")
NUM_SEEDS = 300
OTHERS = (None, True, -1, 0, 1 << 40, 2.5, "", "x", "a/b", b"", b"\xff", [], {}, [1], {"a": 1}, [["x"]])


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("states") / "run"
    run_graph(GRAPH, directory, {}, steps=6, save_every=2, plain=True, preflight=False)
    return directory


def seal_again(path: Path, data: bytes) -> None:
    """Write a state, and a manifest that fits it."""
    (path / STATE).write_bytes(data)
    checkpoint.write_manifest(path, {"step": int(path.name[5:])}, threading.Event())


def packed_of(path: Path) -> bytes:
    return (path / STATE).read_bytes()[len(SEAL) + snapshots.DIGEST_BYTES :]


def require(path: Path) -> dict[str, int]:
    graph, _ = rebuild_graph(GRAPH, {})
    return resume.require_resumable(path, graph, make_plan(graph, EIGHT_CORES), 0)


@pytest.fixture
def copied(run_dir: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run_dir, tmp_path / "run"))


def newest(run_dir: Path) -> Path:
    return checkpoint.steps_of(run_dir / "checkpoints")[-1][1]


def damaged_bytes(data: bytes, rng: random.Random) -> bytes:
    """Bytes flipped, removed, inserted or repeated."""
    start = rng.randrange(len(data))
    end = min(len(data), start + rng.choice([1, 1, 1, 2, 40]))
    return rng.choice(
        [
            data[:start] + bytes([data[start] ^ 1 << rng.randrange(8)]) + data[start + 1 :],
            data[:start] + data[end:],
            data[:start] + rng.randbytes(end - start) + data[end:],
            data[:start] + data[start:end] + data[start:],
            data[:start],
            b"",
        ]
    )


def test_bytes_that_changed_before_they_were_summed_are_found_and_the_older_checkpoint_is_taken(copied: Path) -> None:
    path, steps = newest(copied), checkpoint.steps_of(copied / "checkpoints")
    whole, rng = (path / STATE).read_bytes(), random.Random(0)
    for seed in range(NUM_SEEDS):
        data = damaged_bytes(whole, rng)
        if data == whole:  # a random byte may be the one that was there
            continue
        seal_again(path, data)
        directory = RunDir(copied)
        try:
            found = directory.newest_checkpoint()
            assert found == steps[-2], seed
            assert directory.damaged == [f"{path.name}: {STATE} is not what was written (its own digest differs)"]
        except AssertionError:  # without its seal it passes for the state of an earlier flowrl
            assert not data.startswith(SEAL), seed
            with pytest.raises(ConfigError, match=rf"(?s)^{path.name}: its {STATE} is damaged.*{steps[-2][1].name}"):
                require(path)


def exchanged(value: Any, rng: random.Random) -> Any:
    """The value with another one somewhere in it, or without a part."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        if rng.random() < 0.1:
            return {other: inner for other, inner in value.items() if other != key}
        return {**value, key: exchanged(value[key], rng)}
    if isinstance(value, list | tuple) and value and rng.random() < 0.9:
        index = rng.randrange(len(value))
        return [exchanged(one, rng) if number == index else one for number, one in enumerate(value)]
    if isinstance(value, bytes) and len(value) > 1 and rng.random() < 0.8:
        return damaged_bytes(value, rng)
    return rng.choice(OTHERS)


def test_a_state_of_other_values_is_one_sentence_that_names_the_checkpoint_and_an_older_one(copied: Path) -> None:
    """Whatever wrote them: their digest fits."""
    path, older = newest(copied), checkpoint.steps_of(copied / "checkpoints")[-2][1].name
    whole, rng, refused = packed_of(path), random.Random(1), 0
    content = msgpack.unpackb(whole, strict_map_key=False)
    for seed in range(NUM_SEEDS):
        try:
            packed = msgpack.packb(exchanged(content, rng)) if seed % 3 else damaged_bytes(whole, rng)
        except (TypeError, ValueError):
            continue
        (path / STATE).write_bytes(SEAL + snapshots._digest(packed) + packed)
        try:
            require(path)
        except ConfigError as problem:
            refused += 1
            assert path.name in str(problem), (seed, problem)
            told = (f"--resume continues from {older}", "cannot continue from", "this flowrl reads 3")
            assert any(text in str(problem) for text in told), problem
    assert refused > NUM_SEEDS / 3


def test_a_state_of_an_earlier_flowrl_is_read(copied: Path) -> None:
    path = newest(copied)
    before = require(path)
    (path / STATE).write_bytes(packed_of(path))
    snapshots.read_sealed(path)
    assert require(path) == before


def test_the_only_checkpoint_is_restored_from_a_copy(copied: Path) -> None:
    path = newest(copied)
    for _, older in checkpoint.steps_of(copied / "checkpoints")[:-1]:
        shutil.rmtree(older)
    (path / STATE).write_bytes(b"\x93")
    with pytest.raises(ConfigError, match="restore it from a copy, or start again with a new --run-dir"):
        require(path)
