"""The graph of a rig: the node under test, and at each of its ports a node in place of the rest of a graph."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict

from flowrl.errors import GraphError
from flowrl.graph.analysis.place import HostPlan
from flowrl.graph.analysis.plan import Plan, make_plan, routes_of
from flowrl.graph.graph import Graph, carried_type
from flowrl.graph.machine import Cluster, Machine
from flowrl.graph.node import Node
from flowrl.graph.ports import Call, In, Out, Port, Serve
from flowrl.messages import Weights
from flowrl.runtime.process.context import ReplicaPlace
from flowrl.runtime.process.engine import ProcessSpec
from flowrl.testing.record import port_key
from flowrl.testing.rig_engine import HOST
from flowrl.testing.rig_nodes import Answer, Answerer, Asker, Collector, Feeder, with_port
from flowrl.wire.connection import IpcTransport

CLUSTER = Cluster((Machine((0,), memory_bytes=64 << 30),))
ROOM = 1 << 20
"""Messages that a lane of a rig can hold: all that a test feeds is on its way at once, and so is part of a snapshot."""


class Surroundings(TypedDict, total=False):
    """What a node under test finds in its `context`, and how many groups its source may admit."""

    replica: int
    num_replicas: int
    seed: int
    steps: int | None
    start_version: int
    window: int | None
    in_pieces: bool
    max_staleness: int | None
    longest_asked: int | None
    run_dir: str
    """By default a folder that is removed with the rig."""
    cores: tuple[int, ...]
    num_groups: int | None
    """Groups that are admitted; None, the default: all."""


class RigGraph:
    """The graph that the module describes. Raises GraphError for a node whose `check` finds problems."""

    def __init__(
        self,
        node: Node,
        name: str,
        answers: Mapping[str, Answer],
        *,
        ignore: Collection[str] = (),
        unread: Collection[str] = (),
    ) -> None:
        self.node = node
        self._unread = unread
        self._tickets: dict[str, int] = {}
        self.name = name or node.name or "node"
        self.feeders: dict[str, Feeder] = {}
        self.collectors: dict[str, Collector] = {}
        self.askers: dict[str, Asker] = {}
        self.graph = Graph("rig")
        node.name, node.graph = "", None  # the node may be in a graph, or have been in another rig
        self.graph.add(self.name, node)
        self.graph.placed[self.name] = replace(self.graph.placed[self.name], cpus=0, gpus=0)
        for key in (*answers, *ignore, *unread):
            self.port(key)
        for port in node.ports.values():
            if port.name in ignore or (isinstance(port, Call) and port.name not in answers):
                self.graph.ignore(port)
            else:
                self._join(port, answers)
        self.plan = self._plan()
        problems = [*self.graph.mistakes, *(f"node {self.name}: {text}" for text in node.check(self.plan.numbers))]
        if problems:
            raise GraphError(problems)

    def port(self, key: Port | str, *kinds: type[Port]) -> str:
        """The name of a port of the node. Raises ValueError if it has no such port, or one of another kind."""
        name = port_key(key)
        port = self.node.ports.get(name)
        if port is None or (isinstance(key, Port) and key is not port):
            known = ", ".join(self.node.ports) or "none"
            raise ValueError(f"node {self.name!r} has no port {name!r}; it has {known}")
        if kinds and not isinstance(port, kinds):
            wanted = " or ".join(kind.__name__ for kind in kinds)
            raise ValueError(f"port {name!r} of node {self.name!r} is no {wanted} port, but {port!r}")
        return name

    def _join(self, port: Port, answers: Mapping[str, Answer]) -> None:
        """Add the node at the other end of `port`, and the edge between them."""
        if isinstance(port, In):
            self._feed(port)
        elif isinstance(port, Out):
            self._collect(port)
        elif isinstance(port, Call):
            serve: Any = Serve
            server = self.graph.add(f"answer_{port.name}", with_port(Answerer, serve[port.types])(port))
            server.answer = answers[port.name]
            self.graph.call(port, server.port)
        elif isinstance(port, Serve):
            call: Any = Call
            asker = self.graph.add(f"ask_{port.name}", with_port(Asker, call[port.types])(port))
            self.askers[port.name] = asker
            self.graph.call(asker.port, port)

    def _feed(self, port: In[Any]) -> None:
        kind: Any = carried_type(port)
        feeder = self.feeders[port.name] = self.graph.add(f"feed_{port.name}", with_port(Feeder, Out[kind])(port))
        feeder.tickets = self._tickets
        if issubclass(kind, Weights):
            self.graph.latest(feeder.port, port)
        else:
            self.graph.connect(feeder.port, port, capacity=ROOM, dispatch="gang" if self.node.gang else "share")

    def _collect(self, port: Out[Any]) -> None:
        kind: Any = carried_type(port)
        into = self.graph.add(f"collect_{port.name}", with_port(Collector, In[kind])(port))
        self.collectors[port.name] = into
        unread = port.name in self._unread
        if not unread:
            into.read()
        if issubclass(kind, Weights):
            self.graph.latest(port, into.port)
        else:
            self.graph.connect(port, into.port, capacity=1 if unread else ROOM)

    def _plan(self) -> Plan:
        """The plan with all nodes in one host. A feeder of weights is no trainer: nothing is lost to it."""
        plan = make_plan(self.graph, CLUSTER)
        host = HostPlan(HOST, tuple(replica for host in plan.hosts for replica in host.nodes))
        trains = self.name in plan.trainers
        return replace(
            plan,
            hosts=(host,),
            lanes=tuple(replace(lane, producer_host=HOST, consumer_host=HOST) for lane in plan.lanes),
            calls=tuple(replace(call, caller_host=HOST, server_host=HOST) for call in plan.calls),
            trainers=plan.trainers if trains else (),
            ports=plan.ports if trains else tuple(replace(port, trainers=()) for port in plan.ports),
        )

    def spec(self, run_id: str, resume: Path | None, around: Surroundings) -> ProcessSpec:
        resume_dir = None if resume is None else str(resume)
        places = tuple(self._place(name, run_id, resume_dir, around) for name in self.graph.nodes)
        return ProcessSpec(HOST, run_id, os.getpid(), "", {}, places, self.plan, (), transport=IpcTransport())

    def _place(self, name: str, run_id: str, resume_dir: str | None, around: Surroundings) -> ReplicaPlace:
        return ReplicaPlace(
            node=name,
            replica=0,
            num_replicas=1,
            run_dir=around.get("run_dir", ""),
            seed=around.get("seed", 0),
            steps=around.get("steps"),
            cores=around.get("cores", ()),
            gpus=(),
            resume_dir=resume_dir,
            start_version=around.get("start_version", 0),
            run_id=run_id,
            max_staleness=around.get("max_staleness"),
            window=around.get("window"),
            longest_asked=around.get("longest_asked"),
            in_pieces=around.get("in_pieces", False),
            weight_routes=routes_of(self.plan, name),
        )
