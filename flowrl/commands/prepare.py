"""The first part of `flowrl check` and `flowrl run`: the graph, and its options from a run file and the command
line.

Options that depend on the model or the machine come from somewhere: given, derived, or `tiny`'s own (`find_origins`).
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowrl.errors import ConfigError
from flowrl.graph.command_line import option_names, parse_options
from flowrl.graph.graph import Graph
from flowrl.graph.load import GraphFile, dump_options, load_file, shipped_names
from flowrl.graph.machine import gpu_names
from flowrl.graph.option_help import GRAPH, asked_for_help, help_text, merge_groups, option_groups
from flowrl.graph.option_types import fill_config, has_option, leaves_of, options_of, value_of
from flowrl.graph.run_file import RunFile
from flowrl.machine.cpu import is_slow_in_bfloat16
from flowrl.models.policy import CHARACTER_MODELS
from flowrl.options.size_defaults import BY_SIZE, ENGINE_DTYPE, SizeDefaults, size_defaults
from flowrl.runtime.telemetry.standard_streams import print_text

Origins = Mapping[str, tuple[Any, str]]
GIVEN = "given"
"""Where a value comes from that a user has given."""


@dataclass(frozen=True)
class Prepared:
    """A graph that was built with the options of the command line and of a run file."""

    file: GraphFile
    graph: Graph
    cfg: Any
    own: tuple[Any, ...]
    """The command's own options, one instance for each of its dataclasses."""
    origins: Mapping[str, tuple[Any, str]]
    """Option that depends on the model -> (its value, where the value comes from)."""
    asked: frozenset[str] = frozenset()
    """Options of the graph that were given on the command line or in the run file, such as "trainer.cpus"."""
    of_run: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Options of `flowrl run` in the run file -> their values."""
    of_machine: frozenset[str] = frozenset()
    """Options of the graph that were not given, and whose defaults come from this machine or from a resumed run."""

    def lasting_options(self) -> dict[str, Any]:
        """The graph's options for a run file. Options in `of_machine` are left out, because another machine may read
        the file."""
        lasting = dump_options(self.cfg)
        for name in self.of_machine:
            block, _, leaf = name.rpartition(".")
            (lasting[block] if block else lasting).pop(leaf)
        return lasting


def prepare_graph(command: str, own_types: tuple[type[Any], ...], args: Sequence[str]) -> Prepared:
    """Load the graph file, split the options into flowrl's and the graph's own, build the graph."""
    run_file = _run_file(args)
    named = bool(args) and not args[0].startswith("-")
    file = _load_graph(command, args[0] if named else run_file.graph if run_file is not None else "", run_file)
    _refuse_shadowing(file, own_types)
    parts = _split_options(args[1:] if named else args, own_types)
    _refuse_those_of_run(command, parts[-1], {*option_names(file.config_type)}, own_types)
    given = run_file.values(file.config_type, *_in_run_files()) if run_file is not None else {}
    asked = {**given, **values_given(parts[-1], file.config_type)}
    names_of_run = {name for kind in _in_run_files() for name in leaves_of(kind)}
    of_run = {name: value for name, value in given.items() if name in names_of_run}
    fitting = size_defaults(
        file.config_type,
        asked,
        slow_bfloat16=_is_slow_in_bfloat16(args),
        resumed=_resumed_options(args, of_run),
    )
    own_given = ((kind, of_run if kind in _in_run_files() else {}) for kind in own_types)
    kinds = (*own_given, (file.config_type, {**fitting.values, **given}))
    defaults = [fill_config(kind, values) if values else None for kind, values in kinds]
    if (topic := asked_for_help(args)) is not None:
        _print_help(command, file, topic, [*zip((*own_types, file.config_type), defaults, strict=True)])
    prog = f"flowrl {command} {file.shown}"
    own = [
        parse_options(kind, part, prog=prog, default=default)
        for kind, part, default in zip(own_types, parts, defaults, strict=False)
    ]
    others = [name for kind in own_types for name in option_names(kind)]
    cfg = file.parse(parts[-1], prog=f"flowrl {command}", others=others, default=defaults[-1])
    return Prepared(
        file,
        file.build(cfg),
        cfg,
        tuple(own),
        find_origins(file, cfg, fitting, asked),
        asked=frozenset(asked) - frozenset(of_run),
        of_run=of_run,
        of_machine=frozenset(fitting.others) & frozenset(fitting.values),
    )


def _resumed_options(args: Sequence[str], of_run: Mapping[str, Any]) -> Mapping[str, Any]:
    """The graph's options of the run that --resume names; {} without one, or where its record cannot be read."""
    resume, run_dir = bool(of_run.get("resume")), of_run.get("run_dir")
    for arg, following in itertools.pairwise([*args, ""]):
        name, equals, value = arg.partition("=")
        if name in ("--resume", "--no-resume"):
            resume = name == "--resume"
        if name in ("--run-dir", "--run_dir"):
            run_dir = value if equals else following
    if not (resume and run_dir):
        return {}
    try:
        config = json.loads((Path(run_dir) / "config.json").read_text(encoding="utf-8"))["config"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}  # the run itself says what is wrong
    return config if isinstance(config, dict) else {}


def _is_slow_in_bfloat16(args: Sequence[str]) -> bool | None:
    """Whether this machine's CPU is slow in bfloat16; None if the run may use more than this CPU."""
    elsewhere = any(arg.partition("=")[0] == "--cluster" for arg in args) or os.environ.get("RAY_ADDRESS")
    return None if elsewhere or gpu_names() else is_slow_in_bfloat16()


def _refuse_those_of_run(command: str, args: Sequence[str], known: set[str], own_types: Sequence[type[Any]]) -> None:
    """Raise ConfigError for options that only `flowrl run` has; a suggestion of another option's name would mislead."""
    of_run = {name for kind in _in_run_files() if kind not in own_types for name in option_names(kind)}
    for arg in args:
        name = arg[2:].partition("=")[0].replace("_", "-") if arg.startswith("--") else ""
        if name in of_run - known:
            raise ConfigError(
                f"--{name} is an option of flowrl run, and flowrl {command} has none of that name; leave it out, or "
                "use flowrl run with --dry-run"
            )


def _load_graph(command: str, graph: str, run_file: RunFile | None) -> GraphFile:
    """The graph. If a file of that name also exists here, a line says which of the two is meant."""
    if not graph and run_file is not None:
        raise ConfigError(f"{run_file.path} names no graph; add `graph: grpo` to it, or write the graph first")
    if not graph:
        raise ConfigError(
            f"flowrl {command} needs a graph first, a name or a file: flowrl {command} grpo --field value; "
            "flowrl graphs lists the names"
        )
    if graph in shipped_names() and Path(f"{graph}.py").is_file():
        print_text(f"flowrl: {graph} is the graph of flowrl; the file here is {graph}.py", stream=sys.stderr)
    return load_file(graph)


def _run_file(args: Sequence[str]) -> RunFile | None:
    """The run file that --config names."""
    paths = []
    for arg, following in itertools.pairwise([*args, ""]):
        name, equals, value = arg.partition("=")
        if name == "--config":
            paths.append(value if equals else following)
    if len(paths) > 1:
        raise ConfigError("--config is given twice; a run has one run file, and options given beside it win")
    return RunFile.read(Path(paths[0])) if paths and paths[0] else None


def _in_run_files() -> tuple[type[Any], ...]:
    """The dataclasses, besides the graph's, whose options a run file may have."""
    from flowrl.runtime.driver.job import RunOptions

    return (RunOptions,)


def _split_options(args: Sequence[str], own_types: Sequence[type[Any]]) -> list[list[str]]:
    """The options of each of `own_types` with their values, then everything else."""
    own = [option_names(kind) for kind in own_types]
    parts: list[list[str]] = [[] for _ in (*own, "rest")]
    target = parts[-1]
    for arg in args:
        if arg.startswith("--"):
            name = arg[2:].partition("=")[0].replace("_", "-")
            target = next((part for part, names in zip(parts, own, strict=False) if name in names), parts[-1])
        target.append(arg)
    return parts


def _refuse_shadowing(file: GraphFile, own_types: Sequence[type[Any]]) -> None:
    own = {name for kind in own_types for name in options_of(kind)}
    for one in options_of(file.config_type).values():
        if one.name in own:
            raise ConfigError(
                f"{file.config_type.__name__}.{'.'.join(one.path)} in {file.path} has the name of flowrl's own option "
                f"--{one.name}; rename the field"
            )


def _print_help(command: str, file: GraphFile, asked: str, kinds: Sequence[tuple[type[Any], Any]]) -> None:
    """Print the help of a graph's options and of the command's own, and end the process."""
    *own, (config_type, values) = kinds
    groups = option_groups(config_type, values)
    groups += [group for kind, given in own for group in option_groups(kind, given, own=command)]
    about = (inspect.getdoc(file.module) or "").partition("\n\n")[0]
    filling = GRAPH if command == "run" else command
    print_text(help_text(f"flowrl {command} {file.shown}", asked, merge_groups(groups), about=about, own=filling))
    sys.stdout.flush()  # a closed pipe is noticed here
    raise SystemExit(0)


def values_given(args: Sequence[str], config_type: type[Any]) -> dict[str, Any]:
    """Option -> the text after it, for the options on the command line: "lora.rank" -> "8". Nothing is checked here."""
    leaves, found, name = option_names(config_type), dict[str, Any](), ""
    for arg in args:
        if arg.startswith("--"):
            spelled, equals, value = arg[2:].partition("=")
            name = leaves.get(spelled.replace("_", "-"), "").replace("-", "_")
            found |= {name: value if equals else None} if name else {}
        elif name and found[name] is None:
            found[name] = arg
    return found


def find_origins(file: GraphFile, cfg: Any, fitting: SizeDefaults, given: Mapping[str, Any]) -> Origins:
    """Every option of the graph that depends on model or machine -> (its value, where the value comes from)."""
    model = _leaf_value(cfg, "policy")
    if not isinstance(model, str) or getattr(cfg, "learning", None) is None:
        return {}
    own = f"{model}'s own" if model in CHARACTER_MODELS else f"of {file.shown}"
    found = {}
    for name in BY_SIZE:
        value = _leaf_value(cfg, name)
        if value is not None:
            found[name] = (
                value,
                GIVEN if name in given else fitting.origin_of(name) if name in fitting.values else own,
            )
        if name == "dtype" and (sampled := _leaf_value(cfg, ENGINE_DTYPE)) is not None:
            left = "what the model is stored in" if sampled == "auto" else f"of {file.shown}"
            told = fitting.origin_of(ENGINE_DTYPE) if ENGINE_DTYPE in fitting.values else left
            found[ENGINE_DTYPE] = (sampled, GIVEN if ENGINE_DTYPE in given else told)
    return found


def print_origins(found: Origins) -> None:
    """A line for each option: name, value, where it comes from."""
    if not found:
        return
    width = max(map(len, found), default=0)
    shown = {name: _value_text(value) for name, (value, _) in found.items()}
    column = max(map(len, shown.values()), default=0)
    print_text("\noptions that depend on the model and the machine:")
    print_text(*(f"  {name:<{width}}  {shown[name]:<{column}}  {why}" for name, (_, why) in found.items()), sep="\n")


def derived_text(found: Origins) -> str:
    """What was derived from the model's size, in one line; empty if nothing was."""
    derived = {name: (value, why) for name, (value, why) in found.items() if why.startswith("default for")}
    if not derived:
        return ""
    why = next(why for _, why in derived.values()).replace("default", "defaults", 1)
    return f"{why}: {', '.join(f'{name} {_value_text(value)}' for name, (value, _) in derived.items())}"


def _value_text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _leaf_value(cfg: Any, name: str) -> Any:
    return value_of(cfg, name) if has_option(cfg, name) else None
