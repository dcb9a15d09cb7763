"""Converts a node's failure to plain data that names the node, for the driver and the other hosts."""

from __future__ import annotations

import errno
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from flowrl.errors import FlowrlError, LaneFailed, NodeFailed, SampleFailed
from flowrl.runtime.activity.ending import as_failure, is_cancelled
from flowrl.runtime.host.replica import Replica

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)
"""Errors of the disk, not of the writing code: reported without a traceback."""


class NodeError(Exception):
    """A node's failure as plain data, inside this host."""

    def __init__(self, report: dict[str, Any]) -> None:
        super().__init__(report["reason"])
        self.report = report


@contextmanager
def attributed(replica: Replica) -> Iterator[None]:
    """Exceptions raised inside reach the driver as failures of the node. A node boundary."""
    try:
        yield
    except BaseException as error:  # the boundary to the node's code, which may raise anything
        failure = as_failure(error, cancelled=is_cancelled())
        if not isinstance(failure, Exception):
            raise
        told = failure_of(replica, failure)
        raise NodeFailed(
            told["node"], told["replica"], told["reason"], remote_traceback=told["traceback"], ticket=told["ticket"]
        ) from error


def failure_of(replica: Replica, error: BaseException) -> dict[str, Any]:
    place = replica.place
    return report_of(error) | {"node": place.node, "replica": place.replica, "ticket": replica.open_items.failed_ticket}


def report_of(error: BaseException) -> dict[str, Any]:
    """The report of an exception; for an exception group, of the first one that is not a LaneFailed."""
    while isinstance(error, BaseExceptionGroup):
        leaves = leaves_of(error)
        error = next((leaf for leaf in leaves if not isinstance(leaf, LaneFailed)), leaves[0])
    told = isinstance(error, FlowrlError) or (isinstance(error, OSError) and error.errno in NO_SPACE)
    reason = str(error) if isinstance(error, FlowrlError) else f"{type(error).__name__}: {error}"
    if isinstance(error, SampleFailed):
        reason = f"it raised SampleFailed({reason!r}) outside of `self.PORT.each(...)`, so the sample is unknown"
    return {
        "reason": reason,
        "traceback": "" if told else "".join(traceback.format_exception(error)),
        "ticket": None,
        "consequence": isinstance(error, LaneFailed),
    }


def leaves_of(group: BaseExceptionGroup[Any]) -> list[Any]:
    return [
        leaf
        for error in group.exceptions
        for leaf in (leaves_of(error) if isinstance(error, BaseExceptionGroup) else [error])
    ]
