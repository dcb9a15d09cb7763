"""Every error that flowrl raises on purpose.

An error says what was found, what was needed and the change that mends it. The command line
prints `str(error)` and nothing else, so the message has to be complete on its own.
"""

from __future__ import annotations

from collections.abc import Sequence


class FlowrlError(Exception):
    """Base of all errors a user can cause or has to read. Its text is shown without a traceback."""


class ConfigError(FlowrlError):
    """A setting, path, task, model or reward that cannot work."""


class GraphError(FlowrlError):
    """A graph that cannot run. `problems` holds one complete sentence or more for each finding."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(f"- {problem}" for problem in self.problems))


class WireError(FlowrlError):
    """Bytes that are no valid frame, or a message of the wrong schema. Names the lane."""


class SchemaError(FlowrlError):
    """A stored message whose fields do not fit its class. Names the fields."""


class LaneFailed(FlowrlError):
    """The process at the other end of a lane failed; never to be taken for end of stream."""


class NodeFailed(FlowrlError):
    """A node raised, or its process died.

    `remote_traceback` is the text of the traceback in the node's own process, "" if the process
    died without one. `ticket` is the ticket of the item it was working on, None if there was none.
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
    """Nothing can move any more. The text holds the wait-for cycle, or what each node waits for."""


class SampleFailed(FlowrlError):
    """Raised in a node body to fail one sample: it becomes a tombstone and the run goes on."""
