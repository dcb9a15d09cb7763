"""How a rig fails a test: by the node's own failure, by a wait that took too long, or by messages left over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flowrl.errors import NodeFailed
from flowrl.graph.graph import carried_type
from flowrl.messages import Message, Weights
from flowrl.runtime.process.engine import NodeError, leaves_of
from flowrl.testing.rig_engine import RecordedReplica
from flowrl.testing.rig_nodes import Feeder


class RigTimeout(AssertionError):
    """Something that a test waits for has not come in time. The text says what the node is waiting for."""


class Leaked(AssertionError):
    """A node ended without finishing messages that it was sent: in a run their tickets would not return."""


def failure_in(error: BaseException) -> BaseException:
    """What a test sees of an error of the engine: the exception that the node raised, with a note that names the node.

    Where several nodes failed, causes come before their consequences.
    """
    if not isinstance(error, BaseExceptionGroup):
        return _raised(error)
    leaves = sorted(leaves_of(error), key=lambda leaf: isinstance(leaf, NodeError) and leaf.report["consequence"])
    return _raised(leaves[0])


def _raised(error: BaseException) -> BaseException:
    if not isinstance(error, NodeError):
        return error
    cause = error.__cause__
    if cause is None:
        return node_failed(error.report)
    found = failure_in(cause)
    ticket = error.report["ticket"]
    note = f"raised by node {error.report['node']!r}" + ("" if ticket is None else f", which worked on ticket {ticket}")
    if note not in getattr(found, "__notes__", ()):
        found.add_note(note)
    return found


def node_failed(report: dict[str, Any]) -> NodeFailed:
    """The error for a failure for which only the engine's report is left."""
    return NodeFailed(
        report["node"],
        report["replica"],
        report["reason"],
        remote_traceback=report["traceback"],
        ticket=report["ticket"],
    )


def situation(replica: RecordedReplica, feeders: Mapping[str, Feeder]) -> str:
    """What the node waits for and has done, as the end of a sentence about something that has not come."""
    report = replica.report()
    waits = [f"{kind} of {what} for {for_s:.1f} s" for kind, what, for_s in report["waits"]]
    if report["ended"]:
        parts = ["the node has ended"]
    elif waits:
        parts = [f"the node waits for {', '.join(waits)}"]
    else:
        parts = [f"the node is in its own code: {', '.join(report['alive']) or 'nothing there will move it'}"]
    for name, feeder in feeders.items():
        parts.append(f"port {name!r} took {replica.inbound[name].num_taken} of {feeder.num_fed} message(s)")
    if held := replica.open_items.unfinished():
        parts.append(f"{len(held)} are unfinished")
    return "; ".join(parts)


def left_over(replica: RecordedReplica, feeders: Mapping[str, Feeder]) -> str:
    """What a node that has ended did not take or finish; "" if there is nothing."""
    found = []
    for name, feeder in feeders.items():
        untaken = feeder.num_fed - replica.inbound[name].num_taken
        if untaken and not issubclass(carried_type(feeder.of), Weights):  # only the newest weights exist
            found.append(f"{untaken} message(s) on port {name!r} that it did not take")
    held = [f"{_called(item.body)} of {item.port}" for item in replica.open_items.unfinished()]
    if held:
        found.append(
            f"{len(held)} unfinished message(s): {', '.join(held)}; name each in `send(..., made_from=[...])`, or end "
            "it with `self.PORT.drop(item, reason)` or `self.PORT.finish(item)`"
        )
    return ", and ".join(found)


def _called(message: Message) -> str:
    """ "Sample g:0" """
    identity = getattr(message, "sample_id", "") or getattr(message, "group_id", "")
    return f"{type(message).__name__} {identity}".rstrip()
