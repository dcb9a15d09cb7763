"""The loss of a host that the run goes on without: one whose replicas others stand in for.

`flowrl.graph.analysis.stand_ins` says which. Callers ask another replica what it had not answered, and report what it
had answered and not reported; tickets no longer wait for it, nor do locks.

Invariant: everything of the lost host that arrives after its loss is dropped, in each process at the time at which it
hears of the loss. So what it had reported until then and what its callers report are one or the other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Protocol

from flowrl.channel.endpoint import Endpoint
from flowrl.graph.analysis.plan import Plan
from flowrl.graph.analysis.stand_ins import may_end
from flowrl.runtime.driver.phases import Phases
from flowrl.runtime.driver.processes.barrier import Locks
from flowrl.runtime.driver.run_records import RunRecords
from flowrl.runtime.driver.run_state import RunState

GENERATORS_LOST = "generators_lost"
"""The counter that a generator counts whose engine has died, and the driver one whose process has."""


class HostsLeft(Protocol):
    """The hosts of a run that are not lost, by name."""

    lost: set[str]

    def __iter__(self) -> Iterator[str]: ...


class HostLosses:
    """The losses of one run; `warn` shows the user a text."""

    def __init__(
        self,
        plan: Plan,
        hosts: HostsLeft,
        endpoint: Endpoint,
        *,
        locks: Locks,
        records: RunRecords,
        phases: Phases,
        state: RunState,
        warn: Callable[[str], None],
    ) -> None:
        self._records = records
        self._phases = phases
        self._state = state
        self._plan = plan
        self._hosts = hosts
        self._endpoint = endpoint
        self._locks = locks
        self._warn = warn

    def may_end(self, host: str) -> bool:
        plan = next(one for one in self._plan.hosts if one.name == host)
        left = may_end(plan, ended=self._hosts.lost, hosts=self._plan.hosts, stand_ins=self._plan.stand_ins)
        return self._state.running and left

    def has_ended(self, host: str, reason: str) -> None:
        replica_ids = next(one.nodes for one in self._plan.hosts if one.name == host)
        self._locks.claimants_died({host, *replica_ids})
        for replica_id in replica_ids:
            self._records.accounting.consumer_died(replica_id)
            self._phases.has_ended(replica_id)
            self._records.statistics.lost(replica_id, GENERATORS_LOST, time.monotonic())
        for other in self._hosts:
            self._endpoint.notify(other, "lost", {"host": host, "reason": reason, "replica_ids": list(replica_ids)})
        names = ", ".join(replica_ids)
        self._warn(f"{names}: out of service, its requests go to the other replicas: {reason}")
