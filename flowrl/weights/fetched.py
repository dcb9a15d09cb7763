"""What every way of receiving weights gives to vLLM."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from flowrl.messages import Weights


@dataclass(frozen=True)
class Fetched:
    """One version, ready to load."""

    update: Mapping[str, Any]
    """Update info of the vLLM transfer engine behind this receiver."""
    close: Callable[[], None]
    """Call once, when the update is over or given up."""


class Receiver(Protocol):
    """How one replica gets one policy's versions."""

    backend: str
    """Name of the transfer engine in vLLM."""
    takes_turns: bool
    """Replicas may update one after another. False where a transfer needs all of them at once."""

    def join(self, manifest: Weights) -> Mapping[str, Any] | None:
        """Init info for vLLM's transfer engine, the first time; None afterwards, or where there is none."""
        ...

    def fetch(self, manifest: Weights) -> Fetched:
        """Raises SegmentLost when newer weights took this version's place: go on with the next manifest."""
        ...

    def close(self) -> None: ...
