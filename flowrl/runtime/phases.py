"""The phases of a run after its start, and the evaluations between them.

An evaluation before or after training happens with admission closed, so at one version. One during
training is started by its step and runs beside it; a further one that comes due meanwhile is left out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flowrl.runtime.driver import Driver


class Phases:
    """Leads one run from its wired hosts to its last checkpoint."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._during: asyncio.Task[Any] | None = None
        nodes = driver.job.graph.nodes
        self._evaluations = [name for name, node in nodes.items() if hasattr(node, "evaluate")]

    async def run(self, running: Mapping[str, asyncio.Task[Any]]) -> dict[str, dict[str, float]]:
        """Returns the results by phase when every host has ended."""
        driver, results = self._driver, {}
        if self._evaluations and driver.version == 0:
            results["before"] = await self._evaluate("before")
        driver.view.progress("driver", "training")
        driver.books.resume_admission("start")
        await self._trainers_end(running)
        if self._during is not None:
            await self._during
        driver.books.end_admission()
        if self._evaluations and not driver.interrupted:
            await driver.books.until_held(driver.version)
            results["after"] = await self._evaluate("after")
        for name in self._evaluations:
            await driver.on_node(f"{name}/0", "finish")
        await asyncio.gather(*running.values())
        await driver.write_checkpoint(driver.version)
        return results

    def step(self, version: int) -> None:
        """A batch is finished; start the evaluation that is due."""
        for name in self._evaluations:
            every = getattr(self._driver.job.graph.nodes[name], "every", 0)
            free = self._during is None or self._during.done()
            if every and version % every == 0 and version != self._driver.job.options.steps and free:
                self._during = asyncio.create_task(self._evaluate("during"))

    async def _trainers_end(self, running: Mapping[str, asyncio.Task[Any]]) -> None:
        """Until every trainer has taken its last batch. Without a trainer: until everything has ended."""
        driver = self._driver
        gangs = [name for name, node in driver.job.graph.nodes.items() if node.gang]
        hosts = {driver.job.plan.host_of(track).name for name in gangs for track in driver.replicas(name)}
        if hosts or not self._evaluations:
            await asyncio.gather(*(task for host, task in running.items() if not hosts or host in hosts))

    async def _evaluate(self, phase: str) -> dict[str, float]:
        driver = self._driver
        version = driver.version
        driver.view.progress("driver", f"evaluation {phase} training, at version {version}")
        answers = await asyncio.gather(
            *(driver.on_node(f"{name}/0", "evaluate", phase=phase, step=version) for name in self._evaluations)
        )
        for answer in answers:
            driver.view.evaluation(phase, version, answer["exact_match"], int(answer["num_answers"]))
            driver.metrics.evaluation(version, {f"evaluation/{key}": value for key, value in answer.items()})
        return {key: value for answer in answers for key, value in answer.items()}
