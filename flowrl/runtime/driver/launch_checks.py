"""Checks for options of a run that have no effect with its graph."""

from __future__ import annotations

from flowrl.errors import ConfigError
from flowrl.graph.analysis.branches import trainers
from flowrl.graph.graph import Graph
from flowrl.runtime.driver.options import RunOptions


def check_options(options: RunOptions, graph: Graph) -> None:
    """Raise ConfigError for an option that would do nothing."""
    _check_keep_best(options, graph)
    _check_stop(options, graph)
    if graph.admission is None and not any(node.gang for node in graph.nodes.values()):
        _check_stepless(options)


def _check_stepless(options: RunOptions) -> None:
    for option, value in (("--steps", options.steps), ("--save-every", options.save_every)):
        if value:
            raise ConfigError(
                f"{option} counts the batches of a trainer, and the graph has none: it runs until the end of its "
                f"data; leave {option} out"
            )


def _check_keep_best(options: RunOptions, graph: Graph) -> None:
    if options.keep_best and not trainers(graph):
        raise ConfigError(
            "--keep-best chooses among the checkpoints of a trainer, and the graph has none; leave --keep-best out"
        )
    if options.keep_best and not any(hasattr(node, "evaluate") for node in graph.nodes.values()):
        raise ConfigError(
            "--keep-best needs held-out scores, but the graph evaluates nothing; add an Evaluation node (in the "
            "graphs of flowrl: --evaluate N), or leave --keep-best out"
        )


def _check_stop(options: RunOptions, graph: Graph) -> None:
    metric = options.stop.metric
    if metric.startswith("evaluation/") and not any(
        getattr(n, "every", 0) for n in graph.nodes.values() if hasattr(n, "evaluate")
    ):
        raise ConfigError(
            f"--stop.metric {metric} has values only from evaluations during training, and there are none; add an "
            "Evaluation node with every=N (in the graphs of flowrl: --evaluate-every N)"
        )
