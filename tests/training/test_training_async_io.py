"""The build of DeepSpeed's async_io: a guard that a killed process left behind holds nobody up."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowrl.training.engine import requirements


def test_a_guard_that_was_left_behind_is_taken_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.ops.op_builder import AsyncIOBuilder

    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    directory = tmp_path / "async_io"
    directory.mkdir()
    (directory / "lock").touch()
    seen = []

    def load(builder: AsyncIOBuilder, verbose: bool) -> None:
        seen.append((directory / "lock").exists())
        (directory / "async_io.so").touch()

    monkeypatch.setattr(AsyncIOBuilder, "load", load)
    assert not requirements.is_built()
    requirements.build_async_io()
    assert seen == [False] and requirements.is_built()
