"""The interface between the receivers of weights and vLLM."""

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
    """Call once, when the update is finished or abandoned."""


class Receiver(Protocol):
    """Receives the versions of one policy for one replica."""

    backend: str
    """Name of the transfer engine in vLLM."""
    takes_turns: bool
    """Whether replicas may update one after another. False if a transfer needs all of them at once."""

    def join(self, manifest: Weights) -> Mapping[str, Any] | None:
        """Init info for vLLM's transfer engine at the first call; None afterwards, or if the engine needs none."""
        ...

    def fetch(self, manifest: Weights) -> Fetched:
        """Get the version of `manifest`. Raises SegmentLost if newer weights have replaced it: continue with the next
        manifest."""
        ...

    def close(self) -> None: ...
