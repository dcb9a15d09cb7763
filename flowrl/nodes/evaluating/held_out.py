"""Held-out preferences as one batch: a trainer is evaluated on it, and it is never trained on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flowrl.errors import ConfigError
from flowrl.graph.facts import Facts
from flowrl.graph.node import Node
from flowrl.graph.ports import Out
from flowrl.messages import Batch, Trainable
from flowrl.models import check_model
from flowrl.nodes.sources.preference_source import Preferences, Renderer
from flowrl.tasks.row_reading.indexed_rows import lowest_asked


class HeldOutPreferences(Node):
    """Sends up to `num_rows` held-out rows of `data`; the choice does not depend on the order of the file.

    Rows with a conversation of more than the data's `max_tokens` are left out. For objectives that compare
    with a reference, a PreferenceReference sends the same rows with its logprobs.
    """

    batch: Out[Batch]

    def __init__(self, data: Preferences, *, num_rows: int = 512, token_budget: int = 8192) -> None:
        self.data = data
        self.num_rows = num_rows
        self.token_budget = token_budget

    def facts(self) -> Facts:
        return Facts(keeps_lineage=False)

    def check(self, facts: Any) -> list[str]:
        ranges = (("num_rows", self.num_rows), ("token_budget", self.token_budget))
        return [f"{name} is {value}; it needs at least 1" for name, value in ranges if value < 1]

    def preflight(self) -> None:
        check_model(self.data.policy)
        if not self.data.rows().held_out:
            raise ConfigError(
                f"{self.data.task.name!r} has no held-out rows to judge by (one prompt in eight is held out); add rows"
            )

    async def setup(self) -> None:
        self._samples = await self.blocking(self._render)

    def _render(self) -> list[Trainable]:
        chat = self.data.chat(self.context.progress)
        chosen = lowest_asked(self.data.rows().held_out, self.num_rows)
        rendered = [samples for samples in Renderer(self.data, chat, chosen) if self._fits(samples)]
        return [sample for samples in rendered for sample in samples]

    def _fits(self, samples: Sequence[Trainable]) -> bool:
        return max(len(sample.token_ids) for sample in samples) <= self.data.max_tokens

    async def run(self) -> None:
        samples = tuple(self._samples)
        if not samples:
            raise ConfigError(f"all held-out rows have more than {self.data.max_tokens} tokens; raise max_tokens")
        batch = Batch(
            samples=samples,
            micro_batches=(),
            num_sequences=len(samples),
            num_tokens=sum(sample.response_tokens for sample in samples),
            num_groups=len(samples) // self.data.group_size,
            token_budget=self.token_budget,
        )
        await self.batch.send(batch)
