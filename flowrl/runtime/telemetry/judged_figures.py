"""The figures in a metrics line for held-out rows that a trainer itself judges: loss and accuracies, before and after.

Objectives without a generator have no answers to be scored: SFT, reward models and preferences.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

BEFORE, AFTER = "held_out_before/", "held_out/"


def judged(record: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, float]]]:
    """(when, name -> value) for each time for which the line has such figures; other figures stay in metrics.jsonl."""
    for prefix, when in ((BEFORE, "before training"), (AFTER, f"at step {record['step']}")):
        found = {name.removeprefix(prefix): value for name, value in record.items() if name.startswith(prefix)}
        shown = {name: value for name, value in found.items() if _is_shown(name) and value is not None}
        if shown:
            yield when, shown


def _is_shown(name: str) -> bool:
    return name == "loss" or name.endswith("accuracy")
