"""The common part of nodes that score with one model: where the model is, and how it leaves a GPU that is shared.

A node that shares a GPU (`g.time_share`) loads its model into host memory, moves it to the GPU when it may use the GPU,
and moves it back afterwards. So at any time only one of these models is on the device. A node with several GPUs shards
its model over them, with one process for each GPU (`flowrl.training.scoring_models`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from flowrl.graph.footprint import Footprint, Share
from flowrl.graph.node import Node
from flowrl.models import Policy
from flowrl.nodes.model_memory import scoring_footprint
from flowrl.training.settings import Dtype

if TYPE_CHECKING:
    from flowrl.training.scoring_models import ModelLoad, ScoringModel

R = TypeVar("R")


class ScoringNode(Node):
    """A node with one model. A subclass opens it in `setup` with `open_model`, and uses it with `scores`."""

    policy: Policy
    dtype: Dtype
    token_budget: int
    """Most tokens of a pass."""
    scoring: Any = None
    """A ScoringModel. Annotated as Any: ports are found by evaluating annotations, and its module imports torch."""

    def open_model(self, load: ModelLoad) -> ScoringModel:
        """Load the model; blocking."""
        import torch

        torch.set_num_threads(max(1, len(self.context.cores)))
        model = opened(load, self.context.gpus, self.load_device, threads=len(self.context.cores))
        self.scoring = model
        return model

    def scores(self, one: Callable[..., list[R]], items: Sequence[Any], *args: Any) -> list[R]:
        """The result of the pass `one` (`flowrl.training.scoring_models`) for each item; blocking."""
        from flowrl.training.scoring_models import scored

        assert self.scoring is not None, "`setup` opens it"
        return scored(self.scoring, one, items, *args, token_budget=self.token_budget)

    def footprint(self, share: Share) -> Footprint | None:
        return scoring_footprint(self.scored_by, share, self.dtype, self.token_budget)

    @property
    def scored_by(self) -> Policy:
        """The model that the node loads."""
        return self.policy

    @property
    def load_device(self) -> str:
        """Where `setup` puts the model: on the GPU, unless the node shares the GPU with others."""
        return "cuda" if self.context.gpus and not self.context.time_shared else "cpu"

    async def on_acquire(self) -> None:
        if self.context.gpus and self.scoring is not None:
            await self.blocking(self.scoring.come_back)

    async def on_release(self) -> None:
        if self.context.gpus and self.scoring is not None:
            await self.blocking(self.scoring.leave)

    async def close(self) -> None:
        if self.scoring is not None:
            self.scoring.close()


def opened(load: ModelLoad, gpus: Sequence[int], device: str, *, threads: int) -> ScoringModel:
    """The model on `device`; with several GPUs, sharded over the GPUs of this process."""
    from flowrl.training.scoring_models import LocalModel

    if len(gpus) < 2:
        return LocalModel(load.model().to(device))
    from flowrl.training.scoring_models import ShardedModel

    visible = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
    return ShardedModel(load, visible, threads=max(1, threads // len(visible)))


def gpu_problems(gpus: float) -> Iterator[str]:
    """What is wrong with the number of GPUs of a model that only scores, as a complete sentence; empty if valid."""
    if gpus > 1 and gpus != int(gpus):
        yield f"gpus is {gpus:g}; a model is sharded over whole GPUs, so use {int(gpus)} or {int(gpus) + 1}"
