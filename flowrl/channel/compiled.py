"""A message class's way into a body and out of one, as a function each, with the fields in its code.

As dataclasses make `__init__`: every message passes here, and a general loop over the fields takes twice as
long, on the sending and on the receiving side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from flowrl.channel.envelope import Envelope
from flowrl.messages import Message

DTYPES = tuple(
    np.dtype(t) for t in ["?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"]
)
DTYPE_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}
NOT_PLAIN = 255
"""In place of a dtype's code: what this field holds is no plain array."""
INLINE_LIMIT_BYTES = 8192
"""Above it an array travels as its own frame. zmq allocates frames of this size by themselves, so
that their data are aligned."""

Head = tuple[bytes, int, int]
"""What the wire says of a message beside its body: id, ticket, member."""
TakeApart = Callable[[str, Any], tuple[Any, ...]]
PutTogether = Callable[[Iterable[Head], Iterable[Sequence[Any]]], list[Envelope]]


def taking_apart(names: Sequence[str], arrays: Sequence[int]) -> TakeApart:
    """(group id, message) -> the values of its body: group id, the arrays' codes (None without), the fields.

    `arrays` are the positions of the fields that may hold plain arrays. They are made read-only here.
    """
    values = [f"v{at}" for at in range(len(names))]
    lines = ["def take_apart(group_id, message):", *(f" v{at} = message.{name}" for at, name in enumerate(names))]
    for at in arrays:
        lines += [
            f" c{at} = {NOT_PLAIN}",
            f" if type(v{at}) is ndarray and v{at}.ndim == 1 and v{at}.nbytes <= {INLINE_LIMIT_BYTES}:",
            f"  c{at} = code(v{at}.dtype, {NOT_PLAIN})",
            f"  if c{at} != {NOT_PLAIN}:",
            f"   v{at}.setflags(False)",
            f"   v{at} = v{at}.tobytes()",
        ]
    codes = f"bytes(({', '.join(f'c{at}' for at in arrays)},))" if arrays else "None"
    lines.append(f" return ({', '.join(['group_id', codes, *values])})")
    return _made(lines, "take_apart", ndarray=np.ndarray, code=DTYPE_CODES.get)  # type: ignore[no-any-return]


def putting_together(cls: type[Message], names: Sequence[str], arrays: Sequence[int], *, slotted: bool) -> PutTogether:
    """(the heads of messages, the values of their bodies) -> the messages in their envelopes.

    Bypasses `__init__`: the sender constructed the message, and a frozen dataclass pays for every field there.
    """
    values = [f"v{at}" for at in range(len(names))]
    lines = [
        "def put_together(heads, bodies):",
        " made = []",
        f" for (id, ticket, member), ({', '.join(['group_id', 'codes', *values])}) in zip(heads, bodies, strict=True):",
        "  if type(group_id) is not str: raise TypeError('a group id that is no text')",
    ]
    if arrays:
        lines.append(f"  [{', '.join(f'c{at}' for at in arrays)}] = codes")
    lines += [f"  if c{at} != {NOT_PLAIN}: v{at} = frombuffer(v{at}, dtypes[c{at}])" for at in arrays]
    lines.append("  message = new(cls)")
    if slotted:
        lines += [f"  put(message, {name!r}, v{at})" for at, name in enumerate(names)]
    else:
        lines.append("  fields = message.__dict__")
        lines += [f"  fields[{name!r}] = v{at}" for at, name in enumerate(names)]
    lines += ["  made.append(envelope(id, ticket, group_id, member, message))", " return made"]
    scope = {"cls": cls, "new": object.__new__, "put": object.__setattr__, "envelope": Envelope}
    return _made(lines, "put_together", **scope, frombuffer=np.frombuffer, dtypes=DTYPES)  # type: ignore[no-any-return]


def _made(lines: Sequence[str], name: str, **scope: Any) -> Any:
    exec("\n".join(lines), scope)
    return scope[name]
