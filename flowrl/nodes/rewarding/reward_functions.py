"""The reward functions and servers that score one task's samples, as nodes ask them.

A question waits for its verdict. The wait ends with the verdict, after `timeout_s`, with the death of the worker
process, or, if no server can be reached, after `away_s`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from flowrl.errors import ConfigError
from flowrl.graph.node import Context
from flowrl.messages import Sample
from flowrl.tasks import KnownRows, Row, Task, asked_columns, load_rows
from flowrl.tasks.reward_calls.away import AWAY_S, Patience
from flowrl.tasks.reward_calls.judge import BadReward, Verdicts
from flowrl.tasks.reward_calls.reward_client import RewardClient
from flowrl.tasks.rewards import Part, adapted_text, check_reward, is_sum, needs_rows, open_reward, uses_http
from flowrl.tasks.row_reading.indexed_rows import joined

FIX_FUNCTION = "fix the function, its signature and its result"


class RewardFunctions:
    """`parts` are the parts of the reward; `processes` worker processes run each synchronous function (None: default).

    Servers get `processes` samples at a time. While none of them can be reached, `ask` waits for up to `away_s`.
    """

    def __init__(
        self, task: Task, parts: Sequence[Part], *, timeout_s: float, processes: int | None, away_s: float = AWAY_S
    ) -> None:
        self._task = task
        self.parts = tuple(parts)
        """The parts of the reward; once they are loaded, they say how their functions are called."""
        self._timeout_s = timeout_s
        self._processes = processes
        self._away_s = away_s
        self._client: RewardClient | None = None
        self._known: KnownRows | None = None
        """Rows of the task, if the reward needs whole rows; else None."""

    def preflight(self) -> str | None:
        """Load the functions, check their columns in every row, and try the reward on the first row."""
        found = load_rows(self._task, whole=True)
        rows = joined(found.train, found.held_out)
        self.parts = check_reward(self.parts, rows)
        asyncio.run(self._trial(rows[0]))
        return adapted_text(self.parts)

    async def _trial(self, row: Row) -> None:
        client = open_reward(self.parts, timeout_s=self._timeout_s, retries=0, patience=Patience(away_s=0.0))
        columns = {**row.columns, **asked_columns(self.parts, self._task, row)}
        try:
            verdicts = await client.ask([row.prompt], [row.answer or ""], [columns])
            self._check_weights(verdicts)
        except BadReward as bad:
            remedy = "start the server, or fix its answer" if uses_http(self.parts) else FIX_FUNCTION
            raise ConfigError(f"the trial reward failed: {bad}; {remedy}") from bad
        finally:
            await client.close()

    def _check_weights(self, verdicts: Verdicts) -> None:
        """Raise ConfigError if a weight names something that is no head of the reward."""
        heads = set(verdicts.heads)
        if is_sum(self.parts):  # a sum's heads are its parts, and PART/HEAD for parts that have heads
            places = [f"{part.name}/" for part in self.parts]
            heads = {name.removeprefix(place) for place in places for name in heads if name.startswith(place)}
        if strange := [name for name in self._task.head_weights if name not in heads]:
            raise ConfigError(
                f"--task.reward-weights names {strange[0]}, but the reward has "
                f"{'the heads ' + ', '.join(sorted(heads)) if heads else 'one value and no heads'}; a function has "
                "heads if it returns a number under each name"
            )

    def open(self, context: Context) -> None:
        """Load the functions; heavy. The node of `context` waits for the verdicts. Raises ConfigError."""
        self.parts = check_reward(self.parts, ())
        self._known = KnownRows(self._task) if needs_rows(self.parts) else None
        self._client = open_reward(
            self.parts,
            timeout_s=self._timeout_s,
            concurrency=self._processes,
            patience=Patience(self._away_s, context.outside, context.progress),
        )

    async def ask(self, sample: Sample) -> Verdicts:
        """The verdict about one sample. Raises BadReward, or ServersAway, which ends the run."""
        assert self._client is not None, "`open` comes first"
        row = None if self._known is None else self._known.get(sample.prompt_id)
        columns = {**sample.columns, **(asked_columns(self.parts, self._task, row) if row is not None else {})}
        return await self._client.ask([sample.prompt_text], [sample.response_text], [columns])

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()
