"""The loss of a host that the run goes on without: one whose replicas others stand in for.

`flowrl.graph.analysis.stand_ins` says which. Callers ask another replica what it had not answered, and report what it
had answered and not reported; tickets no longer wait for it, nor do locks.

Invariant: everything of the lost host that arrives after its loss is dropped, in each process at the time at which it
hears of the loss. So what it had reported until then and what its callers report are one or the other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Protocol

from flowrl.channel.endpoint import Endpoint
from flowrl.graph.analysis.plan import Plan
from flowrl.graph.analysis.stand_ins import may_end
from flowrl.runtime.driver.barrier import Locks
from flowrl.runtime.driver.phases import Phases
from flowrl.runtime.ledger.accounting import Accounting
from flowrl.runtime.telemetry.statistics import Statistics

GENERATORS_LOST = "generators_lost"
"""The counter that a generator counts whose engine has died, and the driver one whose process has."""


class Losing(Protocol):
    """What a loss concerns; implemented by the driver."""

    accounting: Accounting
    phases: Phases
    statistics: Statistics
    running: bool
    """All nodes are set up."""


class HostLosses:
    """The losses of one run; `hosts` are those that are left, `warn` shows the user a text."""

    def __init__(
        self,
        run: Losing,
        plan: Plan,
        hosts: Iterable[str],
        endpoint: Endpoint,
        locks: Locks,
        warn: Callable[[str], None],
    ) -> None:
        self._run = run
        self._plan = plan
        self._hosts = hosts
        self._endpoint = endpoint
        self._locks = locks
        self._warn = warn
        self._ended: set[str] = set()

    def may_end(self, host: str) -> bool:
        plan = next(one for one in self._plan.hosts if one.name == host)
        left = may_end(plan, ended=self._ended, hosts=self._plan.hosts, stand_ins=self._plan.stand_ins)
        return self._run.running and left

    def has_ended(self, host: str, reason: str) -> None:
        self._ended.add(host)
        replica_ids = next(one.nodes for one in self._plan.hosts if one.name == host)
        self._locks.claimants_died({host, *replica_ids})
        for replica_id in replica_ids:
            self._run.accounting.consumer_died(replica_id)
            self._run.phases.has_ended(replica_id)
            self._run.statistics.lost(replica_id, GENERATORS_LOST, time.monotonic())
        for other in self._hosts:
            self._endpoint.notify(other, "lost", {"host": host, "reason": reason, "replica_ids": list(replica_ids)})
        names = ", ".join(replica_ids)
        self._warn(f"{names}: out of service, its requests go to the other replicas: {reason}")
