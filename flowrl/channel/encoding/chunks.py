"""Divides data that are too long for one note: a receiver decodes a limited number of values at once (`cost`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

from flowrl.channel.encoding.cost import MOST_VALUES

CHUNK_VALUES = MOST_VALUES // 4
"""The most values of one chunk. Decoding a chunk takes about 10 ms of the receiver's event loop."""
VALUE_LENGTH = 50
"""Number of characters of text, or of bytes, that count as one more value; this keeps a chunk's texts below
`MOST_TEXT_BYTES`."""

T = TypeVar("T")


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
    """How many values a receiver decodes for this one, counted as in `cost.weigh`: a container itself counts as one.

    A long text counts as several values, and so do long bytes.
    """
    if isinstance(value, str | bytes):
        return 1 + len(value) // VALUE_LENGTH
    if isinstance(value, list | tuple):
        return 1 + sum(map(values_in, value))
    if isinstance(value, Mapping):
        return 1 + len(value) + sum(map(values_in, value.values()))
    return 1
