"""Whose convention a reward function follows, by the names of its parameters.

    flowrl    (prompts, responses, **columns), or (prompt, response, **columns) for one sample
    openrlhf  (queries, prompts, labels, **kwargs): a query is the prompt with its response
    trl       (completions, prompts, **columns) in any order; texts, or lists of messages for rows of messages
    pairwise  (prompts, firsts, seconds, **columns): how likely the first response is the better one
    verl      (data_source, solution_str, ground_truth, extra_info=None) for one sample

`declared` reads the parameters of a function without importing it, so that a graph can be checked at once. If no file
declares them, `flowrl.tasks.reward_calls.judge` finds them once the function is loaded.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from flowrl.errors import ConfigError
from flowrl.tasks.reward_calls.declared_parameters import declared_in, parameters
from flowrl.user_path import user_path

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


def declared(place: str) -> Convention | None:
    """The convention of `file.py:function` or `package.module:function`; None if no file declares it."""
    return convention_of(parameters(place) or ())


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
    if (error := _syntax_error(file)) is not None:
        raise ConfigError(f"the reward's file {place} is no Python: line {error.lineno}: {error.msg}")
    if len(usual) != 1:
        raise ConfigError(
            f"reward {place!r} names a file with {', '.join(found) or 'no function that takes prompts and responses'}; "
            f"name the function: {place}:FUNCTION"
        )
    return f"{place}:{usual[0]}"


def _syntax_error(path: Path) -> SyntaxError | None:
    """What is wrong with a file that Python cannot read."""
    try:
        ast.parse(path.read_bytes())
    except SyntaxError as error:
        return error
    except ValueError as error:  # a null byte
        return SyntaxError(str(error))
    return None
