"""The id that a run has in W&B and Trackio."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowrl.runtime.telemetry.sinks import ID_FILE, tracking_id


def test_a_run_has_one_id_and_others_have_another(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first = tracking_id(tmp_path / "a")
    assert tracking_id(tmp_path / "a") == first != tracking_id(tmp_path / "b")
    assert [path.name for path in (tmp_path / "a").iterdir()] == [ID_FILE]


@pytest.mark.parametrize("text", ["", "\n"])
def test_a_file_that_was_never_written_is_no_id(tmp_path: Path, text: str) -> None:
    (tmp_path / ID_FILE).write_text(text)
    found = tracking_id(tmp_path)
    assert found == found.strip() != "" and tracking_id(tmp_path) == found
