"""A checkpoint's manifest: whatever happens to its files is seen before a run goes on from them."""

from __future__ import annotations

import json
import random
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from flowrl.errors import ConfigError
from flowrl.runtime.checkpoints import checkpoint

FILES = {"state.msgpack": 4000, "ledger.sqlite": 9000, "trainer_state/zero/rank_0.pt": 700, "empty": 0}


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint of several files, whose sums are made of many pieces and chunks."""
    monkeypatch.setattr(checkpoint, "PIECE_BYTES", 1000)
    monkeypatch.setattr(checkpoint, "CHUNK_BYTES", 300)
    draw = random.Random(0)
    path = tmp_path / "step_000004"
    for name, size in FILES.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(draw.randbytes(size))
    checkpoint.write_manifest(path, {"step": 4}, threading.Event())
    return path


def test_a_whole_checkpoint_gives_its_facts(saved: Path) -> None:
    assert checkpoint.verify_files(saved)["step"] == 4
    (saved / "notes.txt").write_text("somebody's own")
    assert {name: entry["bytes"] for name, entry in checkpoint.verify_files(saved)["files"].items()} == FILES


def test_pieces_do_not_change_what_a_file_is(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sums of one piece, in chunks of any size, are those of zlib over the whole of it."""
    whole = json.loads((saved / "manifest.json").read_text())["files"]["trainer_state/zero/rank_0.pt"]["crc32"]
    monkeypatch.setattr(checkpoint, "CHUNK_BYTES", 1 << 20)
    checkpoint.write_manifest(saved, {}, threading.Event())
    assert json.loads((saved / "manifest.json").read_text())["files"]["trainer_state/zero/rank_0.pt"]["crc32"] == whole


def test_a_bit_that_turns_anywhere_is_found(saved: Path) -> None:
    """Also in the manifest itself, but for its white space."""
    draw = random.Random(1)
    files = [*(saved / name for name, size in FILES.items() if size), saved / "manifest.json"]
    found = 0
    for _ in range(300):
        file = draw.choice(files)
        before = file.read_bytes()
        at, bit = draw.randrange(len(before)), 1 << draw.randrange(8)
        file.write_bytes(before[:at] + bytes([before[at] ^ bit]) + before[at + 1 :])
        if file.name == "manifest.json" and same_json(before, file.read_bytes()):
            assert checkpoint.verify_files(saved)["step"] == 4
        else:
            with pytest.raises(ConfigError, match=file.name):
                checkpoint.verify_files(saved)
            found += 1
        file.write_bytes(before)
    assert found > 280
    checkpoint.verify_files(saved)


def same_json(one: bytes, other: bytes) -> bool:
    try:
        return bool(json.loads(one) == json.loads(other))
    except ValueError:
        return False


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut": (lambda path: cut(path / "state.msgpack", 3999), "state.msgpack has 3999 bytes, but 4000 were written"),
    "longer": (lambda path: (path / "empty").write_text("!"), "empty has 1 bytes, but 0 were written"),
    "missing": (lambda path: (path / "ledger.sqlite").unlink(), "ledger.sqlite is missing"),
    "directory": (lambda path: shutil.rmtree(path / "trainer_state"), "trainer_state/zero/rank_0.pt is missing"),
    "exchanged": (
        lambda path: exchange(path / "ledger.sqlite", 5200, 5300),
        "ledger.sqlite has changed since it was written",
    ),
    "piece": (lambda path: exchange(path / "ledger.sqlite", 5200, 5300), r"checksum of bytes 5000 to 6000"),
    "no manifest": (lambda path: (path / "manifest.json").unlink(), "has no manifest.json, so it was never finished"),
    "cut manifest": (lambda path: cut(path / "manifest.json", 200), "manifest.json cannot be read"),
    "empty manifest": (lambda path: cut(path / "manifest.json", 0), "manifest.json cannot be read"),
    "other manifest": (
        lambda path: (path / "manifest.json").write_text("[]"),
        "manifest.json has changed since it was written",
    ),
}


def cut(path: Path, num_bytes: int) -> None:
    path.write_bytes(path.read_bytes()[:num_bytes])


def exchange(path: Path, one: int, other: int) -> None:
    """Two bytes change places: the sum of all bytes stays what it was."""
    content = bytearray(path.read_bytes())
    assert content[one] != content[other]
    content[one], content[other] = content[other], content[one]
    path.write_bytes(content)


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_named(saved: Path, name: str) -> None:
    damage, text = DAMAGES[name]
    damage(saved)
    with pytest.raises(ConfigError, match=text):
        checkpoint.verify_files(saved)


def test_a_run_that_ends_writes_no_manifest(saved: Path) -> None:
    (saved / "manifest.json").unlink()
    stop = threading.Event()
    stop.set()
    with pytest.raises(checkpoint.Abandoned, match="left unfinished"):
        checkpoint.write_manifest(saved, {}, stop)
    assert not (saved / "manifest.json").exists()
