"""One rank of the test of loading, started by `ranks`: how much private memory ZeRO-3 takes to load a model.

What is mapped from the model's files is not private: the kernel shares it among ranks and drops it at need.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from pathlib import Path

import deepspeed
import torch
from torch import Tensor, nn

from flowrl.training.engine.gang import Gang
from flowrl.training.engine.zero import deepspeed_config, sharded_loading
from flowrl.training.model.policy_model import load_policy_model
from flowrl.training.settings import ZeroSettings
from tests.stack.ranks.ranks import as_rank

EVERY_S = 0.002


def private_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return 1024 * int(line.split()[1])
    raise AssertionError("the kernel tells no private memory")


class Highest:
    """The most private memory within a block, looked at every few milliseconds."""

    def __enter__(self) -> Highest:
        self.before = self.most = private_bytes()
        self._over = threading.Event()
        self._watcher = threading.Thread(target=self._watch)
        self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._watcher.join()

    def _watch(self) -> None:
        while not self._over.wait(EVERY_S):
            self.most = max(self.most, private_bytes())


def sums_of(model: nn.Module) -> dict[str, float]:
    """For each parameter of a sharded model, a sum that depends on the place of every value."""
    found = {}
    for name, parameter in model.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            found[name.removeprefix("causal_lm.")] = weighted_sum(parameter)
    return found


def weighted_sum(tensor: Tensor) -> float:
    return float((tensor.detach().flatten().double() * torch.arange(1, tensor.numel() + 1)).sum())


def load(gang: Gang, directory: Path, arguments: Sequence[str]) -> None:
    settings = ZeroSettings(stage=3, dtype="float32")
    load_policy_model(directory / "small", layout="rows", tries=False)  # what the first model imports
    with Highest() as highest, sharded_loading(deepspeed_config(settings, gang.size)):
        model = load_policy_model(directory / "model", layout="rows", tries=False)
    held = sum(p.ds_tensor.numel() * p.ds_tensor.element_size() for p in model.parameters())  # type: ignore[attr-defined]
    found = {"held": held, "most": highest.most - highest.before, "sums": sums_of(model)}
    (directory / f"loading-{gang.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    as_rank(load)
