"""Tables: many messages of one class as columns. A batch is sent in this form.

If samples are sent one by one, each costs about fifty msgpack values and several small arrays. As columns, a batch of
any size costs a few values and arrays for each field, so that it fits into one body (`cost`), and is packed and
unpacked several times as fast. The arrays of all messages are concatenated into one array, which is sent outside the
body or through shared memory like every large array; each message gets a read-only view of it.

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
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, chain, pairwise
from typing import Any

import msgpack
import numpy as np

from flowrl.channel.encoding.compiled import DTYPE_CODES, NOT_PLAIN
from flowrl.channel.encoding.cost import PER_BYTE, of_tuple
from flowrl.channel.encoding.schema import schema_named, schema_of
from flowrl.channel.encoding.values import SCALARS
from flowrl.messages import Message

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

Column = tuple[Any, ...]
Pay = Callable[[int, int], None]
"""pay(bytes of memory, additional bytes of text)"""


def is_table(values: Sequence[Any]) -> bool:
    """Whether these are messages of one class, at least LEAST_ROWS of them."""
    return len(values) >= LEAST_ROWS and isinstance(values[0], Message) and len({*map(type, values)}) == 1


class Columns:
    """Makes columns. `carried(value, nested)` converts a single value that is within `nested` tuples and dicts.

    `pay` is called with what the receiver will pay for columns, and also with the cost of each tuple of ROWS.
    """

    def __init__(self, carried: Callable[[Any, int], Any], pay: Pay) -> None:
        self._carried = carried
        self._pay = pay

    def of(self, values: Sequence[Any], depth: int = 0, nested: int = 0) -> Column:
        """The column of `values`, which has at least one value.

        `depth` is the number of columns around it, `nested` the number of tuples and dicts since the last message.
        """
        kinds = {*map(type, values)}
        first = values[0]
        if (
            len(kinds) == 1
            and depth < MOST_COLUMNS_DEEP
            and (column := self._of_one_type(first, values, depth, nested))
        ):
            return column
        self._pay(of_tuple(len(values)), 0)
        return (ROWS, tuple([self._carried(value, nested) for value in values]))

    def _of_one_type(self, first: Any, values: Sequence[Any], depth: int, nested: int) -> Column | None:
        kind = type(first)
        if kind in SCALARS or kind is tuple:
            if kind is not float and (kind is not tuple or not first) and all(value == first for value in values):
                return (SAME, self._carried(first, nested))
            if kind in NUMBER_TYPES:
                return self._numbers(kind, values)
            if kind is str:
                return self._texts(values)
            return self._tuples(values, depth, nested) if kind is tuple else None
        if kind is np.ndarray:
            return self._arrays(first, values)
        if kind is dict:
            return self._dicts(first, values, depth, nested)
        return self._messages(values, depth) if isinstance(first, Message) else None

    def _numbers(self, kind: type, values: Sequence[Any]) -> Column | None:
        number = NUMBER_TYPES.index(kind)
        try:
            array = np.array(values, _DTYPES[number])
        except OverflowError:
            return None
        self._pay(_NUMBER * len(values), 0)
        return (NUMBERS, number, array)

    def _texts(self, values: Sequence[str]) -> Column:
        texts = [value.encode() for value in values]
        joined = b"".join(texts)
        self._pay(_TEXT * len(texts), _of_text(joined))
        return (TEXTS, np.frombuffer(joined, np.uint8), _lengths(texts))

    def _arrays(self, first: np.ndarray[Any, Any], values: Sequence[np.ndarray[Any, Any]]) -> Column | None:
        dtype = first.dtype
        if dtype not in DTYPE_CODES or any(value.dtype != dtype or value.ndim != 1 for value in values):
            return None
        self._pay(_VIEW * len(values), 0)
        for value in values:
            value.setflags(write=False)
        return (ARRAYS, np.concatenate(values), _lengths(values))

    def _dicts(self, first: dict[Any, Any], values: Sequence[dict[Any, Any]], depth: int, nested: int) -> Column | None:
        keys = (*first,)
        if any((*value,) != keys or not {*map(type, value)} <= {str} for value in values):
            return None
        self._pay(_of_fields(len(keys)) * len(values), 0)
        return (DICTS, keys, *(self.of([value[key] for value in values], depth + 1, nested + 1) for key in keys))

    def _tuples(self, values: Sequence[tuple[Any, ...]], depth: int, nested: int) -> Column:
        width = len(values[0])
        if 0 < width <= LONGEST_RECORD and {*map(len, values)} == {width}:
            self._pay(_of_tuples(len(values), width * len(values)), 0)
            return (RECORDS, width, *(self.of(place, depth + 1, nested + 1) for place in zip(*values, strict=True)))
        items = [*chain.from_iterable(values)]
        self._pay(_of_tuples(len(values), len(items)), 0)
        return (TUPLES, _lengths(values), self.of(items, depth + 1, nested + 1))

    def _messages(self, values: Sequence[Message], depth: int) -> Column:
        schema = schema_of(type(values[0]))
        self._pay(_of_fields(len(schema.names)) * len(values), 0)
        fields = zip(*map(schema.values, values), strict=True)
        return (MESSAGES, schema.hash, *(self.of(field, depth + 1) for field in fields))


def padded(body: bytes, missing: int) -> bytes:
    """`body`, the packed pair of a table, with padding as a third part that pays for `missing` bytes of memory."""
    return b"\x93" + body[1:] + bytes(msgpack.packb(bytes(missing // _GAIN + 1)))


def messages_of(table: Any, pay: Pay | None) -> tuple[Any, ...]:
    """The messages of a table. Raises the same errors as `expanded`; without `pay` nothing is paid."""
    number, column, *_ = table
    if type(number) is not int or number <= 0 or type(column) is not tuple or column[0] != MESSAGES:
        raise ValueError("a table of no messages")
    return tuple(expanded(column, number, pay or (lambda num_bytes, bulk_bytes: None)))


def expanded(column: Any, number: int, pay: Pay, depth: int = 0) -> Sequence[Any]:
    """The values of a column. Raises ValueError if it is not a column of `number` values, and what `pay` raises."""
    if depth > MOST_COLUMNS_DEEP + 1 or type(column) is not tuple or type(column[0]) is not int:
        raise ValueError("a table that is nested too deeply, or has no column")
    form, *parts = column
    match form, parts:
        case 0, [value]:
            if type(value) not in SCALARS and value != ():
                raise ValueError("a value of all rows that is no scalar")
            return [value] * number
        case 1, [int() as kind, array]:
            _require(array, _DTYPES[kind], number)
            pay(_NUMBER * number, 0)
            return array.tolist()  # type: ignore[no-any-return]
        case 2, [data, lengths]:
            _require(data, np.dtype(np.uint8))
            bounds = _bounds(lengths, number, data.size)
            joined = data.tobytes()
            pay(_TEXT * number, _of_text(joined))
            return [joined[start:end].decode() for start, end in bounds]
        case 3, [data, lengths]:
            _require(data)
            bounds = _bounds(lengths, number, data.size)
            pay(_VIEW * number, 0)
            return [data[start:end] for start, end in bounds]
        case 4, [tuple() as keys, *columns]:
            found = _columns(columns, len(keys), number, pay, depth, _of_fields(len(keys)) * number)
            return [dict(zip(keys, row, strict=True)) for row in _rows(found, number)]
        case 5, [int() as width, *columns] if 0 < width <= LONGEST_RECORD:
            found = _columns(columns, width, number, pay, depth, _of_tuples(number, width * number))
            return [*_rows(found, number)]
        case 6, [lengths, items]:
            spans = [*_bounds(lengths, number)]
            total = spans[-1][1] if spans else 0
            pay(_of_tuples(number, total), 0)
            values = tuple(expanded(items, total, pay, depth + 1))
            return [values[start:end] for start, end in spans]
        case 7, [int() as name, *columns]:
            schema = schema_named(name)
            cost = _of_fields(len(schema.names)) * number
            found = _columns(columns, len(schema.names), number, pay, depth, cost)
            codes = bytes([NOT_PLAIN]) * len(schema.arrays) if schema.arrays else None
            return [schema.build((None, codes, *row)) for row in _rows(found, number)]
        case 8, [tuple() as rows] if len(rows) == number:
            return rows
    raise ValueError(f"no column of form {form}")


def _columns(
    columns: Sequence[Any], wanted: int, number: int, pay: Pay, depth: int, cost: int
) -> Sequence[Sequence[Any]]:
    """The values of `wanted` columns, after paying `cost` for what is made from them."""
    if len(columns) != wanted:
        raise ValueError(f"{len(columns)} columns, but the class has {wanted} fields")
    pay(cost, 0)
    return [expanded(column, number, pay, depth + 1) for column in columns]


def _of_text(text: bytes) -> int:
    """Upper bound of the decoded text's bytes: one character outside of ASCII can make each take four."""
    return len(text) if text.isascii() else 4 * len(text)


def _rows(columns: Sequence[Sequence[Any]], number: int) -> Iterator[tuple[Any, ...]]:
    return zip(*columns, strict=True) if columns else iter([()] * number)


def _lengths(values: Sequence[Any]) -> np.ndarray[Any, Any]:
    return np.fromiter(map(len, values), _LENGTH, len(values))


def _require(array: Any, dtype: np.dtype[Any] | None = None, number: int | None = None) -> None:
    if type(array) is not np.ndarray or array.ndim != 1 or (dtype is not None and array.dtype != dtype):
        raise ValueError("a column without its array")
    if number is not None and array.size != number:
        raise ValueError(f"a column of {array.size} values where there are {number} rows")


def _bounds(lengths: Any, number: int, total: int | None = None) -> Iterator[tuple[int, int]]:
    """Where each value begins and ends in the concatenated data."""
    _require(lengths, _LENGTH, number)
    if number and int(lengths.min()) < 0:
        raise ValueError("a negative length")
    ends = [*accumulate(lengths.tolist(), initial=0)]
    if total is not None and ends[-1] != total:
        raise ValueError(f"lengths of {ends[-1]} in all where there are {total}")
    return pairwise(ends)


def _of_tuples(number: int, total: int) -> int:
    return of_tuple(0) * number + (of_tuple(1) - of_tuple(0)) * total


def _of_fields(number: int) -> int:
    """The cost of a dict or message with `number` fields, without the values of the fields."""
    return _DICT + _FIELD * number
