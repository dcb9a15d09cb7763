"""Splits what is too long for one notification: a receiver decodes a limited number of values at once (`cost`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

from flowrl.channel.cost import MOST_VALUES

PART_VALUES = MOST_VALUES // 4
"""Values of one part. Decoding it takes some 10 ms of the receiver's event loop."""
VALUE_CHARACTERS = 50
"""So many characters of a text count as a further value: texts of one part stay below `cost.MOST_TEXT_BYTES`."""

T = TypeVar("T")


def in_parts(items: Iterable[T], most_values: int = PART_VALUES) -> Iterator[list[T]]:
    """The items in order, in lists of at most `most_values` values, or of one item."""
    part: list[T] = []
    total = 0
    for item in items:
        number = values_in(item)
        if part and total + number > most_values:
            yield part
            part, total = [], 0
        part.append(item)
        total += number
    if part:
        yield part


def values_in(value: Any) -> int:
    """How many values a receiver decodes for this one, counted as `cost.weigh` does: a container is one, too.

    A long text counts as several.
    """
    if type(value) is str:
        return 1 + len(value) // VALUE_CHARACTERS
    if isinstance(value, list | tuple):
        return 1 + sum(map(values_in, value))
    if isinstance(value, Mapping):
        return 1 + len(value) + sum(map(values_in, value.values()))
    return 1
