"""Weights are sent in the readers' dtype where that is narrower than the trainer's: half the bytes for bfloat16.

The reader would round in the same way (to the nearest, ties to even) when it copies them into its parameters, so it has
the same bits either way. Parameters that a model keeps in float32 whatever its dtype stay as they are.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Narrowing:
    """How tensors are converted before they are sent."""

    dtype: str | None = None
    """"bfloat16", ...; None: every tensor is sent as it is."""
    kept: tuple[str, ...] = ()
    """Parts of names whose tensors are sent as they are, as in transformers' `_keep_in_fp32_modules`."""

    def of(self, name: str, dtype: torch.dtype) -> torch.dtype:
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
