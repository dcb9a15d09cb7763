"""Nodes whose state is on a shared GPU only while they use it: a trainer's weights, gradients and optimizer state."""

from __future__ import annotations

import time
from typing import Any

from flowrl.graph.node import Node


class ResidentNode(Node):
    """A node that loads its state to its GPU in `setup`. If it shares the GPU (`g.time_share`), the state is moved away
    while another node uses the GPU.

    Each rank of a gang moves its own state; nothing of the move is collective.
    """

    _residence: Any = None
    """A Residence. The annotation is Any because ports are found by evaluating annotations, and the module of Residence
    imports torch."""

    def resident(self) -> object:
        """The object that leads to all tensors on the GPU; made by `setup`."""
        raise NotImplementedError

    async def on_acquire(self) -> None:
        if self._residence is not None:
            began = time.perf_counter()
            await self.blocking(self._residence.come_back)
            self.context.gauge("device_return_s", time.perf_counter() - began)

    async def on_release(self) -> None:
        if self.context.gpus:
            began = time.perf_counter()
            moved = await self.blocking(self._leave)
            self.context.gauge("device_leave_s", time.perf_counter() - began)
            self.context.gauge("device_leave_bytes", moved)

    def _leave(self) -> int:
        if self._residence is None:
            import torch

            from flowrl.training.engine.residence import Residence

            self._residence = Residence(self.resident(), torch.device("cuda", 0))
        return int(self._residence.leave())

    async def close(self) -> None:
        if self._residence is not None and not self._residence.is_away:
            self._residence.close()
