"""The phases of a run after its start, and the evaluations between them.

Every evaluation uses one version. Before and after training, admission is closed. An evaluation during training is
due at the end of a batch: the trainers take no further batch until it has ended, while prompts, generators and
rewards continue as far as the tickets allow. A resumed run makes up for an evaluation that was due at its checkpoint
and is not in it, before it admits anything, and repeats none that is in it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from flowrl.graph.analysis.plan import Plan
from flowrl.graph.graph import Graph, port_owner
from flowrl.runtime.checkpoints.rundir import Best
from flowrl.runtime.driver.job import RunOptions, RunState
from flowrl.runtime.driver.run_checkpoints import RunCheckpoints
from flowrl.runtime.driver.run_processes import Orders
from flowrl.runtime.driver.run_records import RunRecords
from flowrl.runtime.telemetry.view import View
from flowrl.wire.control import is_cancel


class Phases:
    """Runs the phases of one run, from wired processes to the last checkpoint.

    `unless_cancelled(task)` ends the run if a task that nobody awaits has failed.
    """

    def __init__(
        self,
        graph: Graph,
        plan: Plan,
        options: RunOptions,
        orders: Orders,
        view: View,
        *,
        records: RunRecords,
        checkpoints: RunCheckpoints,
        state: RunState,
        resumed: bool,
        unless_cancelled: Callable[[asyncio.Task[Any]], None],
    ) -> None:
        self._records = records
        self._checkpoints = checkpoints
        self._state = state
        self._unless_cancelled = unless_cancelled
        self._graph = graph
        self._publish_every = plan.numbers.publish_every
        self._options = options
        self._orders = orders
        self._view = view
        self._resumed = resumed
        self._missed = False
        """Whether the run was resumed at a version whose evaluation has to be made up for."""
        self._during: asyncio.Task[None] | None = None
        self._evaluating: asyncio.Task[dict[str, float]] | None = None
        """The evaluation that goes on, or the last one."""
        nodes = graph.nodes
        self._evaluations = [name for name, node in nodes.items() if hasattr(node, "evaluate")]
        self.trainers = [replica_id for name in plan.trainers for replica_id in orders.replicas(name)]
        self._ended = {replica_id: asyncio.Event() for name in nodes for replica_id in orders.replicas(name)}
        """Set when the body of the replica has returned."""
        self._steady = {
            replica_id: every
            for replica_id, of in plan.consumers
            if of == plan.trainers[0] and (every := nodes[replica_id.split("/")[0]].facts().takes_every)
        }
        """Replica -> n, if the replica must not miss a version of the main trainer whose number is a multiple of n."""
        self._gated = [replica_id for replica_id in self.trainers if replica_id.split("/")[0] not in plan.own_clock]
        """The trainers that wait at the end of a batch after which an evaluation is due."""

    async def hold_resumed(self) -> None:
        """Close the trainers' gates if an evaluation has to be made up for; before any node of a resumed run runs."""
        version = self._state.version
        self._missed = bool(self._resumed and version and self._evaluates_after(version)) and not self._is_evaluated()
        if self._missed:
            await self._set_gates(open_=False)

    async def run(self, running: Mapping[str, asyncio.Task[Any]]) -> dict[str, dict[str, float]]:
        """Run all phases. Returns the results by phase when every process has ended."""
        accounting, state = self._records.accounting, self._state
        results: dict[str, dict[str, float]] = {}
        if self._evaluations and state.version == 0 and not self._is_evaluated():
            results |= await self._measure_phase("before", self._evaluations)
        if self._missed:
            await self._evaluate_held(state.version)
        if self.trainers or not self._evaluations:
            self._view.progress("driver", "training" if self.trainers else "running")
        accounting.resume_admission("start")
        # The training ends with all trainers; without trainers, with all nodes that receive nothing from an evaluation.
        kept = _reached_by(self._graph, self._evaluations)
        rest = [replica_id for replica_id in self._ended if replica_id.split("/")[0] not in kept]
        await asyncio.gather(*(self._ended[replica_id].wait() for replica_id in self.trainers or rest))
        await accounting.bookings.wait_for_jobs()
        if self._during is not None:
            await self._during
        accounting.end_admission()
        # Without trainers, nothing has changed since `before`.
        if self._evaluations and self.trainers and not state.interrupted and not self._is_evaluated("after"):
            await accounting.until_held(state.version)
            await self._checkpoints.write_trained(state.version)  # a kill during the evaluation loses no weights
            results |= await self._measure_phase("after", self._evaluations)
        for name in self._evaluations:
            await self._orders.on_node(f"{name}/0", "finish")
        await asyncio.gather(*running.values())
        await self._checkpoints.write_checkpoint(state.version, best=self._find_better(results.get("after")))
        return results

    def is_due(self, version: int) -> bool:
        """Whether, after the batch that made `version`, an evaluation is due or a reader has to take that version."""
        return self._evaluates_after(version) or bool(self._readers_of(version))

    def _evaluates_after(self, version: int) -> bool:
        return bool(self._due_evaluations(version)) and version != self._options.steps and not self._state.interrupted

    def _readers_of(self, version: int) -> list[str]:
        """The readers that must not miss `version`."""
        return [replica_id for replica_id, every in self._steady.items() if version % every == 0]

    async def wait_for_readers(self, version: int) -> None:
        """Returns when the readers that must not miss `version` hold it."""
        if takers := self._readers_of(version):
            await self._records.accounting.until_held(version, takers)

    async def begin_evaluation(self, version: int) -> None:
        """Start an evaluation, if one is due, at the end of the batch that made `version`; until its end, the trainers
        take no batch."""
        if not self._evaluates_after(version):
            return
        await self._set_gates(open_=False)
        self._during = asyncio.create_task(self._evaluate_held(version))
        self._during.add_done_callback(self._unless_cancelled)

    def _due_evaluations(self, version: int) -> list[str]:
        """The evaluations due at `version`: the first published version at or after a multiple of their `every`."""
        published = self._publish_every
        if version % published:
            return []
        every = {name: getattr(self._graph.nodes[name], "every", 0) for name in self._evaluations}
        return [name for name, n in every.items() if n and version // n > (version - published) // n]

    def _is_evaluated(self, phase: str = "") -> bool:
        """Whether a resumed run has an evaluation of its version, in that phase or, with "", in any."""
        found = {one for one, step in self._records.metrics.evaluated if step == self._state.version}
        return self._resumed and (phase in found if phase else bool(found))

    async def _evaluate_held(self, version: int) -> None:
        figures = (await self._measure_phase("during", self._due_evaluations(version))).get("during")
        best = self._find_better(figures) if self._evaluations[0] in self._due_evaluations(version) else None
        if best is not None:
            await self._checkpoints.keep_best(best)
        await self._set_gates(open_=True)

    async def _set_gates(self, *, open_: bool) -> None:
        """Open or close the gates of the trainers."""
        gate = self._orders.set_gate
        await asyncio.gather(*(gate(replica_id, "evaluation", open_=open_) for replica_id in self._gated))

    def _find_better(self, figures: Mapping[str, float] | None) -> Best | None:
        """The current version, if --keep-best is on and the first evaluation rates it best so far; else None."""
        if figures is None or not self._options.keep_best:
            return None
        found = Best.of(self._state.version, figures)
        return found if found.beats(self._checkpoints.best) else None

    def has_ended(self, replica_id: str) -> None:
        """The body of a node replica has returned, or its process is lost."""
        self._ended[replica_id].set()

    def give_up_evaluation(self) -> None:
        """End an evaluation that goes on, without a result: what is in flight is trained and saved without it."""
        if self._evaluating is not None:
            self._evaluating.cancel()

    async def _measure_phase(self, phase: str, names: Sequence[str]) -> dict[str, dict[str, float]]:
        """The figures of an evaluation by its phase; {} if it was given up."""
        self._evaluating = asyncio.create_task(self._evaluate_nodes(phase, names))
        try:
            return {phase: await self._evaluating}
        except asyncio.CancelledError as error:
            if is_cancel(error):
                raise
            self._view.progress("driver", f"the evaluation {phase} training is given up")
            return {}

    async def _evaluate_nodes(self, phase: str, names: Sequence[str]) -> dict[str, float]:
        version = self._state.version
        await self._records.accounting.until_held(version)
        text = f"evaluation {phase} training, at version {version}" if self.trainers else "evaluation"
        self._view.progress("driver", text)
        answers = await asyncio.gather(
            *(self._orders.on_node(f"{name}/0", "evaluate", phase=phase, step=version) for name in names)
        )
        figures: dict[str, float] = {}
        for name, answer in zip(names, answers, strict=True):
            for task in shown_sets(answer):  # of each set the figures that are not those of a smaller part
                own = {key.removeprefix(task): value for key, value in answer.items() if key.startswith(task)}
                shown = {key: value for key, value in own.items() if "/" not in key}
                self._view.evaluation(phase if self.trainers else "", version, shown, task.removesuffix("/"))
            prefix = "" if name == self._evaluations[0] else f"{name}/"
            figures |= {f"{prefix}{key}": value for key, value in answer.items()}
        self._records.write_evaluation(phase, version, figures)
        if phase == "during":
            self._view.progress("driver", "training")
        return figures


def shown_sets(figures: Mapping[str, float]) -> list[str]:
    """The prefixes of an evaluation's sets. Plain figures after those of a named set repeat it, and are not shown."""
    found = [key.removesuffix("num_answers") for key in figures if key.endswith("num_answers")]
    return [task for task in found if task or found[0] == ""]


def _reached_by(graph: Graph, evaluations: Iterable[str]) -> set[str]:
    """The evaluations, and all nodes that receive from them, directly or through other nodes."""
    kept, edges = set(evaluations), [(port_owner(edge.out), port_owner(edge.into)) for edge in graph.edges]
    while more := {receiver for sender, receiver in edges if sender in kept} - kept:
        kept |= more
    return kept
