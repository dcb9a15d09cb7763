"""What nodes share that score with one fixed model: where the model is while other nodes use the same GPU.

A node in turns (`g.time_share`) loads its model into host memory, has it on the GPU in its own turns, and moves it back
at their end. So at any time only one of these models is on the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowrl.graph.footprint import Footprint, Share
from flowrl.graph.node import Node
from flowrl.models import Policy
from flowrl.nodes.model_memory import scoring_footprint
from flowrl.training.settings import Dtype

if TYPE_CHECKING:
    from torch import nn


class ScoringNode(Node):
    """A node with one model. A subclass returns it from `scoring_model`, and loads it to `load_device`."""

    policy: Policy
    dtype: Dtype
    token_budget: int
    """Most tokens of a pass."""

    def scoring_model(self) -> nn.Module:
        """The model, loaded by `setup`."""
        raise NotImplementedError

    def footprint(self, share: Share) -> Footprint | None:
        return scoring_footprint(self.scored_by, share, self.dtype, self.token_budget)

    @property
    def scored_by(self) -> Policy:
        """The model that it loads."""
        return self.policy

    @property
    def load_device(self) -> str:
        """Where `setup` puts the model: on the GPU, unless the node uses it in turns."""
        return "cuda" if self.context.gpus and not self.context.in_turns else "cpu"

    async def on_acquire(self) -> None:
        if self.context.gpus:
            await self.blocking(self.scoring_model().to, "cuda")

    async def on_release(self) -> None:
        if self.context.gpus:
            await self.blocking(self._leave)

    def _leave(self) -> None:
        """Move the model to host memory, and return its memory to the device: torch would keep it for this process."""
        import torch

        self.scoring_model().to("cpu")
        torch.cuda.empty_cache()
