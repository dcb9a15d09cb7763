"""Imports the package that an adapter plays, and says what to install if it is missing."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import re
from pathlib import Path
from typing import Any

from flowrl.environments.environment_row import EnvironmentName
from flowrl.errors import ConfigError
from flowrl.tasks.user_code import one_line, refuse_exit

PINS = Path(__file__).parents[2] / "requirements" / "environments.txt"
"""What `flowrl setup environments` installs."""


def imported(name: EnvironmentName, module: str, *, distribution: str) -> Any:
    """The module, untyped; `distribution` is what pip calls its package. Raises ConfigError if it does not import."""
    package = f"environment {name.text!r}: the package {distribution}"
    with refuse_exit(package):
        try:
            return importlib.import_module(module)
        except ModuleNotFoundError as problem:
            missing = (problem.name or module).partition(".")[0]
            if hides := _file_of(missing):
                raise ConfigError(
                    f"environment {name.text!r}: {hides} hides the package {missing}, which {distribution} imports; "
                    "rename it, or move it to another directory"
                ) from None
            needs = distribution if missing == module.partition(".")[0] else missing
            raise ConfigError(
                f"environment {name.text!r} needs the package {needs}; {_remedy(needs, of=distribution)}"
            ) from None
        except Exception as problem:  # the boundary to the package's import
            raise ConfigError(f"{package} does not import: {one_line(problem)}") from None


def _file_of(module: str) -> str | None:
    """The file that an import of `module` takes for it and that is no package; None if there is none."""
    try:
        found = importlib.util.find_spec(module)
    except (ImportError, ValueError):  # a module without a spec
        return None
    return None if found is None or found.submodule_search_locations is not None else found.origin


def _remedy(package: str, *, of: str) -> str:
    """How to install a package that the distribution `of` needs: plain pip might replace packages that flowrl needs."""
    pinned = {_canonical(line.partition("==")[0]) for line in PINS.read_text(encoding="utf-8").splitlines()}
    known = {_canonical(package), _canonical(of)} & pinned
    return "flowrl setup environments" if known else f"pip install {package}"


def _canonical(distribution: str) -> str:
    """The canonical spelling of a distribution's name, for which pip accepts several."""
    return re.sub(r"[-_.]+", "-", distribution.strip()).lower()


def close_names(wanted: str, known: list[str]) -> str:
    """The end of a sentence which says that `wanted` is not among the package's names."""
    close = difflib.get_close_matches(wanted, known, 3)
    return f"did you mean {' or '.join(close)}?" if close else f"it has {', '.join(known[:8])}, and others"
