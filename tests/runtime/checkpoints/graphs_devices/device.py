"""The GPU of the graph `turns`: this module is loaded once, the graph's own for every run."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Device:
    """What every node does with the GPU, in order."""

    on_it: str = ""
    log: list[str] = field(default_factory=list)

    def take(self, who: str) -> None:
        assert self.on_it in ("", who), f"{who} comes while {self.on_it} is there"
        self.on_it = who

    def leave(self, who: str) -> None:
        assert self.on_it == who, f"{who} leaves, but {self.on_it or 'nobody'} is there"
        self.on_it = ""

    def use(self, who: str, what: str) -> None:
        assert self.on_it == who, f"{who}: {what} while {self.on_it or 'nobody'} is on the device"
        self.log.append(f"{who} {what}")


DEVICE = Device()
