"""Messages in storage: self-describing, so that a file outlives changes of its message class.

A stored message carries its fields by name. On loading, fields added since take their defaults;
anything else that does not fit is refused by name. `__post_init__` does not run again, as on the wire.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from flowrl.channel.codec import UNSENDABLE, Decoder, Encoder, check_depth, schema_of, unsendable
from flowrl.errors import SchemaError, WireError
from flowrl.messages import Message, message_type

FORMAT = 1


def dump(message: Message) -> bytes:
    """`message` as bytes, arrays included, fields by name."""
    return dump_value(message)


def load(data: bytes) -> Message:
    """The message that `dump` stored. Raises SchemaError if its class has changed incompatibly."""
    message = load_value(data)
    if not isinstance(message, Message):
        raise SchemaError("the stored bytes hold no message")
    return message


def dump_value(value: Any) -> bytes:
    """Any value a message may hold (a node's state, say) as bytes, messages in it by name.

    Raises WireError for what a message cannot hold.
    """
    try:
        return Encoder(beside=False).pack((FORMAT, _named(value, 0)))
    except UNSENDABLE as error:
        raise unsendable(error, "cannot be stored") from error


def load_value(data: bytes) -> Any:
    """What `dump_value` stored. Raises SchemaError as `load` does."""
    try:
        content = Decoder().unpack(data)
    except WireError as error:
        raise SchemaError(f"no stored value: {error}") from error
    if not isinstance(content, tuple) or len(content) != 2 or content[0] != FORMAT:
        raise SchemaError(f"no stored value of format {FORMAT}; it was written by another flowrl")
    try:
        return _built(content[1], 0)
    except (WireError, RecursionError) as error:
        raise SchemaError(f"no stored value: {error}") from error


_TYPE = "\0type"
"""The key that makes a mapping a message: names its class. None for a mapping that has this key itself."""
_ITEMS = "items"


def _named(value: Any, depth: int) -> Any:
    """`value` with mappings for its messages. `depth` is the number of messages around it."""
    if isinstance(value, Message):
        check_depth(depth)
        fields = {name: _named(item, depth + 1) for name, item in zip(*_taken_apart(value), strict=True)}
        return {_TYPE: type(value).__name__, **fields}
    if isinstance(value, tuple | list):
        return tuple(_named(item, depth) for item in value)
    if isinstance(value, Mapping):
        items = {key: _named(item, depth) for key, item in value.items()}
        return {_TYPE: None, _ITEMS: items} if _TYPE in items else items
    return value


def _taken_apart(message: Message) -> tuple[tuple[str, ...], tuple[Any, ...]]:
    schema = schema_of(type(message))
    return schema.names, schema.values(message)


def _built(value: Any, depth: int) -> Any:
    if isinstance(value, tuple):
        return tuple(_built(item, depth) for item in value)
    if not isinstance(value, dict):
        return value
    if value.get(_TYPE, "") is None and isinstance(value.get(_ITEMS), dict):
        return {key: _built(item, depth) for key, item in value[_ITEMS].items()}
    if _TYPE in value:
        check_depth(depth)
        return _message({key: _built(item, depth + 1) for key, item in value.items()})
    return {key: _built(item, depth) for key, item in value.items()}


def _message(found: dict[str, Any]) -> Message:
    name = found.pop(_TYPE)
    if not isinstance(name, str):
        raise SchemaError(f"a stored message whose class is {name!r}, no name")
    cls = message_type(name)
    schema = schema_of(cls)
    _check_fields(cls, schema.fields, found)
    return schema.build([found[name] if name in found else _default(field) for name, field in schema.fields.items()])


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
