"""Rewards by functions and servers: the node that scores samples by them, and the comparison of two answers.

A question waits for its verdict. The wait ends with the verdict, after `timeout_s`, or when the worker process dies.
While no reward server can be reached, the node waits (`context.outside`) until a server answers; after `away_s` the run
ends. A sample without a verdict fails, with the reason in the ledger. A function that fails for many samples in a row
ends the run (`FailingRewards`).
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from flowrl.errors import ConfigError, FlowrlError, SampleFailed
from flowrl.graph.node import Context, Facts, Node
from flowrl.graph.ports import In, Out
from flowrl.messages import Sample, Scored
from flowrl.nodes.scoring.shaping import Shaping
from flowrl.tasks import KnownRows, Row, Task, asked_columns, load_rows, reward_parts
from flowrl.tasks.reward_calls.http import AWAY_S, Patience
from flowrl.tasks.reward_calls.judge import BadReward, Verdicts
from flowrl.tasks.reward_calls.reward_client import RewardClient
from flowrl.tasks.reward_calls.signatures import SECOND
from flowrl.tasks.rewards import (
    MODEL,
    VERIFIER,
    Part,
    adapted_text,
    check_reward,
    is_sum,
    names_model,
    needs_rows,
    open_reward,
    parse_reward,
    samples_at_once,
    uses_http,
)
from flowrl.tasks.row_reading.rows_on_disk import join_rows

FIX_FUNCTION = "fix the function, its signature and its result"


class RewardFunctions:
    """`parts` are the parts of the reward; `processes` worker processes run each synchronous function (None: default).

    Servers get `processes` samples at a time. While none of them can be reached, a question waits for up to `away_s`.
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
        rows = join_rows(found.train, found.held_out)
        self.parts = check_reward(self.parts, rows)
        asyncio.run(self._try_reward(rows[0]))
        return adapted_text(self.parts)

    async def _try_reward(self, row: Row) -> None:
        columns = {**row.columns, **asked_columns(self.parts, self._task, row)}
        remedy = "start the server, or fix its answer" if uses_http(self.parts) else FIX_FUNCTION
        verdicts = await self._ask_on_trial("reward", row.prompt, row.answer or "", columns, remedy)
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

    async def _ask_on_trial(
        self, what: str, prompt: str, response: str, columns: Mapping[str, Any], remedy: str
    ) -> Verdicts:
        """The verdict about one response, before the run. Raises ConfigError if there is none."""
        client = open_reward(self.parts, timeout_s=self._timeout_s, retries=0, patience=Patience(away_s=0.0))
        try:
            return await client.ask([prompt], [response], [columns])
        except BadReward as bad:
            raise ConfigError(f"the trial {what} failed: {bad}; {remedy}") from bad
        finally:
            await client.close()

    def open_client(self, context: Context) -> None:
        """Load the functions; heavy. The node of `context` waits for the verdicts. Raises ConfigError."""
        self.parts = check_reward(self.parts, ())
        self._known = KnownRows(self._task) if needs_rows(self.parts) else None
        self._client = open_reward(
            self.parts,
            timeout_s=self._timeout_s,
            concurrency=self._processes,
            patience=Patience(self._away_s, context.outside, context.progress),
        )

    def columns_of(self, sample: Sample) -> dict[str, Any]:
        """What the reward gets of a sample's row."""
        row = None if self._known is None else self._known.get(sample.prompt_id)
        return {**sample.columns, **(asked_columns(self.parts, self._task, row) if row is not None else {})}

    async def score_sample(self, sample: Sample) -> Verdicts:
        """The verdict about one sample. Raises BadReward, or ServersAway, which ends the run."""
        assert self._client is not None, "`open_client` comes first"
        return await self._client.ask([sample.prompt_text], [sample.response_text], [self.columns_of(sample)])

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()


FAILURES_IN_A_ROW = 256
"""Samples whose reward fails one after the other before the run ends."""


class FailingRewards:
    """Counts the consecutive failures of one node replica's reward: the first is reported, many end the run.

    A failed sample counts for no optimizer step, so a run whose reward always fails would sample without an end.
    """

    def __init__(self) -> None:
        self._number = 0

    def note_scored(self) -> None:
        """A reward was computed."""
        self._number = 0

    def note_failed(self, context: Context, reason: str, text: str, *, samples: int = 1) -> None:
        """The reward of `samples` samples failed. Raises FlowrlError after FAILURES_IN_A_ROW samples."""
        if not self._number:
            context.progress(f"a sample failed: {text}")
        self._number += samples
        context.metric(reason, 1)
        if self._number >= FAILURES_IN_A_ROW:
            raise FlowrlError(f"the reward failed for {self._number} samples in a row; the last time: {text}")


class Reward(Node):
    """Scores samples by the verifier of `task`, or by `function` if one is given.

    `function` is a function defined at the top of a file, or a reward as text (`flowrl.tasks.rewards`):
    `file.py:function`, `http://HOST:PORT/PATH`, or a weighted sum of several, each logged by name. See
    `flowrl.tasks.reward_calls.judge` for a function's signature. Synchronous functions run in `concurrency` worker
    processes, which are killed after `timeout_s`; of `async` functions, `concurrency` calls run at a time. Both get one
    sample per call, or up to 64 waiting samples if they expect many. Servers are asked about `concurrency` samples at a
    time. None means 1, 4 for check=code, or 64 for servers. If none of the servers can be reached, the node waits
    `away_s`; then the run ends.
    """

    rollouts: In[Sample]
    scored: Out[Scored]

    def __init__(
        self,
        task: Task,
        *,
        function: str | Callable[..., Any] | None = None,
        timeout_s: float = 10.0,
        concurrency: int | None = None,
        away_s: float = AWAY_S,
        shaping: Shaping | None = None,
    ) -> None:
        self.task = task
        self.parts = reward_parts(task, function)
        self.timeout_s = timeout_s
        self._processes = concurrency
        self.away_s = away_s
        self._functions = RewardFunctions(task, self.parts, timeout_s=timeout_s, processes=concurrency, away_s=away_s)
        self.shaping = shaping or Shaping()
        self._failing = FailingRewards()

    def facts(self) -> Facts:
        return Facts(drops=True, concurrency=self.concurrency)

    @property
    def concurrency(self) -> int:
        """Number of samples that are scored at a time."""
        return samples_at_once(self._functions.parts, self._processes)

    def check(self, facts: Any) -> list[str]:
        problems = self.shaping.find_problems()
        if compared := [part.place for part in self.parts if part.convention == "pairwise"]:
            problems.append(
                f"{compared[0]} compares two responses, but a reward scores one; pass it to PairMaker as prefer="
            )
        if names_model(self.task.reward):
            problems.append(f"its reward {self.task.reward!r} names a reward model; a RewardModel node scores with one")
        if self.timeout_s <= 0:
            problems.append(f"timeout_s is {self.timeout_s}; it has to be above 0")
        if self._processes is not None and self._processes < 1:
            problems.append(f"concurrency is {self._processes}; it needs at least 1")
        if self.away_s < 0:
            problems.append(f"away_s is {self.away_s}; it needs at least 0")
        return problems

    def notes(self) -> list[str]:
        found = adapted_text(self.parts)
        return [] if found is None else [found]

    def preflight(self) -> str | None:
        return self._functions.preflight()

    async def setup(self) -> None:
        await self.blocking(self._functions.open_client, self.context)

    async def run(self) -> None:
        await self.rollouts.each(self._score_sample, concurrency=self.concurrency)

    async def close(self) -> None:
        await self._functions.close()

    async def _score_sample(self, sample: Sample) -> None:
        try:
            with self.context.busy("score"):
                verdicts = await self._functions.score_sample(sample)
        except BadReward as bad:
            self._failing.note_failed(self.context, bad.reason, str(bad))
            raise SampleFailed(bad.reason) from bad
        self._failing.note_scored()
        # The shaped reward is trained on; the raw reward is the verdict before shaping.
        parts = {name: values[0] for name, values in verdicts.logs.items()}
        reward = self.shaping.shape_reward(
            verdicts.rewards[0], parts, num_tokens=sample.response_tokens, truncated=sample.truncated
        )
        await self.scored.send(Scored.of(sample, reward, verdicts.scores[0], **parts))


COMPARED_S = 60.0
"""Default time limit for comparing all answers to one prompt."""


class Comparisons(RewardFunctions):
    """Ranks the answers to one prompt by comparing them with each other, two at a time.

    Each pair of answers is asked about once; which of the two comes first alternates, so that a preference for the
    first place nearly evens out over a group. An answer's score is its share of comparisons won.

    Asks the pairwise reward `text`: a function `(prompts, firsts, seconds, **columns)`, or a server.

    The reward says how likely the first response is the better one: 1, 0, or a number in between. Servers get the
    second response as a column, and the conversation of the sample's row in `task`. Raises ConfigError if `text` names
    a reward that scores one answer.
    """

    def __init__(self, text: str, task: Task, *, timeout_s: float = COMPARED_S, away_s: float = AWAY_S) -> None:
        super().__init__(task, parse_reward(text), timeout_s=timeout_s, processes=None, away_s=away_s)
        for part in self.parts:
            if part.place in (VERIFIER, MODEL):
                raise ConfigError(
                    f"--prefer names {part.place}, which scores one answer; a comparison of two is a function "
                    "(prompts, firsts, seconds), as FILE.py:FUNCTION, or a server"
                )

    def preflight(self) -> None:
        """Load the function, and compare two answers to the first row. Raises ConfigError."""
        wrong = [part.place for part in check_reward(self.parts, ()) if not part.urls and part.convention != "pairwise"]
        if wrong:
            raise ConfigError(f"{wrong[0]} compares no two answers; it needs the parameters (prompts, firsts, seconds)")
        rows = load_rows(self._task, whole=True)
        row = join_rows(rows.train, rows.held_out)[0]
        check_reward(self.parts, [replace(row, columns={**row.columns, SECOND: ""})])
        asyncio.run(self._try_comparison(row))

    async def _try_comparison(self, row: Row) -> None:
        answer, columns = row.answer or "", {**row.columns, **asked_columns(self.parts, self._task, row)}
        remedy = "fix the function, or start the server"
        await self._ask_on_trial("comparison", row.prompt, answer, {**columns, SECOND: f"{answer} "}, remedy)

    async def shares_won(self, samples: Sequence[Sample]) -> list[float]:
        """The share of comparisons that each sample wins. Raises BadReward, or ServersAway, which ends the run."""
        assert self._client is not None, "`open_client` comes first"
        if len(samples) < 2:
            return [0.0] * len(samples)
        pairs = [(a, b) if (a + b) % 2 else (b, a) for a, b in itertools.combinations(range(len(samples)), 2)]
        columns = [self.columns_of(sample) for sample in samples]
        verdicts = await self._client.ask(
            [samples[first].prompt_text for first, _ in pairs],
            [samples[first].response_text for first, _ in pairs],
            [{**columns[first], SECOND: samples[second].response_text} for first, second in pairs],
        )
        won = [0.0] * len(samples)
        for (first, second), likely in zip(pairs, verdicts.rewards, strict=True):
            if not 0.0 <= likely <= 1.0:
                raise BadReward("reward_malformed", f"a comparison gave {json.dumps(likely)}; it needs 0 to 1")
            won[first] += likely
            won[second] += 1.0 - likely
        return [share / (len(samples) - 1) for share in won]
