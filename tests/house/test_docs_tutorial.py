"""The tutorial, done by a reader: its file grows block by block, and says what the page says it says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from flowrl.cli import main
from flowrl.graph.load import load_file
from flowrl.testing import run_graph
from tests.house.documents import ROOT

PAGE = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FAKES = ROOT / "tests" / "house" / "graphs_tutorial" / "brief_without_models.py"


def stages() -> Iterator[tuple[str, list[str], list[str]]]:
    """(the file with all its blocks so far, the arguments of the commands on it, what they print) block by block."""
    file, arguments = "", ["check", "brief.py"]
    blocks = BLOCK.findall(PAGE)
    for language, code in blocks[: next(n for n, (_, code) in enumerate(blocks) if "# test_brief.py" in code)]:
        if language == "python":
            file += f"{code}\n\n"
            arguments = ["check", "brief.py"]
        elif language == "text":
            yield file, arguments, code.splitlines()
        else:
            arguments = code.split()[1:]


def files() -> dict[str, str]:
    """Name -> text, as it is at the end of the page."""
    found: dict[str, str] = {}
    name = ""
    for code in (code for language, code in BLOCK.findall(PAGE) if language == "python"):
        if named := re.match(r"# (\w+\.py)\n", code):
            name = named[1]
        found[name] = f"{found.get(name, '')}{code}\n\n"
    return found


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory, in which the reader is."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("file", "arguments", "printed"), list(stages()))
def test_each_stage_says_what_the_page_shows(
    file: str, arguments: list[str], printed: list[str], here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "brief.py").write_text(file)
    status = main(arguments)
    out, err = capsys.readouterr()
    assert (err if status else out).splitlines()[: len(printed)] == printed
    assert all((here / word).is_file() for word in arguments if word.endswith(".svg"))


def test_the_page_has_its_stages() -> None:
    assert len(list(stages())) == 4
    assert set(files()) == {"brief.py", "test_brief.py"}


def test_the_tests_of_the_page_pass(here: Path) -> None:
    for name, code in files().items():
        (here / name).write_text(code)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_brief.py"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert "4 passed" in done.stdout, done.stdout


def test_the_node_of_the_page_runs_in_a_whole_graph(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With stand-ins for both models; a member of each group fails."""
    (here / "brief.py").write_text(files()["brief.py"])
    monkeypatch.syspath_prepend(str(here))
    monkeypatch.delitem(sys.modules, "brief", raising=False)
    run = run_graph(FAKES, here / "run", {"groups_per_step": 2, "group_size": 4, "failing": True}, steps=3)
    assert run.audit().ok
    assert [line["step"] for line in run.metrics()] == [1, 2, 3]
    assert sum(line["brief_answers"] for line in run.metrics()) == 6  # one of three in each group
    assert dict(run.rows("SELECT state, count(*) FROM samples GROUP BY 1")) == {"trained": 18, "failed": 6}


def test_the_graph_of_the_page_takes_the_options_of_others(here: Path) -> None:
    (here / "brief.py").write_text(files()["brief.py"])
    file = load_file("brief.py")
    given = ["--bonus", "0.5", "--lora.rank", "8", "--generator.replicas", "2", "--evaluate", "0", "--staleness", "3"]
    graph = file.build(file.parse(given))
    assert graph.placed["generator"].replicas == 2 and "evaluation" not in graph.nodes
    assert graph.admission is not None and graph.admission.staleness == 3
