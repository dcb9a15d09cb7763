"""The host of a node under test: the real engine, with a driver's answers, and a record of what the node does."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from flowrl.graph.graph import Graph
from flowrl.graph.node import Node
from flowrl.messages import Message, Tombstone
from flowrl.runtime.driver.locks import Locks
from flowrl.runtime.driver.run_processes import Orders
from flowrl.runtime.ledger.ledger_client import LedgerClient, LongTables
from flowrl.runtime.process.context import DRIVER, Meters, ReplicaPlace
from flowrl.runtime.process.engine import ProcessEngine, ProcessSpec
from flowrl.runtime.process.replica import Replica
from flowrl.testing.record import Lost, NodeRecord
from flowrl.wire.activity import Lease
from flowrl.wire.items import Item, OpenItems

HOST = DRIVER
"""The one host of a rig is also its driver: requests to the driver come to its own endpoint."""


class RigEngine(ProcessEngine):
    """Runs the nodes of `graph`, one of them under test."""

    def __init__(self, spec: ProcessSpec, graph: Graph, node: Node, record: NodeRecord, num_groups: int | None) -> None:
        super().__init__(spec)
        self._graph = graph
        self._tested = node
        self._record = record
        self._groups_left = num_groups
        self._next_ticket = 0

    def build_graph(self) -> Graph:
        return self._graph

    def make_replica(self, node: Node, place: ReplicaPlace, lease: Lease) -> Replica:
        if node is not self._tested:
            return super().make_replica(node, place, lease)
        return RecordedReplica(node, place, lease, self, self._record)

    @property
    def under_test(self) -> RecordedReplica:
        return cast(RecordedReplica, self.replicas[f"{self._tested.name}/0"])

    def answer_as_driver(self) -> None:
        """Answer the requests of nodes to the driver; call this after `open`."""
        locks, tables = Locks(), LongTables()
        for kind, handler in (
            ("admit", self._admit),
            ("derive", self._derive),
            ("ledger", lambda host, body: self._noted(self._record.ledger.extend, tables.join_tables(body["events"]))),
            ("progress", lambda host, body: self._noted(self._record.progress.append, body["text"])),
            ("warning", lambda host, body: self._noted(self._record.warnings.append, body["text"])),
            ("statistics", _unused),
            ("episode", lambda host, body: self._noted(self._record.episodes.append, json.loads(body["line"]))),
            ("judged", lambda host, body: self._noted(self._record.judged.append, (body["version"], body["figures"]))),
            ("samples", _unused),
            ("ended", _unused),
            ("ages", _granted),
            ("step_done", _granted),
            ("lock", locks.take_lock),
            ("unlock", locks.release_lock),
        ):
            self.endpoint.on(kind, handler)

    async def _admit(self, host: str, body: dict[str, Any]) -> int | None:
        if self._groups_left == 0:
            return None
        if self._groups_left is not None:
            self._groups_left -= 1
        self._next_ticket += 1
        return self._next_ticket - 1

    async def _derive(self, host: str, body: dict[str, Any]) -> None:
        ids = [row[0] for row in body["rows"]]
        self._noted(self._record.derived.append, (body["parent_id"], body["label"], ids))

    def _noted(self, note: Callable[[Any], None], what: Any) -> None:
        note(what)
        self._record.changed()


def _unused(host: str, body: Any) -> None:
    """A report that a rig has no use for."""


async def _granted(host: str, body: Any) -> None:
    """A request that a rig always grants at once."""


class RecordedReplica(Replica):
    """The node under test. Records which messages it makes from which, and what it loses."""

    def __init__(
        self, node: Node, place: ReplicaPlace, lease: Lease, engine: ProcessEngine, record: NodeRecord
    ) -> None:
        super().__init__(node, place, engine.endpoint, engine.trace, lease)
        self.open_items: RecordedItems = RecordedItems(place.replica_id, self.open_items.ended)
        self._ledger = RecordedLedger(engine.endpoint, place.replica_id)
        self._ledger.record = record
        self.context.ledger = self._ledger
        self.context.meters = RecordedMeters(record=record)

    def book(self, items: Sequence[Item], marker: Tombstone, *, behind: Collection[str] | None = None) -> None:
        self._ledger.losing = items
        super().book(items, marker, behind=behind)
        self._ledger.losing = ()


class RecordedItems(OpenItems):
    """Open items that remember what was made from them."""

    def __init__(self, node: str, ended: Callable[[Item], None]) -> None:
        super().__init__(node, ended)
        self.parents: dict[bytes, tuple[Message, ...]] = {}
        """Id of a sent message -> the messages that it was made from, without those that were lost."""

    def note_child(self, parents: Iterable[Item], child_id: bytes) -> None:
        parents = tuple(parents)
        self.parents[child_id] = tuple(item.body for item in parents if item.lost is None and not item.envelope.lost)
        super().note_child(parents, child_id)

    def unfinished(self) -> list[Item]:
        """The items that user code, or an incomplete group, still holds."""
        return [item for item in self._open.values() if not isinstance(item.body, Tombstone)]


class RecordedLedger(LedgerClient):
    """Reports like every ledger client, and records the messages that are lost."""

    record: NodeRecord
    losing: Sequence[Item] = ()

    def lost(self, marker: Tombstone, trainers: Sequence[str] | None = None) -> None:
        bodies: list[Message] = [item.body for item in self.losing] or [marker]
        self.record.lost += [Lost(body, marker.state, marker.reason) for body in bodies]
        self.record.changed()
        super().lost(marker, trainers)


@dataclass
class RecordedMeters(Meters):
    """Counters and gauges that record the sum of each counter and every value of each gauge."""

    record: NodeRecord = field(default_factory=NodeRecord)

    def add_to_counter(self, name: str, value: float) -> None:
        super().add_to_counter(name, value)
        self.record.metrics[name] = self.counters[name]
        self.record.changed()

    def add_observation(self, name: str, value: float) -> None:
        super().add_observation(name, value)
        self.record.gauges.setdefault(name, []).append(value)
        self.record.changed()


class RigOrders(Orders):
    """The driver's requests to the one host of a rig."""

    async def ask_all(self, kind: str, body: Callable[[str], Any] = lambda host: {}) -> list[Any]:
        return [await self.ask(host, kind, body(host)) for host in self.processes]


class NoAccounting:
    """A stand-in for the ledger and the tickets of a run, which a rig does not have."""

    head = ""

    def __init__(self) -> None:
        self.versions: dict[str, int] = {}
        self.tickets = self.ledger = self

    def as_of_now(self) -> NoAccounting:
        return self

    def __enter__(self) -> NoAccounting:
        return self

    def __exit__(self, *failure: object) -> None: ...

    def write(self, checkpoint: Path) -> None:
        """There is no ledger to write."""
