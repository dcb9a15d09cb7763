"""Every command line in README and docs is one that flowrl takes: the real parsers read them."""

from __future__ import annotations

import contextlib
import functools
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from flowrl.cli import COMMANDS, CheckOptions, main
from flowrl.commands.copy_graph import GraphCopy, parse_new
from flowrl.commands.doctor import DoctorOptions
from flowrl.commands.export import ExportOptions
from flowrl.commands.gpu_check.gpu_check import GpuCheckOptions
from flowrl.commands.merge_adapter import MergeOptions
from flowrl.commands.prepare import prepare_graph
from flowrl.commands.quickstart import QuickstartOptions
from flowrl.commands.run_graph import FIRST, RunFileOptions
from flowrl.commands.samples import SamplesOptions
from flowrl.commands.talk import ChatOptions
from flowrl.commands.tune.tune import TuneOptions
from flowrl.errors import ConfigError
from flowrl.graph.command_line import option_names, parse_options
from flowrl.graph.load import load_file, shipped_names
from flowrl.graph.option_help import asked_for_help
from flowrl.nodes.scoring.reward_service import ServeOptions
from flowrl.runtime.driver.job import RunOptions
from tests.house.documents import DOCUMENTS, PAGES, ROOT, Shown, commands, options_named
from tests.house.test_docs_tutorial import files

OWN = {
    "samples": SamplesOptions,
    "chat": ChatOptions,
    "merge": MergeOptions,
    "export": ExportOptions,
    "doctor": DoctorOptions,
    "gpu-check": GpuCheckOptions,
    "quickstart": QuickstartOptions,
    "serve-reward": ServeOptions,
}
"""Command -> the dataclass of its options, which follow one name but for those in NAMELESS."""
NAMELESS = ("doctor", "quickstart", "gpu-check")
OF_GRAPHS = {"check": (CheckOptions,), "run": (RunOptions, RunFileOptions), "tune": (TuneOptions,)}
PLAIN = {
    "setup": (),
    "audit": ("--whole",),
    "show": ("--plain",),
    "graphs": (),
    "version": (),
    "new": ("--from", "--node"),
}
"""Command -> its options, of commands without a dataclass."""
REWARDS = {"reward_func.py": "openrlhf", "train_rewards.py": "trl", "my_reward.py": "verl"}
"""Reward files of the pages for those who come from elsewhere -> whose they are."""
SHOWN = [(page.name, one) for page in DOCUMENTS for one in commands(page.read_text(encoding="utf-8"))]


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A reader's directory, with the files that the documents tell to write."""
    home = tmp_path_factory.mktemp("reader")
    (home / "graphs").symlink_to(ROOT / "graphs")
    for name, framework in REWARDS.items():
        shutil.copyfile(ROOT / "tests" / "tasks" / "foreign_rewards" / f"{framework}_reward.py", home / name)
    (home / "rules.py").write_text("def score(prompt, response, *, answer):\n    return 1.0\n")
    (home / "brief.py").write_text(files()["brief.py"])
    GraphCopy("grpo", home / "my_graph.py").write_files()
    (home / "run.yaml").write_text("graph: grpo\npolicy: smollm2\nlr: 1e-5\n")
    (home / "runs" / "tune-grpo").mkdir(parents=True)
    shutil.copyfile(home / "run.yaml", home / "runs" / "tune-grpo" / "chosen.yaml")
    before = list(sys.path)  # loading a file adds its folder, which would hide names from later tests
    with contextlib.chdir(home):
        yield home
    sys.path[:] = before
    for name in ("brief", "rules", "my_graph"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("page", "shown"), [one for one in SHOWN if one[1].whole], ids=lambda value: str(value).removeprefix("flowrl ")
)
def test_a_command_to_copy_is_parsed(page: str, shown: Shown, reader: Path) -> None:
    try:
        read(shown.words)
    except ConfigError as problem:
        pytest.fail(f"{page}: {shown}: {problem}")


def read(words: Sequence[str]) -> None:
    """Parse a command line as `flowrl` does, with options of every kind; builds the graph, if it names one."""
    name, *args = words
    if asked_for_help(args) is not None:
        with contextlib.suppress(SystemExit):
            assert main(words) == 0
    elif name in OF_GRAPHS:
        prepare_graph(name, OF_GRAPHS[name], args)
    elif name in FIRST:
        prepare_graph("run", OF_GRAPHS["run"], [name, FIRST[name][0], *args])
    elif name in OWN:
        rest = args if name in NAMELESS else args[1:]
        assert name in NAMELESS or (args and not args[0].startswith("-")), f"flowrl {name} needs a name first"
        parse_options(OWN[name], rest, prog=f"flowrl {name}")
    elif name == "new":
        parse_new(args)
    else:
        assert {arg for arg in args if arg.startswith("-")} <= set(PLAIN[name])


@pytest.mark.parametrize(
    ("page", "shown"), [one for one in SHOWN if not one[1].whole], ids=lambda value: str(value).removeprefix("flowrl ")
)
def test_a_command_in_a_sentence_has_options_that_there_are(page: str, shown: Shown) -> None:
    name, *args = shown.words
    assert name in COMMANDS, f"{page}: {shown}"
    given = {arg[2:].partition("=")[0] for arg in args if arg.startswith("--")}
    assert given - {"help", "help-all"} <= options_of(name, tuple(args)), f"{page}: {shown}"


@functools.cache
def options_of(name: str, args: tuple[str, ...]) -> set[str]:
    """The options of a command; where it takes a graph and names none, those of every graph."""
    if name in OWN:
        return set(option_names(OWN[name]))
    if name in PLAIN:
        return {option[2:] for option in PLAIN[name]}
    graph = name if name in FIRST else args[0].removeprefix("graphs/").removesuffix(".py") if args else ""
    graphs = [graph] if graph in shipped_names() else shipped_names()
    own = OF_GRAPHS.get(name, OF_GRAPHS["run"])
    return {option for kind in (*own, *(load_file(one).config_type for one in graphs)) for option in option_names(kind)}


OF_OTHERS = ("options.md", "from-openrlhf.md", "from-trl.md", "from-verl.md")
"""Pages that name options of other programs, too."""
ELSEWHERE = {
    "agents.md": {"real", "results", "case"},
    "benchmarks.md": {"case", "real", "plain-malloc", "plain-products"},
    "losses.md": {"objective.coef"},
    "nodes.md": {"config-settings", "strict"},
    "start.md": {"no-deps"},
}
"""Page -> options of a program of the tests or benchmarks, of the page's own example, of pip and mypy."""


@pytest.mark.parametrize("page", [page for page in DOCUMENTS if page.name not in OF_OTHERS], ids=lambda page: page.name)
def test_an_option_in_a_sentence_is_one_that_there_is(page: Path) -> None:
    named = options_named(page.read_text(encoding="utf-8"))
    assert named - every_option() - ELSEWHERE.get(page.name, set()) == set()


@pytest.mark.parametrize("page", [page for page in PAGES if page.name.startswith("from-")], ids=lambda page: page.name)
def test_what_stands_for_an_option_of_others_is_one_that_there_is(page: Path) -> None:
    rows = [line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    named = options_named("\n".join(row.rstrip(" |").rpartition(" | ")[2] for row in rows))
    assert len(named) > 15
    assert named - every_option() == set()


@functools.cache
def every_option() -> set[str]:
    return {"help", "help-all"} | {option for name in COMMANDS for option in options_of(name, ())}


def test_the_documents_show_commands() -> None:
    assert len([one for _, one in SHOWN if one.whole]) > 50
    assert {"run", "check", "audit", "samples", "export", "new"} <= {one.words[0] for _, one in SHOWN if one.whole}


WRONG = ["run grpo --lrr 1", "run grpo --lr x", "check no_graph", "export", "samples runs/a --besst", "new a.py"]


@pytest.mark.parametrize("line", WRONG)
def test_a_wrong_command_is_seen(line: str, reader: Path) -> None:
    with pytest.raises((ConfigError, AssertionError, KeyError)):
        read(line.split())
