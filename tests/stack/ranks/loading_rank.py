"""One rank of the test of loading, started by `ranks`: how much private memory ZeRO-3 takes to load a model.

What is mapped from the model's files is not private: the kernel shares it among ranks and drops it at need.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from pathlib import Path

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


def load(gang: Gang, directory: Path, arguments: Sequence[str]) -> None:
    settings = ZeroSettings(stage=3, dtype="float32")
    load_policy_model(directory / "small", layout="rows", tries=False)  # what the first model imports
    with Highest() as highest:
        sharded = sharded_loading(deepspeed_config(settings, gang.size))
        model = load_policy_model(directory / "model", layout="rows", tries=False)
        del sharded
    held = sum(p.ds_tensor.numel() * p.ds_tensor.element_size() for p in model.parameters())  # type: ignore[attr-defined]
    found = {"held": held, "most": highest.most - highest.before}
    (directory / f"loading-{gang.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    as_rank(load)
