"""What a body costs its receiver in memory and event-loop time, determined before either is spent.

One byte of msgpack can make a mapping of 88 bytes, and five bytes an array of 32 GB. So a decoder has an
allowance for what it makes: PER_BYTE for each received byte and FLOOR_BYTES for a multipart, and never more
than MOST_BYTES, which take some 160 ms to make. The sender counts in the same way: it splits data that would
exceed the allowance into several multiparts, and refuses data that cannot be split.

There are two ways to count. During decoding, an `Allowance` counts containers through msgpack's hooks, as if all
their items were of the costliest kind; it gives up at a container longer than SHORT, because the hook is called
only when the container is already built. A body that passes is accepted, and nearly all pass. For the others,
`weigh` reads the bytes one value at a time, exactly, before anything is decoded; this takes longer than decoding.

Data that are too long for one note are divided by `chunked`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

from flowrl.errors import WireError

PER_BYTE = 16
FLOOR_BYTES = 1 << 20
MOST_BYTES = 96 << 20
"""The content of texts and bytes does not count towards this, because it is copied fast."""
MOST_VALUES = 150_000
"""The most values in all weighed bodies of a multipart together: reading and decoding them takes about 40 ms."""
MOST_TEXT_BYTES = 8 << 20
"""The most bytes of text in one body that is weighed: if the characters of a text have different widths, each of its
bytes takes five bytes of memory."""
SHORT = 256
"""Longest container that is decoded without being weighed first."""
SMALL_BYTES = 1 << 18
"""Longest body that is decoded without being weighed first. So at most this many bytes are decoded in vain, and only
once per multipart."""

ENVELOPE, FRAME, EXTENSION = 512, 300, 1024
"""The cost of a message, of any other frame, and of an array or message in a body."""
_SLOT, _TUPLE, _DICT, _ITEM = 88, 128, 256, 200
WORST = 400
"""The most that an Allowance counts for one byte of a body, without what is made from its tables."""
TINY_BYTES = FLOOR_BYTES // WORST
"""Longest multipart that needs no counting at all."""
FEW_BYTES = 1024
"""Control frames up to this length are counted at the highest cost per byte, WORST."""
_BULK_BYTES = 4096
"""Longer texts and bytes are counted separately."""
ADVICE = "store numbers in numpy arrays instead of tuples, and send large data in several messages"
CHUNK_VALUES = MOST_VALUES // 4
"""The most values of one chunk. Decoding a chunk takes about 10 ms of the receiver's event loop."""
VALUE_LENGTH = 50
"""Number of characters of text, or of bytes, that count as one more value; this keeps a chunk's texts below
`MOST_TEXT_BYTES`."""
WITHIN: dict[int, int] = {}
"""Code of an extension that contains a body -> the number of bytes before that body."""

T = TypeVar("T")
_TUPLES = tuple(_TUPLE + _SLOT * length for length in range(SHORT + 1))


class Costly(Exception):
    """The data being decoded may cost more than the allowance."""


class Allowance:
    """What decoding the current multipart may still cost. `pay_tuple` and `pay_dict` are msgpack's hooks."""

    __slots__ = ("_bulk", "_earned", "_most", "_values", "careful", "left")

    def __init__(self, num_bytes: int = 0) -> None:
        self.begin_multipart(num_bytes)

    def begin_multipart(self, num_bytes: int) -> None:
        """Begin a multipart of `num_bytes` bytes."""
        most = FLOOR_BYTES + PER_BYTE * num_bytes
        self.left = self._most = min(most, MOST_BYTES)
        self._bulk = most - self.left
        self._earned = (0, 0)
        """What `earn` added to `left` and to `_bulk`."""
        self._values = MOST_VALUES
        self.careful = False
        """True after a body was decoded in vain: the other bodies of the multipart are weighed first."""

    def pay(self, num_bytes: int) -> None:
        """Spend `num_bytes`. Raises Costly if that is more than is left."""
        self.left -= num_bytes
        if self.left < 0:
            raise Costly

    def pay_table(self, num_bytes: int, bulk_bytes: int) -> None:
        """Spend `num_bytes`, and `bulk_bytes` of text. Raises Costly if that is more than is left."""
        free = min(bulk_bytes, self._bulk)
        self._bulk -= free
        self.pay(num_bytes + bulk_bytes - free)

    def earn(self, num_bytes: int) -> None:
        """Raise the allowance for `num_bytes` that arrived in shared memory."""
        most = PER_BYTE * num_bytes
        more = min(most, MOST_BYTES - self._most)
        self._most += more
        self._earned = (self._earned[0] + more, self._earned[1] + most - more)
        self.left += more
        self._bulk += most - more

    def spent(self) -> tuple[int, int]:
        """What is left without what was earned, for `spend_again`."""
        return self.left - self._earned[0], self._bulk - self._earned[1]

    def spend_again(self, spent: tuple[int, int]) -> None:
        """Forget what was paid since `spent`, and keep what was earned."""
        self.left, self._bulk = spent[0] + self._earned[0], spent[1] + self._earned[1]

    def weigh(self, data: bytes | memoryview, *, deep: bool = False) -> None:
        """Pay for decoding `data`. Raises Costly, or WireError like the function `weigh`; then nothing is left."""
        left, self.left = self.left, -1
        weight = weigh(data, self._values, deep=deep)
        self.left = left
        self._values -= weight.num_values
        free = min(weight.bulk_bytes, self._bulk)
        self._bulk -= free
        self.pay(weight.num_bytes + weight.bulk_bytes - free)

    def pay_tuple(self, items: tuple[Any, ...]) -> tuple[Any, ...]:
        self.left -= _TUPLES[len(items)]  # a hot path: every message's body passes through here
        if self.left < 0:
            raise Costly
        return items

    def pay_dict(self, items: dict[Any, Any]) -> dict[Any, Any]:
        self.left -= _DICT + _ITEM * len(items)
        if self.left < 0:
            raise Costly
        return items


def tuple_cost(length: int) -> int:
    """What an Allowance counts for a tuple."""
    return _TUPLE + _SLOT * length


def dict_cost(length: int) -> int:
    """What an Allowance counts for a dict."""
    return _DICT + _ITEM * length


class Weight(NamedTuple):
    """What decoding a body costs."""

    num_bytes: int
    bulk_bytes: int
    """Bytes of long texts and bytes, which `num_bytes` does not include."""
    num_values: int


def weigh(data: bytes | memoryview, most_values: int = MOST_VALUES, *, deep: bool = False) -> Weight:
    """What decoding `data` costs. Bodies nested in it, such as those of messages, count as bytes unless `deep`.

    Raises WireError for bytes that end within a value, for more values than `most_values`, for more text than may
    be decoded at once, and for more memory than any allowance permits.
    """
    values = cost = at = text_bytes = bulk_bytes = 0
    end, flat = len(data), _FLAT
    while at < end:
        mark = data[at]
        size, weight = flat[mark]
        if size:
            at += size
        elif mark == _BIN_8:
            size = data[at + 1]
            cost += 48 + size
            at += 2 + size
        elif mark < _AFTER_SHORT_TEXT:
            size = mark - _SHORT_TEXT
            cost += 64 + size if bytes(data[at + 1 : at + 1 + size]).isascii() else 80 + 4 * size
            at += 1 + size
        else:
            form, width, size = _SIZED[mark]
            at += 1 + width
            if width:
                size = int.from_bytes(data[at - width : at], "big")
            if form == _TEXT:
                start, at = at, at + size
                text_bytes += size
                if text_bytes > MOST_TEXT_BYTES:
                    raise too_costly(f"holds more than {MOST_TEXT_BYTES} bytes of text (send long text as bytes)")
                if size > _BULK_BYTES:
                    bulk_bytes += 4 * size
                else:  # one character outside of ASCII can make every other character take four bytes
                    weight = 64 + size if bytes(data[start:at]).isascii() else 80 + 4 * size
            elif form == _ARRAY:
                weight = _flat_tuple(size)
            elif form == _MAPPING:
                weight = _flat_dict(size)
            elif form == _EXTENSION:
                bulk_bytes += size
                code = data[at] if at < end else 0
                at += 1 + (WITHIN[code] if deep and code in WITHIN else size)
                weight = EXTENSION
            else:
                at += size
                weight = 48 if size > _BULK_BYTES else 48 + size
                bulk_bytes += size if size > _BULK_BYTES else 0
        cost += weight
        values += 1
        if values > most_values or cost > MOST_BYTES:
            raise too_costly(f"holds more than {MOST_VALUES} values" if values > most_values else "")
    if at > end:
        raise WireError("a truncated body: it ends within a value")
    return Weight(cost, bulk_bytes, values)


def too_costly(reason: str = "") -> WireError:
    """The error for a body that takes too much memory, or time, to decode."""
    reason = (
        reason or f"needs more than {PER_BYTE} bytes of memory per byte, or more than {MOST_BYTES} in all, to decode"
    )
    return WireError(f"a body that {reason}; {ADVICE}")


def _flat_tuple(length: int) -> int:
    return 64 + 8 * length if length else 0


def _flat_dict(length: int) -> int:
    return 250 + 56 * length if length else 80


def _flat(mark: int) -> tuple[int, int]:
    """(size, weight) of a value whose size follows from its mark alone; (0, 0) for others."""
    if mark <= 0x7F or mark >= 0xFB or mark in (0xC0, 0xC1, 0xC2, 0xC3):  # small integers are cached
        return 1, 0
    if mark >= 0xE0:
        return 1, 32
    sizes = {0xCA: 5, 0xCB: 9, 0xCC: 2, 0xCD: 3, 0xCE: 5, 0xCF: 9, 0xD0: 2, 0xD1: 3, 0xD2: 5, 0xD3: 9}
    if mark in sizes:
        return sizes[mark], 0 if mark == 0xCC else 48 if mark in (0xCF, 0xD3) else 32
    if 0x80 <= mark <= 0x8F:
        return 1, _flat_dict(mark & 0x0F)
    if 0x90 <= mark <= 0x9F:
        return 1, _flat_tuple(mark & 0x0F)
    if 0xA0 <= mark <= 0xA3:  # texts of at most one character are cached
        return mark - 0x9F, 0 if mark <= 0xA1 else 80
    return 0, 0


_SHORT_TEXT, _AFTER_SHORT_TEXT, _BIN_8 = 0xA0, 0xC0, 0xC4
_FLAT = tuple(_flat(mark) for mark in range(256))
_TEXT, _BINARY, _ARRAY, _MAPPING, _EXTENSION = range(5)
_SIZED: dict[int, tuple[int, int, int]] = {
    **{0xC4 + k: (_BINARY, 1 << k, 0) for k in (1, 2)},
    **{0xC7 + k: (_EXTENSION, 1 << k, 0) for k in range(3)},
    **{0xD4 + k: (_EXTENSION, 0, 1 << k) for k in range(5)},
    **{0xD9 + k: (_TEXT, 1 << k, 0) for k in range(3)},
    **{0xDC + k: (_ARRAY, 2 << k, 0) for k in range(2)},
    **{0xDE + k: (_MAPPING, 2 << k, 0) for k in range(2)},
}
"""Mark -> (form, the number of bytes after the mark that hold the length, the length if there are none)."""


def chunked(items: Iterable[T], most_values: int = CHUNK_VALUES) -> Iterator[list[T]]:
    """The items in order, in lists of at most `most_values` values. A list of a single item may have more."""
    chunk: list[T] = []
    total = 0
    for item in items:
        number = values_in(item)
        if chunk and total + number > most_values:
            yield chunk
            chunk, total = [], 0
        chunk.append(item)
        total += number
    if chunk:
        yield chunk


def values_in(value: Any) -> int:
    """How many values a receiver decodes for this one, counted as in `weigh`: a container itself counts as one.

    A long text counts as several values, and so do long bytes.
    """
    if isinstance(value, str | bytes):
        return 1 + len(value) // VALUE_LENGTH
    if isinstance(value, list | tuple):
        return 1 + sum(map(values_in, value))
    if isinstance(value, Mapping):
        return 1 + len(value) + sum(map(values_in, value.values()))
    return 1
