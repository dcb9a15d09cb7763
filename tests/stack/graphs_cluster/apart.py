"""Trainer and generator on machines of their own, and strangers at the doors of both."""

from __future__ import annotations

from typing import Any

import zmq
from zmq.utils import z85

from benchmarks.channels.across import Apart, Fetching, Publishing, made
from flowrl import Graph
from flowrl.graph.routes import WeightTransport
from flowrl.messages import Weights
from flowrl.weights.tcp import Origin
from flowrl.wire.connection import TcpTransport
from tests.wire.strangers import admitted_strangers, is_admitted


async def meet_strangers(node: Any) -> None:
    """Tell which strangers are admitted at the tcp door of this node's process."""
    endpoint = node.context.endpoint
    assert isinstance(endpoint._transport, TcpTransport)
    found = await node.blocking(admitted_strangers, endpoint.address.tcp, endpoint._transport.keys.public)
    node.context.progress(f"strangers admitted: {', '.join(found) or 'none'}")


class GuardedTrainer(Publishing):
    async def publish(self, version: int) -> None:
        if version == 1:
            await meet_strangers(self)
        await super().publish(version)


class GuardedGenerator(Fetching):
    async def follow(self) -> None:
        await meet_strangers(self)
        await super().follow()

    def _look(self, fetching: Any, manifest: Weights) -> None:
        if manifest.version == 0:
            origin = Origin.parse_place(WeightTransport.parse(manifest.transport)[1])
            url, key = f"tcp://{origin.host}:{origin.port}", z85.encode(bytes.fromhex(origin.public_key))
            admitted = is_admitted(url, None, key, zmq.DEALER)
            self.context.progress(f"weights without keys: {'admitted' if admitted else 'refused'}")
        super()._look(fetching, manifest)


def graph(cfg: Apart) -> Graph:
    return made(cfg, GuardedGenerator(0.01, 8), GuardedTrainer(cfg.megabytes))
