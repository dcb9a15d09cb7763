"""Commands around training that run a graph of flowrl: `flowrl generate`, `flowrl score`, `flowrl evaluate`.

`flowrl generate MODEL --field value` is `flowrl run generate --policy MODEL --field value`: the same nodes, options
and records.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flowrl.commands.origins import derived_text
from flowrl.commands.prepare import prepare
from flowrl.errors import ConfigError

FIRST: Mapping[str, tuple[str, str]] = {
    "generate": ("--policy", "a model: flowrl generate MODEL --task TASK --out FILE.jsonl"),
    "score": ("--task", "a file of responses: flowrl score FILE.jsonl --task.reward REWARD --out SCORED.jsonl"),
    "evaluate": ("--policy", "a model: flowrl evaluate MODEL --task TASK"),
}
"""Command -> the option that its first argument stands for, and what that is."""


def run_graph_of(command: str, args: Sequence[str]) -> int:
    """Run the graph of that name; the exit status."""
    option, needed = FIRST[command]
    if args and args[0] in ("-h", "--help"):
        prepare("run", (), [command, "--help"])
    if not args or args[0].startswith("-"):
        raise ConfigError(f"flowrl {command} needs {needed}")
    from flowrl.runtime.driver.launch import Launch
    from flowrl.runtime.driver.options import RunOptions

    prepared = prepare("run", (RunOptions,), [command, option, *args])
    (options,) = prepared.own
    derived = derived_text(prepared.origins)
    result = Launch(prepared.file.path, prepared.graph, prepared.cfg, options, derived).run()
    print_figures(result.outcome.evaluations)
    return 0


def print_figures(evaluations: Mapping[str, Mapping[str, float]]) -> None:
    """Print the figures of a graph that evaluates and trains nothing; nothing for others, whose view has told them.

    `evaluations`: phase -> metric -> value, as `Outcome.evaluations`.
    """
    if set(evaluations) != {"before"}:
        return
    figures = evaluations["before"]
    width = max(map(len, figures), default=0)
    for name, value in figures.items():
        print(f"{name:<{width}}  {value:.4g}")
