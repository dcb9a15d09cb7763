"""The interface between the receivers of weights and vLLM: transfer engines, and the updates that they load."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from flowrl.messages import Weights


@dataclass(frozen=True)
class TransferEngine:
    """An engine of vLLM that loads weights into the model."""

    name: str
    """The name in vLLM's registry."""
    one_by_one: bool = True
    """Whether replicas may update one after another. False if a transfer needs all of them at once."""


SEGMENT_ENGINE = TransferEngine("flowrl_shm")
"""Ours: `flowrl.weights.vllm_process.vllm_worker` registers it."""
NCCL_ENGINE = TransferEngine("nccl", one_by_one=False)
PACKED_BYTES = 256 << 20
"""Size of each of the two buffers in which vLLM packs a broadcast, on the trainer's GPU and on every generator's."""


@dataclass(frozen=True)
class Fetched:
    """One version, ready to load."""

    update: Mapping[str, Any]
    """Update info of the vLLM transfer engine behind this receiver."""
    close: Callable[[], None]
    """Call once, when the update is finished or abandoned."""


class Receiver(Protocol):
    """Receives the versions of one policy for one replica."""

    engine: TransferEngine
    """The engine of vLLM that loads the updates."""

    def join(self, manifest: Weights) -> Mapping[str, Any] | None:
        """Init info for vLLM's transfer engine at the first call; None afterwards, or if the engine needs none."""
        ...

    def fetch(self, manifest: Weights) -> Fetched:
        """Get the version of `manifest`. Raises SegmentLost if newer weights have replaced it: continue with the next
        manifest."""
        ...

    def close(self) -> None: ...
