"""Loads a published version into a torch module: for nodes that read weights and are no vLLM engine."""

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

        found = dict(views(self._mapping(update["segment"]), update["tensors"], start=DATA_OFFSET))
        self._require_same(found)
        with torch.no_grad():
            for name, tensor in found.items():
                self._parameters[name].copy_(tensor)

    def _require_same(self, found: Mapping[str, Tensor]) -> None:
        mine = {name: tuple(parameter.shape) for name, parameter in self._parameters.items()}
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
