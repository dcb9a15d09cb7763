"""Schemas: for each message class, how its messages are frozen, converted to a body and restored from it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from operator import attrgetter
from struct import error as StructError
from types import MemberDescriptorType
from typing import Any, get_type_hints

import numpy as np

from flowrl.channel.encoding import cost
from flowrl.channel.encoding.compiled import make_build, make_freeze, make_put_together, make_take_apart
from flowrl.channel.encoding.values import (
    ARRAY,
    DICT,
    FREE,
    LIST,
    MESSAGE,
    NUMBER,
    PROXY,
    SCALARS,
    TUPLE,
    check_depth,
    check_keys,
    check_nested,
    check_scalar,
    dtype_code,
    kind_of,
)
from flowrl.errors import SchemaError, WireError
from flowrl.messages import Message
from flowrl.messages.base import known_types, scalar_problem, schema_hash

UNSENDABLE = (WireError, SchemaError, ValueError, TypeError, AttributeError, OverflowError, RecursionError, StructError)
"""The errors that the encoder or `freeze` raises for a value that cannot be sent."""


class Schema:
    """How messages of one class are converted to a body and restored from it."""

    def __init__(self, cls: type[Message]) -> None:
        fields = dataclasses.fields(cls)  # type: ignore[arg-type]
        hints = {f.name: hint for f, hint in zip(fields, _hints(cls, fields), strict=True)}
        self.cls = cls
        self.hash = schema_hash(cls)
        self.fields = {f.name: f for f in fields}
        self.names = tuple(self.fields)
        self.arrays = tuple(at for at, hint in enumerate(hints.values()) if "ndarray" in str(hint))
        """Positions of the fields that may hold plain arrays."""
        self.slotted = any(isinstance(getattr(cls, name, None), MemberDescriptorType) for name in self.names)
        """Whether a field is stored in a slot, of this class or of a base class."""
        self.cost = cost.of_tuple(len(fields) + 2)
        """What an Allowance counts for a body, without the contents of its fields."""
        self.freeze = make_freeze(hints, self.arrays, check)
        self.take_apart = make_take_apart(hints, self.arrays, SCALARS)
        self.put_together = make_put_together(cls, self.names, self.arrays, slotted=self.slotted)
        self.build = make_build(cls, self.names, self.arrays, slotted=self.slotted)
        getter = attrgetter(*self.names) if fields else lambda message: ()
        self.values: Callable[[Message], tuple[Any, ...]] = (
            getter if len(fields) != 1 else lambda message: (getter(message),)
        )

    def restore(self, values: Sequence[Any]) -> Message:
        """The message with these field values. Bypasses `__init__`, as `build` does."""
        message = object.__new__(self.cls)
        for name, value in zip(self.names, values, strict=True):
            object.__setattr__(message, name, value)
        return message


def _hints(cls: type[Message], fields: Iterable[dataclasses.Field[Any]]) -> list[Any]:
    try:
        hints = get_type_hints(cls)
    except (NameError, AttributeError, TypeError, SyntaxError) as error:
        raise SchemaError(
            f"the type of a field of {cls.__name__} cannot be found ({error}); "
            "import it at the top of the file, outside of `if TYPE_CHECKING`"
        ) from error
    return [hints[field.name] for field in fields]


KNOWN: dict[type, Schema] = {}
"""Message class -> schema, for all classes for which `schema_of` was called."""
_by_hash: dict[int, Schema] = {}


def schema_of(cls: type[Message]) -> Schema:
    """The schema of a message class, made on first use."""
    schema = KNOWN.get(cls)
    if schema is None:
        if not dataclasses.is_dataclass(cls):
            raise SchemaError(f"{cls.__name__} is no dataclass; declare it with @dataclass(frozen=True)")
        schema = Schema(cls)
        _by_hash[schema.hash] = KNOWN[cls] = schema
    return schema


def schema_named(number: int) -> Schema:
    """The schema with this hash. Raises WireError if no class known here has it."""
    schema = _by_hash.get(number)
    if schema is not None:
        return schema
    for cls in known_types():
        with suppress(SchemaError):  # no message of such a class can exist yet
            known = schema_of(cls)
            _by_hash[known.hash] = known
    if number not in _by_hash:
        raise WireError(
            f"a message of unknown schema {number:#010x}: no class in this process has it; "
            "run the same files, with the same message classes, in every process"
        )
    return _by_hash[number]


def freeze(message: Message) -> None:
    """Make every array inside a message read-only, in place. Raises WireError for a value that an Encoder refuses."""
    try:
        schema_of(type(message)).freeze(message, 0)
    except UNSENDABLE as error:
        raise unsendable(error, message=message) from error


def freeze_inside(value: Any) -> None:
    """`freeze` every message and array in the value of a request, which may also hold other values."""
    if type(value) in SCALARS:
        return
    if isinstance(value, Message):
        freeze(value)
    elif isinstance(value, np.ndarray):
        value.setflags(write=False)
    elif type(value) in (tuple, list):
        for item in value:
            freeze_inside(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            freeze_inside(item)


def check(value: Any, depth: int, nested: int = 0) -> None:
    """Make the arrays in any value read-only. Raises WireError for a value that cannot be sent.

    `depth` is the number of messages, lists and read-only mappings around `value`, `nested` the number of tuples and
    dicts since the last of these.
    """
    kind = kind_of(value)
    if kind == ARRAY:
        dtype_code(value)
        value.setflags(False)
    elif kind == MESSAGE:
        check_depth(depth + 1)
        schema_of(type(value)).freeze(value, depth + 1)
    elif kind == TUPLE:
        _check_all(value, depth, nested + 1)
    elif kind == DICT:
        check_keys(value)
        _check_all(value.values(), depth, nested + 1)
    elif kind == LIST:
        check_depth(depth + 1)
        _check_all(value, depth + 1, 0)
    elif kind == PROXY:
        check_depth(depth + 1)
        check_keys(value)
        _check_all(value.values(), depth + 1, 0)
    elif kind not in (FREE, NUMBER):
        check_scalar(value)


def _check_all(values: Iterable[Any], depth: int, nested: int) -> None:
    check_nested(nested)
    for value in values:
        cls = type(value)
        if cls is int and -9223372036854775808 <= value <= 18446744073709551615:
            continue
        if cls is float or cls is bool or (cls is str and value.isascii()):
            continue
        check(value, depth, nested)


def unsendable(error: Exception, what: str = "cannot send", *, message: Message | None = None) -> WireError:
    """The error for a value that cannot be sent because of `error`, one of UNSENDABLE. Names the field of `message`."""
    reason = str(error)
    if isinstance(error, UnicodeEncodeError):
        reason = scalar_problem(error.object)
    elif isinstance(error, RecursionError) or reason.startswith("recursion limit"):  # msgpack's ValueError
        reason = "values are nested too deep, or contain themselves"
    name = "" if message is None else _culprit(message)
    where = f"{type(message).__name__}.{name}: " if name else ""
    return WireError(f"{what}: {where}{reason}")


def _culprit(message: Message) -> str:
    """The name of the field whose value cannot be sent, "" if the message itself cannot."""
    for name in schema_of(type(message)).names if type(message) in KNOWN else ():
        try:
            check(getattr(message, name, None), 0)
        except UNSENDABLE:
            return name
    return ""
