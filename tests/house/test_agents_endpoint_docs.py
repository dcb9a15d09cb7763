"""The files that docs/endpoint.md is made of, run as a reader would; and its tables are complete."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from flowrl.agents.endpoint.agent_endpoint import APIS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "endpoint.md").read_text(encoding="utf-8")
SOURCES = [path.read_text(encoding="utf-8") for path in (ROOT / "flowrl" / "agents" / "endpoint").rglob("*.py")]


@pytest.mark.timeout(60)
def test_the_agent_of_the_page_is_served(tmp_path: Path) -> None:
    for code in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        (tmp_path / code.splitlines()[0].removeprefix("# ")).write_text(code)
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "serve.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": path, "PATH": "", "PYTHONUNBUFFERED": "1"},
    )
    assert done.stdout.splitlines() == ["12 12", "episode-1 1.0 12<|end|>12<|end|>"]


def test_the_page_names_every_status_and_path() -> None:
    raised = {found for source in SOURCES for found in re.findall(r"ApiProblem\((\d{3})", source)}
    assert set(re.findall(r"^\| (\d{3}) \|", PAGE, re.MULTILINE)) == raised
    assert all(f"`/v1/{path}`" in PAGE for path in APIS)
