"""Resuming a run: checks whether a graph can continue from a checkpoint, and rewinds the run's files to it.

A checkpoint holds the messages in transit between the nodes, made under the numbers of its graph. Another graph can
continue from it if that breaks no guarantee: `require_resumable` compares the two by name before anything starts, and
refuses all other changes with a message. What may change:

- more tickets and a larger bound, because the groups in flight were admitted under stricter ones;
- `on_limit` from "wait" to "mask" under the same rule, but not back: in a masking run nothing orders the groups in
  flight or bounds their age;
- the number of replicas of nodes without state, unless messages in transit are addressed to one particular replica, as
  with a broadcast: the messages in transit go to the new replicas, and a batch for a gang is split again;
- everything that the messages in transit do not depend on: rates, prices, evaluations, records.

The run's files are unchanged until the run can begin, that is, until all processes are set up and have the checkpoint's
states and messages. Then `rewind_run` rewinds the files. If the run is killed at any point, `--resume` starts again
from the same checkpoint, and a fresh run in the directory is refused.
"""

from __future__ import annotations

import operator
import shutil
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from flowrl.errors import ConfigError
from flowrl.graph.analysis.plan import Plan
from flowrl.graph.dispatch_rules import RULES
from flowrl.graph.graph import Graph
from flowrl.graph.node import Saved
from flowrl.runtime.checkpoints import checkpoint, snapshots
from flowrl.runtime.checkpoints.rundir import BEST, read_best
from flowrl.runtime.ledger import ledger_file
from flowrl.runtime.ledger.ledger_file import LEDGER, Terms
from flowrl.runtime.ledger.ledger_segments import any_in_flight, last_commit_s, phases_evaluated
from flowrl.runtime.samples.kept_episodes import rewind_kept
from flowrl.runtime.samples.rollout_files import rewind_rollouts
from flowrl.runtime.telemetry.metrics import EVALUATIONS, METRICS
from flowrl.runtime.telemetry.metrics import rewind_lines as rewind_metrics
from flowrl.wire.encoding.codec import load_value

DAMAGED = ".damaged"
Described = Mapping[str, Any]
"""A graph as described in graph.json."""


def resume_facts(version: int, plan: Plan, seed: int) -> dict[str, Any]:
    """The facts about a run that its checkpoint stores for `require_resumable`."""
    return {"version": version, "seed": seed, "graph": plan.to_json()}


def require_resumable(directory: Path, graph: Graph, plan: Plan, seed: int) -> dict[str, int]:
    """Raise ConfigError with every reason why `graph` cannot continue from the checkpoint in `directory`.

    Returns the version from which each trainer continues.
    """
    state = snapshots.read_state(directory)
    try:
        states = {replica_id: load_value(data) for replica_id, data in state["states"].items()}
        problems = _find_differences(state, states, plan, seed)
        versions = {str(name): operator.index(version) for name, version in state["facts"]["versions"].items()}
    except snapshots.UNREADABLE as problem:
        raise snapshots.damaged_state(directory, problem) from None
    if not problems:
        problems = [*_ask_nodes(directory, graph, seed, states)]
    if problems:
        listed = problems[0] if len(problems) == 1 else "".join(f"\n- {text}" for text in problems)
        raise ConfigError(f"--resume: the run cannot continue from {directory.name}: {listed}")
    return versions


def _find_differences(state: Mapping[str, Any], states: Mapping[str, Any], plan: Plan, seed: int) -> list[str]:
    """The differences between the graph of the checkpoint and this one that the run cannot continue with."""
    before, now = state["facts"]["graph"], plan.to_json()
    if problems := [*_compare_edges(before, now)]:
        return problems
    with_state = {replica_id.split("/")[0] for replica_id, found in states.items() if found}
    addressed = {name.split("/")[0] for _, _, name, _ in state["messages"]}
    return [
        *_compare_admission(before, now),
        *_compare_numbers(before, now),
        *(
            [
                f"--seed is {seed} and was {state['facts']['seed']}: prompts would be repeated, skipped or reordered; "
                f"resume with --seed {state['facts']['seed']}"
            ]
            if state["facts"]["seed"] != seed
            else []
        ),
        *_compare_replicas(before, now, with_state, addressed),
    ]


def _compare_edges(before: Described, now: Described) -> Iterator[str]:
    was, is_ = ({e["name"]: e["dispatch"] for e in g["edges"] if e["kind"] == "queue"} for g in (before, now))
    if strange := sorted(was.keys() ^ is_.keys()):
        yield (
            f"the checkpoint is of another graph ({', '.join(strange)} is in only one of the two); resume with the "
            "file and options that the run was started with (they are in its config.json)"
        )
    for name in sorted(was.keys() & is_.keys()):
        if was[name] != is_[name]:
            yield (
                f'{name} has dispatch="{is_[name]}" and had "{was[name]}", under which messages are in flight; set it '
                f'back to "{was[name]}"'
            )


def _compare_admission(before: Described, now: Described) -> Iterator[str]:
    was, is_ = (dict(graph["admission"] or {}) for graph in (before, now))
    for name, what in (("out", "enters at"), ("until", "waits for")):
        if was.get(name) != is_.get(name):
            yield f"admission {what} {is_.get(name)} and was declared with {was.get(name)} (g.admit); set it back"
    if before["trainers"] != now["trainers"]:
        yield f"the nodes that train are {now['trainers']} and were {before['trainers']}; set them back"


EXACT = {
    "group_size": "groups in flight have that many members",
    "groups_per_batch": "batches in flight and open tickets were made for it",
    "derives": "groups in flight have places for that many derived samples",
}


LIMITS = {
    "max_staleness": "groups are in flight that may become that old",
    "tickets": "that many may be in flight",
    "max_uses": "samples are in flight again that were used that often",
    "max_reused_age": "groups are in flight again that may become that old",
}
"""Number that may only grow -> what the checkpoint may hold under the number before."""


def _compare_numbers(before: Described, now: Described) -> Iterator[str]:
    for name, why in EXACT.items():
        if before.get(name) != now[name]:
            yield f"{name} is {now[name]} and was {before.get(name)}: {why}; set it back to {before.get(name)}"
    for name, in_flight in LIMITS.items():
        was, is_ = before.get(name), now[name]
        if was is not None and name.startswith("max_") and name != "max_staleness" and (is_ or 0) < was:
            yield f"{name} is {is_} and was {was}, under which {in_flight}; set replay back"
        elif was is not None and is_ is not None and is_ < was:
            yield (
                f"{name} is {is_} and was {was}, under which {in_flight}; resume with a "
                f"staleness and a look_ahead that make it {was} or more (flowrl check prints it)"
            )
    if before["window"] == 0 and now["window"]:
        yield (
            'on_limit is "wait" and was "mask", under which groups of any age and order are in flight; resume with '
            '"mask", or start a new run from the checkpoint\'s model'
        )


def _compare_replicas(
    before: Described, now: Described, with_state: Collection[str], addressed: Collection[str]
) -> Iterator[str]:
    """`addressed`: nodes with messages in transit that only one particular replica may take."""
    was, is_ = ({node["name"]: node for node in g["nodes"]} for g in (before, now))
    queues = [edge for edge in now["edges"] if edge["kind"] == "queue"]
    own = {edge["into"].split(".")[0] for edge in queues if RULES[edge["dispatch"]].copies} | set(addressed)
    own |= {name for edge in queues if was.get(name := edge["out"].split(".")[0], {}).get("gang")}
    for name in sorted(was.keys() & is_.keys()):
        old, new = was[name], is_[name]
        if name in with_state and old["type"] != new["type"]:
            yield (
                f"node {name!r} is a {new['type']} and was a {old['type']}, and the checkpoint has the state of the "
                f"latter; use {old['type']} again"
            )
        if old["replicas"] == new["replicas"]:
            continue
        change = f"node {name!r} has {new['replicas']} replicas and had {old['replicas']}"
        if name in own:
            yield f"{change}, each with messages in flight that only it gets; resume with {old['replicas']} replicas"
        elif name in with_state:
            yield (
                f"{change}, each with a state of its own (`state()`) in the checkpoint; resume with {old['replicas']} "
                "replicas"
            )


def _ask_nodes(directory: Path, graph: Graph, seed: int, states: Mapping[str, Any]) -> Iterator[str]:
    """The problems that the nodes themselves report."""
    for name, node in graph.nodes.items():
        mine = {int(t.split("/")[1]): found for t, found in states.items() if t.split("/")[0] == name}
        saved = Saved(directory, graph.placed[name].replicas, seed, mine)
        try:
            yield from [f"node {name!r}: {text}" for text in node.check_resume(saved)]
        except snapshots.UNREADABLE as problem:
            yield (
                f"node {name!r} cannot read its state there ({type(problem).__name__}: {problem}); resume with the "
                "file and options that the run was started with, or from an older checkpoint"
            )


def lacks_evaluation(directory: Path, graph: Graph, version: int) -> bool:
    """Whether all that a run with the checkpoint in `directory` as its last step lacks is the evaluation after it."""
    if not any(hasattr(node, "evaluate") for node in graph.nodes.values()) or any_in_flight(directory):
        return False
    return "after" not in phases_evaluated(directory, version)


def rewind_run(run_dir: Path, directory: Path, version: int, terms: Terms) -> None:
    """Rewind the records of a run to the checkpoint in `directory`; no process may have them open.

    `terms` are the terms of the run from here on; the ledger contains them from the first commit of the resumed run on.

    Later checkpoints, all of them damaged, are moved aside, and a `best.json` that names one of them is removed,
    because this run will write others with the same names.
    """
    for step, path in checkpoint.steps_of(directory.parent):
        if step > version:
            aside = path.with_name(path.name + DAMAGED)
            shutil.rmtree(aside, ignore_errors=True)
            path.replace(aside)
    if (run_dir / BEST).is_file() and read_best(run_dir, newest_step=version) is None:
        (run_dir / BEST).unlink()
    ledger_file.restore_ledger(directory, run_dir / LEDGER, terms)  # first: it shows that lines must follow
    # An evaluation of `version` may have ended after the checkpoint was written: then the ledger lacks its answers.
    for records, phases in ((METRICS, None), (EVALUATIONS, phases_evaluated(directory, version))):
        if (run_dir / records).exists():
            rewind_metrics(run_dir / records, version, phases=phases)
    last_s = last_commit_s(directory)
    rewind_kept(run_dir, last_s)
    rewind_rollouts(run_dir, last_s)
