"""Codec: message bodies as msgpack, with large arrays outside of them.

A body is the tuple of a message's group id, its plain arrays and its field values. A plain array is a
short, one-dimensional array that is itself a field: it is sent as its raw values, and the entry "plain arrays"
holds the code of its dtype, one byte for each field that is declared as an array. Any other array is a
msgpack extension, which costs several calls per array. The extension starts with dtype and shape, followed by

- INLINE: the raw values (small arrays),
- FRAME:  the index of the raw frame that holds them,
- SLAB:   their address in a shared-memory slab.

Values of types that msgpack lacks are also extensions, so that they keep their type: a nested message (its schema hash
and its own body, without a group id), a tuple of many messages of one class (`table`), a list, a read-only mapping, a
numpy number. Nothing is ever pickled. Arrays arrive read-only, and are also made read-only at the sender. A message
arrives with all its fields, including those with `init=False`: no `__init__` or `__post_init__` runs again.

The bodies of requests and notes are less strict outside of the messages in them: lists arrive as tuples, other
mappings as dicts, numpy numbers as Python numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from struct import Struct
from struct import error as StructError
from types import MappingProxyType
from typing import Any

import msgpack
import numpy as np
from msgpack.exceptions import UnpackException

from flowrl.channel.encoding.arrays import ArrayPlace, framed, sealed
from flowrl.channel.encoding.compiled import DTYPE_CODES, DTYPES, INLINE_LIMIT_BYTES, Head
from flowrl.channel.encoding.cost import (
    EXTENSION,
    PER_BYTE,
    SHORT,
    SMALL_BYTES,
    TINY_BYTES,
    WITHIN,
    Allowance,
    Costly,
    of_dict,
    of_tuple,
    too_costly,
)
from flowrl.channel.encoding.envelope import Envelope
from flowrl.channel.encoding.schema import Schema, freeze, freeze_inside, schema_named, schema_of
from flowrl.channel.encoding.table import Columns, is_table, messages_of, padded
from flowrl.channel.encoding.values import (
    DICT,
    LIST,
    MAX_AXES,
    NUMBER,
    PROXY,
    SCALARS,
    TUPLE,
    check_depth,
    check_keys,
    check_nested,
    dtype_code,
    kind_of,
    refusal,
)
from flowrl.errors import WireError
from flowrl.messages import Message

__all__ = ["ArrayPlace", "Buffer", "Decoder", "Encoder", "freeze", "freeze_inside"]

INLINE_CODE, FRAME_CODE, SLAB_CODE, MESSAGE_CODE, LIST_CODE, PROXY_CODE, NUMBER_CODE, TABLE_CODE = range(1, 9)
Buffer = bytes | memoryview | np.ndarray[Any, Any]


_shape_structs = tuple(Struct(f"<BBxxxxxx{ndim}Q") for ndim in range(MAX_AXES + 1))
_index = Struct("<Q")
_hash = Struct("<I")
WITHIN.update({MESSAGE_CODE: _hash.size, LIST_CODE: 0, PROXY_CODE: 0, TABLE_CODE: 0})
UNPARSABLE = (ValueError, TypeError, LookupError, OverflowError, StructError, UnpackException)
"""The errors that the parser raises for bytes that are not a valid body."""
_extension = partial(tuple.__new__, msgpack.ExtType)
"""Makes an ExtType without the checks of its constructor."""


class Encoder:
    """Packs values. After `pack`, `frames` holds the arrays that are sent outside the packed bytes.

    The caller clears `frames` when it begins a new multipart; indices count from its start. After each value that
    put arrays into `frames` or into shared memory, the caller calls `keep`, or `undo` if the value will not be sent.
    """

    def __init__(self, place: ArrayPlace | None = None, *, beside: bool = True) -> None:
        self.frames: list[Buffer] = []
        self.steps: list[Callable[[], object]] = []
        """Functions that take back the arrays of the current value."""
        self.cost = 0
        """What an Allowance counts for the extensions of the current value, and for containers in its messages."""
        self.tables_cost = self.tables_bulk = 0
        """The parts of `cost` for what the receiver makes from tables: `tables_bulk` for the characters of their texts,
        `tables_cost` for everything else."""
        self.beside_bytes = self.shared_bytes = self.tables_shared = 0
        """Bytes of the current value's arrays: those in `frames`, those in shared memory, and of the latter those in
        tables."""
        self._place = place
        self._beside = beside
        self._packers = [msgpack.Packer(default=self._default)]
        self._depth = 0
        self._columns = Columns(self.carried, self._pay)
        self.pack: Callable[[Any], bytes] = self._packers[0].pack

    def keep(self) -> None:
        """The current value will be sent."""
        self.steps.clear()
        self.cost = self.tables_cost = self.tables_bulk = 0
        self.beside_bytes = self.shared_bytes = self.tables_shared = 0

    def undo(self) -> None:
        """The current value will not be sent: take back its arrays from `frames` and from shared memory."""
        for step in self.steps:
            step()
        self.keep()

    def carried(self, value: Any, nested: int = 0) -> Any:
        """Convert `value`, which is in a message, to what a packer takes. Raises WireError if it cannot be sent.

        Integers and texts are not checked here: the packer checks each. `nested` is the number of tuples and dicts
        around `value` since the last message, list or read-only mapping.
        """
        kind = kind_of(value)
        if kind == TUPLE:
            check_nested(nested + 1)
            self.cost += of_tuple(len(value))
            if is_table(value):
                return self._table(value)
            return value if {*map(type, value)} <= SCALARS else tuple([self.carried(v, nested + 1) for v in value])
        if kind == DICT:
            check_nested(nested + 1)
            return self._dict(value, nested + 1)
        if kind == LIST:
            return self._within(LIST_CODE, lambda: self.carried(tuple(value)))
        if kind == PROXY:
            return self._within(PROXY_CODE, lambda: self._dict(value, 0))
        if kind == NUMBER:
            return self._number(value)
        return value

    def _table(self, messages: Sequence[Any]) -> Any:
        """Pack a table. Padding is added if its own bytes would not pay for what the receiver makes from it."""
        paid = self._paid()
        shared = self.tables_shared - self.shared_bytes
        code, body = self._within(TABLE_CODE, lambda: (len(messages), self._columns.of(messages)))
        self.tables_shared = shared + self.shared_bytes
        missing = self._paid() - paid - PER_BYTE // 4 * len(body)  # most of what a byte pays for is the body itself
        return _extension((code, padded(body, missing) if missing > 0 else body))

    def _paid(self) -> int:
        """What tables have cost so far, minus what arrays outside the body pay for."""
        return self.tables_cost + self.tables_bulk - PER_BYTE * (self.beside_bytes + self.shared_bytes)

    def _pay(self, cost: int, bulk: int) -> None:
        self.cost += cost + bulk
        self.tables_cost += cost
        self.tables_bulk += bulk

    def _dict(self, value: Mapping[Any, Any], nested: int) -> Mapping[Any, Any]:
        self.cost += of_dict(len(value))
        if {*map(type, value)} <= SCALARS and {*map(type, value.values())} <= SCALARS:
            return value if type(value) is dict else dict(value)
        check_keys(value)
        return {self.carried(key): self.carried(item, nested) for key, item in value.items()}

    def _number(self, value: np.generic) -> Any:
        self.cost += EXTENSION
        return msgpack.ExtType(NUMBER_CODE, bytes((DTYPE_CODES[value.dtype],)) + value.tobytes())

    def _default(self, value: Any) -> Any:
        if type(value) is np.ndarray:
            return self._array(value)
        if isinstance(value, Message):
            schema = schema_of(type(value))
            head = _hash.pack(schema.hash)
            self.cost += schema.cost
            return self._within(MESSAGE_CODE, lambda: schema.take_apart(None, value, self.carried), head)
        if isinstance(value, np.generic):
            return value.item()
        if isinstance(value, Mapping):
            return dict(value)
        raise refusal(value)

    def _within(self, code: int, make: Callable[[], Any], head: bytes = b"") -> Any:
        """Pack an extension that contains a body."""
        # A packer is not reentrant: each depth of nesting has its own.
        self._depth += 1
        try:
            check_depth(self._depth)
            if self._depth == len(self._packers):
                self._packers.append(msgpack.Packer(default=self._default))
            self.cost += EXTENSION
            return _extension((code, head + self._packers[self._depth].pack(make())))
        finally:
            self._depth -= 1

    def _array(self, array: np.ndarray[Any, Any]) -> Any:
        code = dtype_code(array)
        head = _shape_structs[array.ndim].pack(code, array.ndim, *array.shape)
        array.setflags(write=False)
        self.cost += EXTENSION
        if array.nbytes <= INLINE_LIMIT_BYTES or not self._beside:
            return _extension((INLINE_CODE, head + array.tobytes()))
        if self._place is not None:
            address = self._place(array)
            if address is not None:
                self.steps.append(partial(self._place.take_back, address))
                self.shared_bytes += array.nbytes
                return _extension((SLAB_CODE, head + address))
        raw = array if array.flags.c_contiguous else np.ascontiguousarray(array)
        self.frames.append(raw.reshape(-1).view(np.uint8).data)
        self.steps.append(self.frames.pop)
        self.beside_bytes += array.nbytes
        return _extension((FRAME_CODE, head + _index.pack(len(self.frames) - 1)))


class Decoder:
    """Unpacks what an Encoder packed: stored data, or, after `begin`, data that a peer has sent.

    Data from a peer is refused if decoding it costs more than its number of bytes allows.
    """

    def __init__(self, attach: Callable[[bytes, int], Any] | None = None) -> None:
        self._frames: Sequence[Any] = ()
        self._attach = attach
        self._allowance = Allowance()
        self._num_bytes = 0
        self._attached: dict[bytes, Any] = {}
        """Arrays of the current body by address, kept until the body is decoded: when the last reference to an array
        disappears, its block is released to the owner."""
        self._depth = 0
        self.counting = False
        """Whether the cost of decoding the current multipart is counted. Tiny multiparts and stored data need no
        counting."""
        self._weighing = False
        self._read = self._read_any
        """The function that unpacks bodies of the current multipart."""

    # Methods, because a `functools.partial` with these keywords takes 1.5 times as long as `unpackb` itself.

    def _read_any(self, data: bytes | memoryview) -> Any:
        """The value in `data`, whatever it costs."""
        return msgpack.unpackb(data, ext_hook=self._ext, use_list=False, strict_map_key=False)

    def _read_short(self, data: bytes | memoryview) -> Any:
        """Like `_read_any`, but refuses containers longer than SHORT."""
        return msgpack.unpackb(
            data,
            ext_hook=self._ext,
            use_list=False,
            strict_map_key=False,
            max_array_len=SHORT,
            max_map_len=SHORT,
        )

    def _read_counted(self, data: bytes | memoryview) -> Any:
        """Like `_read_short`, and also pays for every container."""
        return msgpack.unpackb(
            data,
            ext_hook=self._ext,
            use_list=False,
            strict_map_key=False,
            max_array_len=SHORT,
            max_map_len=SHORT,
            list_hook=self._allowance.array,
            object_hook=self._allowance.mapping,
        )

    def begin(self, num_bytes: int, frames: Sequence[Any]) -> None:
        """Begin a multipart of `num_bytes` bytes with the raw frames `frames`."""
        self._frames, self._num_bytes = frames, num_bytes
        if num_bytes > TINY_BYTES:
            self._begin_counting()
        else:
            self.counting, self._read = False, self._read_short

    def _begin_counting(self) -> None:
        self.counting, self._read = True, self._read_counted
        self._allowance.begin(self._num_bytes)
        self._allowance.earn(sum(block.nbytes for block in self._attached.values()))

    def pay(self, num_bytes: int) -> None:
        """Count memory that is used outside of bodies. Only while `counting`. Raises Costly."""
        self._allowance.pay(num_bytes)

    def unpack(self, data: bytes | memoryview) -> Any:
        """The value in `data`; arrays in it are read-only views. Raises WireError."""
        try:
            return self._read_or_weigh(data) if self.counting else self._read(data)
        except UNPARSABLE as error:
            if isinstance(error, ValueError) and self._read == self._read_short:
                # Perhaps a container is longer than SHORT. This is allowed, but the body has to be weighed first.
                self._begin_counting()
                self._allowance.careful = True
                return self.unpack(data)
            raise WireError(f"a body that does not parse ({type(error).__name__}: {error})") from error
        finally:
            if self._attached:
                self._attached.clear()

    def bodies(self, schema: Schema, heads: Sequence[Head], data: bytes | memoryview) -> list[Envelope]:
        """The messages in their envelopes. `data` is an array of the results of `Schema.take_apart`, one per message.

        Raises WireError.
        """
        bodies = self.unpack(data)
        try:
            if len(bodies) != len(heads):
                raise WireError(f"got {len(bodies)} bodies for {len(heads)} message headers")
            return schema.put_together(heads, bodies)
        except UNPARSABLE as error:
            raise WireError(f"a body that does not parse ({type(error).__name__}: {error})") from error

    def _read_or_weigh(self, data: bytes | memoryview) -> Any:
        """Unpack `data` and count its cost meanwhile. A body that costs too much, or is long, is weighed first."""
        allowance = self._allowance
        if len(data) <= SMALL_BYTES and not allowance.careful:
            spent = allowance.spent()
            try:
                return self._read(data)
            except (Costly, ValueError):  # too costly, or a container too long to be counted before it is built
                allowance.spend_again(spent)
                allowance.careful = True
        try:
            return self._weighed(data, allowance)
        except Costly:
            raise too_costly() from None

    def _weighed(self, data: bytes | memoryview, allowance: Allowance) -> Any:
        self._weighing, outer = True, self._weighing
        try:
            allowance.weigh(data)
            return self._read_any(data)
        finally:
            self._weighing = outer

    def _ext(self, code: int, data: bytes) -> Any:
        if self.counting and not self._weighing:
            self._allowance.pay(EXTENSION)
        if code in WITHIN:
            return self._body(code, memoryview(data)[WITHIN[code] :], data)
        if code == NUMBER_CODE:
            return np.frombuffer(data, DTYPES[data[0]], 1, 1)[0]
        if code not in (INLINE_CODE, FRAME_CODE, SLAB_CODE):
            raise ValueError(f"unknown extension {code}")
        ndim = data[1]
        shape = _shape_structs[ndim].unpack_from(data)[2:]
        start = 8 + 8 * ndim
        dtype = DTYPES[data[0]]
        if code == INLINE_CODE:
            return np.ndarray(shape, dtype, data, start)
        if code == FRAME_CODE:
            return framed(shape, dtype, self._frames[_index.unpack_from(data, start)[0]])
        return self._shared(data[start:], shape, dtype)

    def _body(self, code: int, body: memoryview, data: bytes) -> Any:
        """The value of an extension that contains a body."""
        values = self._nested(body)
        if code == LIST_CODE:
            return [*values]
        if code == PROXY_CODE:
            return MappingProxyType(values)
        if code == TABLE_CODE:
            return self._table(values)
        return schema_named(_hash.unpack_from(data)[0]).build(values)

    def _table(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """The messages of a table."""
        if self._read == self._read_short:
            raise ValueError("a table, which has to be paid for")
        return messages_of(values, self._allowance.pay_table if self.counting else None)

    def _nested(self, data: memoryview) -> Any:
        self._depth += 1
        try:
            check_depth(self._depth)
            return self._weighed(data, self._allowance) if self._weighing else self._read(data)
        finally:
            self._depth -= 1

    def _shared(self, address: bytes, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
        if self._attach is None:
            raise ValueError("an array in shared memory, which this transport does not support")
        block = self._attached.get(address)
        if block is None:
            num_bytes = dtype.itemsize * math.prod(shape)
            block = self._attached[address] = np.asarray(self._attach(address, num_bytes))
            self._allowance.earn(num_bytes)
        return sealed(block.view(dtype).reshape(shape))
