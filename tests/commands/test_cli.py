"""The command: what it prints, what it refuses, and with which status."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from flowrl.cli import main
from flowrl.graph.machine import GB, Cluster, Machine
from flowrl.runtime.audit.audit import AuditReport
from flowrl.runtime.driver.driver import Outcome
from flowrl.runtime.driver.launch import Launch, Result

ROOT = Path(__file__).parents[2]

GRAPH = '''
from dataclasses import dataclass

from flowrl import Graph
from tests.graph.graph_nodes import grpo


@dataclass(frozen=True)
class Settings:
    staleness: int = 1
    """Largest staleness of a trained token."""
    group_size: int = 4
    token_budget: int = 4096
    num_generators: int = 1


def graph(cfg: Settings) -> Graph:
    return grpo(
        staleness=cfg.staleness,
        group_size=cfg.group_size,
        token_budget=cfg.token_budget,
        num_generators=cfg.num_generators,
    ).graph
'''

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def graph_file(tmp_path: Path) -> str:
    path = tmp_path / "grpo.py"
    path.write_text(GRAPH)
    return str(path)


def errors(capsys: Capture, *args: str) -> str:
    """What a refused command prints: to stderr only, beginning with its name, without frames."""
    assert main(args) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("flowrl: ")
    assert "Traceback" not in captured.err
    return captured.err


def test_check_prints_the_derived_numbers(capsys: Capture, graph_file: str) -> None:
    assert main(["check", graph_file, "--cluster", "cpus=8 memory=16", "--staleness", "2"]) == 0
    out = capsys.readouterr().out.split()
    for name, value in (("tickets", "12"), ("window", "1"), ("max_staleness", "2"), ("weights", "shm")):
        assert out[out.index(name) + 1] == value
    assert "(derived)" in out


def test_check_prints_all_problems_at_once(capsys: Capture, graph_file: str) -> None:
    text = errors(capsys, "check", graph_file, "--staleness", "-1", "--group_size", "0", "--token_budget", "8")
    assert text.splitlines()[0] == "flowrl: the graph cannot run, 4 problems:"
    for word in ("staleness=-1", "prompts has group_size=0", "advantage has group_size=0", "token_budget=8"):
        assert word in text


def test_check_draws(capsys: Capture, graph_file: str, tmp_path: Path) -> None:
    pictures = [str(tmp_path / name) for name in ("g.svg", "g.mmd")]
    assert main(["check", graph_file, "--cluster", "cpus=4", "--draw", *pictures]) == 0
    assert (tmp_path / "g.svg").read_text().startswith("<svg")
    assert "flowchart LR" in (tmp_path / "g.mmd").read_text()


def test_a_wrong_graph_is_drawn_too(capsys: Capture, graph_file: str, tmp_path: Path) -> None:
    errors(capsys, "check", graph_file, "--staleness", "-1", "--draw", str(tmp_path / "g.svg"))
    assert (tmp_path / "g.svg").exists()


def test_a_graph_whose_numbers_are_none_has_no_picture(capsys: Capture, graph_file: str, tmp_path: Path) -> None:
    Path(graph_file).write_text(GRAPH.replace("=cfg.staleness", "=str(cfg.staleness)"))
    text = errors(capsys, "check", graph_file, "--draw", str(tmp_path / "g.mmd"))
    assert "- g.admit has staleness='1'; it needs a whole number." in text
    assert not (tmp_path / "g.mmd").exists()


TRIED = """
from dataclasses import dataclass

from flowrl import Graph, In, Node, Out, Prompt
from flowrl.errors import ConfigError


class Source(Node):
    prompts: Out[Prompt]

    def __init__(self, words: str) -> None:
        self.words = words

    def preflight(self) -> str | None:
        if "?" in self.words:
            raise ConfigError(f"words are {self.words!r}; leave the question mark out")
        return f"tried {self.words!r}" if self.words else None

    async def run(self) -> None:
        pass


class Sink(Source):
    prompts: In[Prompt]


@dataclass(frozen=True)
class Settings:
    first: str = ""
    second: str = ""


def graph(cfg: Settings) -> Graph:
    g = Graph("tried")
    g.connect(g.add("source", Source(cfg.first)).prompts, g.add("sink", Sink(cfg.second)).prompts)
    return g
"""


@pytest.fixture
def tried(tmp_path: Path) -> str:
    path = tmp_path / "tried.py"
    path.write_text(TRIED)
    return str(path)


def test_check_tries_nothing_out_unless_it_is_asked(capsys: Capture, tried: str) -> None:
    assert main(["check", tried, "--first", "why?"]) == 0
    assert "preflight" not in capsys.readouterr().out


def test_check_with_preflight_prints_what_the_nodes_found(capsys: Capture, tried: str) -> None:
    assert main(["check", tried, "--preflight", "--second", "a b"]) == 0
    plan, found = capsys.readouterr().out.split("\npreflight: ok\n")
    assert "source" in plan and found == "  sink: tried 'a b'\n"


def test_check_with_preflight_refuses_what_a_run_refuses(capsys: Capture, tried: str, tmp_path: Path) -> None:
    assert main(["check", tried, "--preflight", "--first", "why?"]) == 2
    assert capsys.readouterr().err == "flowrl: words are 'why?'; leave the question mark out\n"
    assert main(["check", tried, "--preflight", "--first", "why?", "--second", "who?"]) == 2
    assert "the run cannot start, 2 problems:\n- words are 'why?'" in capsys.readouterr().err
    assert main(["run", tried, "--run-dir", str(tmp_path / "run"), "--first", "why?"]) == 2
    assert "leave the question mark out" in capsys.readouterr().err


MISTAKES: dict[str, Callable[[str], list[str]]] = {
    "there is no command 'chekc'; did you mean check?": lambda file: ["chekc", file],
    "there is no command 'fly'; there are check, run": lambda file: ["fly"],
    "flowrl check needs a graph first, a name or a file: flowrl check grpo": lambda file: ["check"],
    "flowrl run needs a graph first": lambda file: ["run", "--steps", "3"],
    "did you mean": lambda file: ["run", file.replace("grpo", "grop")],
    "--save-every is an option of flowrl run, and flowrl check has none of that name": (
        lambda file: ["check", file, "--save-every", "3"]
    ),
    "there is no option --stpes; did you mean --steps?": lambda file: ["run", file, "--stpes", "3"],
    "there is no option --stalenes; did you mean --staleness?": lambda file: ["run", file, "--stalenes", "3"],
    "--steps is 'many'; it needs an integer, or None": lambda file: [
        "run",
        file,
        "--steps",
        "many",
    ],
    "cluster 'big' is not a valid cluster; write it like": lambda file: ["check", file, "--cluster", "big"],
    "has to end in .svg or .mmd": lambda file: ["check", file, "--draw", "g.png"],
    "needs 99 cores": lambda file: ["check", file, "--cluster", "cpus=2", "--num_generators", "98"],
    "flowrl audit needs one run directory": lambda file: ["audit"],
    "there is no run directory runs/nowhere": lambda file: ["audit", "runs/nowhere"],
    "flowrl version takes no arguments, found now": lambda file: ["version", "now"],
}


@pytest.mark.parametrize("expected", MISTAKES)
def test_mistakes_are_one_message_and_status_two(capsys: Capture, graph_file: str, expected: str) -> None:
    assert expected in errors(capsys, *MISTAKES[expected](graph_file))


def test_a_field_may_not_shadow_an_option_of_flowrl(capsys: Capture, tmp_path: Path) -> None:
    path = tmp_path / "shadow.py"
    path.write_text(GRAPH.replace("    num_generators: int = 1", "    num_generators: int = 1\n    steps: int = 5"))
    assert "Settings.steps in" in errors(capsys, "run", str(path))


@pytest.mark.parametrize("asked", ["--help", "-h"])
def test_help_lists_fields_with_their_meaning(capsys: Capture, graph_file: str, asked: str) -> None:
    with pytest.raises(SystemExit) as end:
        main(["run", graph_file, asked])
    assert end.value.code == 0
    out = capsys.readouterr().out
    assert "--run-dir" in out
    assert "--staleness" in out
    assert "Largest staleness of a trained token (default: 1)" in " ".join(out.split())


def test_usage_and_version(capsys: Capture) -> None:
    assert main([]) == 2
    assert main(["--help"]) == 0
    assert "usage: flowrl COMMAND" in capsys.readouterr().out
    assert main(["version"]) == 0
    assert capsys.readouterr().out.count(".") >= 1


@pytest.mark.parametrize("args", [["show", "runs/one", "--help"], ["audit", "-h", "runs/one"], ["version", "--help"]])
def test_commands_without_options_print_the_usage_wherever_help_is_asked_for(capsys: Capture, args: list[str]) -> None:
    assert main(args) == 0
    assert capsys.readouterr().out.startswith("usage: flowrl COMMAND")


def test_the_installed_command_exits_with_the_status(graph_file: str) -> None:
    command = [sys.executable, "-m", "flowrl.cli", "check", graph_file, "--staleness", "-1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("flowrl: the graph cannot run, 1 problem:\n- g.admit has staleness=-1")


@pytest.mark.parametrize("asked", ["check {} --cluster cpus=4", "--help", "check --help"])
def test_a_reader_that_goes_away_is_no_error(graph_file: str, asked: str) -> None:
    command = f"{sys.executable} -m flowrl.cli {asked.format(graph_file)} | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert done.stdout in ("141\n", "0\n")


def test_clusters_are_read() -> None:
    cluster = Cluster.parse("2x cpus=4 gpus=1 memory=16, cpus=2")
    assert cluster.machines == (Machine((0, 1, 2, 3), 1, 16 * GB),) * 2 + (Machine((0, 1)),)
    assert (cluster.num_cores, cluster.num_gpus) == (10, 2)
    assert len(Cluster.here().machines[0].cores) >= 1


@pytest.mark.parametrize(
    ("audit", "shown"), [(None, "exact_match  0.5\nnum_answers  20000\n"), (AuditReport(), "audit: ok\n")]
)
def test_figures_before_training_are_the_last_word_only_where_nothing_is_trained(
    capsys: Capture, graph_file: str, monkeypatch: pytest.MonkeyPatch, audit: AuditReport | None, shown: str
) -> None:
    """An interrupted run has been evaluated before training alone, too."""
    outcome = Outcome(0, {"before": {"exact_match": 0.5, "num_answers": 20000}}, interrupted=True, seconds=1.0)
    monkeypatch.setattr(Launch, "run", lambda launch: Result(Path("runs/a"), outcome, audit))
    assert main(["run", graph_file]) == 0
    assert capsys.readouterr().out == shown
