"""A training engine's parameters as a stream of copies, for a reader that works on CUDA streams of its own.

vLLM packs and broadcasts on side streams, and takes each tensor under the stream that is current then. So the order
of streams cannot be relied on, and the device is synchronized on purpose:

- before the first gathering, because the optimizer wrote on another stream;
- after each gathering, because the tensors of one bucket are taken under different streams;
- before a bucket is released, because its memory is used again while copies of it may still run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from flowrl.weights.narrowing import Narrowing
from flowrl.weights.send import Source

if TYPE_CHECKING:
    import torch


def copied(
    source: Source, bucket_bytes: int, synchronize: Callable[[], None], narrowing: Narrowing
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, copy) of every parameter; collective over the trainer's ranks. A copy belongs to the caller."""
    synchronize()
    for names, tensors in source.buckets(bucket_bytes):
        synchronize()
        for name, tensor in zip(names, tensors, strict=True):
            yield name, tensor.to(narrowing.of(name, tensor.dtype), copy=True)
        synchronize()
