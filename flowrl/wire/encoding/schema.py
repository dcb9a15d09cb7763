"""What a message may hold, how each message class is converted to a body and back, and the envelope of a message.

One rule for messages that stay in their process, are sent or are stored: a value keeps its type or is refused. So
types are compared exactly: the other end would turn an instance of a subclass (a named tuple, an enum, an OrderedDict,
a masked array) into the plain type.

A class's `Schema` has one generated function for each conversion, with the fields written out. Dataclasses generate
`__init__` in the same way. Every message passes through these functions, and a general loop over the fields takes twice
as long, on the sending and on the receiving side.

A message's id depends only on what the message was made from, never on time, process or replica: a node that runs again
on a replayed item sends messages with the same ids, and receivers drop them.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b
from operator import attrgetter
from struct import error as StructError
from types import MappingProxyType, MemberDescriptorType
from typing import Any, get_type_hints

import numpy as np

from flowrl.errors import SchemaError, WireError
from flowrl.messages import Message, Tombstone
from flowrl.messages.base import known_types, scalar_problem, schema_hash
from flowrl.wire.encoding.cost import tuple_cost

ID_BYTES = 16
MAX_DEPTH = 32
"""The most messages, lists and read-only mappings that may be nested around a value: each takes about 40 KiB of
the receiver's stack."""
MAX_NESTED = 64
"""Deepest nesting of tuples and dicts within one of these."""
MAX_AXES = 8
DTYPES = tuple(
    np.dtype(t) for t in ["?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"]
)
DTYPE_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}
NOT_PLAIN = 255
"""Replaces a dtype's code if the value of the field is not a plain array."""
INLINE_LIMIT_BYTES = 8192
"""A larger array is sent as a separate frame. zmq allocates frames of this size separately, so that their data are
aligned."""
UNSENDABLE = (WireError, SchemaError, ValueError, TypeError, AttributeError, OverflowError, RecursionError, StructError)
"""The errors that the encoder or `freeze` raises for a value that cannot be sent."""

FREE, TEXT, WHOLE, NUMBER, ARRAY, TUPLE, DICT, LIST, PROXY, MESSAGE = range(10)
_kinds: dict[type, int] = {
    **dict.fromkeys((type(None), bool, float, bytes), FREE),
    **dict.fromkeys((dtype.type for dtype in DTYPES if dtype.kind != "c"), NUMBER),
    str: TEXT,
    int: WHOLE,
    np.ndarray: ARRAY,
    tuple: TUPLE,
    dict: DICT,
    list: LIST,
    MappingProxyType: PROXY,
}
SCALARS = frozenset((type(None), bool, float, bytes, str, int))
"""Scalar types that msgpack supports."""
_INSTEAD: tuple[tuple[Any, str], ...] = (
    (enum.Enum, "its `.value`"),
    (Mapping, "a dict of it"),
    (tuple, "a tuple of it"),
    (list, "a list of it"),
    (set | frozenset, "a sorted tuple of it"),
    (np.ndarray, "an array by numpy.asarray, a mask as one of its own"),
    (str, "a str of it"),
    (bytes | bytearray | memoryview, "bytes of it"),
    (int, "an int of it"),
    (float, "a float of it"),
)
"""(type of a refused value, what the message can hold instead)."""


@dataclasses.dataclass(slots=True)
class Envelope:
    """One message in transit: `body` and what the engine knows about it.

    `ticket` is -1 outside admission; `member` is -1 if the message represents a whole group.
    """

    id: bytes
    ticket: int = -1
    group_id: str = ""
    member: int = -1
    body: Message = None  # type: ignore[assignment]

    @property
    def lost(self) -> bool:
        """True if this is a tombstone: it replaces a sample or group that will not arrive."""
        return isinstance(self.body, Tombstone)


def message_id(parents: Sequence[bytes], port: str, ordinal: int) -> bytes:
    """Id of the `ordinal`-th message that `port` sent on behalf of `parents` (in that order)."""
    digest = blake2b(b"".join(parents), digest_size=ID_BYTES)
    digest.update(b"%d %s" % (ordinal, port.encode()))
    return digest.digest()


def source_id(source: str, cursor: str) -> bytes:
    """Id of the message that `source` reads at `cursor`."""
    return blake2b(f"{source}\0{cursor}".encode(), digest_size=ID_BYTES).digest()


def kind_of(value: Any) -> int:
    """Which of the above kinds `value` is. Raises WireError for a value that a message cannot hold."""
    kind = _kinds.get(type(value))
    if kind is not None:
        return kind
    if isinstance(value, Message):
        return MESSAGE
    raise make_refusal(value)


def make_refusal(value: Any) -> WireError:
    """The error for a `value` whose type cannot be sent; it names an alternative if there is one."""
    cls = type(value)
    if cls is int or cls is str:
        return WireError(scalar_problem(value))
    instead = next((f"; make it {what}" for kind, what in _INSTEAD if isinstance(value, kind)), "")
    return WireError(
        f"a value of type {cls.__module__}.{cls.__qualname__} cannot be sent{instead}. Messages hold scalars, str, "
        "bytes, tuples, lists, dicts, messages, numpy arrays and numpy numbers"
    )


def dtype_code(array: np.ndarray[Any, Any]) -> int:
    """The code of the array's dtype. Raises WireError for an array that cannot be sent."""
    code = DTYPE_CODES.get(array.dtype)
    if code is None or array.ndim > MAX_AXES:
        raise WireError(f"an array of dtype {array.dtype} and {array.ndim} axes cannot be sent; convert it first")
    return code


def check_keys(keys: Iterable[Any]) -> None:
    """Raises WireError unless all keys are scalars, or tuples of them."""
    for key in keys:
        kind = kind_of(key)
        if kind == TUPLE:
            check_keys(key)
        elif kind in (TEXT, WHOLE):
            if problem := scalar_problem(key):
                raise WireError(problem)
        elif kind not in (FREE, NUMBER):
            raise WireError(f"a {type(key).__name__} as a key cannot be sent; keys are scalars, or tuples of them")


def check_depth(depth: int) -> None:
    """Raises WireError if `depth`, the number of messages, lists and read-only mappings around a value, is too high."""
    if depth > MAX_DEPTH:
        raise WireError(
            f"a value inside more than {MAX_DEPTH} messages cannot be sent (a list counts as a message), nor can "
            "values that contain themselves; store a chain of messages as a tuple"
        )


def check_nested(nested: int) -> None:
    """Raises WireError if `nested`, the number of tuples and dicts around a value, is too high."""
    if nested > MAX_NESTED:
        raise WireError(f"values are nested in more than {MAX_NESTED} tuples and dicts, or contain themselves")


def freeze_value(value: Any, depth: int, nested: int = 0) -> None:
    """Make the arrays in any value read-only. Raises WireError for a value that cannot be sent.

    `depth` is the number of messages, lists and read-only mappings around `value`, `nested` the number of tuples and
    dicts since the last of these.
    """
    kind = kind_of(value)
    if kind == DICT:
        check_keys(value)
        items, nested = value.values(), nested + 1
    elif kind == TUPLE:
        items, nested = value, nested + 1
    elif kind == ARRAY:
        dtype_code(value)
        value.setflags(False)
        return
    elif kind == MESSAGE:
        check_depth(depth + 1)
        schema_of(type(value)).freeze(value, depth + 1)
        return
    elif kind in (LIST, PROXY):
        depth, nested = depth + 1, 0
        check_depth(depth)
        items = value
        if kind == PROXY:
            check_keys(value)
            items = value.values()
    else:
        if kind not in (FREE, NUMBER) and (problem := scalar_problem(value)):
            raise WireError(problem)
        return

    check_nested(nested)
    for item in items:
        cls = type(item)
        if cls is int and -9223372036854775808 <= item <= 18446744073709551615:
            continue
        if cls is float or cls is bool or (cls is str and item.isascii()):
            continue
        freeze_value(item, depth, nested)


def freeze(message: Message) -> None:
    """Make every array inside a message read-only, in place. Raises WireError for a value that an Encoder refuses."""
    try:
        schema_of(type(message)).freeze(message, 0)
    except UNSENDABLE as error:
        raise explain_unsendable(error, message=message) from error


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


def explain_unsendable(error: Exception, what: str = "cannot send", *, message: Message | None = None) -> WireError:
    """The error for a value that cannot be sent because of `error`, one of UNSENDABLE. Names the field of `message`."""
    reason = str(error)
    if isinstance(error, UnicodeEncodeError):
        reason = scalar_problem(error.object)
    elif isinstance(error, RecursionError) or reason.startswith("recursion limit"):  # msgpack's ValueError
        reason = "values are nested too deep, or contain themselves"

    for name in KNOWN[type(message)].fields if type(message) in KNOWN else ():
        try:
            freeze_value(getattr(message, name, None), 0)
        except UNSENDABLE:
            return WireError(f"{what}: {type(message).__name__}.{name}: {reason}")
    return WireError(f"{what}: {reason}")


def payload_bytes(value: Any) -> int:
    """Approximate size of a value in memory: the bytes of arrays and texts, 8 for any other scalar."""
    kind = type(value)
    if kind is np.ndarray:
        return int(value.nbytes)
    if kind is str or kind is bytes:
        return len(value)
    if kind in SCALARS:
        return 8
    if isinstance(value, Message):
        return sum(map(payload_bytes, schema_of(kind).values(value)))
    if kind is tuple or kind is list:
        return sum(map(payload_bytes, value))
    if isinstance(value, Mapping):
        return sum(map(payload_bytes, value.values()))
    return 8


Head = tuple[bytes, int, int]
"""The part of a message on the wire that is not in its body: id, ticket, member."""
Freeze = Callable[[Any, int], None]
"""freeze(message, number of messages around it) makes the message's arrays read-only, and raises WireError for a value
that cannot be sent."""
TakeApart = Callable[[str | None, Any, Callable[[Any], Any]], tuple[Any, ...]]
"""take_apart(group id, message, carried) gives the values of the message's body: group id, the arrays' codes (None
without such fields), the fields. `carried` converts a value that contains others or whose type msgpack lacks. Plain
arrays are made read-only here."""
PutTogether = Callable[[Iterable[Head], Iterable[Sequence[Any]]], list[Envelope]]
"""put_together(heads of messages, values of their bodies) gives the messages in their envelopes. It checks the number
of values and that the group id is text, and raises TypeError or ValueError; it does not check the types of fields."""
Build = Callable[[Sequence[Any]], Message]
"""build(values of one body) gives the message."""


class Schema:
    """How messages of one class are converted to a body and restored from it."""

    def __init__(self, cls: type[Message]) -> None:
        fields = dataclasses.fields(cls)  # type: ignore[arg-type]
        try:
            types = get_type_hints(cls)
        except (NameError, AttributeError, TypeError, SyntaxError) as error:
            raise SchemaError(
                f"the type of a field of {cls.__name__} cannot be found ({error}); "
                "import it at the top of the file, outside of `if TYPE_CHECKING`"
            ) from error
        hints = {field.name: types[field.name] for field in fields}
        self.cls = cls
        self.hash = schema_hash(cls)
        self.fields = {field.name: field for field in fields}
        self.arrays = tuple(at for at, hint in enumerate(hints.values()) if "ndarray" in str(hint))
        """Positions of the fields that may hold plain arrays."""
        self.no_codes = bytes([NOT_PLAIN]) * len(self.arrays) if self.arrays else None
        """The arrays' codes in a body that has no plain array."""
        self.cost = tuple_cost(len(fields) + 2)
        """What an Allowance counts for a body, without the contents of its fields."""
        self.freeze, self.take_apart = _generate_sending(hints, self.arrays)
        self.put_together, self.build = _generate_receiving(cls, [*hints], self.arrays)
        getter = attrgetter(*hints) if fields else lambda message: ()
        self.values: Callable[[Message], tuple[Any, ...]] = (
            getter if len(fields) != 1 else lambda message: (getter(message),)
        )


def _generate_sending(hints: Mapping[str, Any], arrays: Sequence[int]) -> tuple[Freeze, TakeApart]:
    """`arrays` are the positions of the fields that may hold plain arrays."""
    # Type of a field -> the condition under which its value needs the full check; the packer checks what it packs.
    frozen = {
        int: "type(v) is not int or not -9223372036854775808 <= v <= 18446744073709551615",
        str: "type(v) is not str or not v.isascii()",
    }
    sent = {int: "type(v{at}) is not int", str: "type(v{at}) is not str"}
    freeze = ["def freeze(message, depth):", " pass"]
    take_apart = ["def take_apart(group_id, message, carried):"]
    for at, (name, hint) in enumerate(hints.items()):
        freeze.append(f" v = message.{name}")
        take_apart.append(f" v{at} = message.{name}")
        if at not in arrays:
            freeze.append(f" if {frozen.get(hint, 'type(v) not in free')}: check(v, depth)")
            odd = sent.get(hint, "type(v{at}) not in scalars").format(at=at)
            take_apart.append(f" if {odd}: v{at} = carried(v{at})")
            continue
        freeze += [
            " if type(v) is ndarray and v.dtype in codes and v.ndim < 3:",
            "  v.setflags(False)",
            " elif v is not None: check(v, depth)",
        ]
        take_apart += [
            f" c{at} = {NOT_PLAIN}",
            f" if type(v{at}) is ndarray and v{at}.ndim == 1 and v{at}.nbytes <= {INLINE_LIMIT_BYTES}:",
            f"  c{at} = code(v{at}.dtype, {NOT_PLAIN})",
            f"  if c{at} != {NOT_PLAIN}:",
            f"   v{at}.setflags(False)",
            f"   v{at} = v{at}.tobytes()",
            f" elif v{at} is not None: v{at} = carried(v{at})",
        ]
    codes = f"bytes(({', '.join(f'c{at}' for at in arrays)},))" if arrays else "None"
    take_apart.append(f" return ({', '.join(['group_id', codes, *(f'v{at}' for at in range(len(hints)))])})")
    scope: dict[str, Any] = {
        "ndarray": np.ndarray,
        "codes": DTYPE_CODES,
        "code": DTYPE_CODES.get,
        "check": freeze_value,
        "free": frozenset((type(None), bool, float, bytes)),
        "scalars": SCALARS,
    }
    exec("\n".join(freeze + take_apart), scope)
    return scope["freeze"], scope["take_apart"]


def _generate_receiving(cls: type[Message], names: Sequence[str], arrays: Sequence[int]) -> tuple[PutTogether, Build]:
    """`names` are the class's fields, `arrays` the positions of those that may hold plain arrays.

    Both bypass `__init__`: the sender has constructed the message, and in a frozen dataclass `__init__` is slow.
    """
    slotted = any(isinstance(getattr(cls, name, None), MemberDescriptorType) for name in names)
    values = ", ".join(["codes", *(f"v{at}" for at in range(len(names)))])
    make = [
        *([f"[{', '.join(f'c{at}' for at in arrays)}] = codes"] if arrays else []),
        *(f"if c{at} != {NOT_PLAIN}: v{at} = frombuffer(v{at}, dtypes[c{at}])" for at in arrays),
        "message = new(cls)",
        *([] if slotted else ["fields = message.__dict__"]),
        *(
            f"put(message, {name!r}, v{at})" if slotted else f"fields[{name!r}] = v{at}"
            for at, name in enumerate(names)
        ),
    ]
    lines = [
        "def put_together(heads, bodies):",
        " made = []",
        f" for (id, ticket, member), (group_id, {values}) in zip(heads, bodies, strict=True):",
        "  if type(group_id) is not str: raise TypeError('a group id that is no text')",
        *(f"  {line}" for line in make),
        # `Envelope(...)` here would take 1.5 times as long as these lines.
        "  envelope = new(Envelope)",
        "  envelope.id = id",
        "  envelope.ticket = ticket",
        "  envelope.group_id = group_id",
        "  envelope.member = member",
        "  envelope.body = message",
        "  made.append(envelope)",
        " return made",
        "def build(body):",
        f" (_, {values}) = body",
        *(f" {line}" for line in make),
        " return message",
    ]
    scope: dict[str, Any] = {
        "cls": cls,
        "Envelope": Envelope,
        "new": object.__new__,
        "put": object.__setattr__,
        "frombuffer": np.frombuffer,
        "dtypes": DTYPES,
    }
    exec("\n".join(lines), scope)
    return scope["put_together"], scope["build"]


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
