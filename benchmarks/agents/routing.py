"""How sessions of many turns are spread over the replicas of a server, by the margin of the edge.

    python -m benchmarks.agents.routing [--repetitions 5] [--margin 2] [--real [--steps 10]]

With `--real` it is the runs of `benchmarks/agents/agents_stack.py` on Ray, vLLM and ZeRO, which take some minutes each.

Calls and servers are those of a run, over endpoints in separate processes; the servers sleep in place of a model. A
tenth of the sessions has ten times as many turns. Their number, their turns and the times are drawn from the
repetition's number, so that all systems get the same sessions within a repetition:

    margin 2         a session moves when its replica has more than two open requests above another's
    no bound         a session never moves: affinity alone
    no affinity      every request goes where least is open

The table gives the median over repetitions with the smallest and largest, and each line of JSON one figure of one
system. "busiest / idlest" compares the seconds that replicas worked; "stayed" is the share of requests, after the
first of a session, that went where the one before had gone, and "requests/s" counts all that were answered.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import multiprocessing
import os
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from statistics import median
from time import perf_counter

import tyro
import uvloop

from benchmarks.agents import agents_stack
from flowrl.graph.analysis.plan import CallPlan, make_plan
from flowrl.graph.graph import Graph
from flowrl.graph.machine import Cluster, Machine
from flowrl.graph.node import Node
from flowrl.graph.ports import Call, Serve
from flowrl.messages import Message
from flowrl.wire.activity import Activity, Lease
from flowrl.wire.endpoint import Endpoint
from flowrl.wire.requests import LiveCall, LiveServe

SPAWN = multiprocessing.get_context("spawn")
NEVER = 1 << 30
"""A margin that no load exceeds."""


@dataclass(frozen=True)
class Options:
    repetitions: int = 5
    margin: int = 2
    replicas: int = 2
    """Servers, each in a process of its own."""
    callers: int = 2
    sessions: int = 120
    """Sessions of each caller, in one repetition."""
    alive: int = 16
    """Sessions that a caller has at a time."""
    turns: int = 8
    """Turns of a session; ten times as many for every tenth."""
    slots: int = 8
    """Requests that a server works on at a time; more of them wait."""
    service_s: float = 0.02
    """Mean time that a request takes at the server; exponential."""
    step_s: float = 0.01
    """Mean time between a reply and the next request of its session; exponential."""
    real: bool = False
    """Runs on the real stack in place of servers that sleep."""
    steps: int = 10
    """Steps of each of these runs."""


@dataclass(frozen=True)
class Asked(Message):
    service_s: float


@dataclass(frozen=True)
class Served(Message):
    replica: int


@dataclass(frozen=True)
class Outcome:
    """What one system did in one repetition."""

    busy_s: tuple[float, ...]
    """Busy seconds of each replica."""
    stayed: float
    rate: float

    def figures(self) -> dict[str, float]:
        return {
            "busiest / idlest": max(self.busy_s) / min(self.busy_s),
            "stayed": self.stayed,
            "requests/s": self.rate,
        }


class Environment(Node):
    cpus = 1
    generate: Call[Asked, Served]


class Generator(Node):
    cpus = 1
    turns: Serve[Asked, Served]


def planned(options: Options, margin: int | None) -> tuple[CallPlan, ...]:
    """The ways from each caller to each server, as a run would have them."""
    graph = Graph("routing")
    environment = graph.add("environment", Environment(), replicas=options.callers)
    generator = graph.add("generator", Generator(), replicas=options.replicas)
    graph.call(environment.generate, generator.turns, capacity=options.alive, affinity_margin=margin)
    machine = Machine(tuple(range(options.callers + options.replicas)))
    return make_plan(graph, Cluster((machine,))).calls


def grouped(calls: Sequence[CallPlan], end: Callable[[CallPlan], str]) -> list[list[CallPlan]]:
    """The ways by the replica at one of their ends."""
    return [list(ways) for _, ways in itertools.groupby(sorted(calls, key=end), end)]


def unread(name: str, value: float) -> None:
    """The table has its own figures."""


def server(pipe: Connection, replica: int, ways: Sequence[CallPlan], slots: int, driver_pid: int) -> None:
    """A process that serves until all callers have closed, and then sends the seconds that it has worked."""

    async def main() -> None:
        name = ways[0].server
        endpoint = await opened(ways[0].server_host, driver_pid)
        live = LiveServe("generator.turns", ways, endpoint, Activity(name), Lease("", name, endpoint), unread)
        pipe.send(endpoint.address)
        for address in pipe.recv():
            endpoint.connect(address.host, address)
        busy_s = 0.0

        async def answer(asked: Asked) -> Served:
            nonlocal busy_s
            await asyncio.sleep(asked.service_s)
            busy_s += asked.service_s
            return Served(replica)

        pipe.send("ready")
        await live.serve(answer, slots)
        pipe.send(busy_s)
        await endpoint.close()

    uvloop.run(main())


async def opened(host: str, driver_pid: int) -> Endpoint:
    endpoint = Endpoint(host, run_id="bench", driver_pid=driver_pid)
    await endpoint.open()
    return endpoint


async def session(call: LiveCall, name: str, times_s: Sequence[tuple[float, float]]) -> list[int]:
    """The replicas that served one session. `times_s`: for each turn that of the service, and of the step after it."""
    served = []
    for service_s, step_s in times_s:
        reply = await call.call(Asked(service_s), session=name, group="", priority=0, timeout_s=None)
        served.append(reply.replica)
        await asyncio.sleep(step_s)
    call.forget(name)
    return served


def drawn(options: Options, caller: int, repetition: int) -> Iterator[list[tuple[float, float]]]:
    """The times of each session of a caller."""
    dice = random.Random(f"{caller} {repetition}")
    for _ in range(options.sessions):
        turns = options.turns * (10 if dice.random() < 0.1 else 1)
        yield [(dice.expovariate(1 / options.service_s), dice.expovariate(1 / options.step_s)) for _ in range(turns)]


async def calling(call: LiveCall, sessions: Iterator[list[tuple[float, float]]], alive: int) -> list[list[int]]:
    """The replicas that served each session; `alive` sessions at a time, the next when one ends."""
    numbered, found = enumerate(sessions), []

    async def one_after_another() -> None:
        for number, times_s in numbered:
            found.append(await session(call, f"session {number}", times_s))

    await asyncio.gather(*(one_after_another() for _ in range(alive)))
    call.close()
    return found


async def ask(options: Options, calls: Sequence[CallPlan], repetition: int, pipes: Sequence[Connection]) -> Outcome:
    """Play all sessions against servers that wait at the other ends of `pipes`."""
    by_caller = grouped(calls, lambda way: way.caller)
    endpoints = [await opened(ways[0].caller_host, os.getpid()) for ways in by_caller]
    servers = [pipe.recv() for pipe in pipes]
    for endpoint, address in itertools.product(endpoints, servers):
        endpoint.connect(address.host, address)
    for pipe in pipes:
        pipe.send([endpoint.address for endpoint in endpoints])
    for pipe in pipes:
        pipe.recv()
    playing = []
    for caller, (endpoint, ways) in enumerate(zip(endpoints, by_caller, strict=True)):
        call = LiveCall("environment.generate", ways, endpoint, Activity(ways[0].caller), unread)
        playing.append(calling(call, drawn(options, caller, repetition), options.alive))
    began = perf_counter()
    served = [one for found in await asyncio.gather(*playing) for one in found]
    took_s = perf_counter() - began
    busy_s = tuple(pipe.recv() for pipe in pipes)
    for endpoint in endpoints:
        await endpoint.close()
    pairs = [before == after for one in served for before, after in itertools.pairwise(one)]
    return Outcome(busy_s, sum(pairs) / len(pairs), sum(map(len, served)) / took_s)


def measure(options: Options, margin: int | None, repetition: int) -> Outcome:
    pipes, processes = [], []
    calls = planned(options, margin)
    for replica, ways in enumerate(grouped(calls, lambda way: way.server)):
        pipe, other = SPAWN.Pipe()
        arguments = (other, replica, ways, options.slots, os.getpid())
        processes.append(SPAWN.Process(target=server, args=arguments, daemon=True))
        processes[-1].start()
        pipes.append(pipe)
    outcome = uvloop.run(ask(options, calls, repetition, pipes))
    for process in processes:
        process.join()
    return outcome


def main(options: Options) -> int:
    if options.real:
        sizes = {"repetitions": options.repetitions, "margin": options.margin, "steps": options.steps}
        return 0 if agents_stack.measure(**sizes) else 1
    systems = {f"margin {options.margin}": options.margin, "no bound": NEVER, "no affinity": None}
    found: dict[str, list[Outcome]] = {system: [] for system in systems}
    for repetition in range(options.repetitions):
        for system, margin in systems.items():
            found[system].append(measure(options, margin, repetition))
    report(found)
    return 0


def report(found: dict[str, list[Outcome]]) -> None:
    print(f"{'':14}{'':18}{'median':>10}{'least':>10}{'most':>10}")
    lines = []
    for system, outcomes in found.items():
        for what in outcomes[0].figures():
            values = [outcome.figures()[what] for outcome in outcomes]
            middle, least, most = median(values), min(values), max(values)
            print(f"{system:14}{what:18}{middle:10,.4g}{least:10,.4g}{most:10,.4g}")
            line = {"benchmark": "agents", "case": "routing", "system": system, "value": middle, "unit": what}
            lines.append(line | {"min": least, "max": most, "repetitions": len(values)})
    print("\n" + "\n".join(map(json.dumps, lines)))


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options, description=__doc__)))
