"""The protocol's values as plain data, for the connection to an episode's process."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from typing import Any, TypeVar

from flowrl.environments.protocol import Action, MalformedValue, Observation, Step, ToolCall

Value = TypeVar("Value")


def plain(value: Observation | Action | Step) -> dict[str, Any]:
    """The value as lists, mappings and scalars.

    Tool calls become JSON text: the policy wrote them, and may have written whole numbers beyond 64 bits and halves of
    surrogate pairs, which the connection cannot carry.
    """
    found = dict(vars(value))  # each turn makes several values, and dataclasses.asdict takes ten times as long
    match value:
        case Action():
            found["tool_calls"] = json.dumps([vars(call) for call in value.tool_calls])
        case Observation():
            found["messages"] = tuple(map(dict, value.messages))
            found["tools"] = copy.deepcopy(value.tools)
            found["metrics"] = dict(value.metrics)
        case Step():
            seen = value.observation
            found["observation"] = plain(seen) if isinstance(seen, Observation) else tuple(map(plain, seen))
            found["metrics"] = dict(value.metrics)
    return found


def action(found: Mapping[str, Any]) -> Action:
    """The action that `plain` converted into `found`."""
    return Action(**{**found, "tool_calls": tuple(ToolCall(**call) for call in json.loads(found["tool_calls"]))})


def observation(found: Any) -> Observation:
    """The observation that `plain` converted into `found`. Raises MalformedValue."""
    return _made(Observation, found)


def observations(found: Any) -> tuple[Observation, ...]:
    """The observations of all seats. Raises MalformedValue."""
    if not isinstance(found, list | tuple) or not found:
        raise MalformedValue("the process answered without observations")
    return tuple(map(observation, found))


def step(found: Any) -> Step:
    """The step that `plain` converted into `found`. Raises MalformedValue."""
    if not isinstance(found, dict):
        raise MalformedValue("the process answered without a step")
    seen = found.get("observation")
    several = isinstance(seen, list | tuple)
    return _made(Step, {**found, "observation": observations(seen) if several else observation(seen)})


def state(found: Any) -> bytes | None:
    """A saved state. Raises MalformedValue."""
    if found is not None and not isinstance(found, bytes):
        raise MalformedValue("the process answered with a state that is not bytes")
    return found


def _made(kind: type[Value], fields: Any) -> Value:
    try:
        return kind(**fields)
    except TypeError:
        raise MalformedValue(f"the process answered with what is no {kind.__name__}") from None
