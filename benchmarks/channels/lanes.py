"""How fast flowrl's lanes are, against raw pyzmq, Ray and memcpy in the same run.

    python -m benchmarks.channels.lanes [--repetitions 5] [--no-ray] [--json FILE]

Two processes; on flowrl's side always typed messages with ids, credits, custody (kept until the ack) and
dedupe, on the event loop that a host has. Rates are timed at the sender, from the first send to the last ack;
messages and their ids are made before, as the peers' payload is. The systems take turns within a repetition,
Ray's last and with Ray there for them alone: its processes take part of two cores even when nobody calls
them. The table gives the median over repetitions with the smallest and largest, and each line of JSON one system in
one case.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt
import uvloop

from benchmarks.channels.channel_peers import (
    SPAWN,
    Rayside,
    memcpy_rate,
    pyzmq_rate,
    pyzmq_round_trip,
)
from flowrl.graph.dispatch_rules import SHARE
from flowrl.messages import Message
from flowrl.wire.connection import EndpointTransport, IpcTransport, TcpTransport
from flowrl.wire.edges import Inbox, OutEdge
from flowrl.wire.encoding.schema import Envelope, message_id
from flowrl.wire.endpoint import Endpoint
from flowrl.wire.lanes import LaneSpec

KB, MB = 1 << 10, 1 << 20
IPC, TCP = IpcTransport(), TcpTransport(ip="127.0.0.1")
ACTOR_CALL, RAY_QUEUE = RAYS = ("Ray actor call", "ray.util.queue")


@dataclass(frozen=True)
class Payload(Message):
    index: int
    name: str
    values: npt.NDArray[np.uint8]


def lane(there: bool, capacity: int) -> LaneSpec:
    ends = ("here/0", "there/0", "A", "B") if there else ("there/0", "here/0", "B", "A")
    return LaneSpec(f"{ends[0]} -> {ends[1]}", "edge", *ends, capacity, "queue", ("Payload",))


def envelope(index: int, values: npt.NDArray[np.uint8]) -> Envelope:
    parent = index.to_bytes(16, "big")
    return Envelope(message_id((parent,), "out", 0), 0, "group", index, Payload(index, "payload", values))


async def connect(host: str, pipe: Connection, transport: EndpointTransport, driver_pid: int) -> Endpoint:
    endpoint = Endpoint(host, run_id="bench", driver_pid=driver_pid, transport=transport)
    pipe.send(await endpoint.open())
    other = pipe.recv()
    endpoint.connect(other.host, replace(other, machine="elsewhere") if transport.spans_machines else other)
    return endpoint


def peer(
    pipe: Connection, count: int, capacity: int, echo: bool, transport: EndpointTransport, driver_pid: int
) -> None:
    """The other process: takes and acks `count` messages, and sends them back if asked."""

    async def main() -> None:
        endpoint = await connect("B", pipe, transport, driver_pid)
        inbox, back = Inbox("in"), OutEdge([endpoint.sender(lane(False, capacity))], SHARE)
        inbox.add_lane(endpoint.receiver(lane(True, capacity)))
        for _ in range(count):
            delivery = await inbox.take()
            if echo:
                await back.send(delivery.envelope)
            delivery.ack()
            del delivery
        endpoint.on("done", lambda host, body: None)
        await endpoint.request("A", "done")
        await endpoint.close()

    uvloop.run(main())


def flowrl(
    body: Callable[[Endpoint, OutEdge, Inbox], Any],
    count: int,
    capacity: int,
    *,
    echo: bool = False,
    transport: EndpointTransport = IPC,
) -> Any:
    """The result of `body` run against a peer process."""
    pipe, other = SPAWN.Pipe()
    process = SPAWN.Process(target=peer, args=(other, count, capacity, echo, transport, os.getpid()), daemon=True)
    process.start()

    async def main() -> Any:
        endpoint = await connect("A", pipe, transport, os.getpid())
        ended = asyncio.Event()
        endpoint.on("done", lambda host, body: ended.set())
        edge, inbox = OutEdge([endpoint.sender(lane(True, capacity))], SHARE), Inbox("in")
        inbox.add_lane(endpoint.receiver(lane(False, capacity)))
        result = await body(endpoint, edge, inbox)
        await ended.wait()
        await endpoint.close()
        return result

    result = uvloop.run(main())
    process.join()
    return result


def flowrl_rate(size: int, count: int, *, capacity: int = 256, transport: EndpointTransport = IPC) -> float:
    values = np.frombuffer(os.urandom(size), np.uint8)
    warm = min(count, 2 * capacity)

    async def body(endpoint: Endpoint, edge: OutEdge, inbox: Inbox) -> float:
        acks = Countdown(edge, warm)
        for index in range(warm):
            await edge.send(envelope(index, values))
        await acks.reached.wait()
        acks.expect(count)
        messages = [envelope(index, values) for index in range(warm, warm + count)]
        began = perf_counter()
        for message in messages:
            await edge.send(message)
        await acks.reached.wait()
        return count / (perf_counter() - began)

    return float(flowrl(body, warm + count, capacity, transport=transport))


def flowrl_round_trip(size: int, count: int, *, capacity: int = 256, transport: EndpointTransport = IPC) -> float:
    values = np.frombuffer(os.urandom(size), np.uint8)

    async def body(endpoint: Endpoint, edge: OutEdge, inbox: Inbox) -> float:
        times = []
        for index in range(count):
            message = envelope(index, values)
            began = perf_counter()
            await edge.send(message)
            delivery = await inbox.take()
            times.append(perf_counter() - began)
            delivery.ack()
        return median(times)

    return float(flowrl(body, count, capacity, echo=True, transport=transport))


def flowrl_local_rate(size: int, count: int, *, capacity: int = 256) -> float:
    """Both nodes in one process."""
    spec = replace(lane(True, capacity), consumer_host="A")
    values = np.frombuffer(os.urandom(size), np.uint8)

    async def main() -> float:
        endpoint = Endpoint("A", run_id="bench", driver_pid=os.getpid())
        await endpoint.open()
        edge, inbox = OutEdge([endpoint.sender(spec)], SHARE), Inbox("in")
        inbox.add_lane(endpoint.receiver(spec))
        acks = Countdown(edge, count)

        async def take() -> None:
            for _ in range(count):
                (await inbox.take()).ack()

        messages = [envelope(index, values) for index in range(count)]
        began = perf_counter()
        taking = asyncio.create_task(take())
        for message in messages:
            await edge.send(message)
        await acks.reached.wait()
        taken_s = perf_counter() - began
        await taking
        await endpoint.close()
        return count / taken_s

    return uvloop.run(main())


class Countdown:
    """Waits for the ack of a number of messages."""

    def __init__(self, edge: OutEdge, count: int) -> None:
        self.reached = asyncio.Event()
        self._left = count
        edge.on_acked(self._acked)

    def expect(self, count: int) -> None:
        self.reached.clear()
        self._left += count

    def _acked(self, ids: Sequence[bytes]) -> None:
        self._left -= len(ids)
        if self._left == 0:
            self.reached.set()


@dataclass(frozen=True)
class Measure:
    case: str
    system: str
    unit: str
    run: Callable[[], float]
    scale: float = 1.0
    """From what `run` returns to `unit`."""

    @property
    def on_ray(self) -> bool:
        return self.system in RAYS


@dataclass(frozen=True)
class Size:
    """What is sent one way, and how often in one measurement."""

    name: str
    num_bytes: int
    count: int
    capacity: int
    calls: int
    """Ray actor calls: far fewer are enough."""

    @property
    def large(self) -> bool:
        return self.num_bytes >= MB


SIZES = (
    Size("1 KB", KB, 60_000, 256, 3_000),
    Size("64 KB", 64 * KB, 6_000, 256, 1_000),
    Size("1 MB", MB, 600, 32, 200),
    Size("64 MB", 64 * MB, 24, 4, 8),
)


def one_way(size: Size, ray: Rayside | None) -> list[Measure]:
    bytes_, count, capacity = size.num_bytes, size.count, size.capacity
    runs: dict[str, Callable[[], float]] = {
        f"flowrl ipc, capacity {capacity}": partial(flowrl_rate, bytes_, count, capacity=capacity),
        "raw pyzmq ipc": partial(pyzmq_rate, bytes_, 2 * count),
        f"raw pyzmq ipc, window {capacity}": partial(pyzmq_rate, bytes_, count, capacity),
        "flowrl in process": partial(flowrl_local_rate, bytes_, count, capacity=capacity),
        "flowrl tcp + CURVE": partial(flowrl_rate, bytes_, max(8, count // 4), capacity=capacity, transport=TCP),
    }
    if size.large:
        runs["memcpy"] = partial(memcpy_rate, bytes_, count)
    else:
        runs["flowrl ipc, capacity 32"] = partial(flowrl_rate, bytes_, count, capacity=32)
    if ray is not None:
        runs[ACTOR_CALL] = partial(ray.actor_rate, bytes_, size.calls)
    if ray is not None and not size.large:
        runs[RAY_QUEUE] = partial(ray.queue_rate, bytes_, 600)
    unit, scale = ("GB/s", bytes_ / 1e9) if size.large else ("messages/s", 1.0)
    return [Measure(f"one way {size.name}", system, unit, run, scale) for system, run in runs.items()]


def round_trips(ray: Rayside | None) -> list[Measure]:
    runs: dict[str, Callable[[], float]] = {
        "flowrl ipc": partial(flowrl_round_trip, KB, 3_000),
        "raw pyzmq ipc": partial(pyzmq_round_trip, KB, 3_000),
        "flowrl tcp + CURVE": partial(flowrl_round_trip, KB, 3_000, transport=TCP),
    }
    if ray is not None:
        runs[ACTOR_CALL] = partial(ray.actor_round_trip, KB, 1_000)
    return [Measure("round trip 1 KB", system, "us", run, 1e6) for system, run in runs.items()]


TARGETS = (
    ("one way 1 KB", "flowrl ipc, capacity 256", "", 50_000.0, ">="),
    ("one way 1 KB", "flowrl ipc, capacity 256", RAY_QUEUE, 100.0, ">="),
    ("one way 1 KB", "flowrl ipc, capacity 256", "raw pyzmq ipc", 0.3, ">="),
    ("one way 64 MB", "flowrl ipc, capacity 4", "memcpy", 0.8, ">="),
    ("round trip 1 KB", "flowrl ipc", "raw pyzmq ipc", 2.5, "<="),
)
"""(case, system, peer or "" for the value itself, bound, direction)"""

Values = dict[tuple[str, str], list[float]]


def ratios(values: Values) -> list[tuple[str, float, float, bool]]:
    """(what, median of the ratios within each repetition, bound, met) for every target that was measured."""
    found = []
    for case, system, peer_, bound, direction in TARGETS:
        own, other = values.get((case, system)), values.get((case, peer_)) if peer_ else None
        if own is None or (peer_ and other is None):
            continue
        value = median(own) if other is None else median(a / b for a, b in zip(own, other, strict=True))
        met = value >= bound if direction == ">=" else value <= bound
        what = f"{case}: {system}" + (f" / {peer_}" if peer_ else "")
        found.append((f"{what} {direction} {bound:g}", value, bound, met))
    return found


def take(measures: Sequence[Measure], values: Values, told: str) -> None:
    """Run each once."""
    for measure in measures:
        values.setdefault((measure.case, measure.system), []).append(measure.run() * measure.scale)
        if sys.stderr.isatty():
            print(f"\r{f'{told} {measure.case}, {measure.system}':78}\r", end="", file=sys.stderr)


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--repetitions", type=int, default=5)
    options.add_argument("--no-ray", action="store_true", help="leave out Ray, which takes seconds to start")
    options.add_argument("--case", default="", help="only cases that contain this text")
    options.add_argument("--json", default="-", help="file for the JSON lines; '-' prints them after the table")
    chosen = options.parse_args()
    ray = None if chosen.no_ray else Rayside()
    everything = [*(m for size in SIZES for m in one_way(size, ray)), *round_trips(ray)]
    plan = [measure for measure in everything if chosen.case in measure.case]
    values: Values = {}
    for repetition in range(chosen.repetitions):
        told = f"{repetition + 1}/{chosen.repetitions}"
        take([measure for measure in plan if not measure.on_ray], values, told)
        if ray is not None and any(measure.on_ray for measure in plan):
            ray.start()
            take([measure for measure in plan if measure.on_ray], values, told)
            ray.close()
    report(plan, values, chosen.json)
    return 0 if all(met for *_, met in ratios(values)) else 1


def report(plan: Sequence[Measure], values: Values, json_file: str) -> None:
    print(f"{'case':18}{'system':34}{'median':>12}{'min':>12}{'max':>12}  unit")
    lines = []
    for measure in plan:
        found = values[measure.case, measure.system]
        middle, least, most = median(found), min(found), max(found)
        print(f"{measure.case:18}{measure.system:34}{middle:12,.4g}{least:12,.4g}{most:12,.4g}  {measure.unit}")
        lines.append(
            {
                "benchmark": "channels",
                "case": measure.case,
                "system": measure.system,
                "value": middle,
                "unit": measure.unit,
                "min": least,
                "max": most,
                "repetitions": len(found),
            }
        )
    print()
    for what, value, bound, met in ratios(values):
        print(f"{'met   ' if met else 'MISSED'} {what}: {value:,.3g}")
        lines.append(
            {"benchmark": "channels", "case": what, "system": "flowrl", "value": value, "unit": "ratio", "bound": bound}
        )
    text = "".join(json.dumps(line) + "\n" for line in lines)
    if json_file == "-":
        print("\n" + text, end="")
    else:
        with open(json_file, "w") as file:
            file.write(text)


if __name__ == "__main__":
    sys.exit(main())
