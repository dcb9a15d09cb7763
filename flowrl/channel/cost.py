"""What a body costs its receiver: memory, and time of the event loop, known before either is spent.

A byte of msgpack can make a mapping of 88 bytes, and five bytes an array of 32 GB. So whoever decodes has an
allowance for what it makes: PER_BYTE for each byte that came and FLOOR_BYTES for a multipart, and never more
than MOST_BYTES, which take some 40 ms to make. The sender counts likewise: what would pass the allowance
leaves in several multiparts, and what cannot is refused there.

Two ways to count. While it decodes, an `Allowance` counts containers by msgpack's hooks, as if all in them
were of the costliest kind; a container longer than SHORT, of which the hook would hear too late, ends this way.
What passes is fine, and nearly all does. Otherwise `weigh` reads the bytes one value at a time, exactly, before
anything is decoded; that takes longer than decoding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from flowrl.errors import WireError

PER_BYTE = 16
FLOOR_BYTES = 1 << 20
MOST_BYTES = 24 << 20
"""Beside the bytes of texts and of bytes themselves, which are copied fast."""
MOST_VALUES = 150_000
"""In the bodies of a multipart that are weighed: reading and decoding them takes some 40 ms."""
MOST_TEXT_BYTES = 8 << 20
"""Of text in one body that is weighed: where characters are of different widths it takes five bytes a byte."""
SHORT = 256
"""Longest container that is decoded without being weighed first."""
SMALL_BYTES = 1 << 18
"""Longest body that is decoded without being weighed first: so much may be decoded in vain, once in a multipart."""

ENVELOPE, FRAME, EXTENSION = 512, 300, 1024
"""A message, another frame, and an array or message in a body."""
_SLOT, _TUPLE, _DICT, _ITEM = 88, 128, 256, 200
WORST = 400
"""No byte of a body counts for more in an Allowance."""
TINY_BYTES = FLOOR_BYTES // WORST
"""Longest multipart of which nothing needs to be counted."""
FEW_BYTES = 1024
"""Control frames this short are taken for the costliest."""
_BULK_BYTES = 4096
"""Longer text and bytes count by themselves."""

ADVICE = "hold numbers in numpy arrays, not in tuples, and send what is large in several messages"


class Costly(Exception):
    """What is decoded may cost more than is allowed."""


class Allowance:
    """What may still be spent on the multipart at hand. `array` and `mapping` are msgpack's hooks."""

    __slots__ = ("_bulk", "_values", "careful", "left")

    def __init__(self, num_bytes: int = 0) -> None:
        self.begin(num_bytes)

    def begin(self, num_bytes: int) -> None:
        """A multipart of so many bytes is at hand."""
        most = FLOOR_BYTES + PER_BYTE * num_bytes
        self.left = min(most, MOST_BYTES)
        self._bulk = most - self.left
        self._values = MOST_VALUES
        self.careful = False
        """A body was decoded in vain: the others are weighed first."""

    def pay(self, num_bytes: int) -> None:
        """Raises Costly if this is more than is left."""
        self.left -= num_bytes
        if self.left < 0:
            raise Costly

    def weigh(self, data: bytes | memoryview, *, deep: bool = False) -> None:
        """Pay for what decoding `data` takes. Raises Costly, and WireError as `weigh` does: then nothing is left."""
        left, self.left = self.left, -1
        weight = weigh(data, self._values, deep=deep)
        self.left = left
        self._values -= weight.num_values
        free = min(weight.bulk_bytes, self._bulk)
        self._bulk -= free
        self.pay(weight.num_bytes + weight.bulk_bytes - free)

    def array(self, items: tuple[Any, ...]) -> tuple[Any, ...]:
        self.left -= _TUPLE + _SLOT * len(items)
        if self.left < 0:
            raise Costly
        return items

    def mapping(self, items: dict[Any, Any]) -> dict[Any, Any]:
        self.left -= _DICT + _ITEM * len(items)
        if self.left < 0:
            raise Costly
        return items


def of_tuple(length: int) -> int:
    """What an Allowance counts for a tuple."""
    return _TUPLE + _SLOT * length


def of_dict(length: int) -> int:
    """What an Allowance counts for a dict."""
    return _DICT + _ITEM * length


class Weight(NamedTuple):
    """What decoding a body makes."""

    num_bytes: int
    bulk_bytes: int
    """Of long texts and bytes, beside `num_bytes`."""
    num_values: int


def weigh(data: bytes | memoryview, most_values: int = MOST_VALUES, *, deep: bool = False) -> Weight:
    """What decoding `data` makes. Bodies of messages within it count as bytes unless `deep`.

    Raises WireError for bytes that end within a value, for more values than `most_values`, for more text than may
    be decoded at once and for more memory than ever.
    """
    scale = _Scale(data, deep)
    values = cost = at = 0
    end, flat, sized = len(data), _FLAT, _SIZED
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
            at, weight = sized[mark](scale, at)
        cost += weight
        values += 1
        if values > most_values or cost > MOST_BYTES:
            raise too_costly(f"holds more than {MOST_VALUES} values" if values > most_values else "")
    if at > end:
        raise WireError("a body that ends within a value")
    return Weight(cost, scale.bulk_bytes, values)


def too_costly(reason: str = "") -> WireError:
    """What says that a body takes too much memory, or time, to decode."""
    reason = reason or f"takes more than {PER_BYTE} bytes of memory a byte, or more than {MOST_BYTES}, to decode"
    return WireError(f"a body that {reason}; {ADVICE}")


class _Scale:
    """The values whose length their bytes tell: each method takes where one begins and how long it is, and says
    where it ends and what it weighs."""

    def __init__(self, data: bytes | memoryview, deep: bool) -> None:
        self.bulk_bytes = 0
        self._data = data
        self._deep = deep
        self._text_bytes = 0

    def length(self, at: int, num_bytes: int) -> int:
        return int.from_bytes(self._data[at + 1 : at + 1 + num_bytes], "big")

    def text(self, start: int, length: int) -> tuple[int, int]:
        end = start + length
        self._text_bytes += length
        if self._text_bytes > MOST_TEXT_BYTES:
            raise too_costly(f"holds more than {MOST_TEXT_BYTES} bytes of text (as bytes they would travel)")
        if length > _BULK_BYTES:
            self.bulk_bytes += 4 * length
            return end, 0
        # One character outside of ASCII can make every other take four bytes.
        return end, 64 + length if bytes(self._data[start:end]).isascii() else 80 + 4 * length

    def binary(self, start: int, length: int) -> tuple[int, int]:
        if length > _BULK_BYTES:
            self.bulk_bytes += length
            return start + length, 48
        return start + length, 48 + length

    def array(self, start: int, length: int) -> tuple[int, int]:
        return start, _tuple_bytes(length)

    def mapping(self, start: int, length: int) -> tuple[int, int]:
        return start, _dict_bytes(length)

    def extension(self, start: int, length: int) -> tuple[int, int]:
        self.bulk_bytes += length
        code = self._data[start] if start < len(self._data) else 0
        if self._deep and code in WITHIN:
            return start + 1 + WITHIN[code], EXTENSION
        return start + 1 + length, EXTENSION


WITHIN: dict[int, int] = {}
"""Extensions that hold a body themselves, by code: the number of bytes before it."""

_Sized = Callable[[_Scale, int], tuple[int, int]]


def _sized(what: Callable[[_Scale, int, int], tuple[int, int]], num_bytes: int) -> _Sized:
    """A value whose length stands in so many bytes behind its mark."""
    return lambda scale, at: what(scale, at + 1 + num_bytes, scale.length(at, num_bytes))


def _fixed(num_bytes: int) -> _Sized:
    """An extension of a length that its mark tells."""
    return lambda scale, at: scale.extension(at + 1, num_bytes)


def _tuple_bytes(length: int) -> int:
    return 64 + 8 * length if length else 0


def _dict_bytes(length: int) -> int:
    return 250 + 56 * length if length else 80


def _flat(mark: int) -> tuple[int, int]:
    """(size, weight) of the values whose size their mark alone tells; (0, 0) for others."""
    if mark <= 0x7F or mark >= 0xFB or mark in (0xC0, 0xC1, 0xC2, 0xC3):  # small integers exist already
        return 1, 0
    if mark >= 0xE0:
        return 1, 32
    sizes = {0xCA: 5, 0xCB: 9, 0xCC: 2, 0xCD: 3, 0xCE: 5, 0xCF: 9, 0xD0: 2, 0xD1: 3, 0xD2: 5, 0xD3: 9}
    if mark in sizes:
        return sizes[mark], 0 if mark == 0xCC else 48 if mark in (0xCF, 0xD3) else 32
    if 0x80 <= mark <= 0x8F:
        return 1, _dict_bytes(mark & 0x0F)
    if 0x90 <= mark <= 0x9F:
        return 1, _tuple_bytes(mark & 0x0F)
    if 0xA0 <= mark <= 0xA3:  # a text of one character exists already
        return mark - 0x9F, 0 if mark <= 0xA1 else 80
    return 0, 0


_SHORT_TEXT, _AFTER_SHORT_TEXT, _BIN_8 = 0xA0, 0xC0, 0xC4
_FLAT = tuple(_flat(mark) for mark in range(256))
_SIZED: dict[int, _Sized] = {
    **{0xC4 + k: _sized(_Scale.binary, 1 << k) for k in (1, 2)},
    **{0xC7 + k: _sized(_Scale.extension, 1 << k) for k in range(3)},
    **{0xD4 + k: _fixed(1 << k) for k in range(5)},
    **{0xD9 + k: _sized(_Scale.text, 1 << k) for k in range(3)},
    **{0xDC + k: _sized(_Scale.array, 2 << k) for k in range(2)},
    **{0xDE + k: _sized(_Scale.mapping, 2 << k) for k in range(2)},
}
