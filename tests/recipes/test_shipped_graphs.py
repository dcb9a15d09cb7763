"""Graphs by name: listed, run, and copied to be edited; and what is said about wrong names."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

from flowrl.cli import main
from flowrl.errors import ConfigError
from flowrl.graph.load import find_graph, graph_summary, is_shipped, load_file, shipped_names

Capture = pytest.CaptureFixture[str]
ROOT = Path(__file__).parents[2]
NAMES = [path.stem for path in sorted((ROOT / "graphs").glob("*.py"))]


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))  # loading a file adds its folder
    return tmp_path


def refused(capsys: Capture, *args: str) -> str:
    assert main(args) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    return captured.err


def test_every_graph_is_listed_with_a_line(capsys: Capture, empty: Path) -> None:
    assert main(["graphs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == NAMES == shipped_names()
    for name, line in zip(NAMES, lines, strict=True):
        assert line.endswith(graph_summary(name)) and len(graph_summary(name)) > 20


@pytest.mark.parametrize("name", NAMES)
def test_a_graph_is_checked_by_name_from_anywhere(capsys: Capture, empty: Path, name: str) -> None:
    assert main(["check", name, "--cluster", "cpus=8 memory=64"]) == 0
    assert is_shipped(load_file(name).path) and load_file(name).shown == name


@pytest.mark.parametrize("name", NAMES)
def test_a_copy_is_a_graph_file_of_its_own(capsys: Capture, empty: Path, name: str) -> None:
    assert main(["new", "my_graph.py", "--from", name]) == 0
    said = capsys.readouterr().out
    assert "wrote my_graph.py" in said and "flowrl run my_graph.py" in said
    assert main(["check", "my_graph.py", "--cluster", "cpus=8 memory=64"]) == 0
    file = load_file("my_graph.py")
    assert not is_shipped(file.path)
    text = (empty / "my_graph.py").read_text()
    assert f"flowrl run {name} " not in text and "flowrl run my_graph.py " in text
    assert ast.dump(ast.parse(text).body[-1]) == ast.dump(ast.parse(find_graph(name).read_text()).body[-1])


def test_a_copy_takes_along_the_files_that_it_finds_by_its_own_place(capsys: Capture, empty: Path) -> None:
    assert main(["new", "my_agent.py", "--from=agent_openai"]) == 0
    assert "wrote agents/calculator_agent.py" in capsys.readouterr().out
    place = load_file("my_agent.py").config_type().agent.rpartition(":")[0]
    assert Path(place) == empty / "agents" / "calculator_agent.py" and Path(place).is_file()


NEW = {
    "needs the file to write, and the graph to copy": ["new"],
    "needs the file to write, and the graph": ["new", "mine.py"],
    "--from gropo: flowrl has no graph of this name; did you mean grpo?": ["new", "mine.py", "--from", "gropo"],
    "--from zzzz: flowrl has no graph of this name; there are agent_game": ["new", "mine.py", "--from", "zzzz"],
    "mine has to end in .py": ["new", "mine", "--from", "grpo"],
    "random.py would hide the Python module random": ["new", "random.py", "--from", "grpo"],
    "torch.py would hide the Python module torch": ["new", "torch.py", "--from", "grpo"],
    "there is no folder deep for a_graph_of_mine.py": ["new", "deep/a_graph_of_mine.py", "--from", "grpo"],
    "there.py is there already": ["new", "there.py", "--from", "grpo"],
    "flowrl new has no option --form": ["new", "mine.py", "--form", "grpo"],
    "flowrl graphs takes no arguments, found grpo": ["graphs", "grpo"],
    "there is no graph 'gropo'; did you mean grpo?": ["check", "gropo"],
    "there is no graph 'iterative-dpo'; did you mean iterative_dpo?": ["run", "iterative-dpo"],
    "there is no graph 'ther'; did you mean there.py?": ["run", "ther"],
    "there is no graph 'xyzxyz'; flowrl graphs lists": ["run", "xyzxyz"],
    "the graph of flowrl is called grpo, and flowrl new grpo.py --from grpo copies it": ["run", "graphs/grpo.py"],
    "runs is a directory; name a graph file": ["run", "runs"],
    "there is no option --group-sizes; did you mean --group_size?": ["run", "grpo", "--group-sizes", "4"],
    "--lr is 'fast'; it needs a number; flowrl run grpo --help-all lists": ["run", "grpo", "--lr", "fast"],
    "--steps is 'all'; it needs an integer, or None; flowrl run grpo --help": ["run", "grpo", "--steps", "all"],
    "--steps is 0; it needs at least 1": ["quickstart", "--steps", "0"],
    "there is no option --stesp; did you mean --steps?": ["quickstart", "--stesp", "3"],
}


@pytest.mark.parametrize("expected", NEW)
def test_wrong_names_are_one_sentence(capsys: Capture, empty: Path, expected: str) -> None:
    (empty / "there.py").write_text("")
    (empty / "runs").mkdir()
    assert expected in refused(capsys, *NEW[expected])
    assert sorted(path.name for path in empty.iterdir()) == ["runs", "there.py"], "nothing was written"


def test_a_file_here_of_the_same_name_is_pointed_out(capsys: Capture, empty: Path) -> None:
    assert main(["new", "rloo.py", "--from", "rloo"]) == 0
    capsys.readouterr()
    assert main(["check", "rloo", "--cluster", "cpus=8"]) == 0
    assert "flowrl: rloo is the graph of flowrl; the file here is rloo.py" in capsys.readouterr().err
    assert load_file("rloo.py").path == Path("rloo.py")


def test_a_path_is_never_a_name(empty: Path) -> None:
    with pytest.raises(ConfigError, match=r"graph file mine/grpo.py does not exist \(looked in"):
        load_file("mine/grpo.py")
    assert find_graph("grpo").is_absolute()


COMMANDS = [
    line.strip()
    for name in shipped_names()
    for line in (ast.get_docstring(ast.parse(find_graph(name).read_text())) or "").splitlines()
    if line.strip().startswith("flowrl run ")
]
CHECKPOINT = re.compile(r"(\S+)/checkpoints/step_0*(\d+)")


@pytest.mark.parametrize(("run_dir", "step"), sorted({one for line in COMMANDS for one in CHECKPOINT.findall(line)}))
def test_a_checkpoint_that_an_example_names_is_the_last_of_another_one(run_dir: str, step: str) -> None:
    assert [line for line in COMMANDS if f"--run-dir {run_dir}" in line and f"--steps {step}" in line]


@pytest.mark.parametrize("name", shipped_names())
def test_every_graph_says_that_its_policy_may_be_on_the_hub(name: str, capsys: Capture) -> None:
    with pytest.raises(SystemExit):
        main(["run", name, "--help", "policy"])
    shown = " ".join(capsys.readouterr().out.split())
    (about,) = re.findall(r"--policy \S+ (.*?) --", shown)
    assert name == "score" or "OWNER/NAME" in about
