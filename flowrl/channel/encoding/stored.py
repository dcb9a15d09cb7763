"""Messages in storage: self-describing, so that a file can still be read after its message class has changed.

A stored message holds its fields by name. On loading, fields that were added later take their defaults; any
other difference raises an error that names the field. `__post_init__` does not run again, as on the wire.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from flowrl.channel.encoding.codec import Decoder, Encoder
from flowrl.channel.encoding.schema import UNSENDABLE, schema_of, unsendable
from flowrl.channel.encoding.values import (
    DICT,
    LIST,
    MESSAGE,
    NUMBER,
    PROXY,
    TUPLE,
    check_depth,
    check_keys,
    check_nested,
    kind_of,
)
from flowrl.errors import SchemaError, WireError
from flowrl.messages import Message
from flowrl.messages.base import message_type, type_name

FORMAT = 1
MOST_BYTES = (1 << 32) - 1
"""The most bytes that one msgpack value can hold."""
TOO_LARGE = "is too large"
"""The end of msgpack's error for an array, or bytes, of more than MOST_BYTES."""
Stored = bytes | npt.NDArray[np.uint8]
"""The bytes that `dump` returned, or an array of them."""


def dump(message: Message) -> bytes:
    """`message` as bytes, with its arrays, fields by name."""
    return dump_value(message)


def load(data: Stored) -> Message:
    """The message that `dump` stored. Raises SchemaError if its class has changed incompatibly."""
    message = load_value(data)
    if not isinstance(message, Message):
        raise SchemaError("the stored bytes hold no message")
    return message


def dump_value(value: Any) -> bytes:
    """Any value that a message may hold (for example a node's state) as bytes, messages in it by name.

    Raises WireError for a value that a message cannot hold, and for one of more than MOST_BYTES.
    """
    try:
        encoder = Encoder(beside=False)
        packed = encoder.pack((FORMAT, _Naming(encoder).named(value, 0)))
    except UNSENDABLE as error:
        if str(error).endswith(TOO_LARGE):
            raise _too_large(value) from error
        raise unsendable(error, "cannot be stored", message=value if isinstance(value, Message) else None) from error
    if len(packed) > MOST_BYTES:
        raise _too_large(value)
    return packed


def _too_large(value: Any) -> WireError:
    what = f"a {type(value).__name__}" if isinstance(value, Message) else "a state"
    return WireError(
        f"{what} of more than {MOST_BYTES / (1 << 30):g} GiB cannot be stored in a checkpoint; make it smaller: of a "
        "batch by fewer groups, or by more ranks that share it"
    )


def load_value(data: Stored) -> Any:
    """The value that `dump_value` stored. Raises SchemaError as `load` does."""
    try:
        content = Decoder().unpack(data if isinstance(data, bytes) else memoryview(data.data))
    except WireError as error:
        raise SchemaError(f"the stored bytes cannot be read: {error}") from error
    if not isinstance(content, tuple) or len(content) != 2 or content[0] != FORMAT:
        raise SchemaError(f"the stored bytes are not of format {FORMAT}; another version of flowrl wrote them")
    try:
        return _built(content[1], 0)
    except (WireError, RecursionError) as error:
        raise SchemaError(f"the stored bytes cannot be read: {error}") from error


_TYPE = "\0type"
"""A stored mapping with this key represents another value. The mapping's value under this key is the class name of a
message, or it tells what the value under _ITEMS is: a mapping that itself has this key (None), a list (_LISTED) or a
read-only mapping (_READ_ONLY)."""
_ITEMS = "items"
_LISTED, _READ_ONLY = 1, 2


class _Naming:
    """Replaces messages, lists and read-only mappings by mappings."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder

    def named(self, value: Any, depth: int, nested: int = 0) -> Any:
        """`value` with mappings in place of messages, lists and read-only mappings.

        `depth` is the number of these around `value`, `nested` the number of tuples and dicts since the last of them.
        """
        kind = kind_of(value)
        if kind == TUPLE:
            return self._tuple(value, depth, nested + 1)
        if kind == DICT:
            items = self._dict(value, depth, nested + 1)
            return {_TYPE: None, _ITEMS: items} if _TYPE in items else items
        if kind not in (MESSAGE, LIST, PROXY):
            return self._encoder.carried(value) if kind == NUMBER else value
        check_depth(depth)
        if kind == LIST:
            return {_TYPE: _LISTED, _ITEMS: self._tuple(value, depth + 1, 0)}
        if kind == PROXY:
            return {_TYPE: _READ_ONLY, _ITEMS: self._dict(value, depth + 1, 0)}
        fields = {name: self.named(item, depth + 1) for name, item in zip(*_taken_apart(value), strict=True)}
        return {_TYPE: type_name(type(value)), **fields}

    def _tuple(self, value: Iterable[Any], depth: int, nested: int) -> tuple[Any, ...]:
        check_nested(nested)
        return tuple([self.named(item, depth, nested) for item in value])

    def _dict(self, value: Mapping[Any, Any], depth: int, nested: int) -> dict[Any, Any]:
        check_nested(nested)
        check_keys(value)
        return {self.named(key, depth): self.named(item, depth, nested) for key, item in value.items()}


def _taken_apart(message: Message) -> tuple[tuple[str, ...], tuple[Any, ...]]:
    schema = schema_of(type(message))
    return schema.names, schema.values(message)


def _built(value: Any, depth: int) -> Any:
    if isinstance(value, tuple):
        return tuple(_built(item, depth) for item in value)
    if not isinstance(value, dict):
        return value
    mark = value.get(_TYPE, "")
    if mark is None and isinstance(value.get(_ITEMS), dict):
        return _built_items(value[_ITEMS], depth)
    if _TYPE not in value:
        return _built_items(value, depth)
    check_depth(depth)
    if mark == _LISTED and isinstance(value.get(_ITEMS), tuple):
        return [_built(item, depth + 1) for item in value[_ITEMS]]
    if mark == _READ_ONLY and isinstance(value.get(_ITEMS), dict):
        return MappingProxyType(_built_items(value[_ITEMS], depth + 1))
    return _message(_built_items(value, depth + 1))


def _built_items(value: Mapping[Any, Any], depth: int) -> dict[Any, Any]:
    return {key: _built(item, depth) for key, item in value.items()}


def _message(found: dict[str, Any]) -> Message:
    name = found.pop(_TYPE)
    if not isinstance(name, str):
        raise SchemaError(f"the class of a stored message is {name!r}; it needs to be a name")
    cls = message_type(name)
    schema = schema_of(cls)
    _check_fields(cls, schema.fields, found)
    return schema.restore([found[name] if name in found else _default(field) for name, field in schema.fields.items()])


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _check_fields(cls: type[Message], fields: Mapping[str, dataclasses.Field[Any]], found: Mapping[str, Any]) -> None:
    unknown = [name for name in found if name not in fields]
    missing = [name for name, field in fields.items() if name not in found and _required(field)]
    if unknown or missing:
        raise SchemaError(
            f"a stored {cls.__name__} does not fit its class: "
            + "; ".join(
                [f"field {name!r} is unknown to this version" for name in unknown]
                + [f"field {name!r} is missing and has no default" for name in missing]
            )
        )


def _required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
