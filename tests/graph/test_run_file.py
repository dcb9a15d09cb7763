"""Run files: what is written is read again exactly, for every option of every graph; what is refused, with its line."""

from __future__ import annotations

import dataclasses
import difflib
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from flowrl.cli import main
from flowrl.commands.prepare import prepare_graph
from flowrl.commands.run_graph import RunFileOptions
from flowrl.errors import ConfigError
from flowrl.graph.load import dump_options, load_file, shipped_names
from flowrl.graph.option_types import fill_config, leaves_of
from flowrl.graph.run_file import RunFile, parse_yaml, plain_data, run_file_text, write_run_file
from flowrl.runtime.driver.job import RunOptions

Capture = pytest.CaptureFixture[str]
KINDS = {**{name: load_file(name).config_type for name in shipped_names()}, "flowrl run": RunOptions}
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.sampled_from(
    [
        "off",
        "1e-5",
        "010",
        "null",
        "~",
        "",
        " x ",
        "a: b",
        "#",
        "yes",
        "2020-01-01",
        "1_000",
        "- a",
        "[",
        "'",
        "\x85",
        "\n",
    ]
)
NUMBERS = st.floats(allow_nan=False) | st.integers(-(10**6), 10**6).map(float)


def values_of(hint: Any) -> st.SearchStrategy[Any]:
    """Any value of an option of this type."""
    origin, parts = get_origin(hint), get_args(hint)
    if hint in SIMPLE:
        return SIMPLE[hint]
    if origin is Literal:
        return st.sampled_from(parts)
    if origin is tuple and Ellipsis in parts:
        return st.lists(values_of(parts[0]), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*map(values_of, parts))
    if origin is not None and issubclass(origin, Mapping) if isinstance(origin, type) else False:
        return st.dictionaries(TEXT, ANYTHING, max_size=3)
    return st.one_of(*map(values_of, parts))


ANYTHING: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | NUMBERS | TEXT,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXT, inner, max_size=2),
    max_leaves=4,
)
SIMPLE: dict[Any, st.SearchStrategy[Any]] = {
    int: st.integers(-(2**70), 2**70),
    float: NUMBERS,
    bool: st.booleans(),
    str: TEXT,
    type(None): st.none(),
    Path: st.sampled_from([Path("runs/x"), Path("/a b/ö"), Path("010")]),
}


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """{"task.name": 1} as {"task": {"name": 1}}, with lists and text in place of tuples and paths"""
    found: dict[str, Any] = {}
    for name, value in values.items():
        *blocks, leaf = name.split(".")
        inner = found
        for block in blocks:
            inner = inner.setdefault(block, {})
        inner[leaf] = list(value) if isinstance(value, tuple) else str(value) if isinstance(value, Path) else value
    return found


@pytest.mark.parametrize("name", KINDS)
def test_every_option_of_every_graph_is_read_as_it_was_written(name: str, tmp_path: Path) -> None:
    leaves = leaves_of(KINDS[name])
    assert len(leaves) > 5

    @settings(max_examples=6, deadline=None, phases=[Phase.generate], suppress_health_check=[HealthCheck.too_slow])
    @given(st.fixed_dictionaries({leaf: values_of(hint) for leaf, hint in leaves.items()}))
    def round_trip(values: dict[str, Any]) -> None:
        path = tmp_path / "run.yaml"
        path.write_text(run_file_text("grpo", nested(values)), encoding="utf-8")
        found = RunFile.read(path).values(KINDS[name])
        assert found == values
        assert {leaf: repr(value) for leaf, value in found.items()} == {leaf: repr(v) for leaf, v in values.items()}

    round_trip()


@pytest.mark.parametrize("name", KINDS)
def test_the_defaults_of_every_graph_come_back_as_the_same_object(name: str, tmp_path: Path) -> None:
    default = KINDS[name]()
    write_run_file(tmp_path / "run.yaml", "grpo", dump_options(default))
    assert fill_config(KINDS[name], RunFile.read(tmp_path / "run.yaml").values(KINDS[name])) == default
    assert set(RunFile.read(tmp_path / "run.yaml").values(KINDS[name])) == set(leaves_of(KINDS[name]))


def test_a_number_that_is_none_comes_back(tmp_path: Path) -> None:
    write_run_file(tmp_path / "run.yaml", "dapo", {"least_reward": math.nan, "objective": {"clip_low": -math.inf}})
    values = RunFile.read(tmp_path / "run.yaml").values(
        KINDS["dapo"], dataclasses.make_dataclass("D", [("least_reward", float)])
    )
    assert math.isnan(values["least_reward"]) and values["objective.clip_low"] == -math.inf


def prepared(*args: str) -> Any:
    return prepare_graph("run", (RunOptions, RunFileOptions), args)


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return str(path)


def test_a_file_gives_the_graph_and_its_options_and_the_command_line_has_precedence(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        "graph: grpo\nlr: 1e-5\ngroup-size: 4\ntask: {name: arithmetic, system_prompt: Add.}\nlora.rank: 8\n"
        "steps: 7\nzero:\n  deepspeed: {a: [1, 2.5, off]}\nevaluate_also: [arithmetic]\n",
    )
    found = prepared("--config", file, "--lr", "2e-5", "--task.name", "a.jsonl", "--steps", "9")
    cfg, options = found.cfg, found.own[0]
    assert (found.file.shown, options.steps, cfg.trainer.lr, cfg.sampling.group_size, cfg.trainer.lora.rank) == (
        "grpo",
        9,
        2e-5,
        4,
        8,
    )
    assert (cfg.data.task.name, cfg.data.task.system_prompt, cfg.evaluation.evaluate_also) == (
        "a.jsonl",
        "Add.",
        ("arithmetic",),
    )
    assert cfg.trainer.zero.deepspeed == {"a": [1, 2.5, "off"]}
    assert prepared("rloo", "--config", file, "--lr", "2e-5").file.shown == "rloo", "a graph named first has precedence"


def test_a_block_is_given_by_the_value_of_its_first_option(tmp_path: Path) -> None:
    assert prepared("--config", write(tmp_path, "graph: grpo\ntask: a.jsonl\n")).cfg.data.task.name == "a.jsonl"


def test_an_option_of_the_command_line_replaces_a_value_that_is_out_of_range(tmp_path: Path) -> None:
    file = write(tmp_path, "graph: grpo\nlr: -1\nresume: true\n")
    assert prepared("--config", file, "--lr", "1", "--run-dir", "runs/x").cfg.trainer.lr == 1
    with pytest.raises(ConfigError, match="--lr is -1"):
        prepared("--config", file, "--run-dir", "runs/x")


def test_what_is_saved_is_the_run_again(tmp_path: Path, capsys: Capture) -> None:
    options = ["--lr", "3e-5", "--zero.betas", "0.8", "0.9", "--steps", "5", "--track", "tensorboard", "--task", "off"]
    first = prepared("dapo", *options)
    file = tmp_path / "saved.yaml"
    write_run_file(file, "dapo", dump_options(first.own[0]), dump_options(first.cfg))
    again = prepared("--config", str(file))
    assert (again.file.shown, again.own[0], again.cfg) == ("dapo", first.own[0], first.cfg)


MISTAKES = {
    "lr: fast": "run.yaml:2: lr is 'fast'; it needs a number",
    "steps: 3.5": "run.yaml:2: steps is 3.5; it needs an integer, or null",
    "group_size: true": "run.yaml:2: group_size is true; it needs an integer",
    "plain: yes": "run.yaml:2: plain is 'yes'; it needs true or false",
    "policy: 7": "run.yaml:2: policy is 7; it needs text in quotes",
    "on_limit: drop": "run.yaml:2: on_limit is 'drop'; it needs one of wait, mask",
    "zero: {betas: [1]}": "run.yaml:2: zero.betas is [1]; it needs a list of 2 values, each a number",
    "track: wandb": "run.yaml:2: track is 'wandb'; it needs a list, of which each is text",
    "zero.deepspeed: 3": "run.yaml:2: zero.deepspeed is 3; it needs a mapping of options to values",
    "groupsize: 4": "run.yaml:2: there is no option groupsize; did you mean group_size?",
    "zero: {stge: 1}": "run.yaml:2: there is no option zero.stge; did you mean zero.stage?",
    "rank: 8": "run.yaml:2: there is no option rank; did you mean lora.rank?",
    "wholly_unknown_thing: 8": "run.yaml:2: there is no option wholly_unknown_thing; --help-all lists the options",
    "lr: 1\nseed: 1\nlr: 2": "run.yaml:4: lr is given twice, first in line 2; keep one",
    "group-size: 1\ngroup_size: 2": "run.yaml:3: group_size is given twice, first in line 2; keep one",
    "task: a\ntask.name: b": "run.yaml:3: task.name is given twice, first in line 2; keep one",
    "graph: rloo": "run.yaml:2: graph is given twice, first in line 1; keep one",
    "zero.deepspeed: {a: 1, a: 2}": "run.yaml:2: zero.deepspeed is not plain data (it has a twice)",
    "policy: !!python/object/apply:os.getcwd []": "run.yaml:2: policy is not plain data",
    "policy: !!binary aGk=": "run.yaml:2: policy is b'hi'; it needs text",
    "lr: [1": "run.yaml:3: expected ',' or ']'",
    "? [a]\n: 1": "run.yaml:2: there is no option a key that is no text",
    "run.yaml: 1": "there is no option run.yaml",
}


@pytest.mark.parametrize("text", MISTAKES)
@pytest.mark.parametrize("command", ["run", "check"])
def test_a_mistake_in_a_file_is_one_sentence_with_its_line(
    capsys: Capture, tmp_path: Path, text: str, command: str
) -> None:
    assert main([command, "--config", write(tmp_path, f"graph: grpo\n{text}\n")]) == 2
    captured = capsys.readouterr()
    assert MISTAKES[text] in captured.err and captured.err.count("\n") == 1
    assert captured.out == ""


def test_files_that_are_none(capsys: Capture, tmp_path: Path) -> None:
    def refused(*args: str) -> str:
        assert main(["run", *args]) == 2
        return capsys.readouterr().err

    file = write(tmp_path, "- 1\n")
    assert "run.yaml has no options; write one `option: value` a line" in refused("--config", file)
    assert "did you mean" in refused("--config", str(tmp_path / "rum.yaml"))
    assert "names no graph; add `graph: grpo` to it" in refused("--config", write(tmp_path, "lr: 1\n"))
    assert "--config is given twice" in refused("grpo", "--config", file, "--config", file)
    assert "graph: needs" not in refused("--config", write(tmp_path, "graph: [grpo]\n"))
    (tmp_path / "run.yaml").write_bytes(b"lr: \xff\n")
    assert "run.yaml is not text in UTF-8 (byte 4)" in refused("grpo", "--config", file)


def test_a_dry_run_prints_options_and_plan_and_starts_nothing(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert main(["run", "grpo", "--lr", "3e-5", "--steps", "4", "--dry-run", "--save-config", "run.yaml"]) == 0
    out = capsys.readouterr().out
    text = (tmp_path / "run.yaml").read_text()
    assert "\nlr: 3.0e-05\n" in text and "\nsteps: 4\n" in text
    lines = text.splitlines()
    changes = [line for line in difflib.ndiff(lines, out.splitlines()[: len(lines) + 1]) if line[0] in "+-"]
    assert changes == ["+   dtype: float32"], "the engine's; the file leaves it to the machine that reads it"
    assert "tickets" in out and out.endswith("nothing was started\n")
    assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"], "no run directory"
    assert main(["run", "--config", "run.yaml", "--dry-run"]) == 0
    again, section = capsys.readouterr().out, "options that depend on the model and the machine:"
    assert again.partition(section)[0] == out.partition(section)[0]
    assert "lr                 3e-05    given" in out and "max_tokens         32       tiny's own" in out
    assert "max_tokens         32       given" in again, "the file has every option"


def test_a_dry_run_finds_what_a_run_would_find_before_it_starts(capsys: Capture) -> None:
    assert main(["run", "grpo", "--task", "missing.jsonl", "--dry-run"]) == 2
    assert "there is no task 'missing.jsonl'" in capsys.readouterr().err


def test_another_file_is_not_replaced(capsys: Capture, tmp_path: Path) -> None:
    file = write(tmp_path, "# mine\n")
    assert main(["run", "grpo", "--dry-run", "--save-config", file]) == 2
    assert "the file is there already and is not replaced" in capsys.readouterr().err
    assert Path(file).read_text() == "# mine\n"


def test_every_option_of_a_graph_has_a_type_that_a_file_can_hold() -> None:
    for kind in KINDS.values():
        for hint in leaves_of(kind).values():
            values_of(hint).validate()
    assert get_type_hints(RunOptions)


ALIASES = ", ".join(f"&a{n} [{', '.join([f'*a{n - 1}' if n else 'x'] * 10)}]" for n in range(10))
BOMBS = {
    "aliases of aliases": (
        f"stop_strings: [{ALIASES}]",
        "run.yaml:2: stop_strings is not plain data (its lists and al",
    ),
    "merged mappings": (
        "zero.deepspeed: {"
        + ", ".join(
            f"m{n}: &m{n} {{!!merge <<: [{', '.join([f'*m{n - 1}'] * 9 if n else ['{a: 1}'])}]}}" for n in range(9)
        )
        + "}",
        "run.yaml:2: zero.deepspeed is not plain data (its lists and aliases stand for more than 100000 values)",
    ),
    "deep lists": (f"lr: {'[' * 5000}", "cannot be read: its lists or mappings are nested too deeply"),
    "deep mappings": (f"lr: {'{a: ' * 5000}", "cannot be read: its lists or mappings are nested too deeply"),
    "a node in itself": ("zero.deepspeed: &a {a: *a}", "is not plain data (it contains itself)"),
    "many digits": (f"lr: {'9' * 5000}", "run.yaml:2: lr is not plain data (Exceeds the limit (4300 digits)"),
    "more digits": (
        f"lr: !!int 0x{'f' * 9000}",
        "run.yaml:2: lr is a number of thousands of digits; it needs a number",
    ),
    "many keys": ("zero.deepspeed: {" + ", ".join(f"k{n}: 1" for n in range(3000)) + ", k7: 2}", "it has k7 twice"),
    "many bytes": ("lr: 1 # " + "x" * (1 << 20), "and a file of options has at most 1048576; is it another?"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_small_file_of_many_values_is_refused_at_once(capsys: Capture, tmp_path: Path, name: str) -> None:
    text, said = BOMBS[name]
    file = write(tmp_path, f"graph: grpo\n{text}\n")
    began_s = time.process_time()
    assert main(["check", "--config", file]) == 2
    captured = capsys.readouterr()
    assert said in captured.err and captured.err.count("\n") == 1, captured.err
    assert time.process_time() - began_s < 3.0  # a second is the aim; the first call also imports


def test_a_node_of_many_aliases_is_visited_once(tmp_path: Path) -> None:
    """Where the aliases stand for few values, too."""
    aliases = ", ".join(f"a{n}: &a{n} {{b: [{f'*a{n - 1}' if n else 'x'}]}}" for n in range(60))
    root = parse_yaml(tmp_path / write(tmp_path, f"it: {{{aliases}}}\n"))
    assert plain_data(root)["it"]["a59"]["b"][0]["b"]


def test_an_option_of_deep_json_is_one_sentence(capsys: Capture) -> None:
    assert main(["check", "grpo", "--zero.deepspeed", "a=" + "[" * 100_000]) == 2
    assert "nested too deeply" in capsys.readouterr().err
