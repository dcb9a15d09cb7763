"""Checks that this machine has what it needs to compile code at its first use, only for code compiled here."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

from flowrl.errors import ConfigError


def check_python_headers(what: str) -> None:
    """Raise ConfigError if this Python's C headers are missing. `what` is the part that needs them."""
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        name = f"python{sys.version_info.major}.{sys.version_info.minor}"
        raise ConfigError(
            f"{what} is compiled at its first use and needs Python.h, which {sysconfig.get_path('include')} does not "
            f"have; install the headers of this Python, on Debian: apt-get install {name}-dev"
        )


def check_nvcc(what: str) -> None:
    """Raise ConfigError if torch finds a GPU here but no CUDA compiler. Imports torch."""
    import torch
    from torch.utils.cpp_extension import CUDA_HOME

    if torch.cuda.is_available() and not (CUDA_HOME and (Path(CUDA_HOME) / "bin" / "nvcc").is_file()):
        raise ConfigError(
            f"{what} is compiled at its first use and needs nvcc on a machine with a GPU; install the CUDA toolkit "
            f"{torch.version.cuda}, and set CUDA_HOME to its directory"
        )
