"""Dividing an accumulated gradient by a number that is known only at its end.

DeepSpeed's ZeRO optimizers divide by their loss scale before norm, clipping and update, wherever the gradient is: on
the device, in host memory or on a disk. So the number is multiplied into the loss scale. Without ZeRO, and in
BF16_Optimizer, the gradient itself is divided.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def divided(engine: Any, number: float) -> Iterator[None]:
    """Within this context, a DeepSpeed engine's next step divides its accumulated gradient by `number`."""
    optimizer = engine.optimizer
    if number == 1.0:
        yield
    elif hasattr(type(optimizer), "loss_scale"):
        before = optimizer.loss_scale
        optimizer.loss_scale = before * number
        try:
            yield
        finally:
            optimizer.loss_scale = before
    else:
        _divide(engine, optimizer, number)
        yield


def _divide(engine: Any, optimizer: Any, number: float) -> None:
    """Divide in place: the fp32 sums of BF16_Optimizer, or the gradients of the parameters."""
    sums = getattr(optimizer, "fp32_groups_gradients_flat", None)
    gradients = [p.grad for p in engine.module.parameters() if p.grad is not None] if sums is None else sums
    with torch.no_grad():
        for gradient in gradients:
            gradient.div_(number)
