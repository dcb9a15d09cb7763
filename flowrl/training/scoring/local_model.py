"""The interface of a model that only scores, and its form in a single process.

Nodes request passes from the model, and move it off a GPU that they time-share.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from flowrl.packing import passes_over
from flowrl.training.scoring.passes import tokens_of
from flowrl.training.settings import Layout

R = TypeVar("R")
Pass = Callable[..., list[R]]
"""See `flowrl.training.scoring.passes`."""


class ScoringModel(Protocol):
    """A model that only scores. Its methods block."""

    layout: Layout
    """How its passes are laid out."""

    @property
    def facts(self) -> dict[str, Any]:
        """The model's config, as transformers has it."""
        ...

    def run(self, one: Pass[R], passes: Sequence[Sequence[Any]], trees: bool, *args: Any) -> Iterator[list[R]]:
        """The results of each of `passes`, in order."""
        ...

    def every(self, function: Callable[..., Any], *args: Any) -> None:
        """Call `function(model, *args)` in every process that has the model or a part of it."""
        ...

    def leave(self) -> None:
        """Move the model to host memory."""
        ...

    def come_back(self) -> None:
        """Move the model to its GPUs."""
        ...

    def close(self) -> None: ...


class LocalModel:
    """The whole model in this process."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.layout: Layout = getattr(model, "layout", "rows")

    @property
    def facts(self) -> dict[str, Any]:
        found: dict[str, Any] = self.model.network.config.to_dict()
        return found

    def run(self, one: Pass[R], passes: Sequence[Sequence[Any]], trees: bool, *args: Any) -> Iterator[list[R]]:
        for items in passes:
            yield one(self.model, items, trees, *args)

    def every(self, function: Callable[..., Any], *args: Any) -> None:
        function(self.model, *args)

    def leave(self) -> None:
        """Move the model to host memory, and return its memory to the device; torch would keep it for this process."""
        self.model.to("cpu")
        torch.cuda.empty_cache()

    def come_back(self) -> None:
        self.model.to("cuda")

    def close(self) -> None:
        """Free the model's memory. No method may be called afterwards."""
        on_gpu = torch.cuda.is_available() and next(iter(self.model.parameters()), torch.empty(0)).is_cuda
        self.model = None
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()


def scored(
    model: ScoringModel | nn.Module, one: Pass[R], items: Sequence[Any], *args: Any, token_budget: int
) -> list[R]:
    """The result of each item. A pass has at most `token_budget` tokens, padding included, or a single longer item."""
    where: Any = LocalModel(model) if isinstance(model, nn.Module) else model
    cut, trees = passes_over([tokens_of(item) for item in items], token_budget, where.layout)
    found: dict[int, R] = {}
    for indices, results in zip(
        cut, where.run(one, [[items[i] for i in part] for part in cut], trees, *args), strict=True
    ):
        found |= zip(indices, results, strict=True)
    return [found[index] for index in range(len(items))]
