"""vLLM's own options as text, `NAME=VALUE`: their names and types as vLLM's source has them.

The source is read and not imported, because importing vllm takes seconds. If vLLM is not installed, its options are not
known: any name is accepted, and values that are JSON are read as JSON.
"""

from __future__ import annotations

import ast
import difflib
import functools
import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flowrl.errors import ConfigError

WORDS = {"int": "an integer", "float": "a number", "bool": "true or false"}


def given_name(text: str) -> str:
    """The name in `--engine.extra NAME=VALUE` in vLLM's spelling, whether or not vLLM has such an option."""
    return text.partition("=")[0].strip().replace("-", "_")


def parse_extra(text: str) -> tuple[str, Any]:
    """(name, value) of `--engine.extra NAME=VALUE`. Raises ConfigError for a name or value that vLLM does not take."""
    _, equals, value = text.partition("=")
    name = given_name(text)
    if not equals or not name:
        raise ConfigError(f"--engine.extra is {text!r}; write NAME=VALUE, such as max_num_batched_tokens=8192")
    known = known_options()
    if known is None:
        return name, _json_or_text(value)
    if name not in known:
        near = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean {near[0]}?" if near else "they are the fields of vLLM's AsyncEngineArgs"
        raise ConfigError(f"--engine.extra names {name!r}, which is not an option of vLLM's engine; {hint}")
    return name, typed_value(name, value, known[name])


@functools.cache
def known_options() -> Mapping[str, str] | None:
    """Option -> its type as vLLM's source writes it; None if vLLM is not installed."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return None
    source = Path(next(iter(spec.submodule_search_locations))) / "engine" / "arg_utils.py"
    if not source.is_file():
        return None
    classes = [node for node in ast.parse(source.read_text(encoding="utf-8")).body if isinstance(node, ast.ClassDef)]
    return {
        field.target.id: ast.unparse(field.annotation)
        for one in classes
        if one.name in ("EngineArgs", "AsyncEngineArgs")
        for field in one.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    }


def typed_value(name: str, value: str, annotation: str) -> Any:
    """`value` as the first type of a union that accepts it. Types other than those in `WORDS` take JSON, or text."""
    kinds = [kind.strip() for kind in annotation.strip("'").split(" | ")]
    if "None" in kinds and value.lower() in ("none", "null"):
        return None
    for kind in kinds:
        try:
            if kind == "bool" and value.lower() in ("true", "false"):
                return value.lower() == "true"
            if kind in ("int", "float"):
                return {"int": int, "float": float}[kind](value)
        except ValueError:
            continue
    if set(kinds) - {"None", *WORDS}:
        return value if kinds == ["str"] else _json_or_text(value)
    needed = ", or ".join(WORDS[kind] for kind in kinds if kind in WORDS)
    raise ConfigError(f"--engine.extra {name}={value}: vLLM's {name} needs {needed}")


def _json_or_text(value: str) -> Any:
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value
