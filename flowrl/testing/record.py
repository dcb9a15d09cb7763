"""What a node did under a rig, in order: messages sent, losses booked, events and metrics reported."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar, overload

from flowrl.graph.ports import Out, Port
from flowrl.messages import Message, Tombstone

T = TypeVar("T", bound=Message)


@dataclass(frozen=True)
class Sent:
    """One message that left the node."""

    message: Message
    ticket: int
    """The ticket under which it travels, -1 for none: that of its parents if they all have the same one."""
    made_from: tuple[Message, ...]
    """The messages that it was made from, as the node received them, without lost ones; empty for a source."""


@dataclass(frozen=True)
class Lost:
    """One message that the node dropped or failed, as the ledger books it."""

    message: Message
    state: str
    """dropped | filtered | failed"""
    reason: str


@dataclass
class NodeRecord:
    """Ports are named as in the class of the node, or given as the node's own (`node.kept`), which types the result."""

    outputs: dict[str, list[Sent]] = field(default_factory=dict)
    """Out port -> what was sent on it, tombstones included."""
    lost: list[Lost] = field(default_factory=list)
    ledger: list[tuple[Any, ...]] = field(default_factory=list)
    """Events for the ledger, such as ("scored", "g:0", 1.0, 1700000000.0); see flowrl.runtime.ledger.ledger_client."""
    derived: list[tuple[str, str, list[str]]] = field(default_factory=list)
    """What `context.derive` was asked for: (parent, label, ids of the derived samples)."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Counter (`context.metric`) -> its sum."""
    gauges: dict[str, list[float]] = field(default_factory=dict)
    """Gauge (`context.gauge`) -> every observation."""
    episodes: list[dict[str, Any]] = field(default_factory=list)
    """What `context.episode` was given, parsed."""
    judged: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    """What `context.judged` was given."""
    progress: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    replies: dict[str, list[Message]] = field(default_factory=dict)
    """Serve port -> its replies to the requests that `run_node` was given for it."""
    changed: Callable[[], None] = lambda: None
    """Called after every change."""

    @overload
    def sent(self, port: Out[T]) -> list[T]: ...
    @overload
    def sent(self, port: str) -> list[Any]: ...
    def sent(self, port: Out[Any] | str) -> list[Any]:
        """The messages sent on `port`, without tombstones."""
        return [one.message for one in self._of(port) if not isinstance(one.message, Tombstone)]

    def made_from(self, port: Out[Any] | str) -> list[tuple[Message, ...]]:
        """For each of the messages `sent` on `port`: what it was made from."""
        return [one.made_from for one in self._of(port) if not isinstance(one.message, Tombstone)]

    def tombstones(self, port: Out[Any] | str) -> list[Tombstone]:
        """The markers that left on `port` in place of lost samples and groups."""
        return [one.message for one in self._of(port) if isinstance(one.message, Tombstone)]

    def groups(self, port: Out[Any] | str) -> list[list[Any]]:
        """The messages `sent` on `port` by their `group_id`, as a source admits them."""
        found: dict[str, list[Any]] = {}
        for message in self.sent(port):
            found.setdefault(message.group_id, []).append(message)
        return list(found.values())

    def reasons(self) -> list[tuple[str, str]]:
        """(state, reason) of everything `lost`."""
        return [(one.state, one.reason) for one in self.lost]

    def events(self, kind: str) -> list[tuple[Any, ...]]:
        """The `ledger` events of one kind, without the kind itself.

        Kinds are generated, scored, lost, step, finished, holds, evaluation, and for episodes request, abandoned, void,
        episode, episode failed.
        """
        return [event[1:] for event in self.ledger if event[0] == kind]

    def _of(self, port: Port | str) -> list[Sent]:
        return self.outputs[port_key(port)]


def port_key(port: Port | str) -> str:
    """The name of a port within its node."""
    return port if isinstance(port, str) else port.name
