"""docs/options.md has every option of OpenRLHF and TRL once, and names nothing of flowrl's that there is not."""

from __future__ import annotations

import ast
import functools
import importlib.util
import inspect
import json
import re
import zipfile
from pathlib import Path

import pytest

import flowrl.nodes
from flowrl.commands.export import ExportOptions
from flowrl.commands.merge_adapter import MergeOptions
from flowrl.errors import ConfigError
from flowrl.graph.command_line import option_names, options_of_others, parse_options
from flowrl.graph.load import load_file
from flowrl.nodes.scoring.reward_service import ServeOptions
from flowrl.runtime.driver.job import RunOptions
from flowrl.training import settings
from flowrl.training.loss import function_objective, policy_objective, preference_objectives
from tests.house.their_options.extract import CONFIGS, config_classes, declared_arguments, extracted, fields_of

ROOT = Path(__file__).parents[2]
DATA = Path(__file__).parent / "their_options"
TABLE, OF_TRANSFORMERS = (
    (ROOT / "docs" / "options.md").read_text(encoding="utf-8").split("\n## Of transformers' TrainingArguments\n")
)
HOMES = (
    flowrl.nodes,
    function_objective,
    policy_objective,
    preference_objectives,
    preference_objectives,
    settings,
    settings,
)
COMMANDS = {"serve-reward": ServeOptions, "merge": MergeOptions, "export": ExportOptions}
GRAPHS = {path.stem for path in (ROOT / "graphs").glob("*.py")}


def rows(text: str) -> list[list[str]]:
    """The cells of each row of the tables, without their headings."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return [row for row in cells if row[0] != "OpenRLHF" and row[1] != "transformers"]


ROWS = rows(TABLE)
ALL_ROWS = [*ROWS, *rows(OF_TRANSFORMERS)]


def theirs(package: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = json.loads((DATA / f"{package}.json").read_text())["options"]
    return found


@pytest.mark.parametrize(("package", "column"), [("openrlhf", 0), ("trl", 1)])
def test_every_option_of_theirs_has_exactly_one_row(package: str, column: int) -> None:
    named = [name for row in ROWS for name in re.findall(r"`([^`]+)`", row[column])]
    assert sorted(named) == sorted(theirs(package))


@pytest.mark.parametrize("package", ["openrlhf", "trl"])
def test_the_page_is_about_the_versions_of_the_lists(package: str) -> None:
    found = json.loads((DATA / f"{package}.json").read_text())
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", found["read"]) and found["version"] in found["source"]
    assert f"version {found['version']}" in TABLE
    assert len(found["options"]) > 100


def test_every_row_says_how_the_two_compare() -> None:
    for row in ALL_ROWS:
        assert len(row) == 4, row
        assert re.match(r"(same$|same: \S|differs: \S|not there$|not there: \S|not there as an option: \S)", row[3]), (
            row
        )
        if not row[3].startswith("not there"):
            assert row[2] != "–" or row[3].startswith("same: "), row


@functools.cache
def options_of(name: str) -> set[str]:
    """The options of a graph and of a run of it, or of a command."""
    if name in COMMANDS:
        return set(option_names(COMMANDS[name]))
    return set(option_names(RunOptions)) | set(option_names(load_file(name).config_type))


def named_options(cell: str) -> list[tuple[str, str]]:
    """(graph or command, option) of each code span of a cell of flowrl's; without a graph it is grpo."""
    found = []
    for span in re.findall(r"`([^`]+)`", cell):
        first = span.split()[0]
        home = first if first in GRAPHS | COMMANDS.keys() else "grpo"
        if first == home or first.startswith("--"):
            found += [(home, name) for name in re.findall(r"(?<!\S)--([a-z][a-z0-9._-]*)", span)]
    return found


def test_every_option_exists_in_the_graph_that_is_named() -> None:
    named = {pair for row in ALL_ROWS for pair in named_options(" ".join(row[2:]))}
    assert len(named) > 100
    assert {pair for pair in named if pair[1] not in options_of(pair[0])} == set()


def test_what_the_introduction_names_exists() -> None:
    introduction = TABLE.split("\n## Models\n")[0]
    ours = {pair for pair in named_options(introduction) if "--" + pair[1] not in theirs("openrlhf")}
    assert len(ours) > 10
    assert {pair for pair in ours if pair[1] not in options_of(pair[0])} == set()


@pytest.mark.parametrize(
    "named", sorted({name for row in ALL_ROWS for name in re.findall(r"`([A-Z]\w+\(\w+\))`", row[2])})
)
def test_every_argument_exists(named: str) -> None:
    name, argument = named.rstrip(")").split("(")
    found = next(getattr(home, name) for home in HOMES if hasattr(home, name))
    assert argument in inspect.signature(found).parameters


def test_trls_list_is_that_of_the_version_installed() -> None:
    """Its files are there for the tests of chat templates; finding them imports nothing."""
    spec = importlib.util.find_spec("trl")
    assert spec is not None and spec.submodule_search_locations
    folder = Path(spec.submodule_search_locations[0])
    classes = {
        f"{path.relative_to(folder.parent)}:{name}": bodies
        for path in folder.rglob("*_config.py")
        for name, bodies in config_classes(ast.parse(path.read_text(encoding="utf-8"))).items()
    }
    for file, kind in CONFIGS.items():
        known = {field for field, kinds in theirs("trl").items() if kind in kinds}
        assert set(fields_of(f"{file}:{kind}", classes)) == known, kind


PROGRAM = """
parser.add_argument("--plain", "-p", type=int)
for prefix in ("actor", "critic"):
    parser.add_argument(f"--{prefix}.lr", type=float, help=f"of {prefix}")
"""


def test_options_are_read_out_of_a_wheel(tmp_path: Path) -> None:
    path = tmp_path / "openrlhf-0.1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("openrlhf-0.1.data/purelib/openrlhf/cli/train.py", PROGRAM)
        wheel.writestr("openrlhf-0.1.data/purelib/openrlhf/cli/serve.py", 'parser.add_argument("--plain")')
        wheel.writestr("openrlhf-0.1.data/purelib/tests/other.py", 'parser.add_argument("--not-read")')
    found = extracted(path)
    assert (found["package"], found["version"], found["source"]) == ("openrlhf", "0.1", path.name)
    assert found["options"] == {"--actor.lr": ["train"], "--critic.lr": ["train"], "--plain": ["serve", "train"]}


def test_an_option_that_cannot_be_read_is_an_error() -> None:
    with pytest.raises(ValueError, match="which is not read here"):
        list(declared_arguments(ast.parse("parser.add_argument(name())")))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("--num_generations", "--group-size"),
        ("--num-generations=8", "--group-size"),
        ("--rollout.n_samples_per_prompt", "--group-size"),
        ("--data.train_batch_size", "--groups-per-step, prompts in both"),
        ("--use_liger_kernel", "flowrl"),
        ("--group_sise", "did you mean --group_size?"),
        ("--clip-low", "did you mean --objective.clip_low?"),
    ],
)
def test_an_option_of_others_is_answered_with_its_place_here(given: str, says: str) -> None:
    with pytest.raises(ConfigError, match=r"there is no option --") as refused:
        parse_options(load_file("grpo").config_type, [given, "8"], prog="flowrl run grpo")
    assert says in str(refused.value) and "](" not in str(refused.value) and "`" not in str(refused.value)


def test_the_answers_are_the_tables_of_the_documents() -> None:
    found = options_of_others()
    for package in ("openrlhf", "trl"):
        assert {name.removeprefix("--").replace("_", "-").lower() for name in theirs(package)} <= found.keys()
    assert all(found.values())
    for name, page in (("options_of_others", "options"), ("options_of_verl", "from-verl")):
        assert (ROOT / "flowrl" / f"{name}.txt").resolve() == ROOT / "docs" / f"{page}.md"
