"""Generates one function per message class for each conversion to and from a body, with the fields written out.

Dataclasses generate `__init__` in the same way. Every message passes through these functions, and a general loop over
the fields takes twice as long, on the sending and on the receiving side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from flowrl.channel.encoding.envelope import Envelope
from flowrl.messages import Message

DTYPES = tuple(
    np.dtype(t) for t in ["?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"]
)
DTYPE_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}
NOT_PLAIN = 255
"""Replaces a dtype's code if the value of the field is not a plain array."""
INLINE_LIMIT_BYTES = 8192
"""A larger array is sent as a separate frame. zmq allocates frames of this size separately, so that their data are
aligned."""

Head = tuple[bytes, int, int]
"""The part of a message on the wire that is not in its body: id, ticket, member."""
Freeze = Callable[[Any, int], None]
TakeApart = Callable[[str | None, Any, Callable[[Any], Any]], tuple[Any, ...]]
PutTogether = Callable[[Iterable[Head], Iterable[Sequence[Any]]], list[Envelope]]
Build = Callable[[Sequence[Any]], Message]

_FROZEN = {
    int: "type(v) is not int or not -9223372036854775808 <= v <= 18446744073709551615",
    str: "type(v) is not str or not v.isascii()",
}
"""Type of a field -> the condition under which its value `v` needs the full check."""
_SENT = {int: "type(v{at}) is not int", str: "type(v{at}) is not str"}
"""The same for a value that will be packed: the packer itself checks each integer and text."""


def make_freeze(hints: Mapping[str, Any], arrays: Sequence[int], check: Callable[[Any, int], None]) -> Freeze:
    """Generate freeze(message, number of messages around it), which makes the message's arrays read-only. `check` does
    the same for any value, and raises WireError for a value that cannot be sent."""
    lines = ["def freeze(message, depth):", " pass"]
    for at, (name, hint) in enumerate(hints.items()):
        lines.append(f" v = message.{name}")
        if at in arrays:
            lines += [" if type(v) is ndarray and v.dtype in codes and v.ndim < 3:", "  v.setflags(False)"]
            lines.append(" elif v is not None: check(v, depth)")
        else:
            lines.append(f" if {_FROZEN.get(hint, 'type(v) not in free')}: check(v, depth)")
    free = frozenset((type(None), bool, float, bytes))
    return _made(lines, "freeze", ndarray=np.ndarray, codes=DTYPE_CODES, check=check, free=free)  # type: ignore[no-any-return]


def make_take_apart(hints: Mapping[str, Any], arrays: Sequence[int], scalars: frozenset[type]) -> TakeApart:
    """Generate take_apart(group id, message, carried) -> the values of the message's body: group id, the arrays' codes
    (None without such fields), the fields. `carried` converts a value that contains others or whose type msgpack lacks.

    `arrays` are the positions of the fields that may hold plain arrays. These arrays are made read-only here.
    """
    lines = ["def take_apart(group_id, message, carried):"]
    for at, (name, hint) in enumerate(hints.items()):
        lines.append(f" v{at} = message.{name}")
        if at not in arrays:
            odd = _SENT.get(hint, "type(v{at}) not in scalars").format(at=at)
            lines.append(f" if {odd}: v{at} = carried(v{at})")
            continue
        lines += [
            f" c{at} = {NOT_PLAIN}",
            f" if type(v{at}) is ndarray and v{at}.ndim == 1 and v{at}.nbytes <= {INLINE_LIMIT_BYTES}:",
            f"  c{at} = code(v{at}.dtype, {NOT_PLAIN})",
            f"  if c{at} != {NOT_PLAIN}:",
            f"   v{at}.setflags(False)",
            f"   v{at} = v{at}.tobytes()",
            f" elif v{at} is not None: v{at} = carried(v{at})",
        ]
    codes = f"bytes(({', '.join(f'c{at}' for at in arrays)},))" if arrays else "None"
    values = [f"v{at}" for at in range(len(hints))]
    lines.append(f" return ({', '.join(['group_id', codes, *values])})")
    return _made(lines, "take_apart", ndarray=np.ndarray, code=DTYPE_CODES.get, scalars=scalars)  # type: ignore[no-any-return]


def make_put_together(cls: type[Message], names: Sequence[str], arrays: Sequence[int], *, slotted: bool) -> PutTogether:
    """Generate put_together(heads of messages, values of their bodies) -> the messages in their envelopes.

    `names` are the class's fields, `arrays` the positions of those that may hold plain arrays. The function checks the
    number of values and that the group id is text, and raises TypeError or ValueError; it does not check the types of
    fields. It bypasses `__init__`: the sender has constructed the message, and in a frozen dataclass `__init__` is
    slow.
    """
    lines = [
        "def put_together(heads, bodies):",
        " made = []",
        f" for (id, ticket, member), ({_body('group_id', names)}) in zip(heads, bodies, strict=True):",
        "  if type(group_id) is not str: raise TypeError('a group id that is no text')",
        *(f"  {line}" for line in _message(names, arrays, slotted)),
        # `Envelope(...)` here would take 1.5 times as long as these lines.
        "  envelope = new(Envelope)",
        "  envelope.id = id",
        "  envelope.ticket = ticket",
        "  envelope.group_id = group_id",
        "  envelope.member = member",
        "  envelope.body = message",
        "  made.append(envelope)",
        " return made",
    ]
    return _made(lines, "put_together", **_scope(cls), Envelope=Envelope)  # type: ignore[no-any-return]


def make_build(cls: type[Message], names: Sequence[str], arrays: Sequence[int], *, slotted: bool) -> Build:
    """Generate build(values of one body) -> the message."""
    lines = [
        "def build(body):",
        f" ({_body('_', names)}) = body",
        *(f" {line}" for line in _message(names, arrays, slotted)),
        " return message",
    ]
    return _made(lines, "build", **_scope(cls))  # type: ignore[no-any-return]


def _body(first: str, names: Sequence[str]) -> str:
    """The names of the variables for the values of a body."""
    return ", ".join([first, "codes", *(f"v{at}" for at in range(len(names)))])


def _message(names: Sequence[str], arrays: Sequence[int], slotted: bool) -> Iterator[str]:
    """Lines of code that make `message` from the values of a body."""
    if arrays:
        yield f"[{', '.join(f'c{at}' for at in arrays)}] = codes"
    for at in arrays:
        yield f"if c{at} != {NOT_PLAIN}: v{at} = frombuffer(v{at}, dtypes[c{at}])"
    yield "message = new(cls)"
    if not slotted:
        yield "fields = message.__dict__"
    for at, name in enumerate(names):
        yield f"put(message, {name!r}, v{at})" if slotted else f"fields[{name!r}] = v{at}"


def _scope(cls: type[Message]) -> dict[str, Any]:
    return {"cls": cls, "new": object.__new__, "put": object.__setattr__, "frombuffer": np.frombuffer, "dtypes": DTYPES}


def _made(lines: Sequence[str], name: str, **scope: Any) -> Any:
    exec("\n".join(lines), scope)
    return scope[name]
