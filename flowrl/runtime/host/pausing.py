"""Pauses the nodes of a host for a checkpoint.

Waits: `pause` waits for invocations to end, or to wait, and warns of nodes whose invocations take long.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress

from flowrl.channel.endpoint import Endpoint
from flowrl.runtime.host.context import DRIVER
from flowrl.runtime.host.replica import Replica

TOLD_EVERY_S = 60.0
"""Interval between warnings that name the nodes whose invocations a checkpoint waits for."""


class Pausing:
    """`replicas` are the replicas of the host, by id."""

    def __init__(self, replicas: Mapping[str, Replica], endpoint: Endpoint) -> None:
        self._replicas = replicas
        self._endpoint = endpoint

    async def pause(self) -> None:
        """Stop taking items; when every invocation has ended or waits, also stop sending."""
        for replica in self._replicas.values():
            replica.gate("checkpoint", open_=False)
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self.idle(), TOLD_EVERY_S)
                break
            for replica in self._replicas.values():
                self._warn_of_invocations(replica)
        for replica in self._replicas.values():
            replica.pause_sending(True)

    def resume(self) -> None:
        """Take and send items again, and report to the ledger."""
        for replica in self._replicas.values():
            replica.context.ledger.pause(False)
            replica.pause_sending(False)
            replica.gate("checkpoint", open_=True)

    async def idle(self) -> None:
        """Wait until no invocation of any node here is inside user code."""
        while any(replica.activity.working for replica in self._replicas.values()):
            for replica in self._replicas.values():
                await replica.activity.idle()

    def _warn_of_invocations(self, replica: Replica) -> None:
        if replica.activity.working:
            text = (
                "a checkpoint waits for its invocations to end. If they wait for another item of this node, which "
                "comes only after the checkpoint, put the wait inside `with self.context.waiting('what for'):`"
            )
            self._endpoint.notify(DRIVER, "warning", {"node": replica.place.replica_id, "text": text})
