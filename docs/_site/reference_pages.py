"""Pages made from docstrings: nodes by what they do, the classes a graph is written with, and the commands."""

from __future__ import annotations

from typing import Any, get_args, get_origin, get_type_hints

import flowrl.nodes
from docs._site.option_tables import field_table, option_rows
from flowrl import Call, In, Node, Out, Serve
from flowrl.cli import CheckOptions
from flowrl.commands.doctor import DoctorOptions
from flowrl.commands.export import ExportOptions
from flowrl.commands.gpu_check.gpu_check import GpuCheckOptions
from flowrl.commands.merge_adapter import MergeOptions
from flowrl.commands.quickstart import QuickstartOptions
from flowrl.commands.run_graph import RunFileOptions
from flowrl.commands.samples import SamplesOptions
from flowrl.commands.talk import ChatOptions
from flowrl.commands.tune.tune import TuneOptions
from flowrl.graph.option_help import class_summary
from flowrl.nodes.scoring.reward_service import ServeOptions
from flowrl.runtime.driver.job import RunOptions

DIRECTIONS: dict[Any, str] = {In: "in", Out: "out", Call: "asks", Serve: "answers"}
NODES = {
    "Sources": (
        "PromptSource",
        "TaskSource",
        "EnvironmentSource",
        "DemonstrationSource",
        "TextSource",
        "RemainingPrompts",
    ),
    "Generation and scoring": ("Generator", "GivenAnswers", "GivenResponses", "Reference", "Teacher", "Critic"),
    "Rewards": ("Reward", "RewardModel", "ProcessReward"),
    "Advantages and batches": ("GroupAdvantage", "JoinedAdvantage", "TeacherAdvantage", "TokenBatch"),
    "Selection": ("BestOfN", "PairMaker", "PairWriter", "ResponseWriter"),
    "Training": ("Trainer",),
    "Datasets": (
        "Demonstrations",
        "TextDataset",
        "Texts",
        "Preferences",
        "PreferenceDataset",
        "PreferenceSource",
        "StepDataset",
    ),
    "Preferences' reference": ("PreferenceReference",),
    "Evaluation": ("Evaluation", "HeldOutBatch"),
    "Episodes": ("Environment", "AgentProgram"),
    "Settings of nodes": (
        "Engine",
        "Sampling",
        "ReplySchema",
        "Limits",
        "Shaping",
        "Replay",
        "Overlong",
        "DynamicSampling",
        "Curriculum",
        "AdaptiveKL",
        "PromptLimit",
    ),
}
"""Heading -> names of `flowrl.nodes`."""
CHOICES = ("RowPart", "TooLong")
"""Names of `flowrl.nodes` that are types of options with a few values each."""
API = {
    "graph": (
        "Graphs and nodes",
        "What a graph and a node of one's own are written with; all of it is imported from `flowrl`.",
        (
            "flowrl.graph.graph.Graph",
            "flowrl.graph.node.Node",
            "flowrl.graph.node.Facts",
            "flowrl.graph.ports.In",
            "flowrl.graph.ports.Out",
            "flowrl.graph.ports.Call",
            "flowrl.graph.ports.Serve",
            "flowrl.graph.ports.Join",
            "flowrl.graph.ports.Members",
            "flowrl.graph.analysis.check.check",
            "flowrl.graph.machine.Cluster",
            "flowrl.graph.machine.Machine",
            "flowrl.errors",
        ),
    ),
    "messages": (
        "Messages",
        "What travels along edges. A message of your own is a frozen dataclass that derives from `flowrl.Message`.",
        ("flowrl.messages",),
    ),
    "training": (
        "Losses, advantages and settings",
        "[losses.md](../losses.md) shows how to write a loss.",
        (
            "flowrl.training.loss.objective",
            "flowrl.training.loss.function_objective.FunctionObjective",
            "flowrl.training.loss.policy_objective.PolicyObjective",
            "flowrl.training.loss.loss_formulas",
            "flowrl.training.loss.token_objectives",
            "flowrl.training.loss.preference_objectives",
            "flowrl.training.loss.token_objectives",
            "flowrl.training.loss.token_objectives",
            "flowrl.training.advantages.Estimate",
            "flowrl.training.advantages",
            "flowrl.training.settings",
            "flowrl.training.settings",
        ),
    ),
    "tasks": (
        "Tasks, models and environments",
        "What names stand for, and the protocol of an environment.",
        ("flowrl.tasks.task.Task", "flowrl.models.policy.Policy", "flowrl.environments.protocol"),
    ),
    "options": (
        "Parts of options",
        "What the configuration of a graph is composed of.",
        (
            "flowrl.options.graph_config",
            "flowrl.options.online",
            "flowrl.options.training_parts",
            "flowrl.options.reward_parts",
            "flowrl.options.loss_parts",
            "flowrl.options.episode_parts",
            "flowrl.options.sizes",
        ),
    ),
    "testing": (
        "Testing",
        "[testing.md](../testing.md) shows how.",
        (
            "flowrl.testing.node_rig",
            "flowrl.testing.graph_run",
            "flowrl.testing.record",
            "flowrl.testing.rollouts",
            "flowrl.testing.clock",
        ),
    ),
}
"""Page -> title, first sentence, modules and classes."""
COMMANDS: dict[str, tuple[type[Any], ...]] = {
    "run": (RunOptions, RunFileOptions),
    "check": (CheckOptions,),
    "tune": (TuneOptions,),
    "quickstart": (QuickstartOptions,),
    "samples": (SamplesOptions,),
    "chat": (ChatOptions,),
    "merge": (MergeOptions,),
    "export": (ExportOptions,),
    "serve-reward": (ServeOptions,),
    "doctor": (DoctorOptions,),
    "gpu-check": (GpuCheckOptions,),
}
"""Command -> dataclasses of its options."""


def nodes_page() -> str:
    """Every node and setting that `flowrl.nodes` has."""
    parts = [
        "# Nodes\n\nThe built-in nodes, imported from `flowrl.nodes`. A graph adds them with `g.add`, and connects "
        "their ports. Importing them loads nothing heavy.\n"
    ]
    for heading, names in NODES.items():
        parts += [f"## {heading}\n", *(_node(name) for name in names)]
    parts.append("## Values of options\n\n" + "".join(f"- `{name}`: {_values(name)}\n" for name in CHOICES))
    return "\n".join(parts)


def _node(name: str) -> str:
    """A node with its ports, or settings with their fields."""
    kind = getattr(flowrl.nodes, name)
    if not issubclass(kind, Node):
        return f"{_directive(f'flowrl.nodes.{name}', 3, members='false')}\n{field_table(kind)}"
    rows = "".join(f"| `{port}` | {direction} | {carries} |\n" for port, direction, carries in ports(kind))
    table = f"| port | | messages |\n|---|---|---|\n{rows}\n" if rows else ""
    return f"{_directive(f'flowrl.nodes.{name}', 3, members='false')}\n{table}"


def _values(name: str) -> str:
    return ", ".join(f"`{value}`" for value in get_args(getattr(flowrl.nodes, name)))


def ports(kind: type[Node]) -> list[tuple[str, str, str]]:
    """(name, direction, message types) of the ports of a node class."""
    found = ((name, hint) for name, hint in get_type_hints(kind).items() if get_origin(hint) in DIRECTIONS)
    return [
        (name, DIRECTIONS[get_origin(hint)], " → ".join(one.__name__ for one in get_args(hint))) for name, hint in found
    ]


def api_page(name: str) -> str:
    """One page of `API`."""
    title, text, targets = API[name]
    return "\n".join([f"# {title}\n\n{text}\n", *(_directive(target, 2) for target in targets)])


def commands_page(usage: str) -> str:
    """The commands and their options; `usage` is what `flowrl` prints."""
    parts = [f"# Commands\n\n```text\n{usage}\n```\n"]
    for command, kinds in COMMANDS.items():
        parts.append(f"## flowrl {command}\n\n{class_summary(kinds[0])}\n\n{option_rows(*kinds)}")
    return "\n".join(parts)


def _directive(target: str, level: int, **settings: str) -> str:
    lines = "".join(f"      {name}: {value}\n" for name, value in {"heading_level": level, **settings}.items())
    return f"::: {target}\n    options:\n{lines}"
