"""What the nodes of a run really did, kept by themselves: nothing here comes from flowrl's ledger.

Nodes find the record of their run by its directory. A checkpoint takes a copy along, and the life that goes on from
there begins with it, as everything after the checkpoint is lost.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FILE = "record.json"
_of: dict[str, Record] = {}


@dataclass
class Meeting:
    """Of the ranks of a trainer, over one batch."""

    parts: list[Any] = field(default_factory=list)
    ranks: int = 0
    complete: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass
class Record:
    """Of one life of a run."""

    admitted: list[str] = field(default_factory=list)
    """Groups, in order."""
    held: dict[str, dict[str, tuple[int, int]]] = field(default_factory=dict)
    """Group -> trainer -> the version of it that every reader held, before and after the wait for its ticket. Without
    the group that a life begins with: it may have had its ticket in the life before."""
    derived: dict[str, str] = field(default_factory=dict)
    """Derived sample -> what it was derived from."""
    holders: dict[str, dict[str, int]] = field(default_factory=lambda: defaultdict(dict))
    """Trainer -> reader -> version. Not in a checkpoint: readers load anew."""
    began_with: dict[str, int] = field(default_factory=dict)
    """Trainer -> its version when this life began."""
    trained: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: defaultdict(list))
    """Trainer -> its batches: version (that was updated), groups, samples
    {id: [tokens trained, too old, masked, oldest version trained]}, and again {id: [uses before, the same counts]}."""
    seen: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    """Node, or replica of a node that gets everything -> how often each group or sample has come to it."""
    meetings: dict[tuple[str, int, int], Meeting] = field(default_factory=dict)
    """By trainer, version and piece of its batch."""
    on_version: Callable[[str, int], None] = lambda trainer, version: None

    def save(self, directory: Path) -> None:
        content = {name: getattr(self, name) for name in ("admitted", "derived", "held", "trained", "seen")}
        (directory / FILE).write_text(json.dumps(content))

    def load(self, directory: Path) -> None:
        content = json.loads((directory / FILE).read_text())
        self.admitted, self.derived, self.held = content["admitted"], content["derived"], content["held"]
        self.trained.update(content["trained"])
        self.began_with = {trainer: len(batches) for trainer, batches in self.trained.items()}
        self.seen.update({name: Counter(counts) for name, counts in content["seen"].items()})

    def floor(self, trainer: str, num_readers: int) -> int:
        """The oldest version that a reader holds. One that has loaded none yet serves none before the start's."""
        held = self.holders[trainer].values()
        return min(held) if len(held) == num_readers else self.began_with.get(trainer, 0)

    def see(self, node: str, key: str) -> None:
        """A group or sample has come to a node."""
        self.seen[node][key] += 1

    def train(
        self, trainer: str, version: int, num_groups: int, samples: dict[str, Any], again: dict[str, Any]
    ) -> None:
        """A batch that updated `version`; `samples` and `again` as in `trained`."""
        batch = {"version": version, "num_groups": num_groups, "samples": samples, "again": again}
        self.trained[trainer].append(batch)
        self.on_version(trainer, version + 1)


def record_of(run_dir: str | Path) -> Record:
    """The record of the run in `run_dir`."""
    return _of[str(Path(run_dir).resolve())]


def begin(run_dir: Path) -> Record:
    """A new one for a life in `run_dir`."""
    return _of.setdefault(str(run_dir.resolve()), Record())


def forget(run_dir: Path) -> None:
    _of.pop(str(run_dir.resolve()), None)
