"""Which places of a row see which, if a place does not see all earlier ones: in packed rows, or with windows.

Axes: L places of the row; Q places of queries and K places of keys among them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sight:
    """What the places of the rows of one pass see; it is the same for every row."""

    length: int
    """Places of a row."""
    device: torch.device
    ends_S: Tensor | None = None
    """If the input is one packed row: a 0, then the place behind each sequence."""
    _sequence_L: list[Tensor] = field(default_factory=list, compare=False)
    _masks: dict[int, Tensor] = field(default_factory=dict, compare=False)

    def window(self, width: int | None) -> int | None:
        """`width`, or None if the rows are not longer than a window of that many places."""
        return None if width is None or width >= self.length else width

    def is_plain(self, width: int | None) -> bool:
        """Whether a place sees every place before it."""
        return self.ends_S is None and self.window(width) is None

    def mask_11LL(self, width: int | None) -> Tensor | None:
        """True where the row's place sees the column's, within a window of `width`; None: each sees all before it."""
        if self.is_plain(width):
            return None
        key = self.window(width) or 0
        if key not in self._masks:  # every layer of a pass needs it
            place_L = torch.arange(self.length, device=self.device)
            self._masks[key] = self.seen_QK(place_L, place_L, width)[None, None]
        return self._masks[key]

    def seen_QK(self, asking_Q: Tensor, looked_at_K: Tensor, width: int | None) -> Tensor:
        """Whether each place of `asking_Q` sees each place of `looked_at_K`."""
        back_QK = asking_Q[:, None] - looked_at_K[None]
        seen_QK = back_QK >= 0
        if (window := self.window(width)) is not None:
            seen_QK &= back_QK < window
        if self.ends_S is not None:
            sequence_L = self._sequences(self.ends_S)
            seen_QK &= sequence_L[asking_Q][:, None] == sequence_L[looked_at_K][None]
        return seen_QK

    def _sequences(self, ends_S: Tensor) -> Tensor:
        if not self._sequence_L:
            lengths_S = ends_S.diff()
            numbers_S = torch.arange(len(lengths_S), device=self.device)
            self._sequence_L.append(torch.repeat_interleave(numbers_S, lengths_S))
        return self._sequence_L[0]
