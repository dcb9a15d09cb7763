"""Held-out demonstrations as one batch: a trainer's loss is measured on it, and it is never trained on."""

from __future__ import annotations

from typing import Any

from flowrl.errors import ConfigError
from flowrl.graph.facts import Facts
from flowrl.graph.node import Node
from flowrl.graph.ports import Out
from flowrl.messages import Batch
from flowrl.nodes.sources.given_sample import HeldOutSource, batch_of


class HeldOutDemonstrations(Node):
    """Sends up to `num_rows` rows that `data` holds out from training; for texts, up to `num_rows` sequences.

    The choice does not depend on the order of the data. Rows that are too long for `data` are left out.
    """

    batch: Out[Batch]

    def __init__(self, data: HeldOutSource, *, num_rows: int = 512, token_budget: int = 8192) -> None:
        self.data = data
        self.num_rows = num_rows
        self.token_budget = token_budget

    def facts(self) -> Facts:
        return Facts(keeps_lineage=False)

    def check(self, facts: Any) -> list[str]:
        ranges = (("num_rows", self.num_rows), ("token_budget", self.token_budget))
        problems = [f"{name} is {value}; it needs at least 1" for name, value in ranges if value < 1]
        if self.data.part != "train":
            problems.append(f"its data trains on part={self.data.part!r}; set part='train', so that rows are held out")
        return problems

    def preflight(self) -> None:
        self.data.require_held_out()

    async def setup(self) -> None:
        self._samples = await self.blocking(self.data.held_out_samples, self.num_rows, self.context.progress)

    async def run(self) -> None:
        if not self._samples:
            raise ConfigError(f"all held-out rows have more than {self.data.max_tokens} tokens; raise max_tokens")
        await self.batch.send(batch_of(self._samples, self.token_budget))
