"""Held-out demonstrations as one batch, on which a trainer's loss is measured and which it is never trained on."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from flowrl.errors import ConfigError
from flowrl.graph.facts import Facts
from flowrl.graph.node import Node
from flowrl.graph.ports import Out
from flowrl.messages import Batch, Trainable
from flowrl.models import Chat, tokenizer_of
from flowrl.nodes.dataset import Demonstrations
from flowrl.tasks import Row, load_demonstrations


class HeldOutDemonstrations(Node):
    """Sends up to `num_rows` of the rows that `data`, which trains on the others, holds out.

    The choice does not depend on the order of the data. Rows that are too long for `data` are left out.
    """

    batch: Out[Batch]

    def __init__(self, data: Demonstrations, *, num_rows: int = 512, token_budget: int = 8192) -> None:
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
        if not load_demonstrations(self.data.task).held_out:
            raise ConfigError(
                f"{self.data.task.name!r} has no held-out rows to measure the loss on (one prompt in eight is held "
                "out); add rows, or leave held_out out"
            )

    async def setup(self) -> None:
        self._samples = await self.blocking(self._rendered)

    def _rendered(self) -> list[Trainable]:
        chat = Chat(tokenizer_of(self.data.policy, progress=self.context.progress), self.data.task.system_prompt)
        rows = load_demonstrations(self.data.task).held_out
        chosen = sorted(rows, key=lambda row: row.prompt_id)[: self.num_rows]
        samples = [self._sample(row, chat) for row in chosen if row.answer is not None]
        return [sample for sample in samples if len(sample.token_ids) <= self.data.max_tokens]

    def _sample(self, row: Row, chat: Chat) -> Trainable:
        token_ids, mask = self.data.rendered(chat, row)
        return Trainable(
            sample_id=row.prompt_id,
            group_id=row.prompt_id,
            prompt_id=row.prompt_id,
            epoch=0,
            member=0,
            group_size=1,
            prompt_text=row.prompt,
            response_text=str(row.answer),
            token_ids=token_ids,
            policy_mask=mask,
            behavior_logprobs=np.zeros(len(token_ids), np.float32),
            versions=np.full(len(token_ids), -1, np.int32),
            prompt_tokens=int((~mask).sum()),
            truncated=False,
            generator="",
            generated_s=time.time(),
            advantages=mask.astype(np.float32),
        )

    async def run(self) -> None:
        samples = tuple(self._samples)
        if not samples:
            raise ConfigError(f"all held-out rows have more than {self.data.max_tokens} tokens; raise max_tokens")
        batch = Batch(
            samples=samples,
            micro_batches=(),
            num_sequences=len(samples),
            num_tokens=sum(sample.response_tokens for sample in samples),
            num_groups=len(samples),
            token_budget=self.token_budget,
        )
        await self.batch.send(batch)
