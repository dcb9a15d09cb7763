"""The names of vLLM's parsers of tool calls and reasoning, read from vLLM's source: importing vllm takes seconds.

If vLLM is not installed, or keeps the names elsewhere, no name is known and any name passes. The generator's process,
which imports vLLM, then refuses wrong names.
"""

from __future__ import annotations

import ast
import difflib
import functools
import importlib.util
from collections.abc import Collection, Iterator
from pathlib import Path

TABLES = {
    "tool_parser": ("tool_parsers", "_TOOL_PARSERS_TO_REGISTER"),
    "reasoning_parser": ("reasoning", "_REASONING_PARSERS_TO_REGISTER"),
}
"""Kind of parser -> vLLM's package of them, and the table in it whose keys are the names."""
OF_RESPONSE_TEMPLATE = "hf"
"""vLLM's name for the parser that reads the tokenizer's `response_template`."""


def parser_problems(*, tool_parser: str | None, reasoning_parser: str | None) -> Iterator[str]:
    """What is wrong with these names, as sentences. None and "" name no parser."""
    for kind, name in (("tool_parser", tool_parser), ("reasoning_parser", reasoning_parser)):
        if name and (problem := name_problem(kind, name, parser_names(kind))):
            yield problem


def name_problem(kind: str, name: str, known: Collection[str]) -> str:
    """Why `name` is none of the `known` parsers of this kind; "" if it is one, or if none is known."""
    if name == OF_RESPONSE_TEMPLATE:
        return f"{kind}={name} is the tokenizer's response_template, which is the default; leave it out"
    if name in known or not known:
        return ""
    close = difflib.get_close_matches(name, known, 1)
    hint = f" Did you mean {close[0]}?" if close else ""
    return f"vLLM has no {kind} {name!r}; it has {', '.join(sorted(known))}.{hint}"


@functools.cache
def parser_names(kind: str) -> tuple[str, ...]:
    """vLLM's parsers of a kind of `TABLES`, sorted; none if they are not known."""
    package, table = TABLES[kind]
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return ()
    source = Path(next(iter(spec.submodule_search_locations))) / package / "__init__.py"
    if not source.is_file():
        return ()
    for node in ast.parse(source.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict) and _is_named(node, table):
            names = {str(key.value) for key in node.value.keys if isinstance(key, ast.Constant)}
            return tuple(sorted(names - {OF_RESPONSE_TEMPLATE}))
    return ()


def _is_named(node: ast.Assign, table: str) -> bool:
    return any(isinstance(target, ast.Name) and target.id == table for target in node.targets)
