"""Headers and compilers are asked for where something is compiled, and nowhere else."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowrl.errors import ConfigError
from flowrl.training.engine import requirements
from flowrl.training.engine.requirements import check_training
from flowrl.training.settings import LoRA, ZeroSettings


def no_headers(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    monkeypatch.setattr("flowrl.training.engine.requirements.sysconfig.get_path", lambda name: str(directory))


def test_missing_headers_are_named_where_something_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_headers(monkeypatch, tmp_path)
    with pytest.raises(ConfigError, match=r"async_io .* needs Python\.h, .*apt-get install python3\.\d+-dev"):
        check_training(ZeroSettings(offload="all", nvme_path=str(tmp_path)), LoRA(), model_dir=None)
    check_training(ZeroSettings(offload="all"), LoRA(), model_dir=None)
    (tmp_path / "Python.h").touch()
    requirements.check_python_headers("anything")
    monkeypatch.setattr("torch.utils.cpp_extension.CUDA_HOME", None)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    with pytest.raises(ConfigError, match=r"async_io .* needs nvcc on a machine with a GPU"):
        check_training(ZeroSettings(offload="all", nvme_path=str(tmp_path)), LoRA(), model_dir=None)


def test_nvcc_is_asked_for_beside_a_gpu_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.utils.cpp_extension.CUDA_HOME", str(tmp_path))
    requirements.check_nvcc("async_io")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    with pytest.raises(ConfigError, match="async_io is compiled at its first use and needs nvcc"):
        requirements.check_nvcc("async_io")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").touch()
    requirements.check_nvcc("async_io")
