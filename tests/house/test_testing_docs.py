"""The files that docs/testing.md is made of, and the script of docs/debugging.md, run as a reader would."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python\n(?:# (\w+\.py)\n)?(.*?)^```$", re.MULTILINE | re.DOTALL)


def files() -> dict[str, str]:
    """The blocks by the file that their first line names; the others go on with the file before."""
    found: dict[str, str] = defaultdict(str)
    name = ""
    for named, code in BLOCK.findall((ROOT / "docs" / "testing.md").read_text(encoding="utf-8")):
        name = named or name
        found[name] += f"{code}\n\n"
    return found


def test_the_page_on_testing_does_what_it_says(tmp_path: Path) -> None:
    found = files()
    for name, code in found.items():
        (tmp_path / name).write_text(code)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_filters.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert f"{found['test_filters.py'].count('def test_')} passed" in done.stdout


def test_the_page_on_debugging_does_what_it_says(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "debugging.md").read_text(encoding="utf-8")
    (code,) = [code for _, code in BLOCK.findall(page)]
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith("got")] == [f"got g:{n}" for n in range(3)]
