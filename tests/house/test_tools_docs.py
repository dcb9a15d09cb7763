"""The files that docs/tools.md is made of, run as a reader would."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from flowrl.environments.tools import PythonTool
from flowrl.environments.tools.sandbox.sandbox_process import CPU_S, NUM_PROCESSES
from flowrl.errors import ConfigError

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "tools.md").read_text(encoding="utf-8")
pytestmark = pytest.mark.timeout(60)


def printed(script: str, folder: Path) -> list[str]:
    """The lines that a script of the page prints, with all files of the page beside it."""
    for code in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        (folder / code.splitlines()[0].removeprefix("# ")).write_text(code)
    done = subprocess.run(
        [sys.executable, script],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
    )
    return done.stdout.splitlines()


def test_the_notebook_of_the_page(tmp_path: Path) -> None:
    try:
        PythonTool().check()
    except ConfigError as why:
        pytest.skip(str(why))
    first, second, third, fourth, last = printed("notebook.py", tmp_path)
    assert (first, second) == ("False 'The code printed nothing.'", "False '16'")
    assert third == "True 'IndexError: list index out of range'"
    assert fourth.startswith("True 'python was stopped: it took more than 2 s.")
    assert last == """True "NameError: name 'squares' is not defined\""""


def test_the_clock_of_the_page(tmp_path: Path) -> None:
    names, *answers = printed("clock.py", tmp_path)
    assert names == "['tick']"
    assert answers == ["False 2", "False 3", "True Error executing tool tick: 1 validation error for tickArguments"]


def test_the_page_names_the_limits() -> None:
    tool = PythonTool()
    assert (tool.call_s, tool.memory_bytes, tool.disk_bytes, tool.output_bytes) == (10.0, 1 << 30, 64 << 20, 8192)
    assert f"{CPU_S} seconds of processor time" in PAGE and f"| {NUM_PROCESSES} with their threads" in PAGE
