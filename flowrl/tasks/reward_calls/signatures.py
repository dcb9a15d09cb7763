"""Whose convention a reward function follows, by the names of its parameters; and how one of another library is called.

    flowrl    (prompts, responses, **columns), or (prompt, response, **columns) for one sample
    openrlhf  (queries, prompts, labels, **kwargs): a query is the prompt with its response; returns a tensor or a dict
              of rewards, scores and extra_logs
    trl       (completions, prompts, **columns) in any order, called with keywords; texts, or lists of messages for rows
              of messages; returns a number or None for each completion
    pairwise  (prompts, firsts, seconds, **columns): how likely the first response is the better one
    verl      (data_source, solution_str, ground_truth, extra_info=None) for one sample; returns a number or a dict with
              score

`declared_convention` reads the parameters of a function from the files that declare it, without importing any of them,
so that a graph can be checked at once. It follows the statements at the top level of a file, including those within
`if` and `try`: `def`, `from module import name as other`, and `other = name`. A function that is made in another way
(by `functools.partial`, in a loop) is known only after `flowrl.tasks.reward_calls.judge` has loaded it.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from flowrl.errors import ConfigError
from flowrl.machine.disk import user_path
from flowrl.messages.base import number_in

Convention = Literal["flowrl", "openrlhf", "trl", "verl", "pairwise"]
TITLES: dict[Convention, str] = {"openrlhf": "OpenRLHF", "trl": "TRL", "verl": "verl"}
"""Convention -> name of the library that it comes from."""
MARKS: dict[str, Convention] = {
    "queries": "openrlhf",
    "completions": "trl",
    "solution_str": "verl",
    "seconds": "pairwise",
}
"""Parameter that only one convention has -> that convention."""
BATCHED: frozenset[Convention] = frozenset({"openrlhf", "trl"})
"""Foreign conventions under which a function expects many samples at once."""
SECOND = "second"
"""The column with the response that another one is compared with."""
USUAL = ("reward_func", "reward_fn", "compute_score")
"""Names that such functions usually have."""


def convention_of(names: Sequence[str]) -> Convention | None:
    """The convention of a function with these parameters; None if they fit none of these."""
    if tuple(names[:2]) in (("prompts", "responses"), ("prompt", "response")):
        return "flowrl"
    return next((MARKS[name] for name in names if name in MARKS), None)


def declared_convention(place: str) -> Convention | None:
    """The convention of `file.py:function` or `package.module:function`; None if no file declares it."""
    where, _, name = place.rpartition(":")
    if where.endswith(".py"):
        return convention_of(_follow_name(user_path(where), "", name, MOST_STEPS) or ())
    file = _file_of(where)
    return None if file is None else convention_of(_follow_name(file, where, name, MOST_STEPS) or ())


def with_function(place: str) -> str:
    """`file.py` with the name of its reward function; other places are unchanged. Raises ConfigError if unclear."""
    if not place.endswith(".py"):
        return place
    file = user_path(place)
    functions = declared_in(file).functions
    found = [name for name, names in functions.items() if name[0] != "_" and convention_of(names) is not None]
    usual = [name for name in USUAL if name in found] or found
    if not file.is_file():
        raise ConfigError(f"the reward's file {place} does not exist (looked for {file.resolve()})")
    try:
        ast.parse(file.read_bytes())
    except SyntaxError as error:
        raise ConfigError(f"the reward's file {place} is no Python: line {error.lineno}: {error.msg}") from None
    except ValueError as error:  # a null byte
        raise ConfigError(f"the reward's file {place} is no Python: line None: {error}") from None
    if len(usual) != 1:
        raise ConfigError(
            f"reward {place!r} names a file with {', '.join(found) or 'no function that takes prompts and responses'}; "
            f"name the function: {place}:FUNCTION"
        )
    return f"{place}:{usual[0]}"


# What files declare


Parameters = tuple[str, ...]
MOST_STEPS = 16
"""The most imports and assignments that are followed from one name."""


@dataclass(frozen=True)
class Declarations:
    """What a file declares at its top level."""

    functions: Mapping[str, Parameters] = field(default_factory=dict)
    imported: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Name -> (module, with a leading dot for each level if it is relative; name in that module)."""
    assigned: Mapping[str, str] = field(default_factory=dict)
    """Name -> another name in the same file."""


def declared_in(file: Path) -> Declarations:
    """What `file` declares; nothing if it cannot be read or parsed."""
    try:
        return _parse_file(file.resolve(), file.stat().st_mtime_ns)
    except OSError:
        return Declarations()


def _follow_name(file: Path, module: str, name: str, steps: int) -> Parameters | None:
    """The parameters of `name` in `file`, which is that of `module`; None if no file declares them."""
    found = declared_in(file)
    if name in found.functions or not steps:
        return found.functions.get(name)
    if name in found.assigned:
        return _follow_name(file, module, found.assigned[name], steps - 1)
    if name not in found.imported:
        return None
    imported, original = found.imported[name]
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    try:
        absolute = importlib.util.resolve_name(imported, package or None)
    except ImportError:  # a relative import in a file that belongs to no package
        return None
    source = _file_of(absolute)
    return None if source is None else _follow_name(source, absolute, original, steps - 1)


def _file_of(module: str) -> Path | None:
    """The source file of a module; None if there is none."""
    path: list[str] | None = None
    origin: str | None = None
    parts = module.split(".")
    for number in range(len(parts)):
        name = ".".join(parts[: number + 1])
        found = (finder.find_spec(name, path) for finder in sys.meta_path if hasattr(finder, "find_spec"))
        spec = next((one for one in found if one is not None), None)
        if spec is None:
            return None
        origin, path = spec.origin, [*(spec.submodule_search_locations or ())]
    return Path(origin) if origin is not None and origin.endswith(".py") else None


@functools.lru_cache(maxsize=64)
def _parse_file(file: Path, changed_ns: int) -> Declarations:
    try:
        statements = [*_top_statements(ast.parse(file.read_bytes()).body)]
    except (OSError, SyntaxError, ValueError):  # importing the file reports what is wrong
        return Declarations()
    functions, imported, assigned = dict[str, Parameters](), dict[str, tuple[str, str]](), dict[str, str]()
    for one in statements:
        if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef):
            given = (*one.args.posonlyargs, *one.args.args, *one.args.kwonlyargs)
            functions[one.name] = tuple(parameter.arg for parameter in given)
        elif isinstance(one, ast.ImportFrom):
            module = "." * one.level + (one.module or "")
            imported |= {name.asname or name.name: (module, name.name) for name in one.names}
        elif isinstance(one, ast.Assign) and isinstance(one.value, ast.Name):
            assigned |= {target.id: one.value.id for target in one.targets if isinstance(target, ast.Name)}
    return Declarations(functions, imported, assigned)


def _top_statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    for one in body:
        yield one
        if isinstance(one, ast.If | ast.Try):
            yield from _top_statements(one.body)
            yield from _top_statements(one.orelse)
        if isinstance(one, ast.Try):
            for handler in one.handlers:
                yield from _top_statements(handler.body)


# Calling functions of other libraries


ROW = "flowrl.row"
"""The column for what a row has in addition to its columns: the task's name, its turns, and whether it came as
messages."""
LABELS = ("label", "labels", "answer", "ground_truth")
TRUTHS = ("ground_truth", "answer", "label")
OF_TRL = ("completion_ids", "trainer_state", "log_extra", "log_metric", "environments")
"""What TRL passes in addition to columns, and flowrl does not have."""


STARRED = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
GIVEN: Mapping[Convention, frozenset[str]] = {
    "openrlhf": frozenset({"queries", "prompts", "labels"}),
    "trl": frozenset({"prompts", "completions"}),
    "pairwise": frozenset({"prompts", "firsts", "seconds"}),
    "verl": frozenset({"data_source", "solution_str", "ground_truth", "extra_info"}),
}
"""Convention -> what it passes besides columns of the row."""
ForeignCall = Callable[..., Any]


def adapt_function(function: ForeignCall, convention: Convention) -> tuple[ForeignCall, frozenset[str], frozenset[str]]:
    """(`function`, of a foreign convention, with our signature; the columns that it needs; columns of which a row needs
    at least one). It takes lists of samples, for verl one sample, and returns what one of flowrl's would."""
    parameters = inspect.signature(function).parameters
    takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters.values())

    def call(prompts: Any, responses: Any, /, **columns: Any) -> Any:
        """With lists of samples, or for verl with one sample."""
        given = foreign_arguments(convention, prompts, responses, columns)
        chosen = {name: value for name, value in given.items() if takes_all or name in parameters}
        answer = function(**chosen)
        if not inspect.isawaitable(answer):
            return foreign_answer(convention, answer, len(prompts))

        async def wait() -> Any:
            return foreign_answer(convention, await answer, len(prompts))

        return wait()

    needed = {name for name, one in parameters.items() if one.default is one.empty and one.kind not in STARRED}
    required = frozenset(needed - GIVEN[convention])
    truths: frozenset[str] = frozenset()
    if convention == "verl" and "ground_truth" in needed:
        truths = frozenset({"reward_model", *TRUTHS})
    if convention == "pairwise":
        required |= {SECOND}
    return _async_like(call, function), required, truths


def foreign_arguments(convention: Convention, prompts: Any, responses: Any, columns: dict[str, Any]) -> dict[str, Any]:
    """What a function of a foreign convention is called with, if it takes all of it."""
    if convention == "verl":  # one sample
        row = columns.pop(ROW, None) or {}
        style = columns.get("reward_model")  # verl's data have the right answer in this column
        if isinstance(style, Mapping) and "ground_truth" in style:
            truth = style["ground_truth"]
        else:
            truth = next((columns[name] for name in TRUTHS if columns.get(name) is not None), None)
        return {
            "data_source": columns.get("data_source", row.get("task", "")),
            "solution_str": responses,
            "ground_truth": truth,
            "extra_info": columns.get("extra_info", columns),
        }
    if convention == "pairwise":
        seconds = columns.pop(SECOND)
        return columns | {"prompts": list(prompts), "firsts": list(responses), "seconds": list(seconds)}
    if convention == "openrlhf":
        queries = [prompt + response for prompt, response in zip(prompts, responses, strict=True)]
        rows = [{name: values[index] for name, values in columns.items()} for index in range(len(prompts))]
        given = {"queries": queries, "prompts": list(prompts), "labels": [label_of(row) for row in rows]}
        return given | {name: values for name, values in columns.items() if name not in (*given, ROW)}

    # TRL: rows of messages get messages, as the dataset has them; others get text, without the chat template.
    asked: list[Any] = []
    completions: list[Any] = []
    for prompt, response, row in zip(prompts, responses, columns.pop(ROW, None) or [None] * len(prompts), strict=True):
        if row is not None and row["messages"]:
            asked.append([dict(turn) for turn in row["turns"]])
            completions.append([{"role": "assistant", "content": response}])
        else:
            asked.append(prompt if row is None else row["turns"][-1]["content"])
            completions.append(response)
    return columns | {"prompts": asked, "completions": completions}


def by_position(function: ForeignCall, first: Sequence[inspect.Parameter]) -> ForeignCall:
    """`function` in a form that takes its `first` parameters by position, even if they are keyword-only."""
    named = [one.name for one in first if one.kind is one.KEYWORD_ONLY]

    def call(*given: Any, **columns: Any) -> Any:
        start = len(given) - len(named)
        return function(*given[:start], **dict(zip(named, given[start:], strict=True)), **columns)

    return _async_like(call, function) if named else function


def _async_like(call: ForeignCall, function: ForeignCall) -> ForeignCall:
    """`call` as a coroutine function if `function` is one."""
    if not inspect.iscoroutinefunction(function):
        return call

    async def awaited(*args: Any, **columns: Any) -> Any:
        return await call(*args, **columns)

    return awaited


# Their arguments


def label_of(columns: Mapping[str, Any]) -> Any:
    """The label of a row as OpenRLHF's functions and servers get it: as the row has it, empty text if there is none."""
    return next((columns[name] for name in LABELS if columns.get(name) is not None), "")


# Their answers


def openrlhf_answer(answer: Any, number: int) -> Any:
    """`extra_logs` become our logs; a log of one number applies to all samples. `as_verdicts` refuses wrong values."""
    if not isinstance(answer, Mapping):
        return _as_list(answer)
    found = {
        name: _as_list(values)
        for name, values in answer.items()
        if name in ("rewards", "scores") and values is not None
    }
    extra = answer.get("extra_logs")
    if not isinstance(extra, Mapping | None):
        return found | {"logs": extra}
    logs = {str(name): _as_list(values) for name, values in (extra or {}).items()}
    every = {name: values if isinstance(values, list) else [values] * number for name, values in logs.items()}
    return found | {"logs": {name: values * number if len(values) == 1 else values for name, values in every.items()}}


def foreign_answer(convention: Convention, answer: Any, number: int) -> Any:
    """What a function of ours would have returned for `number` samples."""
    if convention == "openrlhf":
        return openrlhf_answer(answer, number)
    if convention == "verl":
        if not isinstance(answer, Mapping) or "score" not in answer:
            return answer  # our check of answers names the keys that it has
        logs = {str(name): number_in(value) for name, value in answer.items() if name != "score"}
        return {"reward": answer["score"], "logs": {key: value for key, value in logs.items() if value is not None}}
    values = _as_list(answer)
    if convention == "pairwise" or not isinstance(values, list) or not any(value is None for value in values):
        return values
    # A completion for which the function returned None gets 0, as in TRL's sum, and is counted in the logs.
    rewards = [0.0 if value is None else value for value in values]
    return {"rewards": rewards, "logs": {"not_applicable": [float(value is None) for value in values]}}


def _as_list(values: Any) -> Any:
    """A tensor or array of any shape as a flat list; one without dimensions as its number."""
    if hasattr(values, "reshape") and hasattr(values, "tolist"):
        return values.tolist() if getattr(values, "ndim", 1) == 0 else values.reshape(-1).tolist()
    return values.item() if hasattr(values, "item") else values
