"""The `flowrl` command; `USAGE` lists what it can do.

A user's mistake is printed as one message without a traceback, and the exit status is 2. Heavy modules are imported
inside the command that needs them.
"""

from __future__ import annotations

import difflib
import errno
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path

from flowrl.commands.copy_graph import Skeleton, parse_new
from flowrl.commands.prepare import prepare_graph, print_origins
from flowrl.commands.run_graph import print_preflight, print_report, print_trial, propose_options, report_of, run_graph
from flowrl.commands.usage import HELP, OWN_HELP, USAGE, WITHOUT_OPTIONS
from flowrl.errors import ConfigError, FlowrlError, GraphError
from flowrl.graph.command_line import parse_options
from flowrl.graph.load import graph_summary, shipped_names
from flowrl.graph.machine import Cluster
from flowrl.graph.option_types import named
from flowrl.machine.proxies import reach_directly
from flowrl.runtime.telemetry.standard_streams import (
    flush_stream,
    let_go,
    open_closed,
    print_line,
    print_text,
    replace_unwritable,
)

UNWRITTEN = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)
"""What the system says of a write to a stream; such an error names no file."""


@dataclass(frozen=True)
class CheckOptions:
    """Options of `flowrl check`."""

    draw: tuple[Path, ...] = ()
    """Draw the graph: FILE.svg, FILE.mmd (Mermaid), or both."""
    cluster: str = ""
    """Check against this cluster instead of this machine: "2 x 8 x H100" (machines x GPUs x card), "1 x 1 x 24GB",
    or "2x cpus=32 gpus=8 memory=256" (GiB)."""
    preflight: bool = False
    """Also do the trials that a run does before it starts: models, task, reward, a trial episode, chat template."""
    trial: bool = named("try", False)
    """Also try the graph: two batches through all of its nodes in one process, with a resume and the audit. Models are
    replaced by stand-ins; your nodes, rewards and losses are real."""
    config: Path | None = None
    """Read options from this run file (YAML). Options on the command line take precedence."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    0: it succeeded; 1: an audit, doctor or gpu-check failed; 2: a mistake or failure, which was printed; 130:
    interrupted; 141: the reader of stdout has closed it, which a run does not mind.
    """
    open_closed()
    replace_unwritable()
    reach_directly()
    args = list(sys.argv[1:] if argv is None else argv)
    status = _status(args)
    if (cluster := sys.modules.get("flowrl.runtime.driver.ray_cluster")) is not None and cluster.RayCluster.abandoned:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


def _usage(args: Sequence[str]) -> int:
    print_text(USAGE)
    return 0 if args else 2


def _asks_for_usage(args: Sequence[str]) -> bool:
    """Whether the arguments ask for help in general, or for help on a command that prints none of its own."""
    if args[0] in HELP:
        return True
    if args[0] not in COMMANDS or args[0] in OWN_HELP:
        return False
    if args[0] in WITHOUT_OPTIONS:
        return any(arg in ("-h", "--help") for arg in args[1:])
    return len(args) == 2 and args[1] in HELP


def _status(args: Sequence[str]) -> int:
    """The exit status of a command; a user's mistake or a failure is printed as one message."""
    try:
        status = _usage(args) if not args or _asks_for_usage(args) else _command(args[0])(args[1:])
        sys.stdout.flush()  # a closed pipe is noticed here, and not when Python exits
        return status
    except GraphError as error:
        print_line(f"flowrl: the graph cannot run, {_count(error)}:\n{error}", sys.stderr)
    except FlowrlError as error:
        print_line(f"flowrl: {error}", sys.stderr)
    except KeyboardInterrupt:
        print_line("flowrl: interrupted", sys.stderr)
        return 130
    except BrokenPipeError:
        let_go(sys.stdout)
        return 141
    except OSError as error:
        flush_stream(sys.stdout)
        print_line(f"flowrl: {_of_system(error)}", sys.stderr)
    return 2


def _of_system(error: OSError) -> str:
    """An error of the operating system in one sentence."""
    files = [str(name) for name in (error.filename, error.filename2) if name is not None]
    unnamed = "its output cannot be written" if error.errno in UNWRITTEN else type(error).__name__
    text = f"{' and '.join(files) or unnamed}: {error.strerror or error}"
    if isinstance(error, PermissionError):
        return f"{text}; ask its owner to let you use it, or run the command as its owner (a run is its owner's alone)"
    return text


def setup(args: Sequence[str]) -> int:
    """`flowrl setup`: the command `flowrl` runs it before it imports this module, see `flowrl_setup.entry`."""
    raise ConfigError(
        "setup installs what this module imports, so it begins without it; run flowrl setup cpu, or python -m "
        "flowrl_setup cpu"
    )


def graphs(args: Sequence[str]) -> int:
    """`flowrl graphs`: a line for each graph that comes with flowrl."""
    _no_arguments("graphs", args)
    width = max(map(len, shipped_names()))
    for name in shipped_names():
        print_text(f"{name:<{width}}  {graph_summary(name)}")
    return 0


def new(args: Sequence[str]) -> int:
    """`flowrl new MY_GRAPH.py --from NAME`, or `--node KIND`: prints the files written and what to do next."""
    asked = parse_new(list(args))
    written = asked.write_files()
    for path in written:
        print_text(f"wrote {path}")
    if isinstance(asked, Skeleton):
        print_text(f"next: pytest {written[1]}, and mypy --strict {written[0]}")
    else:
        print_text(f"next: flowrl check {asked.target}, then flowrl run {asked.target} --steps 20")
    return 0


def quickstart(args: Sequence[str]) -> int:
    """`flowrl quickstart`: status 0 when the audit is ok."""
    from flowrl.commands.quickstart import QuickstartOptions, train_quickstart

    return train_quickstart(parse_options(QuickstartOptions, args, prog="flowrl quickstart"))


def check(args: Sequence[str]) -> int:
    """`flowrl check GRAPH`: problems to stderr and status 2, or the plan to stdout."""
    from flowrl.graph.drawing import draw_graph

    prepared = prepare_graph("check", (CheckOptions,), args)
    (options,) = prepared.own
    cluster = Cluster.parse(options.cluster) if options.cluster else Cluster.here()
    report = report_of(prepared, cluster)
    for path in options.draw if report.planned else ():
        draw_graph(prepared.graph, report.plan, path)
    print_report(report, propose_options(prepared, cluster, report))
    print_origins(prepared.origins)
    if options.preflight:
        print_preflight(prepared)
    if options.trial:
        print_trial(prepared)
    return 0


def run(args: Sequence[str]) -> int:
    """`flowrl run GRAPH`: status 0 when it ended well and, where there is a ledger, the audit is ok."""
    return run_graph(args)


def tune(args: Sequence[str]) -> int:
    """`flowrl tune GRAPH`: measures, and writes the run file of the placement with the shortest step."""
    from flowrl.commands.tune.tune import tune_graph as find_placement

    return find_placement(args)


def audit(args: Sequence[str]) -> int:
    """`flowrl audit RUN_DIR [--whole]`: prints "audit: ok" or every violation."""
    names = [arg for arg in args if arg != "--whole"]
    if len(names) != 1 or names[0].startswith("-"):
        raise ConfigError("flowrl audit needs one run directory: flowrl audit runs/NAME [--whole]")
    path = Path(names[0])
    if not path.is_dir():
        raise ConfigError(f"there is no run directory {path}; name the one given to flowrl run --run-dir")
    from flowrl.runtime.audit.audit import continue_audit

    report = continue_audit(path, whole="--whole" in args)
    print_text(report)
    return 0 if report.ok else 1


def samples(args: Sequence[str]) -> int:
    """`flowrl samples RUN_DIR`: prints samples that a run has kept."""
    from flowrl.commands.samples import print_samples as print_samples

    return print_samples(args)


def show(args: Sequence[str]) -> int:
    """`flowrl show RUN_DIR [SAMPLE]`"""
    from flowrl.commands.samples import show_sample

    return show_sample(args)


def _around(command: str, args: Sequence[str]) -> int:
    """`flowrl generate MODEL`, `score FILE`, `evaluate MODEL`: the graph of that name, and its figures."""
    from flowrl.commands.run_graph import run_graph_of

    return run_graph_of(command, args)


def merge(args: Sequence[str]) -> int:
    """`flowrl merge ADAPTER`: prints where the merged model is."""
    from flowrl.commands.merge_adapter import merge_adapter as merge_adapter

    return merge_adapter(args)


def export(args: Sequence[str]) -> int:
    """`flowrl export RUN`: prints where the model is."""
    from flowrl.commands.export import export_model as export_model

    return export_model(args)


def chat(args: Sequence[str]) -> int:
    """`flowrl chat MODEL`: until the input ends."""
    from flowrl.commands.talk import chat_with_model as talk

    return talk(args)


def doctor(args: Sequence[str]) -> int:
    """`flowrl doctor`: status 1 if something failed."""
    from flowrl.commands.doctor import DoctorOptions, print_findings

    return print_findings(parse_options(DoctorOptions, args, prog="flowrl doctor"))


def gpu_check(args: Sequence[str]) -> int:
    """`flowrl gpu-check`: status 1 if a stage failed."""
    from flowrl.commands.gpu_check.gpu_check import GpuCheckOptions
    from flowrl.commands.gpu_check.gpu_check import gpu_check as run_stages

    return run_stages(parse_options(GpuCheckOptions, args, prog="flowrl gpu-check"))


def serve_reward(args: Sequence[str]) -> int:
    """`flowrl serve-reward MODEL`: serves until it is interrupted."""
    if not args or args[0].startswith("-"):
        raise ConfigError(
            "flowrl serve-reward needs a reward model's directory or FILE.py:FUNCTION first: "
            "flowrl serve-reward runs/rm/checkpoints/step_000100 --port 8100"
        )
    from flowrl.nodes.scoring.reward_service import ServeOptions, serve_until_interrupted

    serve_until_interrupted(args[0], parse_options(ServeOptions, args[1:], prog=f"flowrl serve-reward {args[0]}"))
    return 0


def show_version(args: Sequence[str]) -> int:
    """`flowrl version`"""
    _no_arguments("version", args)
    print_text(version("flowrl-engine"))
    return 0


def _no_arguments(command: str, args: Sequence[str]) -> None:
    if args:
        raise ConfigError(f"flowrl {command} takes no arguments, found {' '.join(args)}; leave them out")


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "check": check,
    "run": run,
    "tune": tune,
    "graphs": graphs,
    "new": new,
    "quickstart": quickstart,
    "audit": audit,
    "samples": samples,
    "show": show,
    "evaluate": partial(_around, "evaluate"),
    "generate": partial(_around, "generate"),
    "score": partial(_around, "score"),
    "chat": chat,
    "merge": merge,
    "export": export,
    "doctor": doctor,
    "gpu-check": gpu_check,
    "serve-reward": serve_reward,
    "setup": setup,
    "version": show_version,
}


def _command(name: str) -> Callable[[Sequence[str]], int]:
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, 1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(COMMANDS)}"
        raise ConfigError(f"there is no command {name!r}; {hint}")
    return COMMANDS[name]


def _count(error: GraphError) -> str:
    return f"{len(error.problems)} problem{'s' if len(error.problems) > 1 else ''}"


if __name__ == "__main__":
    sys.exit(main())
