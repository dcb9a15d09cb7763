"""Graph files: found, run, configured, rebuilt; and what a user reads when one of that fails."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from flowrl import ConfigError
from flowrl import check as flowrl_check
from flowrl.cli import main
from flowrl.graph.load import dump_options, load_file, rebuild_graph
from tests.graph.graph_nodes import MACHINE

GOOD = '''
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from flowrl import ConfigError, Graph
from tests.graph.graph_nodes import Prompts, grpo


@dataclass(frozen=True)
class Policy:
    name: str = "tiny"
    layers: int = 2


@dataclass(frozen=True)
class Settings:
    policy: Policy = Policy()
    staleness: int = 1
    """Largest staleness."""
    shuffle: bool = False
    betas: tuple[float, float] = (0.9, 0.95)
    on_limit: Literal["wait", "mask"] = "wait"
    engine: Mapping[str, int] = field(default_factory=dict)
    data: Path | None = None

    def __post_init__(self) -> None:
        if self.staleness < 0:
            raise ConfigError(f"staleness is {self.staleness}; it needs 0 or more")


def graph(cfg: Settings) -> Graph:
    return grpo(staleness=cfg.staleness, on_limit=cfg.on_limit).graph
'''


@pytest.fixture
def write(tmp_path: Path):  # type: ignore[no-untyped-def]
    def write(text: str, name: str = "mine.py") -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


def test_options_override_leaves(write) -> None:  # type: ignore[no-untyped-def]
    file = load_file(write(GOOD))
    cfg = file.parse(["--staleness", "3", "--policy.layers=4", "--shuffle", "--betas", "0.8", "0.9"])
    assert (cfg.staleness, cfg.policy.name, cfg.policy.layers, cfg.shuffle, cfg.betas) == (
        3,
        "tiny",
        4,
        True,
        (0.8, 0.9),
    )
    assert file.build(cfg).admission is not None


def test_a_nested_config_may_be_given_by_its_first_field(write) -> None:  # type: ignore[no-untyped-def]
    cfg = load_file(write(GOOD)).parse(["--policy", "smollm2", "--on_limit", "mask"])
    assert (cfg.policy.name, cfg.policy.layers, cfg.on_limit) == ("smollm2", 2, "mask")


def test_a_host_rebuilds_the_same_graph_from_plain_data(write) -> None:  # type: ignore[no-untyped-def]
    path = write(GOOD)
    file = load_file(path)
    cfg = file.parse(["--staleness", "3", "--data", "x/y.jsonl", "--engine", "block", "32", "--policy", "big"])
    plain = json.loads(json.dumps(dump_options(cfg)))
    assert plain["policy"] == {"name": "big", "layers": 2}
    graph, again = rebuild_graph(path, plain)
    assert again == cfg
    assert type(again) is type(cfg)
    assert [edge.name for edge in graph.edges] == [edge.name for edge in file.build(cfg).edges]


def test_a_file_is_run_once_but_every_rebuild_has_new_nodes(write) -> None:  # type: ignore[no-untyped-def]
    path = write(GOOD)
    plain = dump_options(load_file(path).parse([]))
    (one, first), (other, second) = rebuild_graph(path, plain), rebuild_graph(path, plain)
    assert one.nodes["reward"] is not other.nodes["reward"]
    assert type(first) is type(second)


def test_a_configuration_of_another_shape_is_refused_by_name(write) -> None:  # type: ignore[no-untyped-def]
    path = write(GOOD)
    with pytest.raises(ConfigError, match="has the fields speed, which"):
        rebuild_graph(path, {"speed": 3})
    with pytest.raises(ConfigError, match=r"does not fit.*staleness: .*integer"):
        rebuild_graph(path, {"staleness": "many"})


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["--stalness", "2"], "there is no option --stalness; did you mean --staleness?"),
        (["--polcy", "2"], "there is no option --polcy; did you mean --policy?"),
        (["--xyz"], "there is no option --xyz; flowrl run .*mine.py --help-all lists the options"),
        (["--staleness", "many"], "--staleness is 'many'; it needs an integer"),
        (["--staleness"], "--staleness has no value; write one after it"),
        (["--on_limit", "drop"], "--on-limit is 'drop'; it needs one of 'wait', 'mask'"),
        (["stray"], "stray"),
        (["--staleness", "-1"], "^staleness is -1; it needs 0 or more$"),
    ],
)
def test_wrong_options_are_one_sentence(write, args: list[str], text: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match=text) as error:
        load_file(write(GOOD)).parse(args)
    assert "\n" not in str(error.value)
    assert "│" not in str(error.value)


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_faults_read_the_same_on_plain_terminals(write, encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding=encoding))
    path = write(GOOD)
    with pytest.raises(ConfigError) as error:
        load_file(path).parse(["--staleness", "many"])
    sentence = "--staleness is 'many'; it needs an integer"
    assert str(error.value) == f"{sentence}; flowrl run {path} --help-all lists the options"


WRONG_FILES = {
    "x = 1\n": "is not a graph file: it has no function `graph`; write def graph",
    "def grph(cfg): ...\n": r"it has no function `graph` \(rename grph\?\)",
    "def graph(cfg): ...\n": r"graph\(cfg\) in .*mine.py needs exactly one annotated parameter",
    "def graph(): ...\n": r"graph\(\) in .*mine.py needs exactly one annotated parameter",
    "def graph(cfg: int): ...\n": "int, the configuration of .*mine.py, is not a frozen dataclass; decorate it with",
    "import no_such_module\n": r"mine.py:1: ModuleNotFoundError: No module named 'no_such_module'$",
    "def graph(cfg:\n": r"mine.py:1: SyntaxError: '\(' was never closed$",
    "x = 1\ny = x / 0\n": r"mine.py:2: ZeroDivisionError: division by zero$",
    "import sys\nsys.exit(0)\n": r"mine.py:2: it calls sys.exit\(0\), which ends flowrl; leave it out, or put it under",
    "def graph(cfg: Missing): ...\n": r"mine.py:1: NameError: name 'Missing' is not defined",
}


@pytest.mark.parametrize("text", WRONG_FILES)
def test_a_file_that_is_no_graph(write, text: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match=WRONG_FILES[text]) as error:
        load_file(write(text))
    assert "\n" not in str(error.value)


def test_a_script_that_a_graph_imports(write) -> None:  # type: ignore[no-untyped-def]
    write("raise SystemExit('done')\n", "a_script_beside.py")
    with pytest.raises(ConfigError, match=r"mine.py:1: it calls sys.exit\('done'\), which ends flowrl"):
        load_file(write("import a_script_beside\n"))


def test_help_still_ends_the_command(write) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(SystemExit) as end:
        load_file(write(GOOD)).parse(["--help"])
    assert not end.value.code


def test_an_error_while_building_names_the_line_and_the_near_port(write) -> None:  # type: ignore[no-untyped-def]
    path = write(GOOD.replace("return grpo(", "grpo().generator.rollout\n    return grpo("))
    file = load_file(path)
    line = path.read_text().splitlines().index("    grpo().generator.rollout") + 1
    with pytest.raises(ConfigError, match=f"mine.py:{line}: AttributeError: .*Did you mean: 'rollouts'"):
        file.build(file.parse([]))


def test_a_graph_function_that_returns_nothing(write) -> None:  # type: ignore[no-untyped-def]
    file = load_file(write(GOOD.replace("    return grpo(", "    grpo(")))
    with pytest.raises(ConfigError, match=r"graph\(cfg\) in .*mine.py returned None; it needs to return the Graph"):
        file.build(file.parse([]))


def test_missing_files(tmp_path: Path) -> None:
    (tmp_path / "grpo.py").write_text("")
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(ConfigError, match=r"graph file .*gpro.py does not exist; did you mean .*grpo.py\?"):
        load_file(tmp_path / "gpro.py")
    with pytest.raises(ConfigError, match=r"graph file .*zzz.py does not exist \(looked in"):
        load_file(tmp_path / "zzz.py")
    with pytest.raises(ConfigError, match=r"is a directory; name a graph file \(the directory contains .*grpo.py\)"):
        load_file(tmp_path)
    with pytest.raises(ConfigError, match=r"notes.txt is not a Python file"):
        load_file(tmp_path / "notes.txt")


def test_a_file_of_other_bytes(tmp_path: Path) -> None:
    path = tmp_path / "bytes.py"
    path.write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(ConfigError, match=r"bytes.py:1: "):
        load_file(path)


def test_modules_beside_the_file_can_be_imported(tmp_path: Path) -> None:
    (tmp_path / "beside_the_graph.py").write_text("STALENESS = 4\n")
    path = tmp_path / "mine.py"
    path.write_text(
        GOOD.replace("staleness: int = 1", "staleness: int = STALENESS").replace(
            "\nfrom collections.abc", "\nfrom beside_the_graph import STALENESS\nfrom collections.abc"
        )
    )
    assert load_file(path).parse([]).staleness == 4


MESSAGE = """
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from flowrl import Graph, In, Message, Node, Out

if TYPE_CHECKING:
    from decimal import Decimal


@dataclass(frozen=True)
class Price(Message):
    value: Decimal


@dataclass(frozen=True)
class Settings:
    size: int = 1


class Source(Node):
    prices: Out[Price]

    async def run(self) -> None: ...


class Sink(Node):
    prices: In[Price]

    async def run(self) -> None: ...


def graph(cfg: Settings) -> Graph:
    g = Graph("prices")
    g.connect(g.add("source", Source()).prices, g.add("sink", Sink()).prices)
    return g
"""


def test_an_annotation_of_a_message_is_named_before_a_run(write) -> None:  # type: ignore[no-untyped-def]
    path = write(MESSAGE)
    (problem,) = flowrl_check(load_file(path).build(load_file(path).parse([])), MACHINE).problems
    assert problem.startswith(f"{path}: the annotation 'Decimal' of Price.value cannot be read: name 'Decimal'")


TYPED = """
from __future__ import annotations

import typing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flowrl import Graph, In, Node, Out, Prompt, Sample
from tests.graph.graph_nodes import grpo

if TYPE_CHECKING:
    from decimal import Decimal


@dataclass(frozen=True)
class Part:
    size: int = 1


@dataclass(frozen=True)
class Settings:
    part: Part = Part()


class Sink(Node):
    prompts: In[Prompt]


def graph(cfg: Settings) -> Graph:
    Sink()
    return grpo().graph
"""


@pytest.mark.parametrize(
    ("right", "wrong", "told"),
    [
        (
            "size: int",
            "size: Decimal",
            "the annotation 'Decimal' of Part.size cannot be read: name 'Decimal' is not defined; import Decimal at "
            "the top of the file, outside of `if TYPE_CHECKING:`, or write another type",
        ),
        (
            "part: Part",
            "part: Prat",
            "the annotation 'Prat' of Settings.part cannot be read: name 'Prat' is not defined; did you mean Part?",
        ),
        (
            "cfg: Settings",
            "cfg: Setings",
            "the annotation 'Setings' of cfg of graph cannot be read: name 'Setings' is not defined; did you mean "
            "Settings?",
        ),
        (
            "-> Graph",
            "-> typing.Grahp",
            "the annotation 'typing.Grahp' of what graph returns cannot be read: module 'typing' has no attribute "
            "'Grahp'; write a type that exists when the file is run",
        ),
        (
            "prompts: In[Prompt]",
            "prompts: In[Promt]",
            "the annotation 'In[Promt]' of Sink.prompts cannot be read: name 'Promt' is not defined; did you mean "
            "Prompt?",
        ),
    ],
)
def test_an_annotation_without_a_meaning_is_named(
    write, right: str, wrong: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:  # type: ignore[no-untyped-def]
    assert main(["check", str(write(TYPED)), "--cluster", "cpus=8"]) == 0
    capsys.readouterr()
    path = write(TYPED.replace(right, wrong), "wrong.py")
    assert main(["check", str(path), "--cluster", "cpus=8"]) == 2
    assert capsys.readouterr().err == f"flowrl: {path}: {told}\n"
