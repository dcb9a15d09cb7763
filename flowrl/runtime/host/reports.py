"""What a host reports to the driver once per second, as bodies of "statistics" notifications."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from flowrl.channel.encoding.chunks import chunked
from flowrl.channel.endpoint import Endpoint
from flowrl.runtime.host.replica import Replica
from flowrl.runtime.telemetry.trace import TraceBuffer


def reports(replicas: Mapping[str, Replica], endpoint: Endpoint, trace: TraceBuffer) -> Iterator[dict[str, Any]]:
    """The totals of all replicas and lanes, with the events traced since the last report; if they are too many, further
    reports contain only the rest of them."""
    first, *more = [*chunked(trace.drain())] or [[]]
    yield {
        "nodes": {replica_id: replica.context.meters.read() for replica_id, replica in replicas.items()},
        "lanes": {name: stats.as_dict() for name, stats in endpoint.statistics().items()},
        "trace": first,
    }
    for events in more:
        yield {"trace": events}
