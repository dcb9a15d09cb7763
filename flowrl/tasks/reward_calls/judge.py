"""Finds reward functions by name, calls them, and checks their answers.

A function is `f(prompts, responses, **columns)` over lists, or `f(prompt, response, **columns)` for one sample; either
may be `async`. It returns one of the following (the form for one sample is in parentheses): a list of numbers (one
number); a mapping with `rewards` (`reward`) and optionally `scores` (`score`), the values before any shaping, and
`logs`, named parts; or a mapping of names to lists of numbers (numbers), the heads of the reward, which add up to it.
The first two parameters may be keyword-only. Columns are passed by name: those that the signature names, or all if it
takes `**columns`, except a column with the name of the function's parameter for the prompts or responses. Functions
with the signatures of OpenRLHF, TRL and verl are called as those libraries call them
(`flowrl.tasks.reward_calls.signatures`).
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from flowrl.errors import ConfigError
from flowrl.messages.base import number_in
from flowrl.tasks.reward_calls.signatures import OF_TRL, Convention, adapt_function, by_position, convention_of
from flowrl.tasks.user_code import load_user_module, one_line

RowColumns = Sequence[Mapping[str, Any]]


class BadReward(Exception):
    """A reward function raised, or returned an invalid reward. `reason` is one word for the ledger."""

    def __init__(self, reason: str, text: str) -> None:
        self.reason = reason
        super().__init__(text)


@dataclass(frozen=True)
class Verdicts:
    """The answer of a reward function, one entry per sample."""

    rewards: tuple[float, ...]
    scores: tuple[float, ...]
    logs: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    heads: Mapping[str, float] = field(default_factory=dict)
    """Name -> weight of those `logs` whose weighted sum is the reward; {} if the function itself has computed the
    sum."""

    def weighted(self, weights: Mapping[str, float]) -> Verdicts:
        """These verdicts with the weights of the heads replaced by those in `weights`, and with the new sum as
        reward."""
        if self.heads.keys().isdisjoint(weights):
            return self
        return replace(self, heads={name: weights.get(name, weight) for name, weight in self.heads.items()}).summed()

    def of_sample(self, index: int) -> Verdicts:
        """The verdict about one of several samples."""
        logs = {name: (values[index],) for name, values in self.logs.items()}
        return Verdicts((self.rewards[index],), (self.scores[index],), logs, self.heads)

    def summed(self) -> Verdicts:
        """These verdicts with the weighted sum of the heads as reward."""
        parts = [[weight * value for value in self.logs[name]] for name, weight in self.heads.items()]
        summed = tuple(map(sum, zip(*parts, strict=True)))
        return replace(self, rewards=summed, scores=summed)


@dataclass(slots=True, eq=False)
class Question:
    """One sample that waits for its verdict."""

    prompt: str
    response: str
    columns: Mapping[str, Any]
    verdict: asyncio.Future[Verdicts]

    @classmethod
    def make_all(cls, prompts: Sequence[str], responses: Sequence[str], columns: RowColumns) -> list[Question]:
        """A question for each sample. Called where an event loop runs."""
        loop = asyncio.get_running_loop()
        return [
            cls(prompt, response, dict(row), loop.create_future())
            for prompt, response, row in zip(prompts, responses, columns, strict=True)
        ]

    def answer(self, verdict: Verdicts) -> None:
        """Hand out the verdict, if it is still waited for."""
        if not self.verdict.done():
            self.verdict.set_result(verdict)

    def give_up(self) -> None:
        """Nobody waits any more. A failure counts as retrieved: of several, only the first one is raised."""
        if not self.verdict.cancel():
            self.verdict.exception()


def fail_questions(questions: Iterable[Question], problem: Callable[[], Exception]) -> None:
    """Hand a problem to those of `questions` that still wait. An exception that is raised twice collects tracebacks, so
    `problem` may make one for each."""
    for question in questions:
        if not question.verdict.done():
            question.verdict.set_exception(problem())


@dataclass(frozen=True)
class Judge:
    """A loaded reward function."""

    place: str
    function: Callable[..., Any]
    single: bool
    """Takes one sample rather than lists."""
    wanted: frozenset[str] | None
    """Columns that it is given; None for all."""
    required: frozenset[str]
    any_of: frozenset[str] = frozenset()
    """Columns of which a row needs at least one; empty if it needs none."""
    convention: Convention = "flowrl"
    own: frozenset[str] = frozenset()
    """Names of the parameters that are the prompts and responses: a column of such a name cannot be given to it."""

    @property
    def is_async(self) -> bool:
        return inspect.iscoroutinefunction(self.function)

    def check_columns(self, columns: Mapping[str, Any], place: str = "") -> None:
        """Raise ConfigError if a row of a task, which was read at `place`, lacks a column that the function needs.

        A function that asks other functions has an attribute `check_columns`, which does this for those.
        """
        if (check_others := getattr(self.function, "check_columns", None)) is not None:
            check_others(columns, place)
        missing = sorted(self.required - set(columns))
        row = f"{place}: the row" if place else "a row of the task"
        rows = f"the row at {place} has" if place else "the task's rows have"
        if self.any_of and not self.any_of & set(columns):
            raise ConfigError(
                f"reward {self.place} compares with one of the columns {', '.join(sorted(self.any_of))}, but {rows} "
                f"{', '.join(columns) or 'none'}; set the option answer= of the task to the column that holds it"
            )
        if missing and self.place.startswith("flowrl."):
            raise ConfigError(
                f"{row} has no {', '.join(missing)} to compare responses with (it has "
                f"{', '.join(columns) or 'the prompt alone'}); set the option answer= of the task to the column that "
                "holds it, take rows without one out of the data (malformed=skip does not), or give the task a "
                "reward function, or a reward model with --reward-model"
            )
        if missing:
            raise ConfigError(
                f"reward {self.place} needs the column {', '.join(missing)}, but {rows} "
                f"{', '.join(columns) or 'none'}; rename the parameter, give it a default, or add the column"
            )

    def hidden_columns(self, columns: Mapping[str, Any]) -> frozenset[str]:
        """Those of `columns` that the function would take but cannot be given."""
        return self.own & columns.keys() if self.wanted is None else frozenset()

    def __call__(self, prompts: Sequence[str], responses: Sequence[str], columns: RowColumns) -> Verdicts:
        """Call the function in this thread. Raises BadReward."""
        try:
            answer = self._call_function(prompts, responses, columns)
        except Exception as problem:  # the boundary to the user's function
            raise BadReward("reward_raised", f"{self.place} raised {one_line(problem)}") from problem
        return self._read_verdicts(answer, len(responses))

    async def ask(self, prompts: Sequence[str], responses: Sequence[str], columns: RowColumns) -> Verdicts:
        """Call an `async` function. Raises BadReward."""
        try:
            called = self._call_function(prompts, responses, columns)
            answer = await (asyncio.gather(*map(_await_answer, called)) if self.single else _await_answer(called))
        except Exception as problem:  # the boundary to the user's function
            raise BadReward("reward_raised", f"{self.place} raised {one_line(problem)}") from problem
        return self._read_verdicts(answer, len(responses))

    def _call_function(self, prompts: Sequence[str], responses: Sequence[str], columns: RowColumns) -> Any:
        chosen = [
            {name: value for name, value in row.items() if name not in self.own}
            if self.wanted is None
            else {name: row.get(name) for name in self.wanted & set(row)}
            for row in columns
        ]
        if self.single:
            return [self.function(p, r, **c) for p, r, c in zip(prompts, responses, chosen, strict=True)]
        names = dict.fromkeys(name for row in chosen for name in row)
        lists = {name: [row.get(name) for row in chosen] for name in names}
        return self.function(list(prompts), list(responses), **lists)

    def _read_verdicts(self, answer: Any, num: int) -> Verdicts:
        if self.single:
            return join_verdicts([as_verdicts(self.place, _as_lists(self.place, one), 1) for one in answer])
        return as_verdicts(self.place, answer, num)


def as_verdicts(place: str, answer: Any, num: int) -> Verdicts:
    """Check what a function returned for `num` samples. Raises BadReward that names the returned value."""
    rewards: tuple[float, ...] = ()
    scores: tuple[float, ...] = ()
    if not isinstance(answer, Mapping):
        rewards = _read_numbers(place, "rewards", answer, num)
        return Verdicts(rewards, rewards)
    heads: dict[str, tuple[float, ...]] = {}
    if "rewards" in answer:
        rewards = _read_numbers(place, "rewards", answer["rewards"], num)
        scores = rewards if answer.get("scores") is None else _read_numbers(place, "scores", answer["scores"], num)
    else:
        names = [str(name) for name in answer if name != "logs"]
        if not names or not {"reward", "score", "scores"}.isdisjoint(names):
            raise BadReward(
                "reward_malformed",
                f"{place} returned a mapping of {', '.join(names) or 'nothing'}; it needs the key 'rewards', or a "
                "number under each name, which are added up",
            )
        heads = {str(k): _read_numbers(place, str(k), values, num) for k, values in answer.items() if k != "logs"}
    given = _read_logs(place, answer, "lists")
    logs = {str(k): _read_numbers(place, f"logs[{k!r}]", v, num) for k, v in given.items() if str(k) not in heads}
    if heads:
        return Verdicts((), (), {**logs, **heads}, dict.fromkeys(heads, 1.0)).summed()
    return Verdicts(rewards, scores, logs)


def _read_logs(place: str, answer: Mapping[Any, Any], needed: str) -> Mapping[Any, Any]:
    """The logs of an answer; None means no logs. Raises BadReward if they have no names."""
    logs = answer.get("logs")
    if not isinstance(logs, Mapping | None):
        raise BadReward(
            "reward_malformed", f"{place} returned logs = {_shorten_value(logs)}; it needs {needed} under names"
        )
    return logs or {}


def load_judge(place: str) -> Judge:
    """The function at `file.py:function` or `package.module:function`. Raises ConfigError."""
    where, _, name = place.rpartition(":")
    module = load_user_module(where, owner="reward")
    function = getattr(module, name, None)
    if not callable(function):
        known = sorted(n for n, f in vars(module).items() if inspect.isfunction(f) and f.__module__ == module.__name__)
        raise ConfigError(f"{where} has no function {name!r}; it has {', '.join(known) or 'none'}")
    return make_judge(place, function)


def place_of(function: Callable[..., Any]) -> str:
    """`file.py:function` of a function object, by which a worker process can load it again."""
    name = getattr(function, "__qualname__", "")
    try:
        file = inspect.getsourcefile(inspect.unwrap(function))
    except TypeError:  # an object that is no function, such as a partial
        file = None
    if file is None or not name or "." in name or "<" in name:
        raise ConfigError(
            f"the reward {name or function} cannot be found again by a worker process; define it with def at the "
            "top of a file, or name it as file.py:function"
        )
    return f"{Path(file).resolve()}:{name}"


def make_judge(place: str, function: Callable[..., Any]) -> Judge:
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (ValueError, TypeError):
        raise ConfigError(
            f"reward {place} has a signature that Python cannot read, as functions in C often have; call it in a "
            "function of your own, def f(prompts, responses), and name that"
        ) from None
    names = [p.name for p in parameters]
    convention = convention_of(names)
    if convention is None:
        raise ConfigError(
            f"reward {place} begins with the parameters ({', '.join(names[:2])}); it needs (prompts, responses) "
            "for lists, (prompt, response) for one sample, or a signature of OpenRLHF (queries, prompts, labels), TRL "
            "(prompts, completions) or verl (data_source, solution_str, ground_truth)"
        )
    if convention != "flowrl":
        call, required, any_of = adapt_function(function, convention)
        if unknown := sorted(required.intersection(OF_TRL)):
            raise ConfigError(
                f"reward {place} needs {', '.join(unknown)}, which TRL hands over and flowrl does not have; give the "
                "parameter a default"
            )
        return Judge(place, call, convention == "verl", None, required, any_of, convention)
    first, named = parameters[:2], [p for p in parameters[2:] if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    return Judge(
        place=place,
        function=by_position(function, first),
        single=names[0] == "prompt",
        wanted=None if takes_all else frozenset(p.name for p in named),
        required=frozenset(p.name for p in named if p.default is p.empty),
        own=frozenset(p.name for p in first if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)),
    )


def _read_numbers(place: str, what: str, values: Any, num: int) -> tuple[float, ...]:
    if hasattr(values, "tolist"):
        values = values.tolist()
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise BadReward(
            "reward_malformed",
            f"{place} returned {what} = {_shorten_value(values)}; it needs a list of {num} number(s)",
        )
    if len(values) != num:
        raise BadReward("reward_wrong_length", f"{place} returned {len(values)} {what} for {num} response(s)")
    found = []
    for value in values:
        number = number_in(value)
        if number is None:
            raise BadReward(
                "reward_malformed", f"{place} returned {what} with {_shorten_value(value)}; it needs numbers"
            )
        if not math.isfinite(number):
            told = _shorten_value(value)
            raise BadReward("reward_not_finite", f"{place} returned {what} with {told}; it needs finite numbers")
        found.append(number)
    return tuple(found)


def is_finite(value: Any) -> bool:
    """Whether a number fits into a float and is finite."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _as_lists(place: str, answer: Any) -> Any:
    """One sample's answer in the format for lists."""
    if not isinstance(answer, Mapping):
        return [answer]
    plural = {"reward": "rewards", "score": "scores"}
    listed: dict[str, Any] = {plural.get(k, str(k)): [v] for k, v in answer.items() if k != "logs"}
    return {**listed, "logs": {k: [v] for k, v in _read_logs(place, answer, "numbers").items()}}


def join_verdicts(parts: Sequence[Verdicts]) -> Verdicts:
    """Merge verdicts of one sample each into one; a log that a sample lacks counts as 0."""
    heads = {name: weight for part in parts for name, weight in part.heads.items()}
    if heads:  # a sample with one number gets it as a head of its own, so that the heads add up
        parts = [
            part if part.heads else replace(part, logs={**part.logs, "reward": part.rewards}, heads={"reward": 1.0})
            for part in parts
        ]
        heads = {name: weight for part in parts for name, weight in part.heads.items()}
    names = dict.fromkeys(name for part in parts for name in part.logs)
    return Verdicts(
        tuple(part.rewards[0] for part in parts),
        tuple(part.scores[0] for part in parts),
        {name: tuple(part.logs[name][0] if name in part.logs else 0.0 for part in parts) for name in names},
        heads,
    )


async def _await_answer(called: Awaitable[Any]) -> Any:
    """What an `async` function returns. SystemExit becomes a RuntimeError: it would end the event loop."""
    try:
        return await called
    except SystemExit as end:
        raise RuntimeError(f"it called sys.exit({end.code!r})") from None


def _shorten_value(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
