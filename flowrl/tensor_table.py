"""The table of tensors in a manifest of weights, as columns.

A model with hundreds of experts has some hundred thousand tensors. A message with one value for each field of each
tensor is refused by its receiver, which cannot know what decoding so many values costs (`channel.cost`). A few arrays
cost the receiver nothing, however long they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

from flowrl.message_base import Message

Int64 = npt.NDArray[np.int64]
TensorRow = tuple[str, str, tuple[int, ...], int, int]
"""(name, dtype, shape, offset_bytes, num_bytes)"""


def _none() -> Int64:
    return np.zeros(0, np.int64)


@dataclass(frozen=True)
class TensorTable(Message):
    """Rows of N tensors, in the transport's order. Iterate it for the rows."""

    names: bytes = b""
    """All names in UTF-8, each followed by a zero byte, which no name has."""
    dtypes: tuple[str, ...] = ()
    """The dtypes that occur."""
    dtype: Int64 = field(default_factory=_none)
    """[N], indices into `dtypes`."""
    axes: Int64 = field(default_factory=_none)
    """[N], the numbers of axes."""
    sizes: Int64 = field(default_factory=_none)
    """[sum of `axes`], the shapes one after the other."""
    offset_bytes: Int64 = field(default_factory=_none)
    """[N]"""
    num_bytes: Int64 = field(default_factory=_none)
    """[N]"""

    @staticmethod
    def of(rows: Iterable[TensorRow]) -> TensorTable:
        names, dtypes, shapes, offsets, lengths = zip(*rows, strict=True) if (rows := [*rows]) else ((),) * 5
        known = tuple(dict.fromkeys(dtypes))
        return TensorTable(
            b"".join(name.encode() + b"\0" for name in names),
            known,
            _array(map(known.index, dtypes)),
            _array(map(len, shapes)),
            _array(size for shape in shapes for size in shape),
            _array(offsets),
            _array(lengths),
        )

    def __len__(self) -> int:
        return len(self.dtype)

    def __iter__(self) -> Iterator[TensorRow]:
        names = self.names.decode().split("\0")[:-1]
        dtypes = [self.dtypes[number] for number in self.dtype.tolist()]
        sizes, ends = self.sizes.tolist(), accumulate(self.axes.tolist(), initial=0)
        shapes = [tuple(sizes[start:end]) for start, end in pairwise(ends)]
        return zip(names, dtypes, shapes, self.offset_bytes.tolist(), self.num_bytes.tolist(), strict=True)


def _array(values: Iterable[int]) -> Int64:
    return np.array([*values], np.int64)
