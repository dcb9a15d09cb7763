"""Where groups of a task's questions enter the graph for agents, which read messages rather than tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from flowrl.errors import ConfigError
from flowrl.messages import Prompt
from flowrl.nodes.curricula.curriculum import Curriculum
from flowrl.nodes.sources.row_source import RowPart, RowSource
from flowrl.tasks import Row, Task, conversation, load_rows
from flowrl.tasks.mixture import first_rows, mixed_order
from flowrl.tasks.row_reading.other_columns import require_served

MESSAGES = "messages"


class TaskSource(RowSource):
    """Sends every training row of a task `repeat` times, as the members of one group.

    A prompt has no tokens; its columns are those of the row and `messages`, which is the conversation. The other
    options are those of PromptSource.
    """

    def __init__(
        self,
        task: Task,
        *,
        repeat: int = 1,
        epochs: int | None = None,
        seed: int | None = None,
        part: RowPart = "train",
        num_prompts: int | None = None,
        curriculum: Curriculum | None = None,
    ) -> None:
        super().__init__(
            repeat=repeat, epochs=epochs, seed=seed, part=part, num_prompts=num_prompts, curriculum=curriculum
        )
        self.task = task

    def preflight(self) -> str | None:
        rows = self.rows()
        if rows and MESSAGES in rows[0].columns:
            raise ConfigError(f"the task {self.task.name!r} has a column {MESSAGES!r}, which agents get; rename it")
        require_served(self.task, rows, "prompts")
        self._buckets(rows)
        return "; ".join(load_rows(self.task, whole=self.part == "all").opened) or None

    def rows(self) -> Sequence[Row]:
        rows = load_rows(self.task, whole=self.part == "all")
        return first_rows(self.of_part(rows.train, rows.held_out), self.task, self.num_prompts)

    def group(self, row: Row, epoch: int) -> list[Prompt]:
        return self.members(row.prompt_id, epoch, **task_fields(self.task, row))

    def _order(self, epoch: int) -> list[int]:
        if len(self.task.sources) > 1:
            return mixed_order(self._rows, self.task, self._seed, epoch)
        return super()._order(epoch)


def task_fields(task: Task, row: Row) -> Mapping[str, Any]:
    """The fields of a prompt that tell an agent its task."""
    columns = {**row.columns, MESSAGES: conversation(task, row)}
    return {"text": "", "token_ids": np.zeros(0, np.int32), "columns": columns}
