"""flowrl: an actor-message dataflow engine for RL post-training of language models.

Importing it, and building a graph with it, loads neither ray nor torch, vllm, transformers or
deepspeed. The built-in nodes are in `flowrl.nodes`, tasks in `flowrl.tasks`, models in `flowrl.models`.
`flowrl.run` runs a graph in this process (`flowrl.commands.here`).
"""

from importlib import import_module
from typing import Any

from flowrl.errors import ConfigError, FlowrlError, GraphError, NodeFailed, SampleFailed
from flowrl.graph.analysis.check import check
from flowrl.graph.graph import Graph
from flowrl.graph.machine import Cluster, Machine
from flowrl.graph.node import Facts, Node
from flowrl.graph.ports import Ask, Call, In, Join, Members, Out, Serve, join
from flowrl.messages import Batch, Column, Group, Message, Prompt, Sample, Scored, Tombstone, Trainable, Weights
from flowrl.messages.episode import Episode

__all__ = [
    "Ask",
    "Batch",
    "Call",
    "Cluster",
    "Column",
    "ConfigError",
    "Episode",
    "Facts",
    "FlowrlError",
    "Graph",
    "GraphError",
    "Group",
    "In",
    "Join",
    "Machine",
    "Members",
    "Message",
    "Node",
    "NodeFailed",
    "Out",
    "Prompt",
    "Sample",
    "SampleFailed",
    "Scored",
    "Serve",
    "Tombstone",
    "Trainable",
    "Weights",
    "check",
    "join",
]


def __getattr__(name: str) -> Any:
    """`run` imports what a run needs, which declaring a graph does not."""
    if name == "run":
        return import_module("flowrl.commands.here").run
    raise AttributeError(f"module 'flowrl' has no attribute {name!r}")
