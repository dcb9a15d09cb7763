"""The generator's side on GPUs: joins the trainer's NCCL group.

The transfer happens inside the update itself, while generation is paused: there is no memory to fetch into first.
Written from the source of vLLM 0.32; not yet run on a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flowrl.graph.routes import WeightRoute, WeightTransport, rank_offset, world_size
from flowrl.messages import Weights
from flowrl.weights.fetched import NCCL_ENGINE, PACKED_BYTES, Fetched


class NcclReceiver:
    """Takes part in the trainer's broadcast. All replicas have to do so at once, or the broadcast never ends."""

    engine = NCCL_ENGINE

    def __init__(self, routes: Sequence[WeightRoute], replica: str) -> None:
        self._routes = tuple(routes)
        self._replica = replica
        self._joined = False

    def join(self, manifest: Weights) -> Mapping[str, Any] | None:
        if self._joined:
            return None
        self._joined = True
        _, place = WeightTransport.parse(manifest.transport)
        host, port = place.split("/")
        return {
            "master_address": host,
            "master_port": int(port),
            "rank_offset": rank_offset(self._routes, self._replica),
            "world_size": world_size(self._routes),
            "packed": True,
            "packed_buffer_size_bytes": PACKED_BYTES,
        }

    def fetch(self, manifest: Weights) -> Fetched:
        rows = [*manifest.tensors]
        return Fetched(
            {
                "names": [name for name, *_ in rows],
                "dtype_names": [dtype for _, dtype, *_ in rows],
                "shapes": [list(shape) for _, _, shape, *_ in rows],
            },
            lambda: None,
        )

    def close(self) -> None:
        """vLLM leaves the group when it shuts down."""
