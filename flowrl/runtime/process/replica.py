"""One node replica in its process: the node, its open items, its live ports, and the lanes of these."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Any

from flowrl.errors import FlowrlError
from flowrl.graph.analysis.branches import PortPlan
from flowrl.graph.analysis.plan import LanePlan, Plan
from flowrl.graph.dispatch_rules import RULES
from flowrl.graph.graph import Graph
from flowrl.graph.node import Node
from flowrl.graph.ports import Ask, Call, In, Out, Serve
from flowrl.messages import Message, Prompt, Sample, Tombstone
from flowrl.messages.base import type_name
from flowrl.messages.episode import Turn
from flowrl.runtime.checkpoints.snapshots import SavedMessage
from flowrl.runtime.process.context import DRIVER, NodeContext, ReplicaPlace
from flowrl.runtime.telemetry.trace import TraceBuffer
from flowrl.wire.activity import Activity, Lease, as_failure, find_inside, in_invocation, reasons_alive
from flowrl.wire.asks import PolicyCall
from flowrl.wire.control import Answer
from flowrl.wire.derived_samples import DerivedNumbers, DerivedSamples
from flowrl.wire.edges import Inbox, OutEdge
from flowrl.wire.encoding.schema import Envelope, source_id
from flowrl.wire.endpoint import Endpoint
from flowrl.wire.in_ports import Inbound
from flowrl.wire.items import NOT_ROUTED, Item, OpenItems, samples_of
from flowrl.wire.lanes import LaneSpec
from flowrl.wire.out_ports import GroupOffer, Kept, Outbound
from flowrl.wire.requests import LiveCall, LiveServe

TRACED_WAIT_NS = 1_000_000
"""Shorter waits get no slice in the trace."""


class Replica:
    """Runs one node. It also records the losses of its in ports (`items.PortOwner`)."""

    def __init__(self, node: Node, place: ReplicaPlace, endpoint: Endpoint, trace: TraceBuffer, lease: Lease) -> None:
        self.node = node
        self.place = place
        self.activity = Activity(place.replica_id)
        self.context = NodeContext(place, endpoint, self.activity, trace, lease)
        self.open_items = OpenItems(place.replica_id, self._report_finished)
        self.inbound: dict[str, Inbound] = {}
        self.outbound: dict[str, Outbound] = {}
        self.calls: list[LiveCall] = []
        self.lease = lease
        self.trainers: frozenset[str] = frozenset()
        """The trainers that items arriving here can reach, including this node."""
        self.every_trainer: frozenset[str] = frozenset()
        """The trainers that an admitted group can reach by any branch."""
        self._trace = trace
        self._tasks = asyncio.TaskGroup()
        self._restored: list[tuple[Outbound, Kept]] = []
        self._offers: list[tuple[Outbound, GroupOffer]] = []
        """Groups that were being admitted when the checkpoint was taken."""
        self.ended = False
        self._closed_by: set[str] = set()
        """The reasons for which in ports currently take nothing, or out ports send nothing."""
        node.context = self.activity.pending.context = self.context

    async def run(self) -> None:
        """Run the body, then close the out ports. Raises what the body, or the forwarding of a loss, raised."""
        with self.activity.pending.named():
            async with self._tasks as tasks:
                for out, kept in self._restored:
                    tasks.create_task(self._send_again(out, kept))
                self._restored = []
                for out, offer in self._offers:  # before the body, which may offer the same groups
                    admitting = tasks.create_task(self._admit_again(out, offer))
                    out.offered_again[offer.prompts[0].group_id] = admitting
                self._offers = []
                tasks.create_task(self._run_body(asyncio.current_task()))
        self.ended = True
        self.context.ledger.flush()
        for out in self.outbound.values():
            out.close()
        for call in self.calls:
            call.close()

    async def _run_body(self, whole: asyncio.Task[None] | None) -> None:
        """Run the node's own code; the engine cancels it by cancelling `whole`, the task of `run`."""
        with self.open_items.noting_failure():
            try:
                await self.node.run()
            except BaseException as error:  # the boundary to the node's code, which may raise anything
                failure = as_failure(error, cancelled=whole is None or bool(whole.cancelling()))
                raise failure from failure.__cause__

    async def _send_again(self, out: Outbound, kept: Kept) -> None:
        with self.activity.waiting("credit", kept[0], inside=None):
            await out.restore(kept)

    async def _admit_again(self, out: Outbound, offer: GroupOffer) -> bool:
        try:
            return await out.admit_offer(offer)
        finally:
            out.count_leaving(-1)

    def lose(self, items: Sequence[Item], marker: Tombstone) -> None:
        self.book(items, marker)
        if not self._ports_unheard(items) and marker.state == "failed" and items[0].sent_on:
            self.context.metric("failed_after_send", 1)  # all ports have sent already: nothing is lost
        self.forward(items, marker)

    def book(self, items: Sequence[Item], marker: Tombstone, *, behind: Collection[str] | None = None) -> None:
        """Report `marker` to the ledger; see `items.PortOwner`. The items stay open, and nothing is forwarded.

        The loss is booked for each trainer that this node leads to (only those in `behind`, if given), except trainers
        behind an out port on which something made from `items` was sent already.
        """
        reached = self.trainers if behind is None else self.trainers.intersection(behind)
        lost_at = reached.difference(*(out.trainers for out in self._ports_sent_on(items)))
        if lost_at:
            self._note_samples(items, failed=marker.state == "failed")
            self.context.ledger.lost(marker, sorted(lost_at))

    def give_up(self, item: Item, state: str, reason: str) -> None:
        """See `items.PortOwner`. Raises FlowrlError if a branch that does not pass here may still need the group."""
        group_id = item.envelope.group_id
        if not group_id:
            raise FlowrlError(f"it dropped the group of a {type(item.body).__name__} that belongs to no group")
        if others := self.every_trainer - self.trainers:
            raise FlowrlError(
                f"it dropped a whole group, but {', '.join(sorted(others))} can still receive samples of this group "
                "over branches that do not pass this node; drop only the sample"
            )
        marker = Tombstone(group_id, -1, state, reason, self.place.replica_id)
        self.context.ledger.lost(marker, sorted(self.trainers))
        body = {"group_id": group_id, "state": state, "reason": reason}
        self.context.endpoint.notify(DRIVER, "give up", body)

    def _report_finished(self, item: Item) -> None:
        """If this node is a trainer, report the samples of `item` as finished: the trainer has to book them.

        What was asked for the item ends with it.
        """
        if item.derived_as is not None:
            self.context.ledger.forget_replies(item.derived_as.sample_id)
            return
        for call in self.calls if item.asks is not None else ():
            if isinstance(call, PolicyCall):
                call.end_asks(item)
        if self.place.node in self.trainers and item.lost is None:
            self._note_samples([item])
            self.context.ledger.finished(self.place.node, [sample.sample_id for sample in samples_of(item.body)])

    def book_replies(self, item: Item, body: Message) -> None:
        if isinstance(body, Sample):
            assert item.derived_from is not None
            self.context.ledger.asked(body, resumed=getattr(item.derived_from.body, "record", None) is not None)

    def skip_sent(self, items: Sequence[Item]) -> bool:
        skipped = [out.skip_sent(items) for out in self.outbound.values()]  # each is asked, not up to the first
        return any(skipped)

    async def commit_derived(self, parent_id: str, label: str, samples: Sequence[Prompt]) -> None:
        """Book samples that this node derives. Raises FlowrlError if they would reach no trainer."""
        if not self.trainers:
            raise FlowrlError(
                f"samples were derived from {parent_id!r}, but no branch leads from node {self.place.node!r} to a "
                "trainer, so nothing would end them; derive in a node before one"
            )
        await self.context.ledger.derive(parent_id, label, samples, trainers=sorted(self.trainers))

    def _note_samples(self, items: Sequence[Item], *, failed: bool = False) -> None:
        """Offer the samples in `items`, whose fate is decided here, for keeping; the last item with a sample counts."""
        found = (sample for item in items for sample in samples_of(item.body))
        samples = {sample.sample_id: sample for sample in found if not getattr(sample, "times_trained", 0)}
        if samples:
            self.context.samples.send_decided(samples.values(), failed=failed)

    def _ports_sent_on(self, items: Sequence[Item]) -> list[Outbound]:
        """The out ports on which something was made from `items`."""
        names = set().union(*(item.sent_on for item in items))
        return [out for out in self.outbound.values() if out.port in names]

    def _ports_unheard(self, items: Sequence[Item]) -> list[Outbound]:
        """The out ports that carry tombstones, and on which nothing was made from `items`."""
        sent = self._ports_sent_on(items)
        return [out for out in self.outbound.values() if out not in sent and out.carries_tombstones]

    def forward(self, items: Sequence[Item], marker: Tombstone) -> None:
        self._begin_forward(items, marker, self._ports_unheard(items))

    def _begin_forward(
        self, items: Sequence[Item], marker: Tombstone, outs: Sequence[Outbound]
    ) -> asyncio.Task[None] | None:
        if not outs:
            for item in items:
                self.open_items.end_item(item)
            return None
        for item in items:
            item.held = True  # its invocation may end before the marker is sent
        for out in outs:
            out.count_leaving(+1)

        async def send_markers() -> None:
            in_invocation.set(None)  # this wait is not part of the invocation that lost the items
            for out in outs:
                await out.send_tombstone(marker, items)
                out.count_leaving(-1)
            for item in items:
                self.open_items.end_item(item)

        forwarding = send_markers()
        try:
            return self._tasks.create_task(forwarding)
        except RuntimeError:  # the node is ending because of a failure: it sends nothing more
            forwarding.close()
            return None

    async def leave(self, items: Sequence[Item]) -> None:
        """See `items.PortOwner`. If the caller is cancelled, the work continues in its own task."""
        if len(self.outbound) > 1 and (leaving := self._report_elsewhere(items)) is not None:
            await asyncio.shield(leaving)

    def use_up(self, items: Sequence[Item]) -> None:
        if len(self.outbound) == 1 or self._report_elsewhere(items) is None:
            for item in items:
                self.open_items.end_item(item)

    def _report_elsewhere(self, items: Sequence[Item]) -> asyncio.Task[None] | None:
        """On ports that count samples, send tombstones for samples sent only on other ports; None if there are none."""
        outs = [out for out in self._ports_unheard(items) if out.counted]
        if not outs or not any(item.sent_on for item in items) or any(item.lost for item in items):
            return None
        first = items[0].envelope
        alike = all(item.envelope.member == first.member for item in items)
        ids = tuple(dict.fromkeys(sample.sample_id for item in items for sample in samples_of(item.body)))
        member = first.member if alike else -1
        marker = Tombstone(first.group_id, member, "dropped", NOT_ROUTED, self.place.replica_id, ids)
        self.book(items, marker)
        return self._begin_forward(items, marker, outs)

    def saved(self) -> list[SavedMessage]:
        """The messages that no consumer has finished, and records of items in progress, for `Snapshot.add_saved`."""
        replica_id = self.place.replica_id
        messages = [(replica_id, *kept) for out in self.outbound.values() for kept in out.unacked()]
        for out in self.outbound.values():
            edge = f"{out.port} -> "  # to nobody yet
            messages += [
                (replica_id, edge, "", Envelope(source_id("offer", group_id), group_id=group_id, body=offer))
                for group_id, offer in out.offers.items()
            ]
        records = [*self.open_items.kept_records(), *self.open_items.kept_asks()]
        return messages + [(replica_id, port, "", Envelope(key, body=record)) for (port, key), record in records]

    def sent_already(self) -> list[bytes]:
        """Ids of messages already sent by unfinished invocations and admissions, and outside of invocations."""
        admitted = [key for out in self.outbound.values() for key in out.sent_of_open_group()]
        waiting = {key for out in self.outbound.values() for key in out.not_sent()}
        outside = [key for out in self.outbound.values() for key in out.sent_outside()]
        return [key for key in self.open_items.sent_by_open_items() if key not in waiting] + admitted + outside

    async def admit(
        self, samples: Sequence[Prompt], trainers: Sequence[str], asks: int, asked_by: str | None
    ) -> int | None:
        if asks > (most := self.node.facts().asks):
            raise FlowrlError(
                f"node {self.place.node!r} admitted a group with asks={asks}, but declares {most}; `flowrl check` has "
                f"to know how many tickets are kept for the groups that a sample asks for: return Facts(asks={asks}) "
                "from facts()"
            )
        return await self.context.ledger.admit(
            self.place.node, samples, trainers=trainers, asks=asks, asked_by=asked_by
        )

    def trace_sent(self, envelope: Envelope) -> None:
        self._trace.record_sent(self.place.replica_id, envelope)

    def trace_wait(self, what: str, since_ns: int) -> None:
        now = time.time_ns()
        if now - since_ns >= TRACED_WAIT_NS:
            self._trace.record_slice(self.place.replica_id, what, since_ns, now, kind="wait")

    def restore(self, kept: Kept) -> None:
        """Send a checkpoint's message again once the node runs: the send may have to wait for credit."""
        ports = [out for out in self.outbound.values() if kept[0].startswith(f"{out.port} -> ")]
        for out in ports:
            out.count_leaving(+1)
        if isinstance(offer := kept[2].body, GroupOffer):
            self._offers += [(out, offer) for out in ports]
            return
        self._restored += [(out, kept) for out in ports]

    def trace_invocation(self, item: Item, *, begins: bool) -> None:
        self._trace.record_item(self.place.replica_id, item.envelope, begins=begins)

    def gate(self, by: str, *, open_: bool) -> None:
        """Open or close the gates of the in ports for `by`."""
        (self._closed_by.discard if open_ else self._closed_by.add)(by)
        for port in self.inbound.values():
            port.gate(by, open_=open_)

    def pause_sending(self, paused: bool) -> None:
        """Pause or resume sending on the out ports, for a checkpoint's snapshot."""
        (self._closed_by.add if paused else self._closed_by.discard)("pause")
        for port in self.outbound.values():
            port.pause(paused)

    def report(self) -> dict[str, Any]:
        """The report for the stall watch; `alive` lists the reasons, if any, why the node moves without other nodes."""
        now = time.monotonic()
        waits = [(wait.kind, wait.what, now - wait.since_s) for wait in self.activity.waits.values()]
        waits += [("inside", f"something inside the node, at {place}", 0.0) for place in find_inside(self.activity)]
        if self._closed_by and not self.ended:
            waits.append(("barrier", "the driver, which keeps its ports closed", 0.0))
        return {
            "replica_id": self.place.replica_id,
            "ended": self.ended,
            "moves": self.activity.moves,
            "waits": waits,
            "open": len(self.open_items),
            "alive": [] if self.ended else reasons_alive(self.activity, asyncio.get_running_loop().time()),
        }


def connect_ports(replica: Replica, graph: Graph, plan: Plan, endpoint: Endpoint) -> None:
    """Give every port of `replica` its live side.

    An ignored port gets one without lanes; an unused Call or Serve port gets none.
    """
    node = graph.nodes[replica.place.node]
    port_plans = {port_plan.name: port_plan for port_plan in plan.ports}
    admitted = [port_plans[plan.admission["out"]]] if plan.admission is not None else plan.ports
    replica.every_trainer = frozenset(trainer for port_plan in admitted for trainer in _find_trainers(plan, port_plan))
    ends = {end for edge in plan.edges for end in (edge.out, edge.into)}
    sink = not any(isinstance(port, Out) for port in node.ports.values())
    for port in node.ports.values():
        label = f"{replica.place.node}.{port.name}"
        port.connected = label in ends
        if isinstance(port, In):
            port_plan = port_plans[label]
            port.live = replica.inbound[port.name] = _connect_in(replica, plan, endpoint, port_plan, sink=sink)
            replica.trainers |= frozenset(_find_trainers(plan, port_plan))
            if port_plan.derives:
                _derive_at(replica, plan, label)
        elif isinstance(port, Out):
            port.live = replica.outbound[port.name] = _connect_out(replica, graph, plan, endpoint, port_plans[label])
        elif isinstance(port, Call):
            port.live = _connect_call(replica, plan, endpoint, port)
        elif isinstance(port, Serve):
            port.live = _connect_serve(replica, plan, endpoint, label)


def _lane_spec(lane: LanePlan) -> LaneSpec:
    return LaneSpec(
        name=lane.name,
        edge=lane.edge,
        producer=lane.producer,
        consumer=lane.consumer,
        producer_host=lane.producer_host,
        consumer_host=lane.consumer_host,
        capacity=lane.capacity,
        kind="latest" if lane.kind == "latest" else "queue",
        types=lane.types,
    )


def _find_trainers(plan: Plan, port_plan: PortPlan) -> tuple[str, ...]:
    """The trainers downstream of a port; in a graph without trainers, the single end "" of all branches."""
    return port_plan.trainers if plan.trainers else ("",)


def _derive_at(replica: Replica, plan: Plan, label: str) -> None:
    """Let the node derive samples from what arrives at the In port `label`."""
    own, numbers = replica.node.facts().derives, plan.numbers
    derived = DerivedSamples(
        replica,
        label,
        own,
        DerivedNumbers(numbers.group_size, numbers.derives),
        seed=replica.place.seed,
        commit=replica.commit_derived,
    )
    replica.context.derived = derived
    replica.open_items.finish_derived = derived.finish_derived


def _connect_in(replica: Replica, plan: Plan, endpoint: Endpoint, port_plan: PortPlan, *, sink: bool) -> Inbound:
    label = port_plan.name
    inbox = Inbox(label)
    for lane in plan.lanes:
        if lane.consumer == replica.place.replica_id and lane.edge.endswith(f" -> {label}"):
            inbox.add_lane(endpoint.receiver(_lane_spec(lane)))
            sink = sink or lane.kind == "latest"
    away = label.partition(".")[2] in replica.node.facts().without_devices
    lease = Lease("", replica.place.replica_id, endpoint) if away else replica.lease
    services = (replica.open_items, replica.activity, replica, lease)
    return Inbound(label, inbox, *services, sink=sink, arrivals=port_plan.arrivals, members=port_plan.members)


def _connect_out(replica: Replica, graph: Graph, plan: Plan, endpoint: Endpoint, port_plan: PortPlan) -> Outbound:
    label = port_plan.name
    lanes: dict[str, list[LanePlan]] = defaultdict(list)
    for lane in plan.lanes:
        if lane.producer == replica.place.replica_id and lane.edge.startswith(f"{label} -> "):
            lanes[lane.edge].append(lane)
    rules = {edge.name: RULES[edge.dispatch] for edge in plan.edges}
    shared = {edge.name: graph.nodes[edge.into.partition(".")[0]].facts().ranks_per_part for edge in plan.edges}
    edges = [
        OutEdge([endpoint.sender(_lane_spec(lane)) for lane in members], rules[edge], lanes_per_part=shared[edge])
        for edge, members in lanes.items()
    ]
    for out in edges:
        out.on_taken(replica.open_items.note_arrivals)
    return Outbound(label, edges, replica, _find_trainers(plan, port_plan), counted=port_plan.counted)


def _connect_call(replica: Replica, plan: Plan, endpoint: Endpoint, port: Call[Any, Any]) -> LiveCall | None:
    label = f"{replica.place.node}.{port.name}"
    calls = [w for w in plan.calls if w.caller == replica.place.replica_id and w.edge.startswith(f"{label} -> ")]
    if not calls:
        return None
    ledger = replica.context.ledger
    answered = (ledger.answered,) if calls[0].types[0] == type_name(Turn) else ()
    around = (label, calls, endpoint, replica.activity, replica.context.metric, *answered)
    live = LiveCall(*around)
    if isinstance(port, Ask):
        seed, items = replica.place.seed, replica.open_items
        live = PolicyCall(*around, server=port.server, open_items=items, reports=ledger, seed=seed)
    replica.calls.append(live)
    return live


def _connect_serve(replica: Replica, plan: Plan, endpoint: Endpoint, label: str) -> LiveServe | None:
    calls = [w for w in plan.calls if w.server == replica.place.replica_id and w.edge.endswith(f" -> {label}")]
    if not calls:
        return None
    doors: Any = _Doors(endpoint, replica)
    return LiveServe(label, calls, doors, replica.activity, replica.lease, replica.context.gauge)


class _Doors:
    """Wraps the endpoint for a Serve port, so that its handlers run as work of the node."""

    def __init__(self, endpoint: Endpoint, replica: Replica) -> None:
        self._endpoint = endpoint
        self._pending = replica.activity.pending

    def on(self, kind: str, handler: Answer) -> None:
        if not inspect.iscoroutinefunction(handler):
            self._endpoint.on(kind, handler)
            return

        async def answer(host: str, body: Any) -> Any:
            self._pending.enter()
            return await handler(host, body)

        self._endpoint.on(kind, answer)
