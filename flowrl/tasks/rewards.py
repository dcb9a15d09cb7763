"""Rewards as text: a function, an HTTP endpoint, or a weighted sum of several named ones.

    verifier                                            the task's own
    rules.py:short                                      a function of a file, or package.module:function
    rules.py                                            the one reward function of a file
    http://a:8100/score,http://b:8100/score             servers that share the work; see flowrl.tasks.reward_calls.http
    openrlhf+http://a:8100/get_reward                   a server that was written for OpenRLHF
    reward_model                                        that of a graph's --reward-model, in a sum
    verifier + 0.1*rules.py:short + 0.5*http://a:8100/score as taste

In a sum each part is logged under its name: the function's, `http` for a server, or what follows `as`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from flowrl.errors import ConfigError
from flowrl.tasks.checks.answer_checks import CHECKS, OF_MIXTURE_WITH_CODE
from flowrl.tasks.reward_calls import http
from flowrl.tasks.reward_calls.http import PATIENT, Patience
from flowrl.tasks.reward_calls.judge import BadReward, RowColumns, Verdicts, load_judge
from flowrl.tasks.reward_calls.reward_client import GATHERED, Gathered, RewardClient, open_client
from flowrl.tasks.reward_calls.signatures import BATCHED, ROW, TITLES, Convention, declared_convention, with_function
from flowrl.tasks.rows import OF_TASK, Row
from flowrl.tasks.task_syntax import parse_sum

SCHEMES = ("http://", "https://")
OPENRLHF = "openrlhf+"
"""Prefix of an address: its requests have OpenRLHF's fields in addition to ours."""
VERIFIER = "verifier"
MODEL = "reward_model"
"""The name of a graph's reward model in a sum."""
HTTP_CONCURRENCY = 64
PROGRAMS = 4
"""Number of programs that check=code runs at a time."""


@dataclass(frozen=True)
class Part:
    """One reward of a sum, or the only one."""

    place: str
    weight: float = 1.0
    name: str = ""
    heads: tuple[tuple[str, float], ...] = ()
    """(head of its answer, weight), for heads whose weight is not 1."""
    loaded: Convention | None = None
    """The convention of the function, once `check_reward` has loaded it."""
    asks: tuple[str, ...] = ()
    """Verifiers that the function asks, as a mixture's function asks those of its sources."""
    hidden: tuple[str, ...] = ()
    """Columns of the rows given to `check_reward` that the function would take but cannot be given."""

    @property
    def urls(self) -> tuple[str, ...]:
        """The addresses of an HTTP reward; () for a function."""
        place = self.place.removeprefix(OPENRLHF)
        return tuple(url.removeprefix(OPENRLHF) for url in place.split(",")) if place.startswith(SCHEMES) else ()

    @property
    def of_openrlhf(self) -> bool:
        """Whether requests of an HTTP reward also have OpenRLHF's fields."""
        return self.place.startswith(OPENRLHF)

    @cached_property
    def convention(self) -> Convention | None:
        """The convention of a function; None if it is no function, or if it is not loaded yet and no file declares
        it."""
        return None if self.urls else self.loaded or declared_convention(self.place)


def parse_reward(text: str, *, verifier: str = VERIFIER) -> tuple[Part, ...]:
    """The parts of a reward, with the word `verifier` replaced. Raises ConfigError for an invalid part."""
    parts = []
    for term in parse_sum(text):
        place = with_function(term.text)  # a file without a function is replaced by its one reward function
        is_http = place.removeprefix(OPENRLHF).startswith(SCHEMES)
        name = term.name or ("http" if is_http else place.rpartition(":")[2])
        part = Part(verifier if place == VERIFIER else place, term.weight, name)
        if wrong := [url for url in part.urls if not url.startswith(SCHEMES) or not url.partition("//")[2]]:
            raise ConfigError(f"reward {text!r}: {wrong[0]!r} is no address; write http://HOST:PORT/PATH,http://…")
        if not part.urls and part.place not in (VERIFIER, MODEL) and not part.place.rpartition(":")[0]:
            raise ConfigError(
                f"reward {part.place!r} names no function; write file.py:function, package.module:function or "
                "http://HOST:PORT/PATH"
            )
        parts.append(part)
    names = [part.name for part in parts]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"reward {text!r} has two parts called {', '.join(twice)}; name them: PLACE as NAME")
    return tuple(parts)


def uses_http(parts: Iterable[Part]) -> bool:
    """Whether one of the parts is requested over HTTP."""
    return any(part.urls for part in parts)


def names_model(reward: str) -> bool:
    """Whether the text of a reward has a reward model among its parts."""
    return any(term.text == MODEL for term in parse_sum(reward)) if reward else False


def usual_processes(parts: Iterable[Part]) -> int:
    """Number of worker processes for each function, unless a graph says otherwise."""
    return PROGRAMS if any(part.place in (CHECKS["code"], OF_MIXTURE_WITH_CODE) for part in parts) else 1


def samples_at_once(parts: Sequence[Part], concurrency: int | None) -> int:
    """How many samples a node asks about at a time; `concurrency` is that of `open_reward`."""
    if any(part.convention in BATCHED for part in parts):  # it expects many samples at once
        return GATHERED * (usual_processes(parts) if concurrency is None else concurrency)
    if concurrency is not None:
        return concurrency
    return HTTP_CONCURRENCY if uses_http(parts) else usual_processes(parts)


def needs_rows(parts: Iterable[Part]) -> bool:
    """Whether one of the parts needs more of a row than its columns."""
    return any(part.urls or part.convention in ("trl", "verl") for part in parts)


def adapted_text(parts: Iterable[Part]) -> str | None:
    """Sentences about functions of other conventions, and about columns that a function is not given; None: none."""
    found = []
    for part in parts:
        if part.convention in TITLES:
            many = f", with up to {GATHERED} samples at once" if part.convention in BATCHED else ""
            found.append(f"{part.place} is called as {TITLES[part.convention]} calls it{many}")
        if part.hidden:
            found.append(
                f"{part.place} is not given the column {', '.join(part.hidden)}: its own parameter has that name; "
                "rename the column if the function needs it"
            )
    return "; ".join(found) or None


def row_columns(parts: Sequence[Part], task: str, turns: Sequence[Mapping[str, Any]], row: Row) -> dict[str, Any]:
    """What rewards receive about a row in addition to its columns: servers get the conversation, and functions of other
    conventions get the column ROW."""
    found: dict[str, Any] = {"messages": [dict(turn) for turn in turns]} if uses_http(parts) else {}
    if any(part.convention in ("trl", "verl") for part in parts):
        source = str(row.columns.get(OF_TASK, task))
        found[ROW] = {"task": source, "turns": [dict(turn) for turn in turns], "messages": row.as_messages}
    return found


def check_reward(parts: Sequence[Part], rows: Iterable[Row]) -> tuple[Part, ...]:
    """Load every function and check that each of `rows` has its columns. Returns the parts with what loading has found.
    Raises ConfigError."""
    judges = {part.place: load_judge(part.place) for part in parts if not part.urls}
    hidden: dict[str, set[str]] = {place: set() for place in judges}
    for row in rows:
        for place, judge in judges.items():
            judge.check_columns(row.columns, row.place)
            hidden[place] |= judge.hidden_columns(row.columns)
    return tuple(
        part
        if part.urls
        else replace(part, loaded=judges[part.place].convention, hidden=tuple(sorted(hidden[part.place])))
        for part in parts
    )


def open_reward(
    parts: Sequence[Part],
    *,
    timeout_s: float,
    concurrency: int | None = None,
    retries: int | None = None,
    patience: Patience = PATIENT,
) -> RewardClient:
    """A client for the weighted sum, with `concurrency` worker processes for each synchronous function; None: the usual
    number.

    `concurrency` is also the number of calls of an `async` function that run at a time, and of the calls in which
    functions that expect many samples at once get the waiting samples. Servers get this many samples at a time, in at
    least two requests each; `patience` says how long to wait for servers that cannot be reached.
    """
    opened = []
    for part in parts:
        if part.urls:
            client: RewardClient = http.HttpReward(
                part.urls,
                timeout_s=timeout_s,
                retries=http.RETRIES if retries is None else retries,
                of_openrlhf=part.of_openrlhf,
                per_url=max(http.REQUESTS_PER_URL, math.ceil((concurrency or 1) / (http.HTTP_BATCH * len(part.urls)))),
                patience=patience,
            )
        else:
            judge = load_judge(part.place)
            number = usual_processes(parts) if concurrency is None else concurrency
            processes = 1 if judge.is_async else number
            clients = [open_client(judge, timeout_s, asks=part.asks, report=patience.report) for _ in range(processes)]
            if judge.is_async:  # one process has all calls
                clients *= number
            client = Gathered(clients) if judge.convention in BATCHED else Pool(clients)
        opened.append(client)
    return WeightedSum(parts, opened)


def is_sum(parts: Sequence[Part]) -> bool:
    """Whether the reward is a sum, in which each part is logged by name."""
    return len(parts) != 1 or parts[0].weight != 1.0


def named_parts(parts: Sequence[Part], verdicts: Verdicts) -> dict[str, float]:
    """What the functions next to a reward model return for one sample, each under its name, as in a sum."""
    named = {name: values[0] for name, values in verdicts.logs.items()}
    return named if is_sum(parts) else {parts[0].name: verdicts.rewards[0], **named}


def beside_model(parts: Sequence[Part]) -> tuple[float, tuple[Part, ...]]:
    """The weight of the reward model in a sum, and the other parts. A reward that does not name the model is replaced
    by it."""
    weights = [part.weight for part in parts if part.place == MODEL]
    return (sum(weights), tuple(part for part in parts if part.place != MODEL)) if weights else (1.0, ())


class WeightedSum:
    """Requests all parts concurrently, and weighs the heads of their answers; a sample for which one part fails has no
    reward."""

    def __init__(self, parts: Sequence[Part], asked: Sequence[RewardClient]) -> None:
        self._parts = parts
        self._asked = asked

    async def ask(self, prompts: Sequence[str], responses: Sequence[str], columns: RowColumns) -> Verdicts:
        answers = await asyncio.gather(
            *(client.ask(prompts, responses, columns) for client in self._asked), return_exceptions=True
        )
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        verdicts = [
            answer.weighted(dict(part.heads))
            for part, answer in zip(self._parts, answers, strict=True)
            if isinstance(answer, Verdicts)
        ]
        if not is_sum(self._parts):
            return verdicts[0]
        logs: dict[str, tuple[float, ...]] = {}
        heads: dict[str, float] = {}
        for part, verdict in zip(self._parts, verdicts, strict=True):
            logs[part.name] = verdict.rewards
            logs |= {f"{part.name}/{name}": values for name, values in verdict.logs.items()}
            inner = {f"{part.name}/{name}": part.weight * weight for name, weight in verdict.heads.items()}
            heads |= inner or {part.name: part.weight}
        rewards, scores = (
            tuple(
                sum(part.weight * value for part, value in zip(self._parts, of_sample, strict=True))
                for of_sample in zip(*values, strict=True)
            )
            for values in ([verdict.rewards for verdict in verdicts], [verdict.scores for verdict in verdicts])
        )
        return Verdicts(rewards, scores, logs, heads)

    async def close(self) -> None:
        for client in self._asked:
            await client.close()


class Pool:
    """Several clients of the same function; each question uses one that is free."""

    def __init__(self, members: Sequence[RewardClient]) -> None:
        self._members = members
        self._free: asyncio.Queue[RewardClient] = asyncio.Queue()
        for member in members:
            self._free.put_nowait(member)

    async def ask(self, prompts: Sequence[str], responses: Sequence[str], columns: RowColumns) -> Verdicts:
        member = await self._free.get()
        try:
            return await member.ask(prompts, responses, columns)
        finally:
            self._free.put_nowait(member)

    async def close(self) -> None:
        for member in self._members:
            await member.close()


__all__ = ["BadReward", "Part", "check_reward", "open_reward", "parse_reward", "uses_http"]
