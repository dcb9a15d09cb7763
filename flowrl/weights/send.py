"""Senders move one version's tensors from the trainer's ranks to where generators read them.

`Publisher` calls a sender collectively on all ranks. `stage_version` makes a version readable and returns its manifest
on rank 0; `transmit_tensors` runs after the manifest has been sent.

Weights are sent in the readers' dtype where that is narrower than the trainer's (`Narrowing`): half the bytes for
bfloat16. The reader would round in the same way (to the nearest, ties to even) when it copies them into its parameters,
so it has the same bits either way. Parameters that a model keeps in float32 whatever its dtype stay as they are.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from flowrl.graph.routes import WeightTransport
from flowrl.messages import TensorRow, TensorTable, Weights
from flowrl.weights.shm import Checksum, Segment, SegmentPool, align_offset, tensor_bytes

if TYPE_CHECKING:
    import torch

    from flowrl.weights.tcp import ChunkServer


@dataclass(frozen=True)
class Narrowing:
    """How tensors are converted before they are sent."""

    dtype: str | None = None
    """"bfloat16", ...; None: every tensor is sent as it is."""
    kept: tuple[str, ...] = ()
    """Parts of names whose tensors are sent as they are, as in transformers' `_keep_in_fp32_modules`."""

    def narrow_dtype(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which a tensor is sent; never a wider one than its own."""
        import torch

        if self.dtype is None or not dtype.is_floating_point:
            return dtype
        target: torch.dtype = getattr(torch, self.dtype)
        kept = any(re.search(rf"(^|\.){re.escape(part)}($|\.)", name) for part in self.kept)
        return dtype if kept or target.itemsize >= dtype.itemsize else target


AS_IT_IS = Narrowing()


def kept_in_float32(network: Any) -> tuple[str, ...]:
    """Parts of the names of parameters that a transformers model keeps in float32."""
    lists = (getattr(network, f"_keep_in_fp32_modules{strict}", None) or () for strict in ("", "_strict"))
    return tuple(sorted({part for parts in lists for part in parts}))


BUCKET_BYTES = 64 << 20


class Source(Protocol):
    """What a publisher needs from a training engine, on every rank. All but the properties are collective."""

    @property
    def rank(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    def buckets(self, max_bytes: int) -> Iterator[tuple[Sequence[str], Sequence[torch.Tensor]]]:
        """Whole parameters with their Hugging Face names, at least one per bucket; valid until the next bucket.

        Tied parameters appear once. The order is the same in every call.
        """
        ...

    def score(self, sequences: Sequence[Sequence[int]]) -> Sequence[Sequence[float]]:
        """log p(token t | tokens before t) at temperature 1, for t = 1 ... T-1 of each sequence."""
        ...


class Sender(Protocol):
    """The trainer's end of a weight backend, as `Receiver` is the generator's. All methods are collective."""

    copy_s: float
    """Seconds that the last `stage_version` or `transmit_tensors` spent moving bytes, without gathering."""

    def stage_version(self, source: Source, policy: str, version: int) -> Weights | None:
        """Manifest of `version` on rank 0, None on the others."""
        ...

    def transmit_tensors(self) -> None:
        """Move the tensors that `stage_version` announced, if the receivers have to take part in it."""
        ...

    def close(self) -> None: ...


class SegmentSender:
    """Rank 0 writes the gathered buckets into a segment that any process of the machine can read.

    `narrowing` says in which dtype tensors are sent. With `serve`, generators on other machines may fetch the segments
    over TCP. `readers` as `SegmentPool` takes it.
    """

    def __init__(
        self,
        run_id: str,
        policy: str,
        *,
        narrowing: Narrowing = AS_IT_IS,
        bucket_bytes: int = BUCKET_BYTES,
        serve: bool = False,
        readers: int = 0,
    ) -> None:
        self.copy_s = 0.0
        self._serve = serve
        self._server: ChunkServer | None = None
        self.pool = SegmentPool(run_id, policy, readers=readers)
        self._narrowing = narrowing
        self._bucket_bytes = bucket_bytes

    def stage_version(self, source: Source, policy: str, version: int) -> Weights | None:
        buckets = source.buckets(self._bucket_bytes)
        if source.rank != 0:
            for _ in buckets:
                pass
            return None
        segment = self.pool.take_writable()
        rows, checksum, num_bytes = self._write_tensors(segment, buckets)
        self.pool.publish_segment(segment, version, num_bytes)
        transport = WeightTransport.SHM.at(segment.name)
        if self._serve:
            from flowrl.weights.tcp import ChunkServer

            self._server = self._server or ChunkServer()
            transport = WeightTransport.TCP.at(str(self._server.name_origin(segment.name)))
        return Weights(
            policy=policy,
            version=version,
            base_version=version,
            kind="full",
            transport=transport,
            num_bytes=num_bytes,
            checksum=checksum,
            tensors=TensorTable.of(rows),
        )

    def _write_tensors(
        self, segment: Segment, buckets: Iterator[tuple[Sequence[str], Sequence[torch.Tensor]]]
    ) -> tuple[list[TensorRow], int, int]:
        """(table, checksum, number of bytes) of what is written."""
        rows: list[TensorRow] = []
        checksum = Checksum()
        offset, self.copy_s = 0, 0.0
        for names, tensors in buckets:
            began = time.perf_counter()
            for name, tensor in zip(names, tensors, strict=True):
                # Converted where the tensor is, so that fewer bytes are copied.
                narrow = self._narrowing.narrow_dtype(name, tensor.dtype)
                dtype = str(narrow).removeprefix("torch.")
                data = tensor_bytes(tensor.detach().to(narrow).to("cpu").contiguous())
                segment.write_data(offset, data.data)
                checksum.add_tensor(name, dtype, tensor.shape, data)
                rows.append((name, dtype, tuple(tensor.shape), offset, len(data)))
                offset = align_offset(offset + len(data))
            self.copy_s += time.perf_counter() - began
        return rows, checksum.value, offset

    def transmit_tensors(self) -> None:
        """Does nothing: readers fetch the tensors themselves."""

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        self.pool.close()


def copy_tensors(
    source: Source, bucket_bytes: int, synchronize: Callable[[], None], narrowing: Narrowing
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, copy) of every parameter; collective over the trainer's ranks. A copy belongs to the caller.

    For a reader that works on CUDA streams of its own: vLLM packs and broadcasts on side streams, and takes each tensor
    under the stream that is current then. So the order of streams cannot be relied on, and the device is synchronized
    on purpose: before the first gathering, because the optimizer wrote on another stream; after each gathering, because
    the tensors of one bucket are taken under different streams; before a bucket is released, because its memory is used
    again while copies of it may still run.
    """
    synchronize()
    for names, tensors in source.buckets(bucket_bytes):
        synchronize()
        for name, tensor in zip(names, tensors, strict=True):
            yield name, tensor.to(narrowing.narrow_dtype(name, tensor.dtype), copy=True)
        synchronize()
