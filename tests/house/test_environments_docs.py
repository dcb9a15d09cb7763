"""The files that docs/environments.md is made of, run as a reader would; and its lists are complete."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from flowrl.environments import CAUSES
from flowrl.environments.environment_row import ADAPTERS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "environments.md").read_text(encoding="utf-8")
pytestmark = pytest.mark.timeout(30)


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


def test_a_question_of_the_page_is_answered_with_tools(tmp_path: Path) -> None:
    first, last = printed("ask.py", tmp_path)
    a, b, total = re.fullmatch(r"(\d+)\+(\d+)= (\d+) 'cow' is in no dictionary\.", first).groups()  # type: ignore[union-attr]
    assert int(a) + int(b) == int(total) and last == "1.0"


def test_the_environment_of_the_page_is_played(tmp_path: Path) -> None:
    first, *guesses, last = printed("play.py", tmp_path)
    assert first == "I think of a number below 8. Guess it."
    assert 1 <= len(guesses) <= 4 and float(last) == 1 / len(guesses)


def test_the_page_names_every_cause_and_adapter() -> None:
    assert set(re.findall(r"^\| `(env_\w+)` \|", PAGE, re.MULTILINE)) == set(CAUSES)
    assert set(re.findall(r"^\| `(\w+)/", PAGE, re.MULTILINE)) == set(ADAPTERS)
