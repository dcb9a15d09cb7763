"""The trainer's side on GPUs: vLLM's own engine for NCCL, fed from ZeRO-3 shards.

vLLM's trainer engine controls the inference side through a client. Here the manifest on the latest edge does that:
every generator starts, loads and finishes by itself when it receives a manifest. So the client below does nothing.
Ranks and generators synchronize in `transmit_tensors`, which runs after the manifest was sent. It ends when every
generator has the version, or when the run ends because a generator died.

Written from the source of vLLM 0.32; not yet run on a GPU.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

from flowrl.graph.routes import WeightRoute, WeightTransport, world_size
from flowrl.messages import TensorRow, TensorTable, Weights
from flowrl.weights.receive import PACKED_BYTES
from flowrl.weights.send import AS_IT_IS, BUCKET_BYTES, Narrowing, Source, copy_tensors
from flowrl.wire.connection import local_ip


class ZeroSource(WeightSource):  # type: ignore[misc]
    """Presents a training engine's buckets as vLLM's stream of whole tensors; collective over the trainer's ranks."""

    def __init__(self, source: Source, *, narrowing: Narrowing = AS_IT_IS, bucket_bytes: int = BUCKET_BYTES) -> None:
        self._source = source
        self._narrowing = narrowing
        self._bucket_bytes = bucket_bytes
        self._metadata: list[ParamMeta] | None = None

    def metadata(self) -> list[ParamMeta]:
        """Names, dtypes and shapes. The first call gathers the parameters once, on all ranks, to find them."""
        if self._metadata is None:
            self._metadata = [
                ParamMeta(name, self._narrowing.narrow_dtype(name, tensor.dtype), tuple(tensor.shape))
                for names, tensors in self._source.buckets(self._bucket_bytes)
                for name, tensor in zip(names, tensors, strict=True)
            ]
        return self._metadata

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return copy_tensors(self._source, self._bucket_bytes, _synchronize_device, self._narrowing)


class Announced:
    """A client that does nothing: the generators learn everything from the manifest."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None: ...
    def start_weight_update(self) -> None: ...
    def update_weights(self, update_info: Any) -> None: ...
    def finish_weight_update(self, weight_version: str | None = None) -> None: ...


class NcclSender:
    """One broadcast, packed by vLLM, from rank 0 to every worker of every generator."""

    def __init__(self, routes: Sequence[WeightRoute], *, narrowing: Narrowing = AS_IT_IS) -> None:
        self.copy_s = 0.0
        self._routes = tuple(routes)
        self._narrowing = narrowing
        self._source: ZeroSource | None = None
        self._engine: Any = None
        self._port = 0

    def stage_version(self, source: Source, policy: str, version: int) -> Weights | None:
        if self._source is None:
            self._source = ZeroSource(source, narrowing=self._narrowing)
        rows = [describe_tensor(meta) for meta in self._source.metadata()]
        self._rank = source.rank
        if source.rank != 0:
            return None
        if not self._port:
            with socket.socket() as free:
                free.bind((trainer_address(), 0))
                self._port = int(free.getsockname()[1])
        return Weights(
            policy=policy,
            version=version,
            base_version=version,
            kind="full",
            transport=WeightTransport.NCCL.at(f"{trainer_address()}/{self._port}"),
            num_bytes=sum(row[4] for row in rows),
            checksum=0,
            tensors=TensorTable.of(rows),
        )

    def transmit_tensors(self) -> None:
        assert self._source is not None
        began = time.perf_counter()
        if self._engine is None:
            info = NCCLTrainerInitInfo(
                master_address=trainer_address(),
                master_port=self._port,
                world_size=world_size(self._routes),
                rank=self._rank,
                packed_buffer_size_bytes=PACKED_BYTES,
            )
            self._engine = WeightTransferTrainerFactory.trainer_init(info, client=Announced(), source=self._source)
        self._engine.send_weights()
        self.copy_s = time.perf_counter() - began

    def close(self) -> None:
        if self._engine is not None:
            self._engine.shutdown()


def describe_tensor(meta: ParamMeta) -> TensorRow:
    dtype = str(meta.dtype).removeprefix("torch.")
    return meta.name, dtype, tuple(meta.shape), 0, torch.Size(meta.shape).numel() * meta.dtype.itemsize


def _synchronize_device() -> None:
    torch.cuda.synchronize()


def trainer_address() -> str:
    """The IP address at which generators reach the trainer: loopback if all are on one machine."""
    return os.environ.get("VLLM_HOST_IP") or local_ip()
