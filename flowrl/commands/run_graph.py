"""Running a graph with the options of a command line: what `flowrl run` and the commands around training share."""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowrl.commands.prepare import Prepared, derived_text, prepare_graph, print_origins
from flowrl.errors import ConfigError, GraphError
from flowrl.graph.load import dump_options, is_shipped, user_code
from flowrl.graph.machine import Cluster
from flowrl.graph.option_help import asked_for_help
from flowrl.graph.run_file import run_file_text, write_run_file
from flowrl.runtime.telemetry.standard_streams import print_line, print_text

if TYPE_CHECKING:
    from flowrl.testing.trial import RunningTrial


WITHOUT_TRIAL = "--try-s 0 leaves the trial out"


@dataclass(frozen=True)
class RunFileOptions:
    """Options of `flowrl run` about its options."""

    config: Path | None = None
    """Read options from this run file (YAML). Options on the command line take precedence."""
    save_config: Path | None = None
    """Write all options to this run file before the run begins."""
    here: bool = False
    """Run all nodes in this process, without Ray: breakpoint(), print and debuggers work, and the run begins sooner.
    vLLM's engine has its own process. For one machine without GPUs; a trainer has one rank."""
    try_s: float = 3.0
    """Seconds to wait, when everything else is checked, for a trial of your own graph, as of flowrl check --try; 0: no
    trial. A run that is resumed, joins a cluster or is --here has none."""
    dry_run: bool = False
    """Print all options, check the graph, models, data and reward, and start nothing."""


def run_graph(args: Sequence[str]) -> int:
    """Run the graph named first in `args`. Returns 0 if the run ended well and, if it has a ledger, the audit is ok."""
    from flowrl.runtime.driver.job import RunOptions

    started_s = time.monotonic()
    prepared = prepare_graph("run", (RunOptions, RunFileOptions), args)
    options, of_files = prepared.own
    if of_files.save_config is not None:
        write_run_file(of_files.save_config, prepared.file.shown, dump_options(options), prepared.lasting_options())
    from flowrl.runtime.driver.launch import Launch

    if of_files.here:  # the terminal is the user's: for print, input and debuggers
        options = replace(options, plain=True)
    file, derived = prepared.file.path, derived_text(prepared.origins)
    launch = Launch(file, prepared.graph, prepared.cfg, options, derived, started_s, _advice(prepared))
    launch.here = of_files.here
    if of_files.dry_run:
        return _dry_run(prepared, run_file_text(prepared.file.shown, dump_options(options), dump_options(prepared.cfg)))
    trial = None if options.resume or of_files.here else begin_trial(prepared, of_files.try_s)
    try:
        if trial is not None:
            launch.trial = functools.partial(tell_trial, trial, of_files.try_s)
        result = launch.run()
    finally:
        if trial is not None:
            trial.end()
    if result.audit is None:
        print_figures(result.outcome.evaluations)
        return 0
    print_line(str(result.audit), sys.stdout)
    return 0 if result.audit.ok else 1


def _advice(prepared: Prepared) -> Callable[[Mapping[str, Any]], str]:
    """What is said during the run if another placement would be faster."""
    from flowrl.commands.tune.faster_placement import PlacementAdvice
    from flowrl.commands.tune.tuned_graph import TunedGraph

    tuned = TunedGraph(prepared.file, prepared.cfg, Cluster.here(), fixed=prepared.asked)
    return PlacementAdvice(tuned).after_step


def print_figures(evaluations: Mapping[str, Mapping[str, float]]) -> None:
    """Print the figures of a graph that evaluates and does not train; other graphs' figures were already shown during
    the run.

    `evaluations`: phase -> metric -> value, as `Outcome.evaluations`.
    """
    if set(evaluations) != {"before"}:
        return
    figures = evaluations["before"]
    width = max(map(len, figures), default=0)
    for name, value in figures.items():
        print_text(f"{name:<{width}}  {value:.0f}" if float(value).is_integer() else f"{name:<{width}}  {value:.4g}")


def begin_trial(prepared: Prepared, within_s: float) -> RunningTrial | None:
    """The trial of a graph that is the user's, while the other checks go on; None if there is nothing to try here."""
    if within_s <= 0 or is_shipped(prepared.file.path) or os.environ.get("RAY_ADDRESS"):
        return None
    from flowrl.testing.trial import start_trial, untried_nodes

    return None if untried_nodes(prepared.graph) else start_trial(prepared.file, dump_options(prepared.cfg))


def tell_trial(trial: RunningTrial, within_s: float) -> str:
    """A line about the trial. Raises ConfigError for what it has found."""
    result = trial.wait_for_result(within_s)
    if result.problem:
        raise ConfigError(f"a trial of the graph, before its run, has found a mistake: {result}\n{WITHOUT_TRIAL}")
    return "\n".join((str(result), *result.warnings))


def print_trial(prepared: Prepared) -> None:
    """Try the graph, and print the result. Raises ConfigError for what the trial has found."""
    from flowrl.testing.trial import start_trial, untried_nodes

    sys.stdout.flush()
    if untried := untried_nodes(prepared.graph):
        raise ConfigError(
            f"--try: {', '.join(untried)} needs a GPU and has no stand-in, so the graph cannot be tried; give the node "
            "0 GPUs for the trial, or test it by itself (docs/testing.md)"
        )
    result = start_trial(prepared.file, dump_options(prepared.cfg)).wait_for_result()
    if result.problem:
        raise ConfigError(f"--try has found a mistake: {result}")
    print_text(f"\ntry: {result}")
    for text in result.warnings:
        print_text(f"  warning: {text}")


def _dry_run(prepared: Prepared, text: str) -> int:
    """Print the options, the plan, and the results of the checks that a run does before it starts."""
    print_text(text)
    report = report_of(prepared, Cluster.here())
    print_report(report, propose_options(prepared, Cluster.here(), report))
    print_origins(prepared.origins)
    print_preflight(prepared)
    print_text("dry run: graph, models, data and reward are fine; nothing was started")
    return 0


def report_of(prepared: Prepared, cluster: Cluster) -> Any:
    """What the checks of the graph find for this cluster."""
    from flowrl.graph.analysis.check import check as find

    with user_code(prepared.file.path):
        return find(prepared.graph, cluster)


def propose_options(prepared: Prepared, cluster: Cluster, report: Any) -> str:
    """Options with which the graph would fit, if its size is the only problem; else ""."""
    if not report.too_large:
        return ""
    from flowrl.commands.fit import find_fitting, option_text

    found = find_fitting(prepared.file, prepared.cfg, cluster)
    if found is None:
        return "Nothing that was tried (ranks, their micro-batches, parallel parts, turns, offload) makes it fit there."
    return f"It fits with {option_text(found)}"


def print_report(report: Any, proposed: str = "") -> None:
    """Print the plan. Raises GraphError for the problems of the graph, with `proposed` after the last one."""
    from flowrl.graph.analysis.report import render_report

    if report.problems:
        *others, last = report.problems
        raise GraphError((*others, f"{last} {proposed}".rstrip()))
    print_text(render_report(report))


def print_preflight(prepared: Prepared) -> None:
    """Do the checks that a run does before it starts, and print the nodes' findings."""
    from flowrl.runtime.driver.launch import preflight

    sys.stdout.flush()  # so that the plan is shown while models load
    findings = preflight(prepared.graph, prepared.file.path)
    print_text("\npreflight: ok")
    for name, text in findings.items():
        print_text(f"  {name}: {text}")


FIRST: Mapping[str, tuple[str, str]] = {
    "generate": ("--policy", "a model: flowrl generate MODEL --task TASK --out FILE.jsonl"),
    "score": ("--task", "a file of responses: flowrl score FILE.jsonl --task.reward REWARD --out SCORED.jsonl"),
    "evaluate": ("--policy", "a model: flowrl evaluate MODEL --task TASK"),
}
"""Command -> (the option whose value its first argument is, what that argument has to be)."""


def run_graph_of(command: str, args: Sequence[str]) -> int:
    """Run the graph of that name; returns the exit status."""
    option, needed = FIRST[command]
    if args and args[0].startswith("-") and asked_for_help(args) is not None:
        return run_graph([command, *args])
    if args and not args[0].startswith("-"):
        return run_graph([command, option, *args])
    if not any(arg.partition("=")[0] == "--config" for arg in args):
        raise ConfigError(f"flowrl {command} needs {needed}")
    return run_graph([command, *args])
