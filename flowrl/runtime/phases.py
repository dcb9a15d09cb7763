"""The phases of a run after its start, and the evaluations between them.

Every evaluation sees one version. Before and after training admission is closed. One during training is
due at the end of a batch: the trainers then take no further batch until it has ended, whereas prompts,
generators and rewards work on what the tickets allow.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flowrl.graph.graph import Graph, owner
from flowrl.runtime.best import Best

if TYPE_CHECKING:
    from flowrl.runtime.driver import Driver


class Phases:
    """Leads one run from its wired hosts to its last checkpoint."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._during: asyncio.Task[None] | None = None
        nodes = driver.job.graph.nodes
        self._evaluations = [name for name, node in nodes.items() if hasattr(node, "evaluate")]
        self.trainers = [track for name in driver.job.plan.trainers for track in driver.replicas(name)]
        self._ended = {track: asyncio.Event() for name in nodes for track in driver.replicas(name)}
        """Set when the body of the replica has returned."""
        own = driver.job.plan.own_clock
        self._standing = [track for track in self.trainers if track.split("/")[0] not in own]
        """The trainers that stand at the batch's end after which an evaluation is due."""

    async def run(self, running: Mapping[str, asyncio.Task[Any]]) -> dict[str, dict[str, float]]:
        """Returns the results by phase when every host has ended."""
        driver, results = self._driver, {}
        if self._evaluations and driver.version == 0:
            results["before"] = await self._evaluate("before", self._evaluations)
        driver.view.progress("driver", "training")
        driver.books.resume_admission("start")
        await self._end_of_training()
        if self._during is not None:
            await self._during
        driver.books.end_admission()
        if self._evaluations and not driver.interrupted:
            await driver.books.until_held(driver.version)
            results["after"] = await self._evaluate("after", self._evaluations)
        for name in self._evaluations:
            await driver.on_node(f"{name}/0", "finish")
        await asyncio.gather(*running.values())
        await driver.write_checkpoint(driver.version, best=self._better(results.get("after")))
        return results

    def due(self, version: int) -> bool:
        """An evaluation follows the batch that made `version`."""
        return bool(self._due(version)) and version != self._driver.job.options.steps and not self._driver.interrupted

    async def hold(self, version: int) -> None:
        """The trainers stand at the end of that batch: let them take no other, and evaluate."""
        await self._gate(open_=False)
        self._during = asyncio.create_task(self._evaluate_held(version))
        self._during.add_done_callback(self._driver.unless_cancelled)

    def _due(self, version: int) -> list[str]:
        """The evaluations of the first published version from each multiple of their `every` on."""
        published = self._driver.job.plan.numbers.publish_every
        if version % published:
            return []
        every = {name: getattr(self._driver.job.graph.nodes[name], "every", 0) for name in self._evaluations}
        return [name for name, n in every.items() if n and version // n > (version - published) // n]

    async def _evaluate_held(self, version: int) -> None:
        await self._driver.books.until_held(version)
        figures = await self._evaluate("during", self._due(version))
        best = self._better(figures) if self._evaluations[0] in self._due(version) else None
        if best is not None:
            await self._driver.keep(best)
        await self._gate(open_=True)

    async def _gate(self, *, open_: bool) -> None:
        """Let the trainers take batches, or not."""
        gate = self._driver.gate
        await asyncio.gather(*(gate(track, "evaluation", open_=open_) for track in self._standing))

    def _better(self, figures: Mapping[str, float] | None) -> Best | None:
        """The current version, if it is to be kept as the best so far: the first evaluation decides."""
        driver = self._driver
        if figures is None or not driver.job.options.keep_best:
            return None
        found = Best.of(driver.version, figures)
        return found if found.beats(driver.best) else None

    def node_ended(self, host: str, body: Mapping[str, str]) -> None:
        """The word of a host that the body of a node replica has returned."""
        self._ended[body["node"]].set()

    async def _end_of_training(self) -> None:
        """Until every trainer has taken its last batch. Without one: until all that an evaluation does not keep."""
        kept = _kept_open(self._driver.job.graph, self._evaluations)
        rest = [track for track in self._ended if track.split("/")[0] not in kept]
        await asyncio.gather(*(self._ended[track].wait() for track in self.trainers or rest))

    async def _evaluate(self, phase: str, names: Sequence[str]) -> dict[str, float]:
        driver = self._driver
        version = driver.version
        driver.view.progress("driver", f"evaluation {phase} training, at version {version}")
        answers = await asyncio.gather(
            *(driver.on_node(f"{name}/0", "evaluate", phase=phase, step=version) for name in names)
        )
        figures: dict[str, float] = {}
        for name, answer in zip(names, answers, strict=True):
            for task in [key.removesuffix("exact_match") for key in answer if key.endswith("exact_match")]:
                score, count = answer[f"{task}exact_match"], int(answer[f"{task}num_answers"])
                driver.view.evaluation(phase, version, score, count, task.removesuffix("/"))
            prefix = "" if name == self._evaluations[0] else f"{name}/"
            figures |= {f"{prefix}{key}": value for key, value in answer.items()}
        driver.metrics.evaluation(version, {f"evaluation/{key}": value for key, value in figures.items()})
        if phase == "during":
            driver.view.progress("driver", "training")
        return figures


def _kept_open(graph: Graph, evaluations: Iterable[str]) -> set[str]:
    """The evaluations, the nodes that go on answering them, and those that take from these."""
    kept, edges = set(evaluations), [(owner(edge.out), owner(edge.into)) for edge in graph.edges]
    while more := {receiver for sender, receiver in edges if sender in kept} - kept:
        kept |= more
    return kept
