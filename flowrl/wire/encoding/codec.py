"""Message bodies, and messages in storage, as msgpack with large arrays outside of it.

**Bodies.** A body is the tuple of a message's group id, its plain arrays and its field values. A plain array is a
short, one-dimensional array that is itself a field: it is sent as its raw values, and the entry "plain arrays"
holds the code of its dtype, one byte for each field that is declared as an array. Any other array is a
msgpack extension, which costs several calls per array. The extension starts with dtype and shape, followed by

- INLINE: the raw values (small arrays),
- FRAME:  the index of the raw frame that holds them,
- SLAB:   their address in a shared-memory slab.

Values of types that msgpack lacks are also extensions, so that they keep their type: a nested message (its schema hash
and its own body, without a group id), a table of messages, a list, a read-only mapping, a numpy number. Nothing is ever
pickled. Arrays arrive read-only, and are also made read-only at the sender. A message arrives with all its fields,
including those with `init=False`: no `__init__` or `__post_init__` runs again.

The bodies of requests and notes are less strict outside of the messages in them: lists arrive as tuples, other
mappings as dicts, numpy numbers as Python numbers.

**Tables.** A tuple of many messages of one class, such as the samples of a batch, is sent as columns. If samples are
sent one by one, each costs about fifty msgpack values and several small arrays. As columns, a batch of any size costs a
few values and arrays for each field, so that it fits into one body (`cost`), and is packed and unpacked several times
as fast. The arrays of all messages are concatenated into one array, which is sent outside the body or through shared
memory like every large array; each message gets a read-only view of it.

A column is a tuple: its form, then the data that this form needs for the column's n values.

- SAME:     the one value that all rows have: one of SCALARS other than a float, or an empty tuple.
- NUMBERS:  the position of the numbers' type in NUMBER_TYPES, and an array of the n numbers.
- TEXTS:    an array with the bytes of all texts in UTF-8, and the n lengths of the texts in bytes.
- ARRAYS:   the concatenation of all arrays, each of one axis and all of one dtype, and their n lengths.
- DICTS:    the keys (texts, the same in all dicts and in the same order), and a column for each key.
- RECORDS:  for tuples of one short length: this length, and a column for each position.
- TUPLES:   for other tuples: their n lengths, and a column of all items.
- MESSAGES: the hash of their schema, and a column for each field.
- ROWS:     the values one by one.

A table is (number of messages, a MESSAGES column, optional padding bytes). A receiver pays for the values of a column
before it makes them, and the sender counts the same cost. Every received byte adds to the receiver's allowance
(`cost`), but columns have fewer bytes than the same messages sent one by one: the padding makes up for the difference.

**Storage.** Stored messages describe themselves, so that a file can still be read after its message class has changed:
they hold their fields by name. On loading, fields that were added later take their defaults; any other difference
raises an error that names the field. `__post_init__` does not run again, as on the wire.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING
from functools import partial
from itertools import accumulate, chain, pairwise
from struct import Struct
from struct import error as StructError
from types import MappingProxyType
from typing import Any, Protocol

import msgpack
import numpy as np
import numpy.typing as npt
from msgpack.exceptions import UnpackException

from flowrl.errors import SchemaError, WireError
from flowrl.messages import Message
from flowrl.messages.base import message_type, type_name
from flowrl.wire.encoding.cost import (
    EXTENSION,
    PER_BYTE,
    SHORT,
    SMALL_BYTES,
    TINY_BYTES,
    WITHIN,
    Allowance,
    Costly,
    dict_cost,
    too_costly,
    tuple_cost,
)
from flowrl.wire.encoding.schema import (
    DICT,
    DTYPE_CODES,
    DTYPES,
    INLINE_LIMIT_BYTES,
    LIST,
    MAX_AXES,
    MESSAGE,
    NUMBER,
    PROXY,
    SCALARS,
    TUPLE,
    UNSENDABLE,
    Envelope,
    Head,
    Schema,
    check_depth,
    check_keys,
    check_nested,
    dtype_code,
    explain_unsendable,
    kind_of,
    make_refusal,
    schema_named,
    schema_of,
)

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

SAME, NUMBERS, TEXTS, ARRAYS, DICTS, RECORDS, TUPLES, MESSAGES, ROWS = range(9)
LONGEST_RECORD = 8
LEAST_ROWS = 32
"""The messages of a shorter tuple are sent one by one."""
MOST_COLUMNS_DEEP = 8
"""The most columns around a column; deeper values are sent as ROWS."""
NUMBER_TYPES: tuple[type, ...] = (bool, int, float)
_DTYPES = (np.dtype(np.bool_), np.dtype(np.int64), np.dtype(np.float64))
_LENGTH = np.dtype(np.int64)
_NUMBER, _TEXT, _VIEW, _DICT, _FIELD = 48, 80, 144, 256, 56
"""Upper bounds, in bytes of memory: a number, a text without its characters, a view of an array, an empty dict or
message, and one key with its value."""
_GAIN = PER_BYTE - 4
"""What a padding byte pays for, minus what it costs itself, because it is counted at each level around it."""
TableColumn = tuple[Any, ...]
Pay = Callable[[int, int], None]
"""pay(bytes of memory, additional bytes of text)"""

FORMAT = 1
MOST_STORED_BYTES = (1 << 32) - 1
"""The most bytes that one msgpack value can hold."""
TOO_LARGE = "is too large"
"""The end of msgpack's error for an array, or bytes, of more than MOST_STORED_BYTES."""
Stored = bytes | npt.NDArray[np.uint8]
"""The bytes that `dump_value` returned, or an array of them."""
_TYPE = "\0type"
"""A stored mapping with this key represents another value. The mapping's value under this key is the class name of a
message, or it tells what the value under _ITEMS is: a mapping that itself has this key (None), a list (_LISTED) or a
read-only mapping (_READ_ONLY)."""
_ITEMS = "items"
_LISTED, _READ_ONLY = 1, 2


class ArrayPlace(Protocol):
    """Puts arrays into shared memory."""

    def __call__(self, array: np.ndarray[Any, Any]) -> bytes | None:
        """Copy `array` into shared memory and return the address, None if that is not possible."""

    def take_back(self, address: bytes) -> None:
        """Free the array at `address`, which was not sent."""


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
        self._packers = [msgpack.Packer(default=self._carry_other)]
        self._depth = 0
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

    def carry_value(self, value: Any, nested: int = 0) -> Any:
        """Convert `value`, which is in a message, to what a packer takes. Raises WireError if it cannot be sent.

        Integers and texts are not checked here: the packer checks each. `nested` is the number of tuples and dicts
        around `value` since the last message, list or read-only mapping.
        """
        kind = kind_of(value)
        if kind == TUPLE:
            check_nested(nested + 1)
            self.cost += tuple_cost(len(value))
            types = {*map(type, value)}
            if len(value) >= LEAST_ROWS and len(types) == 1 and isinstance(value[0], Message):
                return self._carry_table(value)
            return value if types <= SCALARS else tuple([self.carry_value(item, nested + 1) for item in value])
        if kind == DICT:
            check_nested(nested + 1)
            return self._carry_dict(value, nested + 1)
        if kind == LIST:
            return self._pack_within(LIST_CODE, lambda: self.carry_value(tuple(value)))
        if kind == PROXY:
            return self._pack_within(PROXY_CODE, lambda: self._carry_dict(value, 0))
        if kind == NUMBER:
            self.cost += EXTENSION
            return _pack_number(value)
        return value

    def _carry_dict(self, value: Mapping[Any, Any], nested: int) -> Mapping[Any, Any]:
        self.cost += dict_cost(len(value))
        if {*map(type, value)} <= SCALARS and {*map(type, value.values())} <= SCALARS:
            return value if type(value) is dict else dict(value)
        check_keys(value)
        return {self.carry_value(key): self.carry_value(item, nested) for key, item in value.items()}

    def _carry_other(self, value: Any) -> Any:
        """The packer's hook for a value of a type that msgpack lacks."""
        if type(value) is np.ndarray:
            return self._carry_array(value)
        if isinstance(value, Message):
            schema = schema_of(type(value))
            self.cost += schema.cost
            head = _hash.pack(schema.hash)
            return self._pack_within(MESSAGE_CODE, lambda: schema.take_apart(None, value, self.carry_value), head)
        if isinstance(value, np.generic):
            return value.item()
        if isinstance(value, Mapping):
            return dict(value)
        raise make_refusal(value)

    def _carry_array(self, array: np.ndarray[Any, Any]) -> Any:
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

    def _pack_within(self, code: int, make: Callable[[], Any], head: bytes = b"") -> Any:
        """Pack an extension that contains a body."""
        # A packer is not reentrant: each depth of nesting has its own.
        self._depth += 1
        try:
            check_depth(self._depth)
            if self._depth == len(self._packers):
                self._packers.append(msgpack.Packer(default=self._carry_other))
            self.cost += EXTENSION
            return _extension((code, head + self._packers[self._depth].pack(make())))
        finally:
            self._depth -= 1

    def _carry_table(self, messages: Sequence[Any]) -> Any:
        """Pack a table. Padding is added if its own bytes would not pay for what the receiver makes from it."""
        cost_before = self.tables_cost + self.tables_bulk
        beside_before, shared_before, inside_before = self.beside_bytes, self.shared_bytes, self.tables_shared
        code, body = self._pack_within(TABLE_CODE, lambda: (len(messages), self.make_column(messages)))
        shared = self.shared_bytes - shared_before
        self.tables_shared = inside_before + shared  # those of tables within it are among them

        # Most of what a byte of the body pays for is the body itself.
        paid = PER_BYTE * (self.beside_bytes - beside_before + shared) + PER_BYTE // 4 * len(body)
        missing = self.tables_cost + self.tables_bulk - cost_before - paid
        if missing > 0:  # as a third part of the pair
            body = b"\x93" + body[1:] + bytes(msgpack.packb(bytes(missing // _GAIN + 1)))
        return _extension((code, body))

    def make_column(self, values: Sequence[Any], depth: int = 0, nested: int = 0) -> TableColumn:
        """The column of `values`, which has at least one value.

        `depth` is the number of columns around it, `nested` the number of tuples and dicts since the last message.
        """
        first, number = values[0], len(values)
        kind = type(first) if depth < MOST_COLUMNS_DEEP and len({*map(type, values)}) == 1 else None
        may_be_one = (kind in SCALARS and kind is not float) or (kind is tuple and not first)
        if may_be_one and all(value == first for value in values):
            return (SAME, self.carry_value(first, nested))
        if kind in NUMBER_TYPES:
            form = NUMBER_TYPES.index(kind)
            with suppress(OverflowError):
                numbers = np.array(values, _DTYPES[form])
                self._pay_table(_NUMBER * number)
                return (NUMBERS, form, numbers)
        elif kind is str:
            texts = [value.encode() for value in values]
            joined = b"".join(texts)
            self._pay_table(_TEXT * number, _text_cost(joined))
            return (TEXTS, np.frombuffer(joined, np.uint8), _lengths_of(texts))
        elif kind is np.ndarray:
            dtype = first.dtype
            if dtype in DTYPE_CODES and all(value.dtype == dtype and value.ndim == 1 for value in values):
                self._pay_table(_VIEW * number)
                for value in values:
                    value.setflags(write=False)
                return (ARRAYS, np.concatenate(values), _lengths_of(values))
        elif kind is dict:
            keys = (*first,)
            if all((*value,) == keys and {*map(type, value)} <= {str} for value in values):
                self._pay_table(_fields_cost(len(keys)) * number)
                by_key = ([value[key] for value in values] for key in keys)
                return (DICTS, keys, *(self.make_column(one, depth + 1, nested + 1) for one in by_key))
        elif kind is tuple:
            width = len(first)
            if 0 < width <= LONGEST_RECORD and {*map(len, values)} == {width}:
                self._pay_table(_tuples_cost(number, width * number))
                places = zip(*values, strict=True)
                return (RECORDS, width, *(self.make_column(one, depth + 1, nested + 1) for one in places))
            items = [*chain.from_iterable(values)]
            self._pay_table(_tuples_cost(number, len(items)))
            return (TUPLES, _lengths_of(values), self.make_column(items, depth + 1, nested + 1))
        elif kind is not None and issubclass(kind, Message):
            schema = schema_of(kind)
            self._pay_table(_fields_cost(len(schema.fields)) * number)
            fields = zip(*map(schema.values, values), strict=True)
            return (MESSAGES, schema.hash, *(self.make_column(one, depth + 1) for one in fields))
        self._pay_table(tuple_cost(number))
        return (ROWS, tuple([self.carry_value(value, nested) for value in values]))

    def _pay_table(self, cost: int, bulk: int = 0) -> None:
        """Count what the receiver will pay for columns."""
        self.cost += cost + bulk
        self.tables_cost += cost
        self.tables_bulk += bulk


def _pack_number(value: np.generic) -> Any:
    return msgpack.ExtType(NUMBER_CODE, bytes((DTYPE_CODES[value.dtype],)) + value.tobytes())


class Decoder:
    """Unpacks what an Encoder packed: stored data, or, after `begin_multipart`, data that a peer has sent.

    Data from a peer is refused if decoding it costs more than its number of bytes allows.
    """

    def __init__(self, attach: Callable[[bytes, int], Any] | None = None) -> None:
        self._frames: Sequence[Any] = ()
        self._attach = attach
        self.allowance = Allowance()
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
        return msgpack.unpackb(data, ext_hook=self._make_extension, use_list=False, strict_map_key=False)

    def _read_short(self, data: bytes | memoryview) -> Any:
        """Like `_read_any`, but refuses containers longer than SHORT."""
        return msgpack.unpackb(
            data,
            ext_hook=self._make_extension,
            use_list=False,
            strict_map_key=False,
            max_array_len=SHORT,
            max_map_len=SHORT,
        )

    def _read_counted(self, data: bytes | memoryview) -> Any:
        """Like `_read_short`, and also pays for every container."""
        return msgpack.unpackb(
            data,
            ext_hook=self._make_extension,
            use_list=False,
            strict_map_key=False,
            max_array_len=SHORT,
            max_map_len=SHORT,
            list_hook=self.allowance.pay_tuple,
            object_hook=self.allowance.pay_dict,
        )

    def begin_multipart(self, num_bytes: int, frames: Sequence[Any]) -> None:
        """Begin a multipart of `num_bytes` bytes with the raw frames `frames`."""
        self._frames, self._num_bytes = frames, num_bytes
        if num_bytes > TINY_BYTES:
            self._begin_counting()
        else:
            self.counting, self._read = False, self._read_short

    def _begin_counting(self) -> None:
        self.counting, self._read = True, self._read_counted
        self.allowance.begin_multipart(self._num_bytes)
        self.allowance.earn(sum(block.nbytes for block in self._attached.values()))

    def unpack(self, data: bytes | memoryview) -> Any:
        """The value in `data`; arrays in it are read-only views. Raises WireError."""
        try:
            return self._read_or_weigh(data) if self.counting else self._read(data)
        except UNPARSABLE as error:
            if isinstance(error, ValueError) and self._read == self._read_short:
                # Perhaps a container is longer than SHORT. This is allowed, but the body has to be weighed first.
                self._begin_counting()
                self.allowance.careful = True
                return self.unpack(data)
            raise WireError(f"a body that does not parse ({type(error).__name__}: {error})") from error
        finally:
            if self._attached:
                self._attached.clear()

    def unpack_messages(self, schema: Schema, heads: Sequence[Head], data: bytes | memoryview) -> list[Envelope]:
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
        allowance = self.allowance
        if len(data) <= SMALL_BYTES and not allowance.careful:
            spent = allowance.spent()
            try:
                return self._read(data)
            except (Costly, ValueError):  # too costly, or a container too long to be counted before it is built
                allowance.spend_again(spent)
                allowance.careful = True
        try:
            return self._read_weighed(data)
        except Costly:
            raise too_costly() from None

    def _read_weighed(self, data: bytes | memoryview) -> Any:
        self._weighing, outer = True, self._weighing
        try:
            self.allowance.weigh(data)
            return self._read_any(data)
        finally:
            self._weighing = outer

    def _make_extension(self, code: int, data: bytes) -> Any:
        """msgpack's hook for the value of an extension."""
        if self.counting and not self._weighing:
            self.allowance.pay(EXTENSION)
        if code in WITHIN:
            return self._make_body(code, data)
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
        array: np.ndarray[Any, Any]
        if code == FRAME_CODE:
            array = np.ndarray(shape, dtype, self._frames[_index.unpack_from(data, start)[0]])
            array = array if array.flags.aligned else array.copy()
        else:
            address = data[start:]
            if self._attach is None:
                raise ValueError("an array in shared memory, which this transport does not support")
            block = self._attached.get(address)
            if block is None:
                num_bytes = dtype.itemsize * math.prod(shape)
                block = self._attached[address] = np.asarray(self._attach(address, num_bytes))
                self.allowance.earn(num_bytes)
            array = block.view(dtype).reshape(shape)
        array.flags.writeable = False
        return array

    def _make_body(self, code: int, data: bytes) -> Any:
        """The value of an extension that contains a body."""
        body = memoryview(data)[WITHIN[code] :]
        self._depth += 1
        try:
            check_depth(self._depth)
            values = self._read_weighed(body) if self._weighing else self._read(body)
        finally:
            self._depth -= 1
        if code == LIST_CODE:
            return [*values]
        if code == PROXY_CODE:
            return MappingProxyType(values)
        if code == MESSAGE_CODE:
            return schema_named(_hash.unpack_from(data)[0]).build(values)

        if self._read == self._read_short:
            raise ValueError("a table, which has to be paid for")
        number, column, *_ = values
        if type(number) is not int or number <= 0 or type(column) is not tuple or column[0] != MESSAGES:
            raise ValueError("a table of no messages")
        pay = self.allowance.pay_table if self.counting else lambda num_bytes, bulk_bytes: None
        return tuple(expand_column(column, number, pay))


def expand_column(column: Any, number: int, pay: Pay, depth: int = 0) -> Sequence[Any]:
    """The values of a column. Raises ValueError if it is not a column of `number` values, and what `pay` raises."""
    if depth > MOST_COLUMNS_DEEP + 1 or type(column) is not tuple or type(column[0]) is not int:
        raise ValueError("a table that is nested too deeply, or has no column")

    def expand_rows(columns: Sequence[Any], wanted: int, cost: int) -> Iterator[tuple[Any, ...]]:
        """The rows of `wanted` columns, after paying `cost` for what is made from them."""
        if len(columns) != wanted:
            raise ValueError(f"{len(columns)} columns, but the class has {wanted} fields")
        pay(cost, 0)
        found = [expand_column(one, number, pay, depth + 1) for one in columns]
        return zip(*found, strict=True) if found else iter([()] * number)

    form, *parts = column
    match form, parts:
        case 0, [value]:
            if type(value) not in SCALARS and value != ():
                raise ValueError("a value of all rows that is no scalar")
            return [value] * number
        case 1, [int() as kind, array]:
            _require_array(array, _DTYPES[kind], number)
            pay(_NUMBER * number, 0)
            return array.tolist()  # type: ignore[no-any-return]
        case 2, [data, lengths]:
            _require_array(data, np.dtype(np.uint8))
            bounds = _bounds_of(lengths, number, data.size)
            joined = data.tobytes()
            pay(_TEXT * number, _text_cost(joined))
            return [joined[start:end].decode() for start, end in bounds]
        case 3, [data, lengths]:
            _require_array(data)
            bounds = _bounds_of(lengths, number, data.size)
            pay(_VIEW * number, 0)
            return [data[start:end] for start, end in bounds]
        case 4, [tuple() as keys, *columns]:
            rows = expand_rows(columns, len(keys), _fields_cost(len(keys)) * number)
            return [dict(zip(keys, row, strict=True)) for row in rows]
        case 5, [int() as width, *columns] if 0 < width <= LONGEST_RECORD:
            return [*expand_rows(columns, width, _tuples_cost(number, width * number))]
        case 6, [lengths, items]:
            spans = [*_bounds_of(lengths, number)]
            total = spans[-1][1] if spans else 0
            pay(_tuples_cost(number, total), 0)
            values = tuple(expand_column(items, total, pay, depth + 1))
            return [values[start:end] for start, end in spans]
        case 7, [int() as name, *columns]:
            schema = schema_named(name)
            rows = expand_rows(columns, len(schema.fields), _fields_cost(len(schema.fields)) * number)
            return [schema.build((None, schema.no_codes, *row)) for row in rows]
        case 8, [tuple() as values] if len(values) == number:
            return values
    raise ValueError(f"no column of form {form}")


def _text_cost(text: bytes) -> int:
    """Upper bound of the decoded text's bytes: one character outside of ASCII can make each take four."""
    return len(text) if text.isascii() else 4 * len(text)


def _tuples_cost(number: int, total: int) -> int:
    return tuple_cost(0) * number + (tuple_cost(1) - tuple_cost(0)) * total


def _fields_cost(number: int) -> int:
    """The cost of a dict or message with `number` fields, without the values of the fields."""
    return _DICT + _FIELD * number


def _lengths_of(values: Sequence[Any]) -> npt.NDArray[np.int64]:
    return np.fromiter(map(len, values), _LENGTH, len(values))


def _bounds_of(lengths: Any, number: int, total: int | None = None) -> Iterator[tuple[int, int]]:
    """Where each value begins and ends in the concatenated data."""
    _require_array(lengths, _LENGTH, number)
    if number and int(lengths.min()) < 0:
        raise ValueError("a negative length")
    ends = [*accumulate(lengths.tolist(), initial=0)]
    if total is not None and ends[-1] != total:
        raise ValueError(f"lengths of {ends[-1]} in all where there are {total}")
    return pairwise(ends)


def _require_array(array: Any, dtype: np.dtype[Any] | None = None, number: int | None = None) -> None:
    if type(array) is not np.ndarray or array.ndim != 1 or (dtype is not None and array.dtype != dtype):
        raise ValueError("a column without its array")
    if number is not None and array.size != number:
        raise ValueError(f"a column of {array.size} values where there are {number} rows")


def dump_value(value: Any) -> bytes:
    """A message, or any value that a message may hold (for example a node's state), as bytes, messages in it by name.

    Raises WireError for a value that a message cannot hold, and for one of more than MOST_STORED_BYTES.
    """
    message = value if isinstance(value, Message) else None
    cause = None
    try:
        packed = Encoder(beside=False).pack((FORMAT, _name_fields(value, 0)))
        if len(packed) <= MOST_STORED_BYTES:
            return packed
    except UNSENDABLE as error:
        if not str(error).endswith(TOO_LARGE):
            raise explain_unsendable(error, "cannot be stored", message=message) from error
        cause = error
    what = f"a {type(value).__name__}" if message is not None else "a state"
    raise WireError(
        f"{what} of more than {MOST_STORED_BYTES / (1 << 30):g} GiB cannot be stored in a checkpoint; make it smaller: "
        "of a batch by fewer groups, or by more ranks that share it"
    ) from cause


def _name_fields(value: Any, depth: int, nested: int = 0) -> Any:
    """`value` with mappings in place of messages, lists and read-only mappings.

    `depth` is the number of these around `value`, `nested` the number of tuples and dicts since the last of them.
    """
    kind = kind_of(value)
    if kind < TUPLE:
        return _pack_number(value) if kind == NUMBER else value
    if kind in (TUPLE, DICT):
        nested += 1
    else:
        check_depth(depth)
        depth, nested = depth + 1, 0
    if kind == MESSAGE:
        schema = schema_of(type(value))
        items = zip(schema.fields, schema.values(value), strict=True)
        return {_TYPE: type_name(type(value)), **{name: _name_fields(item, depth) for name, item in items}}

    check_nested(nested)
    if kind in (TUPLE, LIST):
        listed = tuple([_name_fields(item, depth, nested) for item in value])
        return listed if kind == TUPLE else {_TYPE: _LISTED, _ITEMS: listed}
    check_keys(value)
    named = {_name_fields(key, depth): _name_fields(item, depth, nested) for key, item in value.items()}
    if kind == PROXY:
        return {_TYPE: _READ_ONLY, _ITEMS: named}
    return {_TYPE: None, _ITEMS: named} if _TYPE in named else named


def load_message(data: Stored) -> Message:
    """The message that `dump_value` stored. Raises SchemaError if its class has changed incompatibly."""
    message = load_value(data)
    if not isinstance(message, Message):
        raise SchemaError("the stored bytes hold no message")
    return message


def load_value(data: Stored) -> Any:
    """The value that `dump_value` stored. Raises SchemaError as `load_message` does."""
    try:
        content = Decoder().unpack(data if isinstance(data, bytes) else memoryview(data.data))
    except WireError as error:
        raise SchemaError(f"the stored bytes cannot be read: {error}") from error
    if not isinstance(content, tuple) or len(content) != 2 or content[0] != FORMAT:
        raise SchemaError(f"the stored bytes are not of format {FORMAT}; another version of flowrl wrote them")
    try:
        return _restore_value(content[1], 0)
    except (WireError, RecursionError) as error:
        raise SchemaError(f"the stored bytes cannot be read: {error}") from error


def _restore_value(value: Any, depth: int) -> Any:
    """The value that `_name_fields` made `value` from."""
    if isinstance(value, tuple):
        return tuple(_restore_value(item, depth) for item in value)
    if not isinstance(value, dict):
        return value
    mark, items = value.get(_TYPE, ""), value.get(_ITEMS)
    if mark is None and isinstance(items, dict):
        return {key: _restore_value(item, depth) for key, item in items.items()}
    if _TYPE not in value:
        return {key: _restore_value(item, depth) for key, item in value.items()}

    depth += 1
    check_depth(depth - 1)
    if mark == _LISTED and isinstance(items, tuple):
        return [_restore_value(item, depth) for item in items]
    if mark == _READ_ONLY and isinstance(items, dict):
        return MappingProxyType({key: _restore_value(item, depth) for key, item in items.items()})
    return _restore_message({key: _restore_value(item, depth) for key, item in value.items()})


def _restore_message(found: dict[str, Any]) -> Message:
    name = found.pop(_TYPE)
    if not isinstance(name, str):
        raise SchemaError(f"the class of a stored message is {name!r}; it needs to be a name")
    cls = message_type(name)
    schema = schema_of(cls)
    defaults = {
        name: field.default if field.default_factory is MISSING else field.default_factory()
        for name, field in schema.fields.items()
        if name not in found
    }
    unknown = [f"field {name!r} is unknown to this version" for name in found if name not in schema.fields]
    missing = [f"field {name!r} is missing and has no default" for name, new in defaults.items() if new is MISSING]
    if unknown or missing:
        raise SchemaError(f"a stored {cls.__name__} does not fit its class: {'; '.join(unknown + missing)}")
    values = [found[name] if name in found else defaults[name] for name in schema.fields]
    return schema.build((None, schema.no_codes, *values))
