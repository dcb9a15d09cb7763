"""Nodes that write down which GPUs they see: time-shared ranks and a reader, and a node without a GPU.

For `flowrl gpu-check`; run by its path.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from flowrl.graph.graph import Graph
from flowrl.graph.node import Node
from flowrl.graph.ports import In, Out
from flowrl.messages import Message


@dataclass(frozen=True)
class Signal(Message):
    """Something to react to."""

    value: int


@dataclass(frozen=True)
class SeenDevices:
    gpus: int = 2
    """Number of GPUs of the machine."""
    ask_torch: bool = True
    """Also write down what torch sees."""


class Signals(Node):
    """Sends one message to every node."""

    signals: Out[Signal]

    async def run(self) -> None:
        await self.signals.send(Signal(0))


class Looker(Node):
    """Writes down what it sees."""

    signals: In[Signal]

    def __init__(self, ask_torch: bool) -> None:
        self.ask_torch = ask_torch

    async def run(self) -> None:
        async for _ in self.signals:
            found = await self.blocking(self.look)
            (Path(self.context.run_dir) / f"{self.name}-{self.context.replica}.json").write_text(
                json.dumps(found), encoding="utf-8"
            )

    def look(self) -> dict[str, object]:
        """Devices in the plan, devices in the environment variable, and those that torch finds."""
        found: dict[str, object] = {
            "plan": list(self.context.gpus),
            "visible": os.environ.get("CUDA_VISIBLE_DEVICES", "not set"),
        }
        if self.ask_torch:
            import torch

            properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
            found["uuids"] = [str(one.uuid) for one in properties]
        return found


class LookingRank(Looker):
    """A rank of a gang."""

    gang = True


def graph(cfg: SeenDevices) -> Graph:
    g = Graph("seen")
    source = g.add("source", Signals())
    ranks = g.add("ranks", LookingRank(cfg.ask_torch), replicas=cfg.gpus, cpus=0.25, gpus=1)
    reader = g.add("reader", Looker(cfg.ask_torch), cpus=0.25, gpus=cfg.gpus)
    judge = g.add("judge", Looker(cfg.ask_torch), cpus=0.25)
    for node in (ranks, reader, judge):
        g.connect(source.signals, node.signals, dispatch="broadcast")
    g.time_share(ranks, reader)
    return g
