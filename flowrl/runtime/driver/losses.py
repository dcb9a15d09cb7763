"""Handles the loss of a host without which the run continues, because other replicas stand in for its replicas.

`flowrl.graph.analysis.stand_ins` says which hosts these are. Callers send the requests that the lost host had not
answered to another replica, and report those that it had answered but not reported. Tickets and locks no longer wait
for the host.

Invariant: each process drops everything from the lost host that arrives after the process was told of the loss. So an
answer is reported either by the host, before that, or by its caller, but not by both.
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
"""Counter of lost generators: one whose engine has died counts itself; the driver counts one whose process has died."""


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
