"""Every error that flowrl raises on purpose.

An error states what was found, what was needed and the change that fixes it. The command line
prints `str(error)` and nothing else, so the message has to be complete on its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class FlowrlError(Exception):
    """Base of all errors that a user can cause or has to read. The text is shown without a traceback."""


class ConfigError(FlowrlError):
    """A setting, path, task, model or reward is invalid."""


class GraphError(FlowrlError):
    """The graph cannot run. `problems` holds one or more complete sentences for each finding."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(f"- {problem}" for problem in self.problems))


class WireError(FlowrlError):
    """The bytes are not a valid frame, or a message has the wrong schema. Names the lane."""


class SchemaError(FlowrlError):
    """The fields of a stored message do not match its class. Names the fields."""


class LaneFailed(FlowrlError):
    """The process at the other end of a lane failed. Must never be treated as end of stream."""


class NodeFailed(FlowrlError):
    """A node raised, or its process died.

    `remote_traceback` is the text of the traceback in the node's own process, "" if the process
    died without one. `ticket` is the ticket of the item that the node was processing, None if there was none.
    """

    def __init__(
        self, node: str, replica: int, reason: str, *, remote_traceback: str = "", ticket: int | None = None
    ) -> None:
        self.node = node
        self.replica = replica
        self.reason = reason
        self.remote_traceback = remote_traceback
        self.ticket = ticket
        at = "" if ticket is None else f" (ticket {ticket})"
        tail = f"\n{remote_traceback.rstrip()}" if remote_traceback else ""
        super().__init__(f"node {node!r}, replica {replica}, failed{at}: {reason}{tail}")


class Stalled(FlowrlError):
    """No node can make progress. The text holds the wait-for cycle, or what each node waits for."""


class SampleFailed(FlowrlError):
    """Raised in a node body to fail one sample: the sample becomes a tombstone and the run continues."""


class OutOfService(FlowrlError):
    """Raised in the body of a Serve port: this replica no longer answers requests, so its callers ask the others.

    A caller that has no other replica to ask also raises it.
    """


class AttemptFailed(FlowrlError):
    """An attempt at an episode is void, and the episode's reward is unknown.

    `cause` is a word for the ledger. `again` is False if a further attempt would fail in the same way. `played` is what
    the node has of the attempt so far; None if the attempt failed before it started. Attempts that one event made void
    together carry the event's name in `event`; "" means that the event concerns only this attempt.
    """

    def __init__(self, cause: str, text: str, *, again: bool = True, played: Any = None, event: str = "") -> None:
        self.cause = cause
        self.again = again
        self.played = played
        self.event = event
        super().__init__(text)
