"""The registry of weight backends: for every `WeightTransport`, the trainer's end and the generator's.

Both ends get the same routes, so they choose the same backend. The one on GPUs needs vLLM, so it is imported when it
is used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from flowrl.graph.routes import WeightRoute, WeightTransport, common_transport
from flowrl.weights.fetched import Receiver
from flowrl.weights.narrowing import Narrowing
from flowrl.weights.receive import SegmentReceiver
from flowrl.weights.send import SegmentSender, Sender


@dataclass(frozen=True)
class Publication:
    """What a trainer publishes, and to whom."""

    routes: Sequence[WeightRoute]
    run_id: str
    policy: str
    narrowing: Narrowing


@dataclass(frozen=True)
class WeightBackend:
    """Constructors of both ends."""

    sender: Callable[[Publication], Sender]
    receiver: Callable[[Sequence[WeightRoute], str, str], Receiver]
    """(routes, replica id of the reader, run id) -> its receiver."""


def sender(routes: Sequence[WeightRoute], run_id: str, policy: str, *, narrowing: Narrowing) -> Sender:
    """The trainer's end of the backend that serves all readers. Raises ConfigError if none does."""
    return BACKENDS[common_transport(routes)].sender(Publication(routes, run_id, policy, narrowing))


def receiver(routes: Sequence[WeightRoute], replica: str, run_id: str) -> Receiver:
    """The generator's end for the route of `replica`; for shared memory if it has no route."""
    kind = next((route.transport for route in routes if route.consumer == replica), WeightTransport.SHM)
    return BACKENDS[kind].receiver(routes, replica, run_id)


def _to_segments(publication: Publication, *, serve: bool) -> Sender:
    return SegmentSender(publication.run_id, publication.policy, narrowing=publication.narrowing, serve=serve)


def _from_segments(routes: Sequence[WeightRoute], replica: str, run_id: str) -> Receiver:
    return SegmentReceiver(run_id)


def _to_group(publication: Publication) -> Sender:
    from flowrl.weights.device import NcclSender

    return NcclSender(publication.routes, narrowing=publication.narrowing)


def _from_group(routes: Sequence[WeightRoute], replica: str, run_id: str) -> Receiver:
    from flowrl.weights.device_receive import NcclReceiver

    return NcclReceiver(routes, replica)


BACKENDS: Mapping[WeightTransport, WeightBackend] = {
    WeightTransport.SHM: WeightBackend(partial(_to_segments, serve=False), _from_segments),
    WeightTransport.TCP: WeightBackend(partial(_to_segments, serve=True), _from_segments),
    WeightTransport.NCCL: WeightBackend(_to_group, _from_group),
}
