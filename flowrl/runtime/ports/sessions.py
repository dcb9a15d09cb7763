"""Chooses the server replica for a request: the one that has served its session, unless that replica is much busier.

The load of a replica is the number of requests that this caller has open there, plus the number that the other callers
had open there when the replica last replied to this caller. A replica that has not replied yet is given the smallest
number that any replica has reported for the other callers: if it counted as idle, all callers would go to the slowest
replica, which replies last.

Invariants
- A request goes to a replica whose load exceeds the smallest load by at most the margin; without a margin, to one with
  the smallest load.
- A session stays on its replica for as long as that rule allows. A new session goes where the first session of its
  group went, for as long as the rule allows; otherwise, and without a group, to a replica with the smallest load.
- Among replicas of equal load the choice is round-robin. Each replica of the calling node starts at a different server
  replica, so that callers without any reply yet do not all choose the same one.
- A replica where this caller has nothing open sends it no reply, so the replica's last report would never change. Each
  reply of another replica therefore lowers that report by one request.
- A replica that is out of service is not chosen again; its sessions and groups move to the other replicas. Once all
  replicas are out of service, the choice is as if all were in service: the caller gives up then.
- A group is known while at least one of its sessions is known. At most `most_sessions` sessions are known: a new
  session replaces the least recently used one, which counts as new if it asks again.
"""

from __future__ import annotations

import zlib
from collections import OrderedDict
from dataclasses import dataclass

MOST_SESSIONS = 1 << 16
"""Number of sessions that one Call port of a replica remembers; each takes about 300 bytes, including its names."""


@dataclass(frozen=True)
class RoutedTo:
    """Where a request goes."""

    replica: int
    moved: bool
    """Whether the request's session was on another replica before."""


@dataclass(slots=True)
class GroupHome:
    """Where the first session of a group went, and how many of its sessions are known."""

    replica: int
    num_sessions: int = 0


@dataclass(slots=True)
class SessionHome:
    """Where a session is, and its group ("" for none)."""

    replica: int
    group: str


class SessionRouter:
    """See the module. `caller` is the replica that asks, for example "environment/0".

    Without a `margin`, sessions and groups are not remembered, and each request goes to a replica with the smallest
    load.
    """

    def __init__(
        self, num_replicas: int, *, margin: int | None, caller: str, most_sessions: int = MOST_SESSIONS
    ) -> None:
        self._margin = margin
        self._most_sessions = most_sessions
        self._own = [0] * num_replicas
        """Open requests of this caller, by replica."""
        self._others: list[int | None] = [None] * num_replicas
        """Open requests of all other callers, by replica, as last reported; None before the first report."""
        self._sessions: OrderedDict[str, SessionHome] = OrderedDict()
        """In order of last use, the least recently used session first."""
        self._groups: dict[str, GroupHome] = {}
        self._in_service = [True] * num_replicas
        node, _, index = caller.partition("/")
        self._next = (zlib.crc32(node.encode()) + int(index or 0)) % num_replicas
        """The replica that is preferred first among replicas of equal load."""

    @property
    def loads(self) -> tuple[int, ...]:
        """The load of each replica."""
        unknown = min((others for others in self._others if others is not None), default=0)
        pairs = zip(self._own, self._others, strict=True)
        return tuple(own + (unknown if others is None else others) for own, others in pairs)

    @property
    def num_in_service(self) -> int:
        return sum(self._in_service)

    @property
    def num_sessions(self) -> int:
        return len(self._sessions)

    @property
    def num_groups(self) -> int:
        return len(self._groups)

    def begin(self, session: str = "", group: str = "") -> RoutedTo:
        """Choose the replica for a request, and count the request as open there until `end`."""
        choice = self._choose(session, group)
        self._own[choice.replica] += 1
        return choice

    def end(self, replica: int, others: int | None = None) -> None:
        """A request has ended.

        `others` is how many requests the other callers have open at `replica`, by the reply; None without a reply.
        """
        self._own[replica] -= 1
        if others is None:
            return
        self._others = [
            before - 1 if before and not own else before for own, before in zip(self._own, self._others, strict=True)
        ]
        self._others[replica] = others

    def leave(self, replica: int) -> None:
        """This replica is out of service from now on."""
        self._in_service[replica] = False

    def forget(self, session: str) -> None:
        """The session has ended. Does nothing for an unknown session."""
        home = self._sessions.pop(session, None)
        if home is not None and home.group:
            group = self._groups[home.group]
            group.num_sessions -= 1
            if not group.num_sessions:
                del self._groups[home.group]

    def _choose(self, session: str, group: str) -> RoutedTo:
        if not session or self._margin is None:
            return RoutedTo(self._least_loaded(), moved=False)
        home = self._sessions.get(session)
        if home is None:
            return RoutedTo(self._add(session, group), moved=False)
        self._sessions.move_to_end(session)
        if self._is_near(home.replica):
            return RoutedTo(home.replica, moved=False)
        home.replica = self._least_loaded()
        return RoutedTo(home.replica, moved=True)

    def _add(self, session: str, group: str) -> int:
        """Remember a new session. Returns its replica."""
        if len(self._sessions) == self._most_sessions:
            self.forget(next(iter(self._sessions)))
        known = self._groups.get(group)
        replica = known.replica if known is not None and self._is_near(known.replica) else self._least_loaded()
        if group:
            self._groups.setdefault(group, GroupHome(replica)).num_sessions += 1
        self._sessions[session] = SessionHome(replica, group)
        return replica

    def _is_near(self, replica: int) -> bool:
        """Whether the margin allows a request to go to `replica`."""
        loads = self.loads
        least = min(loads[index] for index in self._candidates())
        return self._margin is not None and self._in_service[replica] and loads[replica] <= least + self._margin

    def _least_loaded(self) -> int:
        loads = self.loads
        order = sorted(self._candidates(), key=lambda replica: (replica - self._next) % len(loads))
        chosen = min(order, key=loads.__getitem__)
        self._next = (chosen + 1) % len(loads)
        return chosen

    def _candidates(self) -> list[int]:
        """The replicas in service; all replicas, once none is in service."""
        every = range(len(self._in_service))
        return [replica for replica in every if self._in_service[replica]] or list(every)
