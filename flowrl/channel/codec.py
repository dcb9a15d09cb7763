"""Message bodies as msgpack, arrays beside it.

A body is the tuple of a message's group id, its plain arrays and its field values. A plain array is a
short, one-dimensional one that is a field itself: it travels as its raw values, and its dtype's code
stands among the plain arrays, one byte for each field that is declared as an array. Any other array is a
msgpack extension, which costs several calls each, that starts with dtype and shape, followed by

- INLINE: the raw values (small arrays),
- FRAME:  the index of the raw frame that holds them,
- SLAB:   where they lie in a shared-memory slab.

A nested message is an extension of its schema hash and its own body. Nothing is ever pickled. Lists
arrive as tuples. Arrays arrive read-only, and are made read-only at the sender too. A message arrives with
the fields it had, those with `init=False` too: no `__init__` or `__post_init__` runs again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from operator import attrgetter
from struct import Struct
from struct import error as StructError
from types import MemberDescriptorType
from typing import Any, Protocol, get_type_hints

import msgpack
import numpy as np
from msgpack.exceptions import UnpackException

from flowrl.channel.compiled import DTYPE_CODES, DTYPES, INLINE_LIMIT_BYTES, Head, putting_together, taking_apart
from flowrl.channel.envelope import Envelope
from flowrl.errors import SchemaError, WireError
from flowrl.messages import Message, known_types, schema_hash

INLINE, FRAME, SLAB, MESSAGE = 1, 2, 3, 4
MAX_DEPTH = 32
"""So many messages may lie around a message: each takes some 40 KiB of the receiver's stack."""
Buffer = bytes | memoryview | np.ndarray[Any, Any]


class Place(Protocol):
    """Shared memory to put arrays into."""

    def __call__(self, array: np.ndarray[Any, Any]) -> bytes | None:
        """The address of a copy of `array` there, None where that is not possible."""

    def take_back(self, address: bytes) -> None:
        """Free what lies at `address`, which was not sent after all."""


MAX_AXES = 8
_shape_structs = tuple(Struct(f"<BBxxxxxx{ndim}Q") for ndim in range(MAX_AXES + 1))
_index = Struct("<Q")
_hash = Struct("<I")
UNPARSABLE = (ValueError, TypeError, LookupError, OverflowError, StructError, UnpackException)
"""What bytes that are no body make the parser raise."""
UNSENDABLE = (WireError, SchemaError, ValueError, TypeError, AttributeError, OverflowError, RecursionError, StructError)
"""What a value that cannot travel makes the encoder or `freeze` raise."""
_extension = partial(tuple.__new__, msgpack.ExtType)
"""An ExtType without the checks of its constructor."""


class Schema:
    """How one message class is taken apart and put together again."""

    def __init__(self, cls: type[Message]) -> None:
        fields = dataclasses.fields(cls)  # type: ignore[arg-type]
        hints = _hints(cls)
        self.cls = cls
        self.hash = schema_hash(cls)
        self.fields = {f.name: f for f in fields}
        self.names = tuple(self.fields)
        self.arrays = tuple(at for at, name in enumerate(self.names) if "ndarray" in str(hints[name]))
        """Fields that may hold plain arrays."""
        self.slotted = any(isinstance(getattr(cls, name, None), MemberDescriptorType) for name in self.names)
        """A field lies in a slot, of this class or of one it inherits from."""
        self.take_apart = taking_apart(self.names, self.arrays)
        self.put_together = putting_together(cls, self.names, self.arrays, slotted=self.slotted)
        getter = attrgetter(*self.names) if fields else lambda message: ()
        self.values: Callable[[Message], tuple[Any, ...]] = (
            getter if len(fields) != 1 else lambda message: (getter(message),)
        )

    def build(self, values: Sequence[Any]) -> Message:
        """The message with these field values.

        Bypasses `__init__`: the sender constructed the message, and a frozen dataclass pays for
        every field there.
        """
        if len(values) != len(self.names):
            raise WireError(f"{self.cls.__name__} has {len(self.names)} fields, the frame holds {len(values)}")
        message = object.__new__(self.cls)
        if self.slotted:
            for name, value in zip(self.names, values, strict=True):
                object.__setattr__(message, name, value)
        else:
            message.__dict__.update(zip(self.names, values, strict=True))
        return message


def _hints(cls: type[Message]) -> Mapping[str, Any]:
    try:
        return get_type_hints(cls)
    except (NameError, AttributeError, TypeError, SyntaxError) as error:
        raise SchemaError(
            f"the type of a field of {cls.__name__} cannot be found ({error}); "
            "import it at the top of the file, outside of `if TYPE_CHECKING`"
        ) from error


_by_class: dict[type, Schema] = {}
_by_hash: dict[int, Schema] = {}


def schema_of(cls: type[Message]) -> Schema:
    """The schema of a message class, made on first use."""
    schema = _by_class.get(cls)
    if schema is None:
        if not dataclasses.is_dataclass(cls):
            raise SchemaError(f"{cls.__name__} is no dataclass; declare it with @dataclass(frozen=True)")
        schema = _by_class[cls] = Schema(cls)
        _by_hash[schema.hash] = schema
    return schema


def schema_named(number: int) -> Schema:
    """The schema with this hash. Raises WireError if no class known here has it."""
    schema = _by_hash.get(number)
    if schema is not None:
        return schema
    for cls in known_types():
        with suppress(SchemaError):  # a class that no message can be of yet
            schema_of(cls)
    if number not in _by_hash:
        raise WireError(
            f"a message of schema {number:#010x} that no class here has; "
            "run the same files, with the same message classes, in every process"
        )
    return _by_hash[number]


_scalars = frozenset((str, int, float, bool, bytes, type(None)))


def freeze(message: Message) -> None:
    """Make every array inside a message read-only, in place. Raises WireError for what an Encoder refuses."""
    try:
        _freeze(message, 0)
    except UNSENDABLE as error:
        raise unsendable(error) from error


def _freeze_all(values: Iterable[Any], depth: int) -> None:
    for value in values:
        if type(value) not in _scalars:
            _freeze(value, depth)


def _freeze(value: Any, depth: int) -> None:
    """`depth` is the number of messages around `value`."""
    if isinstance(value, np.ndarray):
        dtype_code(value)
        value.setflags(False)
    elif isinstance(value, Message):
        check_depth(depth)
        _freeze_all(schema_of(type(value)).values(value), depth + 1)
    elif isinstance(value, tuple | list):
        _freeze_all(value, depth)
    elif isinstance(value, Mapping):
        _freeze_all(value, depth)
        _freeze_all(value.values(), depth)
    elif isinstance(value, np.generic):
        if type(value.item()) not in _scalars:
            raise _refusal(value)
    elif not isinstance(value, str | bytes | int | float):
        raise _refusal(value)


def unsendable(error: Exception, what: str = "cannot send") -> WireError:
    """What says that a value cannot travel because of `error`, one of UNSENDABLE."""
    nested = isinstance(error, RecursionError) or str(error).startswith("recursion limit")  # msgpack's ValueError
    return WireError(f"{what}: {'values nested too deep, or within themselves' if nested else error}")


def check_depth(depth: int) -> None:
    """Raises WireError for a message with so many around it."""
    if depth > MAX_DEPTH:
        raise WireError(
            f"a message with more than {MAX_DEPTH} messages around it cannot travel; "
            "hold a chain of messages as a tuple of them"
        )


def dtype_code(array: np.ndarray[Any, Any]) -> int:
    """The code of the array's dtype. Raises WireError for an array that cannot travel."""
    code = DTYPE_CODES.get(array.dtype)
    if code is None or array.ndim > MAX_AXES:
        raise WireError(f"an array of dtype {array.dtype} and {array.ndim} axes cannot travel; convert it first")
    return code


def _refusal(value: Any) -> WireError:
    return WireError(
        f"a value of type {type(value).__module__}.{type(value).__qualname__} cannot travel; messages hold "
        "scalars, str, bytes, tuples, mappings, messages and numpy arrays"
    )


def payload_bytes(value: Any) -> int:
    """Rough size of a value in memory: array and text bytes, 8 for any other scalar."""
    kind = type(value)
    if kind is np.ndarray:
        return int(value.nbytes)
    if kind is str or kind is bytes:
        return len(value)
    if isinstance(value, Message):
        return sum(map(payload_bytes, schema_of(kind).values(value)))
    if kind is tuple or kind is list:
        return sum(map(payload_bytes, value))
    if isinstance(value, Mapping):
        return sum(map(payload_bytes, value.values()))
    return 8


class Encoder:
    """Packs values. After `pack`, `frames` holds the arrays that travel beside the packed bytes.

    The caller clears `frames` when it begins a new multipart; indices count from its start. After each value
    that put arrays there, or into shared memory, it calls `keep` or, for one that is not to travel, `undo`.
    """

    def __init__(self, place: Place | None = None, *, beside: bool = True) -> None:
        self.frames: list[Buffer] = []
        self.steps: list[Callable[[], object]] = []
        """What takes back the arrays of the value at hand."""
        self._place = place
        self._beside = beside
        self._packers = [msgpack.Packer(default=self._default)]
        self._depth = 0
        self.pack: Callable[[Any], bytes] = self._packers[0].pack

    def keep(self) -> None:
        """The value at hand will travel."""
        self.steps.clear()

    def undo(self) -> None:
        """The value at hand will not travel: take back the arrays it put elsewhere."""
        for step in self.steps:
            step()
        self.steps.clear()

    def _default(self, value: Any) -> Any:
        if type(value) is np.ndarray:
            return self._array(value)
        if isinstance(value, Message):
            schema = schema_of(type(value))
            return msgpack.ExtType(MESSAGE, _hash.pack(schema.hash) + self._nested(schema.values(value)))
        if isinstance(value, np.generic):
            return value.item()
        if isinstance(value, np.ndarray):
            return self._array(np.asarray(value))
        if isinstance(value, Mapping):
            return dict(value)
        raise _refusal(value)

    def _nested(self, values: tuple[Any, ...]) -> bytes:
        # A packer cannot be entered twice: one for each depth of nesting.
        self._depth += 1
        try:
            check_depth(self._depth)
            if self._depth == len(self._packers):
                self._packers.append(msgpack.Packer(default=self._default))
            packed: bytes = self._packers[self._depth].pack(values)
            return packed
        finally:
            self._depth -= 1

    def _array(self, array: np.ndarray[Any, Any]) -> Any:
        code = dtype_code(array)
        head = _shape_structs[array.ndim].pack(code, array.ndim, *array.shape)
        array.setflags(write=False)
        if array.nbytes <= INLINE_LIMIT_BYTES or not self._beside:
            return _extension((INLINE, head + array.tobytes()))
        if self._place is not None:
            address = self._place(array)
            if address is not None:
                self.steps.append(partial(self._place.take_back, address))
                return msgpack.ExtType(SLAB, head + address)
        raw = array if array.flags.c_contiguous else np.ascontiguousarray(array)
        self.frames.append(raw.reshape(-1).view(np.uint8).data)
        self.steps.append(self.frames.pop)
        return msgpack.ExtType(FRAME, head + _index.pack(len(self.frames) - 1))


class Decoder:
    """Unpacks what an Encoder packed. `frames` are the raw frames of the multipart at hand."""

    def __init__(self, attach: Callable[[bytes, int], Any] | None = None) -> None:
        self.frames: Sequence[Any] = ()
        self._attach = attach
        self._depth = 0
        self._unpack = partial(msgpack.unpackb, ext_hook=self._ext, use_list=False, strict_map_key=False)

    def unpack(self, data: bytes | memoryview) -> Any:
        """The value; arrays in it are read-only views. Raises WireError."""
        try:
            return self._unpack(data)
        except UNPARSABLE as error:
            raise WireError(f"a body that does not parse ({type(error).__name__}: {error})") from error

    def bodies(self, schema: Schema, heads: Sequence[Head], data: bytes | memoryview) -> list[Envelope]:
        """The messages in their envelopes. `data` is an array of what `Schema.take_apart` made of each.

        Raises WireError.
        """
        try:
            bodies = self._unpack(data)
            if len(bodies) != len(heads):
                raise WireError(f"{len(bodies)} bodies where there are heads of {len(heads)} messages")
            return schema.put_together(heads, bodies)
        except UNPARSABLE as error:
            raise WireError(f"a body that does not parse ({type(error).__name__}: {error})") from error

    def _ext(self, code: int, data: bytes) -> Any:
        if code == MESSAGE:
            return schema_named(_hash.unpack_from(data)[0]).build(self._nested(memoryview(data)[_hash.size :]))
        if code not in (INLINE, FRAME, SLAB):
            raise ValueError(f"unknown extension {code}")
        ndim = data[1]
        shape = _shape_structs[ndim].unpack_from(data)[2:]
        start = 8 + 8 * ndim
        dtype = DTYPES[data[0]]
        if code == INLINE:
            return np.ndarray(shape, dtype, data, start)
        if code == FRAME:
            return _framed(shape, dtype, self.frames[_index.unpack_from(data, start)[0]])
        if self._attach is None:
            raise ValueError("an array in shared memory that this transport does not have")
        num_bytes = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        return _sealed(np.asarray(self._attach(data[start:], num_bytes)).view(dtype).reshape(shape))

    def _nested(self, data: memoryview) -> Any:
        self._depth += 1
        try:
            check_depth(self._depth)
            return self.unpack(data)
        finally:
            self._depth -= 1


def _framed(shape: tuple[int, ...], dtype: np.dtype[Any], frame: Any) -> np.ndarray[Any, Any]:
    array: np.ndarray[Any, Any] = np.ndarray(shape, dtype, frame)
    return _sealed(array if array.flags.aligned else array.copy())


def _sealed(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    array.flags.writeable = False
    return array
