"""Where groups of episodes enter the graph: the rows of an environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from flowrl.environments import EnvironmentName, EnvironmentRow, EnvironmentRows, environment_rows
from flowrl.environments.task_questions import question_row
from flowrl.messages import Prompt
from flowrl.nodes.curricula.curriculum import Curriculum
from flowrl.nodes.sources.row_source import RowPart, RowSource
from flowrl.tasks import Row


class EnvironmentSource(RowSource):
    """Sends every training row of an environment `repeat` times, as the members of one group.

    `environment` is a name as in docs/environments.md. A prompt has no tokens: the episode begins with what the
    environment shows. The other options are those of PromptSource.
    """

    def __init__(
        self,
        environment: str,
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
        self.environment = environment

    def check(self, facts: Any) -> list[str]:
        if self.curriculum is None or not self.curriculum.by:
            return super().check(facts)
        problem = (
            f"curriculum.by is {self.curriculum.by!r}, but rows of an environment differ only by their seed, and each "
            "has a pass rate of its own; leave it out"
        )
        return [*super().check(facts), problem]

    def preflight(self) -> None:
        EnvironmentName(self.environment)

    @cached_property
    def _read(self) -> EnvironmentRows:
        return environment_rows(self.environment)

    def rows(self) -> Sequence[EnvironmentRow]:
        return self.chosen(self._read.train, self._read.held_out)

    def group(self, row: EnvironmentRow, epoch: int) -> list[Prompt]:
        return self.members(row.prompt_id, epoch, **prompt_fields(row))


def prompt_fields(row: EnvironmentRow) -> Mapping[str, Any]:
    """The fields of a prompt that say where its episode starts."""
    columns = {"environment": row.name, "options": dict(row.options), "seed": row.seed}
    return {"text": "", "token_ids": np.zeros(0, np.int32), "columns": columns}


def question_fields(environment: str, asked_set: str, row: Row) -> Mapping[str, Any]:
    """The fields of a prompt that asks a question of an evaluation set in an environment."""
    return prompt_fields(question_row(environment, asked_set, row))


def row_of(prompt: Prompt) -> EnvironmentRow:
    """The row that the fields from `prompt_fields` describe."""
    columns = prompt.columns
    return EnvironmentRow(columns["environment"], columns["options"], columns["seed"])
