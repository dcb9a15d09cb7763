"""One tool: a function that a policy may call, its description, and the result of a call. `ToolSource` has tools for an
episode, opened when it begins and closed at its end.

A description is JSON Schema from the function's type hints, and text from its docstring; a section `Args:` with lines
`name: text` describes the arguments. pydantic makes the schema, and checks the arguments of a call against it as
strictly as JSON allows: a number in quotes is text. An optional argument is marked `nullable`, as transformers does:
chat templates are written for its form.
"""

from __future__ import annotations

import inspect
import re
import typing
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, create_model
from pydantic.errors import PydanticUserError
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue, PydanticJsonSchemaWarning

from flowrl.errors import ConfigError

NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
ARGS = re.compile(r"^(?:Args|Arguments|Parameters):[ \t]*$", re.MULTILINE)
NEXT_SECTION = re.compile(r"^\w+:[ \t]*$", re.MULTILINE)
ARGUMENT = re.compile(r"^\*{0,2}(\w+)(?:[ \t]*\([^)]*\))?:[ \t]*(.*)$")
STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


@dataclass(frozen=True)
class ToolDescription:
    """A function's name, its schema, and the model that checks a call's arguments."""

    name: str
    text: str
    parameters: Mapping[str, Any]
    """JSON Schema of an object."""
    model: type[BaseModel] | None
    """None if the server that executes the call checks the arguments."""


def describe_function(function: Callable[..., Any]) -> ToolDescription:
    """The description of `function`. Raises ConfigError, which names it, if its name, docstring or hints are not
    enough."""
    name = getattr(function, "__name__", repr(function))
    if not (inspect.isfunction(function) or inspect.ismethod(function)) or not NAME.fullmatch(name):
        raise ConfigError(
            f"{name} is no function with a name that a policy can call; define the tool with def, its name in ASCII"
        )
    text, arguments = parse_docstring(name, function)
    parameters = parameters_schema(name, function)
    if unknown := sorted(arguments.keys() - parameters.keys()):
        raise ConfigError(f"the docstring of tool {name} describes {', '.join(unknown)}, which it does not take")
    fields: dict[str, Any] = {
        f"p{index}": (hint, Field(default, alias=key, description=arguments.get(key)))
        for index, (key, (hint, default)) in enumerate(parameters.items())
    }
    model, schema = schema_of_fields(name, fields)
    return ToolDescription(name, text, schema, model)


def parameters_schema(name: str, function: Callable[..., Any]) -> dict[str, tuple[Any, Any]]:
    """Parameter -> its hint, and its default or `...`."""
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except (NameError, TypeError, SyntaxError, AttributeError) as problem:
        raise ConfigError(
            f"the type hints of tool {name} cannot be read ({problem}); use names that its file has"
        ) from None
    found = {}
    for key, parameter in inspect.signature(function).parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ConfigError(
                f"tool {name} has the parameter {parameter.name}, which a call cannot give by name; "
                "write one parameter for each argument"
            )
        if key not in hints:
            raise ConfigError(f"the parameter {key} of tool {name} has no type hint; write {key}: str, or another type")
        found[key] = (hints[key], ... if parameter.default is parameter.empty else parameter.default)
    return found


def schema_of_fields(name: str, fields: dict[str, Any]) -> tuple[type[BaseModel], dict[str, Any]]:
    """The model that checks a call's arguments, and the schema that describes them."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", PydanticJsonSchemaWarning)
            model = create_model(name, __config__=STRICT, **fields)
            schema = model.model_json_schema(schema_generator=_Form)
        silent = [key for key, one in schema["properties"].items() if not one.keys() - {"description", "default"}]
        why = f"the hint of {silent[0]} says nothing" if silent else ""
    except (PydanticUserError, PydanticJsonSchemaWarning) as problem:
        why = str(problem).splitlines()[0]
    if why:
        raise ConfigError(
            f"the type hints of tool {name} cannot be described as JSON Schema ({why}); use str, int, float, bool, "
            "Literal, list[...], dict[...] and Optional of these"
        )
    for key in ("title", "additionalProperties"):
        schema.pop(key, None)
    return model, schema


class _Form(GenerateJsonSchema):
    """A schema without titles, and with `nullable` in place of a choice between a type and null."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def nullable_schema(self, schema: Any) -> JsonSchemaValue:
        inner = self.generate_inner(schema["schema"])
        return {**inner, "nullable": True} if "type" in inner else super().nullable_schema(schema)

    def default_schema(self, schema: Any) -> JsonSchemaValue:
        described = super().default_schema(schema)
        if described.get("default", ...) is None:
            del described["default"]
        return described


def parse_docstring(name: str, function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """The description, and those of the arguments."""
    whole = inspect.getdoc(function) or ""
    section = ARGS.search(whole)
    text = whole[: section.start()].strip() if section else whole.strip()
    if not text:
        raise ConfigError(f"tool {name} has no docstring; say in it what the tool does, since the policy reads it")
    if section is None:
        return text, {}
    rest = whole[section.end() :]
    following = NEXT_SECTION.search(rest)
    lines = [line for line in rest[: following.start() if following else None].splitlines() if line.strip()]
    indents = [len(line) - len(line.lstrip()) for line in lines]
    found: dict[str, str] = {}
    name = ""
    for line, indent in zip(lines, indents, strict=True):
        # A line that is indented further belongs to the argument before.
        match = ARGUMENT.match(line.strip()) if indent == indents[0] else None
        if match:
            name = match[1]
            found[name] = match[2].strip()
        elif name:
            found[name] = f"{found[name]} {line.strip()}".strip()
    return text, found


CALL_S = 10.0
OBSERVATION_BYTES = 65536


class ToolError(Exception):
    """Raised by a tool to answer with only this text, for example to a question that has no answer."""


@dataclass(frozen=True)
class ToolResult:
    """What the policy is shown about its call."""

    text: str
    failed: bool = False


@dataclass(frozen=True)
class Tool:
    """One function with its limits."""

    function: Callable[..., Any]
    description: ToolDescription
    call_s: float
    observation_bytes: int
    when_stopped: str = ""
    """A sentence for the policy after a call whose time was over."""

    @property
    def name(self) -> str:
        return self.description.name


class ToolSource(ABC):
    """Opens tools for one episode, such as an interpreter of its own or a session with a server."""

    replays: ClassVar[bool] = True
    """The same calls in a new session give the same answers, and may be made again."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Its name in texts for the user."""

    @abstractmethod
    def check(self) -> None:
        """Called once before any episode, outside of an event loop. Raises ConfigError if no session can be opened."""

    @abstractmethod
    def session(self, seed: int) -> AbstractAsyncContextManager[Sequence[Tool]]:
        """The tools of one episode, whose row has this seed.

        Entering, and calling a tool, raise EnvironmentFailed for failures that the policy has not caused; a ToolError
        is an answer to the policy.
        """
