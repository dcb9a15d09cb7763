"""`--help`: twenty options first, every option in one group, and the same texts as on the pages of the site."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from flowrl.cli import CheckOptions, main
from flowrl.commands.run_graph import RunFileOptions
from flowrl.errors import ConfigError
from flowrl.graph.command_line import option_names
from flowrl.graph.load import load_file, shipped_names
from flowrl.graph.option_help import (
    FIRST,
    GRAPH,
    MOST_FIRST,
    OptionGroup,
    asked_for_help,
    first_options,
    help_text,
    merge_groups,
    option_groups,
)
from flowrl.graph.option_types import blocks_of, fill_config, options_of
from flowrl.runtime.driver.job import RunOptions
from tests.house.documents import ROOT


def leaves(kind: type[Any]) -> set[str]:
    """Options without other spellings: neither short forms of blocks nor the `no-` of flags."""
    return {leaf for name, leaf in option_names(kind).items() if not name.rpartition(".")[2].startswith("no-")}


def groups_of_run(name: str) -> list[OptionGroup]:
    own = [group for kind in (RunOptions, RunFileOptions) for group in option_groups(kind, own="run")]
    return merge_groups([*option_groups(load_file(name).config_type), *own])


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def printed(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    with pytest.raises(SystemExit) as end:
        main(args)
    assert end.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", shipped_names())
def test_every_option_stands_in_one_group_of_all_of_them(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = [option.name for group in groups_of_run(name) for option in group.options]
    assert Counter(options) == Counter(
        {one: 1 for kind in (load_file(name).config_type, RunOptions, RunFileOptions) for one in leaves(kind)}
    )
    text = printed(capsys, "run", name, "--help-all")
    assert re.findall(r"^  (?:--\S+, )?--(\S+)", text, re.M) == options


@pytest.mark.parametrize("name", shipped_names())
def test_twenty_options_come_first_and_all_groups_after_them(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    text, groups = printed(capsys, "run", name, "--help"), groups_of_run(name)
    shown = [line.split()[0] for line in text.splitlines() if line.startswith("  --")]
    assert shown == [f"--{one}" for one in first_options(groups)]
    assert 10 <= len(shown) <= MOST_FIRST and {"--policy", "--task", "--steps", "--run-dir"} <= {*shown}
    (number,) = (line for line in text.splitlines() if line.endswith("options, those that most runs set:"))
    assert number.startswith(f"{len(shown)} of {sum(len(group.options) for group in groups)} ")
    assert [line.split()[:2] for line in text.splitlines() if line.startswith("  ") and line[2].isalpha()] == [
        [group.name, str(len(group.options))] for group in groups
    ]
    assert all(group.about for group in groups)


def test_grpo_shows_twenty_of_the_list_and_each_of_the_list_is_an_option_of_a_graph() -> None:
    assert list(first_options(groups_of_run("grpo"))) == [name for name in FIRST if name not in ("batch", "max-length")]
    known = {name for graph in shipped_names() for name in option_names(load_file(graph).config_type)}
    assert {*FIRST} <= known | set(option_names(RunOptions))
    assert len({*FIRST}) == len(FIRST)


@pytest.mark.parametrize("name", shipped_names())
def test_the_groups_of_a_graph_are_its_parts_and_its_blocks(name: str) -> None:
    kind = load_file(name).config_type
    parts = {one.path[0].replace("_", "-") for one in options_of(kind).values() if len(one.path) > 1}
    blocks = {block.replace("_", "-") for block in blocks_of(kind) if "." not in block}
    shown = {group.name: group for group in option_groups(kind)}
    assert {*shown} - {GRAPH} <= parts | blocks and {"policy", "task", "placement"} <= {*shown}
    of_trainer = {option.name for option in shown["trainer"].options} if "trainer" in parts else {"lr"}
    assert {"lr"} <= of_trainer, "options of a part and of a block of its name stand together"


SHARED_BY = 5
"""An option that this many graphs have is not a graph's own."""


def test_what_several_graphs_have_is_in_a_group_that_says_what_it_is_about() -> None:
    own = [
        option.name
        for name in shipped_names()
        for group in option_groups(load_file(name).config_type)
        for option in group.options
        if group.name == GRAPH
    ]
    assert [name for name, number in Counter(own).items() if number >= SHARED_BY] == []


@dataclass(frozen=True)
class Inner:
    """What is inside."""

    size: int = 1
    """How large
    it is."""
    kind: Literal["a", "b"] = "a"


@dataclass(frozen=True)
class Config:
    """A configuration."""

    path: Path
    """What is read."""
    inner: Inner = Inner()
    also: Inner = field(default_factory=lambda: Inner(7))
    """Another one."""
    lr: float = 1e-5
    """How fast. Not too fast."""
    names: tuple[str, ...] = ("x", "y")
    range: tuple[float, float] = (0.0, 1.0)
    odd: str = "\x1b[31m"
    quiet: bool = False
    """Say nothing."""
    loud: bool = True
    maybe: bool | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Derived(Config):
    lr: float = 0.5


EVERYTHING = """\
usage: flowrl run mine [--OPTION VALUE ...]

graph: What this graph has and no other.

  --path <path>                What is read. (has to be given)
  --lr <number>                How fast. Not too fast. (default: 0.5)
  --names <text ...>           (default: x y)
  --range <number number>      (default: 0.0 1.0)
  --odd <text>                 (default: '\\x1b[31m')
  --quiet                      Say nothing.
  --loud                       (default: on)
  --maybe <True|False>         (default: None)
  --settings <NAME=VALUE ...>

inner: What is inside.

  --inner, --inner.size <integer>
                                How large it is. (default: 1)
  --inner.kind <a|b>            (default: a)

also: Another one.

  --also, --also.size <integer>
                                How large it is. (default: 7)
  --also.kind <a|b>             (default: a)

A flag is switched off with no-: --no-resume, --zero.no-keep-optimizer."""


@pytest.mark.usefixtures("wide")
def test_the_help_of_a_small_configuration_is_whole() -> None:
    text = help_text("flowrl run mine", "", option_groups(Derived))
    assert text.splitlines() == EVERYTHING.splitlines()


@pytest.mark.usefixtures("wide")
def test_defaults_are_those_of_the_instance_that_is_given() -> None:
    values = fill_config(Config, {"inner.size": 5, "lr": 2.0})
    options = {option.name: option.default for group in option_groups(Config, values) for option in group.options}
    assert (options["inner.size"], options["also.size"], options["lr"]) == (5, 7, 2.0)
    assert options["path"] is dataclasses.MISSING


@pytest.mark.parametrize(
    ("args", "asked"),
    [
        (["--lr", "1"], None),
        (["--lr", "1", "--help"], ""),
        (["-h"], ""),
        (["--help", "--lr", "1"], ""),
        (["--help", "zero"], "zero"),
        (["--help=zero", "x"], "zero"),
        (["--policy", "tiny", "--help-all"], "all"),
    ],
)
def test_what_help_is_asked_about(args: Sequence[str], asked: str | None) -> None:
    assert asked_for_help(args) == asked


def test_a_group_and_an_option_are_shown_whole(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "run", "grpo", "--help", "schedule")
    shown = re.findall(r"^  (?:--\S+, )?--(\S+)", text, re.M)
    assert shown == ["schedule.decay", "schedule.warmup-steps", "schedule.floor"]
    option = " ".join(printed(capsys, "run", "grpo", "--help", "lr").split())
    assert option == "--lr <number> Peak learning rate of the policy. (default: 0.0001)"
    assert "OWNER/NAME[@REVISION]" in printed(capsys, "generate", "--help", "task.name")


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ("schedul", "--help schedul: there is no group or option of this name; did you mean schedule?"),
        ("xyz", "there is no group or option of this name; the groups are graph, policy, "),
    ],
)
def test_another_word_after_help_is_told(capsys: pytest.CaptureFixture[str], asked: str, told: str) -> None:
    assert main(["run", "grpo", "--help", asked]) == 2
    assert told in capsys.readouterr().err


def test_defaults_of_a_run_file_and_of_the_models_size_are_shown(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "run.yaml").write_text("graph: grpo\ngroup_size: 5\nsteps: 3\n")
    text = " ".join(printed(capsys, "run", "--config", str(tmp_path / "run.yaml"), "--help").split())
    assert "Number of samples for one prompt (default: 5)" in text
    assert "repeat the data as needed (default: 3)" in text


def test_a_command_shows_its_own_options_too(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [line.split()[:2] for line in printed(capsys, "check", "grpo", "--help").splitlines()]
    assert ["--policy", "<text>"] in lines and ["check", str(len(leaves(CheckOptions)))] in lines
    lines = [line.split()[:2] for line in printed(capsys, "check", "dpo", "--help").splitlines()]
    assert ["--cluster", "<text>"] in lines, "the first screen has places left"
    assert "--draw <path ...>" in printed(capsys, "check", "grpo", "--help", "check")
    text = printed(capsys, "doctor", "--help")
    assert text.startswith("usage: flowrl doctor [--OPTION VALUE ...]") and "--address <text>" in text


def test_help_loads_neither_the_parser_of_options_nor_anything_heavy() -> None:
    code = (
        "import sys\nfrom flowrl.cli import main\n"
        "try:\n    main(['run', 'grpo', '--help'])\nexcept SystemExit:\n    pass\n"
        "print(*[name for name in ('torch', 'ray', 'vllm', 'transformers', 'zmq') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == ""


def test_a_reader_that_goes_away_is_no_error() -> None:
    command = f"{sys.executable} -m flowrl.cli run grpo --help-all | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stderr == "" and done.stdout in ("141\n", "0\n")


def test_an_unknown_group_is_an_error_of_the_configuration() -> None:
    with pytest.raises(ConfigError, match="did you mean inner"):
        help_text("flowrl run mine", "iner", option_groups(Config))
