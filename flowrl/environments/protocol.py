"""What an environment is: `Env`, and the values that it and the policy exchange.

The values are immutable and cannot be constructed in an illegal state: that raises `MalformedValue`, which counts as
the environment's fault (the cause `env_malformed`) wherever it is raised in an environment.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from flowrl.messages.base import number_in, scalar_problem

ROLES = ("system", "user", "tool")
"""Roles of messages in an observation. Only the policy speaks as the assistant."""
FINISH_REASONS = ("stop", "length")


class MalformedValue(ValueError):
    """A value that the protocol does not allow."""


@dataclass(frozen=True)
class Observation:
    """What the policy is shown: one text, or several messages."""

    text: str = ""
    """Shown as one message of the user, or as the result of the tool calls that the action made."""
    messages: tuple[Mapping[str, str], ...] = ()
    """Messages with `role` and `content`, in place of `text`."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """Descriptions of functions as JSON Schema, in the form of OpenAI's API. Read from the first observation."""
    metrics: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_text("an observation's text", self.text)
        for message in check_items("messages", self.messages):
            if not isinstance(message, Mapping) or not {"role", "content"} <= set(message):
                raise MalformedValue(f"an observation's message is {shorten_value(message)}; it needs role and content")
            if isinstance(message["content"], list | tuple):
                raise MalformedValue(
                    "an observation's message has a list of parts as content; images are not supported: give one text, "
                    "and describe in words what is to be seen"
                )
            for key, text in message.items():
                check_text(f"{key!r} of an observation's message", text)
            if message["role"] not in ROLES:
                raise MalformedValue(f"a message's role is {message['role']!r}; it has to be one of {', '.join(ROLES)}")
        if self.text and self.messages:
            raise MalformedValue("an observation has both text and messages; put the text into the messages")

        tools = []
        for tool in check_items("tools", self.tools):
            function = tool.get("function") if isinstance(tool, Mapping) else None
            if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
                needed = "{'type': 'function', 'function': {'name': …}}"
                raise MalformedValue(f"a tool is {shorten_value(tool)}; it needs {needed}")
            try:
                tools.append(json.loads(json.dumps(tool)))
            except (TypeError, ValueError) as problem:
                raise MalformedValue(
                    f"the tool {function['name']!r} has values that JSON cannot represent: {problem}"
                ) from None
        messages = tuple(map(dict, self.messages))
        vars(self).update(messages=messages, tools=tuple(tools), metrics=check_metrics(self.metrics))


@dataclass(frozen=True)
class ToolCall:
    """A call that the policy made, as it was parsed."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    call_id: str = ""


@dataclass(frozen=True)
class Action:
    """One reply of the policy."""

    text: str
    tool_calls: tuple[ToolCall, ...] = ()
    token_ids: tuple[int, ...] = ()
    """The sampled tokens; empty if a person plays by hand."""
    finish_reason: str = "stop"
    """"stop", or "length": the reply was cut off at its limit of tokens."""

    @classmethod
    def of_message(
        cls,
        message: Mapping[str, Any],
        *,
        token_ids: Sequence[int] = (),
        finish_reason: str = "stop",
    ) -> Action:
        """The action for a parsed reply, which is an assistant's message with tool calls in the form of OpenAI's API.

        The arguments of a call are JSON text or a mapping.
        """
        calls = []
        for call in message.get("tool_calls") or ():
            function = call.get("function", call)
            arguments = function.get("arguments") or {}
            known = json.loads(arguments) if isinstance(arguments, str) else arguments
            calls.append(ToolCall(function["name"], known, str(call.get("id") or "")))
        return cls(str(message.get("content") or ""), tuple(calls), tuple(token_ids), finish_reason)

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            raise MalformedValue(f"an action's text is {shorten_value(self.text)}; it needs text")
        if self.finish_reason not in FINISH_REASONS:
            raise MalformedValue(f"finish_reason is {self.finish_reason!r}; it has to be {' or '.join(FINISH_REASONS)}")
        vars(self).update(tool_calls=tuple(self.tool_calls), token_ids=tuple(map(int, self.token_ids)))


@dataclass(frozen=True)
class Step:
    """What one action led to."""

    observation: Observation | tuple[Observation, ...]
    """One observation, or with several seats one for each; a seat with nothing new to see gets an empty one."""
    reward: float | tuple[float, ...] = 0.0
    """One number, or with several seats one for each."""
    terminated: bool = False
    """The episode is over by its own rules."""
    truncated: bool = False
    """The episode is cut off; it could have continued."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the episode so far; the last value of each name counts."""
    max_tokens: int | None = None
    """The next reply's limit of tokens; None leaves it to the sampling."""
    stop: tuple[str, ...] = ()
    """Texts that end the next reply."""

    def __post_init__(self) -> None:
        seen = self.observation
        for one in seen if isinstance(seen, tuple | list) else [seen]:
            if not isinstance(one, Observation):
                raise MalformedValue(f"a step's observation is {shorten_value(one)}; it needs an Observation")
        rewards = tuple(check_number("a reward", one) for one in self.rewards)
        for name, value in (("terminated", self.terminated), ("truncated", self.truncated)):
            if not isinstance(value, bool | np.bool_):
                raise MalformedValue(f"{name} is {shorten_value(value)}; it needs True or False")
        most: Any = self.max_tokens
        if most is not None and (not isinstance(most, int) or isinstance(most, bool) or most < 1):
            raise MalformedValue(f"max_tokens is {shorten_value(most)}; it needs a whole number above 0, or None")
        for text in check_items("stop", self.stop):
            check_text("a stop text", text)
            if not text:
                raise MalformedValue("a stop text is empty; it would end every reply at once")
        vars(self).update(
            observation=tuple(seen) if isinstance(seen, tuple | list) else seen,
            reward=rewards if isinstance(self.reward, tuple | list) else rewards[0],
            terminated=bool(self.terminated),
            truncated=bool(self.truncated),
            metrics=check_metrics(self.metrics),
            stop=tuple(map(str, self.stop)),
        )

    @property
    def observations(self) -> tuple[Observation, ...]:
        """One for each seat."""
        return self.observation if isinstance(self.observation, tuple) else (self.observation,)

    @property
    def rewards(self) -> tuple[float, ...]:
        """One for each seat."""
        return tuple(self.reward) if isinstance(self.reward, tuple | list) else (self.reward,)

    @property
    def over(self) -> bool:
        """Whether this is the episode's last step."""
        return self.terminated or self.truncated


class Env:
    """Base of environments. An object plays one episode: `reset` or `restore`, then steps, then `close`.

    An environment's options are the keyword arguments of its class. By default an object has a process of its own,
    whose modules `random`, `numpy.random` and `torch` are seeded before the object is made.
    """

    cooperative: ClassVar[bool] = False
    """The environment awaits, never computes for long, and uses no global state: it may share a process with others."""
    replays: ClassVar[bool] = True
    """The same seed and actions give the same observations and rewards."""
    seats: ClassVar[int] = 1
    """Number of players. They act in order, from seat 0."""

    @classmethod
    def before_fork(cls, **options: Any) -> None:
        """Called with the options in the process from which the processes of episodes are forked: they share what this
        method loads.

        Raise ConfigError for a user's mistake. It must not start threads.
        """

    async def reset(self, task: Mapping[str, Any], seed: int) -> Observation | tuple[Observation, ...]:
        """Begin the episode. `task` is the row: its name, options and seed. With several seats, return one observation
        for each."""
        raise NotImplementedError

    async def step(self, action: Action) -> Step:
        """Play one action. With several seats the method is `step(action, seat=0)`."""
        raise NotImplementedError

    async def close(self) -> None:
        """Release what the episode holds. Called once, unless the process had to be killed."""

    def save(self) -> bytes | None:
        """The state between two steps, for `restore`; None if it cannot be saved."""
        return None

    def restore(self, state: bytes) -> None:
        """Continue from a saved state; called in place of `reset`, on a new object."""
        raise NotImplementedError


def can_save(kind: type[Env]) -> bool:
    """Whether environments of this class may have a state to save."""
    return kind.save is not Env.save


def check_items(what: str, values: Any) -> Sequence[Any]:
    if not isinstance(values, tuple | list):
        raise MalformedValue(f"{what} is {shorten_value(values)}; it needs a tuple")
    return values


def check_metrics(values: Any) -> Mapping[str, float]:
    if not isinstance(values, Mapping):
        raise MalformedValue(f"metrics is {shorten_value(values)}; it needs names with numbers")
    return {str(name): check_number(f"the metric {name!r}", value) for name, value in values.items()}


def check_number(what: str, value: Any) -> float:
    number = number_in(value)
    if number is None or not math.isfinite(number):
        raise MalformedValue(f"{what} is {shorten_value(value)}; it needs a finite number")
    return number


def check_text(what: str, value: Any) -> None:
    if not isinstance(value, str):
        raise MalformedValue(f"{what} is {shorten_value(value)}; it needs text")
    if problem := scalar_problem(value):
        raise MalformedValue(f"{what} holds {problem}")


def shorten_value(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


LEAST_BYTES = 64
"""A shorter limit would leave no room for the mark."""


def without_middle(text: str, most_bytes: int) -> str:
    """`text` in at most `most_bytes` bytes of UTF-8: its beginning and its end, with a mark between them for what is
    left out.

    Halves of surrogate pairs, which nothing can send, become question marks. `most_bytes` is at least 64.
    """
    assert most_bytes >= LEAST_BYTES, most_bytes
    whole = text.encode("utf-8", "replace")
    if len(whole) <= most_bytes:
        return whole.decode()
    mark = "\n[{} bytes left out]\n"
    room = most_bytes - len(mark.format(len(whole)))
    head, tail = whole[: room - room // 2], whole[len(whole) - room // 2 :]
    return f"{head.decode(errors='ignore')}{mark.format(len(whole) - room)}{tail.decode(errors='ignore')}"


def as_plain(value: Observation | Action | Step) -> dict[str, Any]:
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
            found["observation"] = as_plain(seen) if isinstance(seen, Observation) else tuple(map(as_plain, seen))
            found["metrics"] = dict(value.metrics)
    return found


def read_action(found: Mapping[str, Any]) -> Action:
    """The action that `as_plain` converted into `found`."""
    return Action(**{**found, "tool_calls": tuple(ToolCall(**call) for call in json.loads(found["tool_calls"]))})


def read_observation(found: Any) -> Observation:
    """The observation that `as_plain` converted into `found`. Raises MalformedValue."""
    try:
        return Observation(**found)
    except TypeError:
        raise MalformedValue("the process answered with what is no Observation") from None


def read_observations(found: Any) -> tuple[Observation, ...]:
    """The observations of all seats. Raises MalformedValue."""
    if not isinstance(found, list | tuple) or not found:
        raise MalformedValue("the process answered without observations")
    return tuple(map(read_observation, found))


def read_step(found: Any) -> Step:
    """The step that `as_plain` converted into `found`. Raises MalformedValue."""
    if not isinstance(found, dict):
        raise MalformedValue("the process answered without a step")
    seen = found.get("observation")
    several = isinstance(seen, list | tuple)
    observation = read_observations(seen) if several else read_observation(seen)
    try:
        return Step(**{**found, "observation": observation})
    except TypeError:
        raise MalformedValue("the process answered with what is no Step") from None


def read_state(found: Any) -> bytes | None:
    """A saved state. Raises MalformedValue."""
    if found is not None and not isinstance(found, bytes):
        raise MalformedValue("the process answered with a state that is not bytes")
    return found
