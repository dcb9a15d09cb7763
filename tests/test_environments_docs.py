"""The files that docs/environments.md is made of, run as a reader would; and its lists are complete."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from flowrl.environments import CAUSES
from flowrl.environments.environment_row import ADAPTERS

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "environments.md").read_text(encoding="utf-8")
pytestmark = pytest.mark.timeout(30)


def test_the_environment_of_the_page_is_played(tmp_path: Path) -> None:
    for code in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        (tmp_path / code.splitlines()[0].removeprefix("# ")).write_text(code)
    done = subprocess.run(
        [sys.executable, "play.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
    )
    first, *guesses, last = done.stdout.splitlines()
    assert first == "I think of a number below 8. Guess it."
    assert 1 <= len(guesses) <= 4 and float(last) == 1 / len(guesses)


def test_the_page_names_every_cause_and_adapter() -> None:
    assert set(re.findall(r"^\| `(env_\w+)` \|", PAGE, re.MULTILINE)) == set(CAUSES)
    assert set(re.findall(r"^\| `(\w+)/", PAGE, re.MULTILINE)) == set(ADAPTERS)
