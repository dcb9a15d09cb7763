"""Calls functions written for OpenRLHF, TRL or verl as those libraries do, and reads what the functions return.

The signatures are those that the three document: OpenRLHF's `reward_func(queries, prompts, labels, **kwargs)`, which
returns a tensor or a dict of `rewards`, `scores` and `extra_logs`; TRL's `f(prompts, completions, **columns)`, called
with keywords, which returns a number or None for each completion; verl's `compute_score(data_source, solution_str,
ground_truth, extra_info=None)`, which returns a number or a dict with `score`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flowrl.message_base import number_in
from flowrl.tasks.reward_calls.signatures import SECOND, Convention

ROW = "flowrl.row"
"""The column for what a row has in addition to its columns: the task's name, its turns, and whether it came as
messages."""
LABELS = ("label", "labels", "answer", "ground_truth")
TRUTHS = ("ground_truth", "answer", "label")
OF_TRL = ("completion_ids", "trainer_state", "log_extra", "log_metric", "environments")
"""What TRL passes in addition to columns, and flowrl does not have."""


@dataclass(frozen=True)
class Adapted:
    """How one function is called: with lists of samples, or with one. `function` returns what one of flowrl's would."""

    function: Callable[..., Any]
    single: bool
    wanted: frozenset[str] | None
    required: frozenset[str]
    any_of: frozenset[str] = frozenset()
    """Columns of which a row needs at least one."""


def adapted(function: Callable[..., Any], convention: Convention) -> Adapted:
    """`function`, of a foreign convention, with our signature."""
    parameters = inspect.signature(function).parameters
    needed = {name for name, one in parameters.items() if one.default is one.empty and one.kind not in STARRED}
    takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    keep = frozenset(parameters)
    if convention == "verl":
        truths = frozenset({"reward_model", *TRUTHS}) if "ground_truth" in needed else frozenset()
        return Adapted(_of_verl(function, keep, takes_all), True, None, frozenset(needed - VERL), truths)
    if convention == "openrlhf":
        return Adapted(_of_openrlhf(function, keep, takes_all), False, None, frozenset(needed - OPENRLHF))
    if convention == "pairwise":
        return Adapted(_of_comparison(function, keep, takes_all), False, None, frozenset(needed - PAIRWISE) | {SECOND})
    return Adapted(_of_trl(function, keep, takes_all), False, None, frozenset(needed - TRL))


STARRED = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
OPENRLHF = frozenset({"queries", "prompts", "labels"})
TRL = frozenset({"prompts", "completions"})
PAIRWISE = frozenset({"prompts", "firsts", "seconds"})
VERL = frozenset({"data_source", "solution_str", "ground_truth", "extra_info"})
ForeignCall = Callable[..., Any]


def _of_openrlhf(function: ForeignCall, keep: frozenset[str], takes_all: bool) -> ForeignCall:
    def call(prompts: Sequence[str], responses: Sequence[str], /, **columns: Sequence[Any]) -> Any:
        queries = [prompt + response for prompt, response in zip(prompts, responses, strict=True)]
        given = {"queries": queries, "prompts": list(prompts), "labels": _labels(columns, len(prompts))}
        others = {name: values for name, values in columns.items() if name not in (*given, ROW)}
        return _then(
            function(**_chosen(given | others, keep, takes_all)), lambda answer: openrlhf_answer(answer, len(prompts))
        )

    return _like(call, function)


def _of_trl(function: ForeignCall, keep: frozenset[str], takes_all: bool) -> ForeignCall:
    def call(prompts: Sequence[str], responses: Sequence[str], /, **columns: Sequence[Any]) -> Any:
        rows = columns.pop(ROW, None) or [None] * len(prompts)
        asked = list(zip(prompts, responses, rows, strict=True))
        given = {
            "prompts": [_trl_prompt(prompt, row) for prompt, _, row in asked],
            "completions": [_trl_completion(response, row) for _, response, row in asked],
        }
        return _then(function(**_chosen(columns | given, keep, takes_all)), _trl_answer)

    return _like(call, function)


def _of_comparison(function: ForeignCall, keep: frozenset[str], takes_all: bool) -> ForeignCall:
    def call(prompts: Sequence[str], responses: Sequence[str], /, **columns: Sequence[Any]) -> Any:
        seconds = columns.pop(SECOND)
        given = {"prompts": list(prompts), "firsts": list(responses), "seconds": list(seconds)}
        return _then(function(**_chosen(columns | given, keep, takes_all)), _flat)

    return _like(call, function)


def _of_verl(function: ForeignCall, keep: frozenset[str], takes_all: bool) -> ForeignCall:
    def call(prompt: str, response: str, /, **columns: Any) -> Any:
        row = columns.pop(ROW, None) or {}
        given = {
            "data_source": columns.get("data_source", row.get("task", "")),
            "solution_str": response,
            "ground_truth": _truth(columns),
            "extra_info": columns.get("extra_info", columns),
        }
        return _then(function(**_chosen(given, keep, takes_all)), _verl_answer)

    return _like(call, function)


def by_position(function: ForeignCall, first: Sequence[inspect.Parameter]) -> ForeignCall:
    """`function` in a form that takes its `first` parameters by position, even if they are keyword-only."""
    named = [one.name for one in first if one.kind is one.KEYWORD_ONLY]

    def call(*given: Any, **columns: Any) -> Any:
        start = len(given) - len(named)
        return function(*given[:start], **dict(zip(named, given[start:], strict=True)), **columns)

    return _like(call, function) if named else function


def _like(call: ForeignCall, function: ForeignCall) -> ForeignCall:
    """`call` as a coroutine function if `function` is one."""
    if not inspect.iscoroutinefunction(function):
        return call

    async def awaited(*args: Any, **columns: Any) -> Any:
        return await call(*args, **columns)

    return awaited


def _then(answer: Any, read: Callable[[Any], Any]) -> Any:
    """`read(answer)`, after waiting for it if `answer` is a coroutine."""
    if not inspect.isawaitable(answer):
        return read(answer)

    async def wait() -> Any:
        return read(await answer)

    return wait()


def _chosen(given: Mapping[str, Any], keep: frozenset[str], takes_all: bool) -> dict[str, Any]:
    return {name: value for name, value in given.items() if takes_all or name in keep}


# Arguments


def label_of(columns: Mapping[str, Any]) -> Any:
    """The label of a row as OpenRLHF's functions and servers get it: as the row has it, empty text if there is none."""
    return next((columns[name] for name in LABELS if columns.get(name) is not None), "")


def _labels(columns: Mapping[str, Sequence[Any]], number: int) -> list[Any]:
    return [label_of({name: values[index] for name, values in columns.items()}) for index in range(number)]


def _trl_prompt(prompt: str, row: Mapping[str, Any] | None) -> Any:
    """The prompt as the dataset has it: messages, or text without the chat template."""
    if row is None:
        return prompt
    return [dict(turn) for turn in row["turns"]] if row["messages"] else row["turns"][-1]["content"]


def _trl_completion(response: str, row: Mapping[str, Any] | None) -> Any:
    return [{"role": "assistant", "content": response}] if row is not None and row["messages"] else response


def _truth(columns: Mapping[str, Any]) -> Any:
    """The right answer of a row, which verl's data have in the column reward_model."""
    style = columns.get("reward_model")
    if isinstance(style, Mapping) and "ground_truth" in style:
        return style["ground_truth"]
    return next((columns[name] for name in TRUTHS if columns.get(name) is not None), None)


# Answers


def openrlhf_answer(answer: Any, number: int) -> Any:
    """`extra_logs` become our logs; a log of one number applies to all samples. `as_verdicts` refuses wrong values."""
    if not isinstance(answer, Mapping):
        return _flat(answer)
    found = {
        name: _flat(values) for name, values in answer.items() if name in ("rewards", "scores") and values is not None
    }
    extra = answer.get("extra_logs")
    if not isinstance(extra, Mapping | None):
        return found | {"logs": extra}
    logs = {str(name): _flat(values) for name, values in (extra or {}).items()}
    every = {name: values if isinstance(values, list) else [values] * number for name, values in logs.items()}
    return found | {"logs": {name: values * number if len(values) == 1 else values for name, values in every.items()}}


def _trl_answer(answer: Any) -> Any:
    """A completion for which the function returned None gets 0, as in TRL's sum, and is counted in the logs."""
    values = _flat(answer)
    if not isinstance(values, list) or not any(value is None for value in values):
        return values
    rewards = [0.0 if value is None else value for value in values]
    return {"rewards": rewards, "logs": {"not_applicable": [float(value is None) for value in values]}}


def _verl_answer(answer: Any) -> Any:
    """If the answer is a dict, its `score` is the reward, and its other numbers are logged."""
    if not isinstance(answer, Mapping) or "score" not in answer:
        return answer  # our check of answers names the keys that it has
    logs = {str(name): number_in(value) for name, value in answer.items() if name != "score"}
    return {"reward": answer["score"], "logs": {k: value for k, value in logs.items() if value is not None}}


def _flat(values: Any) -> Any:
    """A tensor or array of any shape as a flat list; one without dimensions as its number."""
    if hasattr(values, "reshape") and hasattr(values, "tolist"):
        return values.tolist() if getattr(values, "ndim", 1) == 0 else values.reshape(-1).tolist()
    return values.item() if hasattr(values, "item") else values
