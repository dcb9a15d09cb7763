"""The `flowrl` command: check, run, audit, show, serve-reward, version.

What a user got wrong is printed as one message without frames, and exits with 2. Everything heavy is
imported inside the command that needs it.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

from flowrl.errors import ConfigError, FlowrlError, GraphError
from flowrl.graph.command_line import option_names, parse_options
from flowrl.graph.graph import Graph
from flowrl.graph.load import GraphFile, load_file, user_code
from flowrl.graph.machine import Cluster

Options = TypeVar("Options")

HELP = ("-h", "--help", "help")
USAGE = """\
usage: flowrl COMMAND

  check GRAPH.py [--draw FILE.svg|FILE.mmd] [--cluster SPEC] [--preflight] [--field value ...]
        find every problem of a graph and print what follows from it; starts nothing.
        --preflight: also load models, task, reward and environment, and try them out as a run does before it starts
  run   GRAPH.py [--steps N] [--run-dir DIR] [--resume] [--field value ...]
        run a graph; --help after GRAPH.py lists the fields and all options
  audit RUN_DIR
        prove a run's ledger and its staleness bound from its own records
  show  RUN_DIR [SAMPLE] [--plain]
        print an episode as the policy saw it, token by token; without SAMPLE list those that are kept
  serve-reward MODEL|FILE.py:FUNCTION [--port N] [--host ADDRESS]
        answer rewards over HTTP, for graphs that name the address as their reward
  version

to begin with:

  flowrl check graphs/grpo.py
  flowrl run graphs/grpo.py --steps 20 --run-dir runs/first
  flowrl audit runs/first"""


@dataclass(frozen=True)
class CheckOptions:
    """Options of `flowrl check`."""

    draw: tuple[Path, ...] = ()
    """Draw the graph: FILE.svg, FILE.mmd (Mermaid), or both."""
    cluster: str = ""
    """Check against this cluster instead of this machine: "2x cpus=32 gpus=8 memory=256" (GiB)."""
    preflight: bool = False
    """Also try out what a run tries out before it starts: models, task, reward, a trial episode, chat template."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit status: 0 fine, 1 an audit that failed, 2 a mistake or failure told."""
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in HELP or (len(args) == 2 and args[0] in COMMANDS and args[1] in HELP):
        print(USAGE)
        return 0 if args else 2
    status = _status(args)
    if (cluster := sys.modules.get("flowrl.runtime.driver.cluster")) is not None and cluster.RayCluster.abandoned:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


def _status(args: Sequence[str]) -> int:
    """The exit status of a command; a user's mistake or a failure is printed as one message."""
    try:
        return _command(args[0])(args[1:])
    except GraphError as error:
        print(f"flowrl: the graph cannot run, {_count(error)}:\n{error}", file=sys.stderr)
    except FlowrlError as error:
        print(f"flowrl: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        print("flowrl: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python complains of it once more at exit
        return 141
    return 2


def check(args: Sequence[str]) -> int:
    """`flowrl check GRAPH.py`: problems to stderr and status 2, or the plan to stdout."""
    from flowrl.graph.analysis.check import check as find
    from flowrl.graph.analysis.report import render
    from flowrl.graph.drawing.draw import draw

    file, graph, _, options = _prepare("check", CheckOptions, args)
    cluster = Cluster.parse(options.cluster) if options.cluster else Cluster.here()
    with user_code(file.path):
        report = find(graph, cluster)
    for path in options.draw:
        draw(graph, report.plan, path)
    if report.problems:
        raise GraphError(report.problems)
    print(render(report))
    if options.preflight:
        _print_preflight(graph, file.path)
    return 0


def _print_preflight(graph: Graph, path: Path) -> None:
    from flowrl.runtime.driver.preflight import preflight

    sys.stdout.flush()  # the plan is to be seen while models load
    findings = preflight(graph, path)
    print("\npreflight: ok")
    for name, text in findings.items():
        print(f"  {name}: {text}")


def run(args: Sequence[str]) -> int:
    """`flowrl run GRAPH.py`: status 0 when it ended well and, where there is a ledger, the audit is ok."""
    from flowrl.runtime.driver.options import RunOptions

    file, graph, cfg, options = _prepare("run", RunOptions, args)
    from flowrl.runtime.driver.launch import run as launch

    result = launch(file.path, graph, cfg, options)
    if result.audit is None:
        return 0
    print(result.audit)
    return 0 if result.audit.ok else 1


def audit(args: Sequence[str]) -> int:
    """`flowrl audit RUN_DIR`: prints "audit: ok" or every violation."""
    if len(args) != 1 or args[0].startswith("-"):
        raise ConfigError("flowrl audit needs one run directory: flowrl audit runs/NAME")
    path = Path(args[0])
    if not path.is_dir():
        raise ConfigError(f"there is no run directory {path}; name the one given to flowrl run --run-dir")
    from flowrl.runtime.audit.audit import audit as prove

    report = prove(path)
    print(report)
    return 0 if report.ok else 1


def show(args: Sequence[str]) -> int:
    """`flowrl show RUN_DIR [SAMPLE]`: prints a sample, or the list of the episodes kept."""
    plain = "--plain" in args
    names = [arg for arg in args if arg != "--plain"]
    if not 1 <= len(names) <= 2 or any(name.startswith("-") for name in names):
        raise ConfigError("flowrl show needs a run directory, and maybe a sample: flowrl show runs/NAME prompts:0:1")
    if not Path(names[0]).is_dir():
        raise ConfigError(f"there is no run directory {names[0]}; name the one given to flowrl run --run-dir")
    from rich.console import Console

    from flowrl.runtime.show.show import show as print_sample

    console = Console(force_terminal=False if plain else None, color_system=None if plain else "auto")
    print_sample(Path(names[0]), names[1] if len(names) == 2 else None, console)
    return 0


def serve_reward(args: Sequence[str]) -> int:
    """`flowrl serve-reward MODEL`: serves until it is interrupted."""
    if not args or args[0].startswith("-"):
        raise ConfigError(
            "flowrl serve-reward needs a reward model's directory or FILE.py:FUNCTION first: "
            "flowrl serve-reward runs/rm/checkpoints/step_000100 --port 8100"
        )
    from flowrl.nodes.serve import ServeOptions, serve

    serve(args[0], parse_options(ServeOptions, args[1:], prog=f"flowrl serve-reward {args[0]}"))
    return 0


def show_version(args: Sequence[str]) -> int:
    """`flowrl version`"""
    if args:
        raise ConfigError(f"flowrl version takes no arguments, found {' '.join(args)}; leave them out")
    print(version("flowrl"))
    return 0


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "check": check,
    "run": run,
    "audit": audit,
    "show": show,
    "serve-reward": serve_reward,
    "version": show_version,
}


def _command(name: str) -> Callable[[Sequence[str]], int]:
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, 1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(COMMANDS)}"
        raise ConfigError(f"there is no command {name!r}; {hint}")
    return COMMANDS[name]


def _prepare(command: str, own_type: type[Options], args: Sequence[str]) -> tuple[GraphFile, Graph, Any, Options]:
    """Load the graph file, split the options into flowrl's and the graph's own, build the graph."""
    if not args or args[0].startswith("-"):
        raise ConfigError(f"flowrl {command} needs a graph file first: flowrl {command} GRAPH.py --field value")
    file = load_file(args[0])
    _refuse_shadowing(file, own_type)
    own, rest = _split(args[1:], own_type)
    if "--help" in own + rest:
        _print_help(command, file, own_type)
    options = parse_options(own_type, own, prog=f"flowrl {command} {file.path}")
    cfg = file.parse(rest, prog=f"flowrl {command}", others=option_names(own_type))
    return file, file.build(cfg), cfg, options


def _split(args: Sequence[str], own_type: type[Any]) -> tuple[list[str], list[str]]:
    """(flowrl's own options with their values, everything else)"""
    own = option_names(own_type)
    parts: tuple[list[str], list[str]] = ([], [])
    target = parts[1]
    for arg in args:
        if arg.startswith("--"):
            target = parts[0] if arg[2:].partition("=")[0].replace("_", "-") in own else parts[1]
        target.append(arg)
    return parts


def _refuse_shadowing(file: GraphFile, own_type: type[Any]) -> None:
    own = {field.name for field in dataclasses.fields(own_type)}
    for field in dataclasses.fields(file.config_type):
        if field.name in own:
            raise ConfigError(
                f"{file.config_type.__name__}.{field.name} in {file.path} has the name of flowrl's own option "
                f"--{field.name}; rename the field"
            )


def _print_help(command: str, file: GraphFile, own_type: type[Any]) -> None:
    """Both lists of options; ends the process."""
    for kind, prog in ((own_type, f"flowrl {command} GRAPH.py"), (file.config_type, f"flowrl {command} {file.path}")):
        try:
            parse_options(kind, ["--help"], prog=prog)
        except SystemExit:
            print()
    for name, leaf in option_names(file.config_type).items():
        if leaf.startswith(f"{name}."):
            print(f"--{name} VALUE is short for --{leaf} VALUE")
    raise SystemExit(0)


def _count(error: GraphError) -> str:
    return f"{len(error.problems)} problem{'s' if len(error.problems) > 1 else ''}"


if __name__ == "__main__":
    sys.exit(main())
