"""`flowrl new FILE.py --node KIND`: a skeleton whose test passes, with types."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from flowrl import cli
from flowrl.commands.node_skeletons import SKELETONS
from tests.house.documents import FENCED, ROOT


@pytest.mark.parametrize("kind", SKELETONS)
def test_a_skeleton_passes_its_test(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["new", str(tmp_path / f"my_{kind}.py"), "--node", kind]) == 0
    assert f"next: pytest {tmp_path}/test_my_{kind}.py" in capsys.readouterr().out
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error", f"test_my_{kind}.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, encoding="utf-8")
    assert done.returncode == 0, done.stdout


def test_the_skeletons_pass_mypy_in_strict_mode(tmp_path: Path) -> None:
    for kind in SKELETONS:
        assert cli.main(["new", str(tmp_path / f"my_{kind}.py"), "--node", kind]) == 0
    page = (ROOT / "docs" / "nodes.md").read_text(encoding="utf-8")
    (tmp_path / "mypy.ini").write_text(next(code for language, code in FENCED.findall(page) if language == "ini"))
    files = sorted(path.name for path in tmp_path.glob("*.py"))
    command = [sys.executable, "-m", "mypy", "--strict", *files]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, encoding="utf-8")
    assert done.returncode == 0, done.stdout


def test_what_is_there_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "test_mine.py").write_text("mine")
    assert cli.main(["new", str(tmp_path / "mine.py"), "--node", "filter"]) == 2
    assert "test_mine.py is there already" in capsys.readouterr().err
    assert not (tmp_path / "mine.py").exists()


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["mine.py", "--node", "filtre"], "--node filtre: there is no skeleton of this kind; did you mean filter?"),
        (["mine.py", "--node", "xyz"], "there are reward, filter, environment, objective, source"),
        (["mine.py"], "flowrl new my_filter.py --node filter"),
        (["mine.py", "--node", "filter", "--from", "grpo"], "flowrl new needs the file to write"),
        (["my-filter.py", "--node", "filter"], "a name that its test can import, such as my_filter.py"),
    ],
)
def test_mistakes_are_told(args: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["new", *args]) == 2
    assert told in capsys.readouterr().err
