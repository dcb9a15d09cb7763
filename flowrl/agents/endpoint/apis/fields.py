"""Reading the fields of a body. What is not understood is refused, and the error names the field."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from flowrl.agents.endpoint.apis.api import ApiProblem, invalid
from flowrl.environments.protocol import shorten_value

MOST_REPLIES = 128


def check_fields(
    body: Mapping[str, Any], read: Collection[str], neutral: Mapping[str, tuple[Any, ...]], where: str = ""
) -> None:
    """Raises ApiProblem for a field that is neither read nor has one of the values that ask for nothing.

    `neutral` maps fields that change what is sampled or shown in a way that this endpoint does not offer to these
    values.
    """
    for name, value in body.items():
        if value is None or name in read:
            continue
        if name not in neutral:
            raise invalid(where + name, f"{where}{name} is not known here; leave it out")
        asked = _without_nulls(value)
        if not any(asked == one and isinstance(asked, bool) == isinstance(one, bool) for one in neutral[name]):
            raise untrainable_field(where + name, value)


def _without_nulls(value: Any) -> Any:
    """An object without keys that are null, as SDKs send them for fields that were not set."""
    if not isinstance(value, Mapping):
        return value
    return {name: _without_nulls(one) for name, one in value.items() if one is not None}


def untrainable_field(name: str, value: Any) -> ApiProblem:
    """The error for a field that changes how tokens are sampled."""
    return invalid(
        name,
        f"{name}={shorten_value(value)} is not possible here: the policy is trained on what it samples with the run's "
        f"own settings, and nothing else; leave {name} out",
    )


def read_mapping(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise invalid(name, f"{name} is {shorten_value(value)}; it needs an object")
    return value


def read_items(name: str, value: Any) -> Sequence[Any]:
    if not isinstance(value, list):
        raise invalid(name, f"{name} is {shorten_value(value)}; it needs a list")
    return value


def read_text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise invalid(name, f"{name} is {shorten_value(value)}; it needs text")
    return value


def read_choice(name: str, value: Any, allowed: Collection[str]) -> str:
    if not isinstance(value, str) or value not in allowed:
        raise invalid(name, f"{name} is {shorten_value(value)}; it has to be one of {', '.join(sorted(allowed))}")
    return value


def read_flag(body: Mapping[str, Any], name: str, where: str = "") -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise invalid(where + name, f"{where}{name} is {shorten_value(value)}; it needs true or false")
    return bool(value)


def read_count(body: Mapping[str, Any], name: str, most: int | None = None) -> int | None:
    """The field's whole number, 1 or more; None if the field is missing."""
    value = body.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1 or (most is not None and value > most):
        limit = "above 0" if most is None else f"from 1 to {most}"
        raise invalid(name, f"{name} is {shorten_value(value)}; it needs a whole number {limit}")
    return value


def read_stop(body: Mapping[str, Any], name: str = "stop") -> tuple[str, ...]:
    value = body.get(name)
    texts = [value] if isinstance(value, str) else read_items(name, value or [])
    for one in texts:
        if not read_text(name, one):
            raise invalid(name, f"{name} has an empty text, which would end every reply at once")
    return tuple(texts)


def check_numbers(body: Mapping[str, Any], *names: str) -> None:
    """Check that sampling parameters are numbers, although the graph's values are used in their place."""
    for name in names:
        value = body.get(name)
        if value is not None and (not isinstance(value, int | float) or isinstance(value, bool)):
            raise invalid(name, f"{name} is {shorten_value(value)}; it needs a number")


def read_content(name: str, content: Any, kinds: Collection[str] = ("text",)) -> str:
    """The text of a message's content: text, or parts of text, one after the other."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for n, part in enumerate(read_items(name, content)):
        kind = read_mapping(f"{name}[{n}]", part).get("type")
        if not isinstance(kind, str) or kind not in kinds:
            raise invalid(f"{name}[{n}]", f"{name}[{n}] is of type {shorten_value(kind)}; the policy reads only text")
        texts.append(read_text(f"{name}[{n}].text", part.get("text")))
    return "".join(texts)


def read_arguments(name: str, arguments: Any) -> Mapping[str, Any]:
    """The arguments of a tool call that a client sends, given as JSON text."""
    try:
        found = json.loads(read_text(name, arguments) or "{}")
    except ValueError:
        raise invalid(name, f"{name} is not valid JSON: {shorten_value(arguments)}") from None
    return read_mapping(name, found)


def read_function(name: str, function: Any, parameters: str = "parameters") -> Mapping[str, Any]:
    """A tool as chat templates know it, from its name, description and schema."""
    described = read_mapping(name, function)
    tool = {"name": read_text(f"{name}.name", described.get("name"))}
    if described.get("description") is not None:
        tool["description"] = read_text(f"{name}.description", described["description"])
    name = f"{name}.{parameters}"
    schema = read_mapping(name, described.get(parameters) or {"type": "object", "properties": {}})
    # Templates and parsers go through the arguments of a tool, so each has to be described by what JSON Schema allows.
    for key, argument in read_mapping(f"{name}.properties", schema.get("properties", {})).items():
        if not isinstance(argument, bool):
            read_mapping(f"{name}.properties.{key}", argument)
    return {"type": "function", "function": {**tool, "parameters": schema}}
