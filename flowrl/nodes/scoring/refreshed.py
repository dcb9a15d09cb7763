"""The weights of a reference that follows the policy: those of every nth version, mixed with its own.

Reference r, for r = 0, n, 2n, …, is α · (the policy's weights of version r) + (1 − α) · (reference r − n); reference 0
has the initial weights. TRL calls n `ref_model_sync_steps` and α `ref_model_mixup_alpha` (TR-DPO, arXiv 2404.09656).

A sample is compared with reference n · ⌊v / n⌋, where v is the newest version that sampled one of its tokens. So its
reference depends only on the sample, not on the order of scoring. That needs the references of all versions that
samples in progress may have: 1 + ⌈staleness / n⌉ references in host memory, one of which is loaded in the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

FILE = "references.pt"


def num_kept(every: int, staleness: int | None) -> int:
    """The number of references that samples in progress may need."""
    return 1 + -(-(staleness or 0) // every)


class KeptReferences:
    """The newest references of one model; the model's parameters hold one reference at a time."""

    def __init__(self, network: nn.Module, *, every: int, mixup: float, kept: int) -> None:
        self._parameters = dict(network.named_parameters())
        self._every = every
        self._mixup = mixup
        self._kept = kept
        self._weights: dict[int, Mapping[str, Tensor]] = {0: self._copied()}
        self._loaded = 0

    def _copied(self) -> dict[str, Tensor]:
        return {name: parameter.detach().to("cpu", copy=True) for name, parameter in self._parameters.items()}

    @property
    def newest(self) -> int:
        """The number of the newest reference."""
        return max(self._weights)

    def of(self, version: int) -> int:
        """The number of the reference for samples whose newest token is of that version."""
        return version // self._every * self._every

    def take(self, version: int, policy: Mapping[str, Tensor]) -> None:
        """Make reference `version` from `policy`: the policy's weights of that version, by parameter name."""
        own = self._weights[self.newest]
        mixed = {
            name: (self._mixup * policy[name].float().cpu() + (1 - self._mixup) * tensor.float()).to(tensor.dtype)
            for name, tensor in own.items()
        }
        self._weights[version] = mixed
        for number in sorted(self._weights)[: -self._kept]:
            del self._weights[number]

    def load(self, number: int) -> int:
        """Load that reference into the model, or the oldest kept if it is older than that; return the loaded number."""
        import torch

        number = number if number in self._weights else min(self._weights)
        if number != self._loaded:
            with torch.no_grad():
                for name, tensor in self._weights[number].items():
                    self._parameters[name].copy_(tensor)
            self._loaded = number
        return number

    def save(self, directory: Path) -> None:
        """Write all kept references into a checkpoint's new `directory`."""
        import torch

        directory.mkdir(parents=True, exist_ok=True)
        torch.save({number: dict(weights) for number, weights in self._weights.items()}, directory / FILE)

    def restore(self, directory: Path) -> None:
        """Load the references that `save` wrote, and the newest of them into the model."""
        import torch

        found: dict[int, dict[str, Any]] = torch.load(directory / FILE, map_location="cpu")
        self._weights = dict(found)
        self._loaded = -1
        self.load(self.newest)
