"""Whose checkpoint it is: told before DeepSpeed looks into it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flowrl.errors import ConfigError
from flowrl.training.engine.requirements import TAG
from flowrl.training.engine.zero import ZeroEngine
from flowrl.training.settings import ZeroSettings


def load(path: Path, *, ranks: int, nvme_path: str) -> None:
    settings = ZeroSettings(offload="all", nvme_path=nvme_path) if nvme_path else ZeroSettings()
    engine: Any = SimpleNamespace(settings=settings, gang=SimpleNamespace(size=ranks, tensor_size=1))
    ZeroEngine.load_state(engine, path)


@pytest.mark.parametrize(
    ("ranks", "nvme_path", "said"),
    [
        (2, "", "with nvme_path, but this run is without it"),
        (3, "/disk", "written by 2 trainer ranks, but this run has 3; resume with 2 trainer replicas"),
    ],
)
def test_a_checkpoint_on_disk(tmp_path: Path, ranks: int, nvme_path: str, said: str) -> None:
    for rank in range(2):
        (tmp_path / TAG / f"on_disk_rank_{rank}").mkdir(parents=True)
    with pytest.raises(ConfigError, match=said):
        load(tmp_path, ranks=ranks, nvme_path=nvme_path)


def test_a_checkpoint_of_memory(tmp_path: Path) -> None:
    (tmp_path / TAG).mkdir()
    for rank in range(2):
        (tmp_path / TAG / f"rank_{rank}_optim_states.pt").touch()
    with pytest.raises(ConfigError, match="without nvme_path, but this run is with it"):
        load(tmp_path, ranks=2, nvme_path="/disk")
    with pytest.raises(ConfigError, match="written by 2 trainer ranks, but this run has 1"):
        load(tmp_path, ranks=1, nvme_path="")
