"""Loads a published version into a torch module: for nodes that read weights and are not vLLM engines."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from flowrl.errors import FlowrlError
from flowrl.weights.manifest import views
from flowrl.weights.shm import DATA_OFFSET, Segment

if TYPE_CHECKING:
    from torch import Tensor


class ModuleWeights:
    """Loads versions into `parameters`, whose keys are the published names."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._parameters = parameters
        self._mappings: dict[str, mmap.mmap] = {}
        """Segment name -> mapping. Kept, because a publisher reuses its few segments and mapping costs page faults."""

    def load(self, update: Mapping[str, Any]) -> None:
        """Copy the version that `Receiver.fetch` returned; dtypes are converted. The caller holds the segment's lock.

        Raises FlowrlError, and loads nothing, if names or shapes differ from the module's.
        """
        import torch

        with torch.no_grad():
            for name, tensor in self.read(update).items():
                _fill(self._parameters[name], tensor)

    def read(self, update: Mapping[str, Any]) -> dict[str, Tensor]:
        """The version's tensors by name, as views of its segment: they are valid while the caller holds its lock.

        Raises FlowrlError if names or shapes differ from the module's.
        """
        found = dict(views(self._mapping(update["segment"]), update["tensors"], start=DATA_OFFSET))
        self._require_same(found)
        return found

    def _require_same(self, found: Mapping[str, Tensor]) -> None:
        mine = {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in self._parameters.items()}
        theirs = {name: tuple(tensor.shape) for name, tensor in found.items()}
        different = sorted(name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name))
        if different:
            raise FlowrlError(
                f"the published weights do not fit this node's model: {len(different)} tensors differ in name or "
                f"shape, among them {', '.join(different[:3])}; give the node and its trainer the same model"
            )

    def _mapping(self, name: str) -> mmap.mmap:
        if name not in self._mappings:
            segment = Segment(name)
            self._mappings[name] = segment.map()
            segment.close()
        return self._mappings[name]


def load_published(model: Any, update: Mapping[str, Any]) -> None:
    """Load the version of `update` into a flowrl model, or into this rank's part of one that ZeRO-3 has sharded."""
    if not hasattr(model, "loader"):
        model.loader = ModuleWeights(dict(model.network.named_parameters()))
    model.loader.load(update)


def _fill(parameter: Any, whole: Tensor) -> None:
    """Copy a tensor into a parameter; of a sharded one, this rank's range of the flattened tensor."""
    if not hasattr(parameter, "ds_tensor"):
        parameter.copy_(whole)
        return
    import torch

    shard = parameter.ds_tensor
    start = torch.distributed.get_rank() * shard.numel()
    part = whole.reshape(-1)[start : start + shard.numel()]
    shard[: part.numel()].copy_(part)
