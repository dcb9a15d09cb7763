"""What is said of a disk that is full while something is written to it."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from flowrl.errors import FlowrlError
from flowrl.machine.disk import LEFT_BYTES, told_if_full


def free(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=num_bytes))


def test_an_error_of_a_library_on_a_full_disk_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    free(monkeypatch, 4096)
    there = tmp_path / "run" / "checkpoints" / "step_000001"
    told = rf"the checkpoint cannot be written to {there}: its disk is full \(0.0 MB free\); make room"
    with pytest.raises(FlowrlError, match=told) as caught, told_if_full("the checkpoint", there, "make room"):
        raise RuntimeError("unexpected pos 21760 vs 21654")
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_a_quota_is_told_by_its_number(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    free(monkeypatch, 1 << 40)
    with pytest.raises(FlowrlError, match="its disk is full"), told_if_full("rows", tmp_path, "make room"):
        raise OSError(errno.EDQUOT, "Disk quota exceeded")


def test_with_room_on_the_disk_an_error_stays_what_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    free(monkeypatch, LEFT_BYTES)
    with pytest.raises(RuntimeError, match=r"^broken$"), told_if_full("rows", tmp_path, "make room"):
        raise RuntimeError("broken")
