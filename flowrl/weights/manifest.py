"""The table of tensors in a manifest: layout, checksum, and views onto a mapped segment.

Offsets count from the segment's first data byte and are multiples of 64. torch is imported only where it is used:
drivers, and tests of the parts without tensors, do not need it.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from flowrl.errors import FlowrlError
from flowrl.messages import Weights
from flowrl.tensor_table import TensorRow

if TYPE_CHECKING:
    import mmap

    import torch

ALIGNMENT = 64


class ChecksumMismatch(FlowrlError):
    """The bytes in the transport are not those that the trainer published."""


class Checksum:
    """Depends on the order of tensors, and runs at memory speed: 64-bit word sums, hashed with name, type and shape."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=8)

    def add(self, name: str, dtype: str, shape: Sequence[int], data: npt.NDArray[np.uint8]) -> None:
        self._hash.update(f"{name};{dtype};{tuple(shape)};".encode())
        self._hash.update(struct.pack("<Q", word_sum(data)))

    @property
    def value(self) -> int:
        """The checksum, with 63 bits so that it fits any signed 64-bit integer."""
        return int.from_bytes(self._hash.digest(), "little") >> 1


def word_sum(data: npt.NDArray[np.uint8]) -> int:
    """Sum modulo 2**64 of the bytes as 64-bit little-endian words, the last one padded with zeros."""
    whole = len(data) // 8 * 8
    total = int(np.add.reduce(data[:whole].view("<u8"), dtype=np.uint64)) if whole else 0
    return (total + int.from_bytes(data[whole:].tobytes(), "little")) % 2**64


def aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def tensor_bytes(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    """The bytes of a contiguous CPU tensor, without a copy."""
    import torch

    return tensor.reshape(-1).view(torch.uint8).numpy()


def views(mapping: mmap.mmap, rows: Iterable[TensorRow], *, start: int) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) for each row, as views of a mapped segment. Valid while the segment is locked."""
    import torch

    for name, dtype, shape, offset, num_bytes in rows:
        torch_dtype = getattr(torch, dtype)
        count = num_bytes // torch_dtype.itemsize
        flat = torch.frombuffer(mapping, dtype=torch_dtype, count=count, offset=start + offset)
        yield name, flat.reshape(tuple(shape))


def verify(manifest: Weights, mapping: mmap.mmap, *, start: int) -> None:
    """Raises ChecksumMismatch if the mapped bytes do not match the manifest."""
    found = Checksum()
    everything = np.frombuffer(mapping, np.uint8)
    for name, dtype, shape, offset, num_bytes in manifest.tensors:
        begin = start + offset
        found.add(name, dtype, shape, everything[begin : begin + num_bytes])
    if found.value != manifest.checksum:
        raise ChecksumMismatch(
            f"weights of {manifest.policy!r}, version {manifest.version}, have checksum {found.value:x} in "
            f"{manifest.transport}, but the manifest says {manifest.checksum:x}. Nothing was loaded; "
            "something other than the trainer wrote into the segment, or the copy is broken."
        )
