"""Commands around training that run a graph of flowrl: `flowrl generate`, `flowrl score`, `flowrl evaluate`.

`flowrl generate MODEL --field value` is `flowrl run generate --policy MODEL --field value`: the same nodes, options and
records. A run file (--config) may give what the first argument gives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flowrl.commands.run_graph import run_graph
from flowrl.errors import ConfigError
from flowrl.graph.option_help import asked_for_help

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
