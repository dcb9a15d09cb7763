"""The measurements of `flowrl tune`, kept in its directory: the same command does not measure them again.

A measurement belongs to a graph's text, all its options, the number of steps, the packages and the machine's cores and
GPUs. `measurements.json` is complete at any time: a new file takes the old one's place after every run.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from flowrl.commands.tune.measured_step import MeasuredStep
from flowrl.errors import ConfigError

MEASUREMENTS = "measurements.json"
FORMAT = 1


class Measurements:
    """The measured steps in a directory, by key."""

    def __init__(self, directory: Path, *, again: bool = False) -> None:
        """`again`: existing measurements count as not measured. Raises ConfigError if the file is not one of
        measurements."""
        self._path = directory / MEASUREMENTS
        self._known = _read_lines(self._path)
        self._valid = set() if again else set(self._known)

    def find_result(self, key: str) -> MeasuredStep | None:
        return self._known[key] if key in self._valid else None

    def add_result(self, key: str, step: MeasuredStep) -> None:
        self._known[key] = step
        self._valid.add(key)
        runs = {name: asdict(known) for name, known in self._known.items()}
        temporary = self._path.with_name(f".{MEASUREMENTS}")
        temporary.write_text(json.dumps({"format": FORMAT, "runs": runs}, indent=2) + "\n", encoding="utf-8")
        temporary.replace(self._path)


def measurement_key(purpose: str, graph_file: Path, options: Mapping[str, Any], **others: Any) -> str:
    """A key that is equal for runs that measure the same. `options`: the graph's, as plain data; `others`: what else
    matters."""
    about = {"graph": graph_file.read_text(encoding="utf-8"), "options": options, **others}
    digest = hashlib.blake2b(json.dumps(about, sort_keys=True, default=str).encode(), digest_size=8).hexdigest()
    return f"{purpose}-{digest}"


def _read_lines(path: Path) -> dict[str, MeasuredStep]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["format"] != FORMAT:
            raise ValueError(f"format {found['format']}")
        return {key: MeasuredStep(**step) for key, step in found["runs"].items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as problem:
        raise ConfigError(
            f"{path} is no file of measurements that this flowrl reads ({problem}); remove it, or name another "
            "directory with --run-dir"
        ) from None
