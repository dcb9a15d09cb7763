"""Which replica a request goes to: bounds of load, sessions that stay, groups together, nothing kept for ever."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl.wire.requests import RoutedTo, SessionRouter

MARGINS = st.integers(0, 4)
REPLICAS = st.integers(1, 4)
SESSIONS = st.sampled_from([f"s{index}" for index in range(6)])


@dataclass
class Play:
    """A router under operations drawn at random; `open` are the replicas of its open requests."""

    router: SessionRouter
    homes: dict[str, int] = field(default_factory=dict)
    """Session -> its replica, as the router has chosen it."""
    open: list[int] = field(default_factory=list)

    def ask(self, session: str, group: str = "") -> int:
        choice = self.router.begin(session, group)
        before = self.homes.get(session)
        assert choice.moved == (before is not None and before != choice.replica)
        if session:
            self.homes[session] = choice.replica
        self.open.append(choice.replica)
        return choice.replica

    def answer(self, which: int, others: int | None) -> None:
        if self.open:
            self.router.end(self.open.pop(which % len(self.open)), others)

    def forget(self, session: str) -> None:
        self.router.forget(session)
        self.homes.pop(session, None)


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), SESSIONS),
        st.tuples(st.just("answer"), st.integers(0, 30), st.none() | st.integers(0, 5)),
        st.tuples(st.just("forget"), SESSIONS),
    ),
    max_size=80,
)


def group_of(session: str) -> str:
    """Two groups of two; two sessions of no group."""
    return {"s0": "a", "s1": "a", "s2": "b", "s3": "b"}.get(session, "")


@given(REPLICAS, MARGINS, OPERATIONS)
def test_a_request_goes_within_the_margin_and_its_session_stays_while_that_holds(
    num_replicas: int, margin: int, operations: list[tuple[object, ...]]
) -> None:
    play = Play(SessionRouter(num_replicas, margin=margin, caller="asker/0"))
    for operation in operations:
        match operation:
            case ("ask", str(session)):
                loads, home = play.router.loads, play.homes.get(session)
                chosen = play.ask(session, group_of(session))
                assert loads[chosen] <= min(loads) + margin
                if home is not None and loads[home] <= min(loads) + margin:
                    assert chosen == home
                elif home is not None:
                    assert loads[chosen] == min(loads)
                assert play.router.loads[chosen] == loads[chosen] + 1
            case ("answer", int(which), others):
                assert others is None or isinstance(others, int)
                play.answer(which, others)
            case ("forget", str(session)):
                play.forget(session)
        assert play.router.num_sessions == len(play.homes)
        assert play.router.num_groups == len({group_of(session) for session in play.homes} - {""})


@given(REPLICAS, MARGINS, st.lists(SESSIONS, max_size=60))
def test_open_requests_differ_by_the_margin_and_one_at_most_while_none_ends(
    num_replicas: int, margin: int, sessions: list[str]
) -> None:
    router = SessionRouter(num_replicas, margin=margin, caller="asker/0")
    for session in sessions:
        router.begin(session)
        assert max(router.loads) - min(router.loads) <= margin + 1


@given(REPLICAS, st.lists(st.tuples(SESSIONS, st.booleans()), max_size=60))
def test_without_a_margin_a_request_goes_where_least_is_open_and_nothing_is_kept(
    num_replicas: int, asked: list[tuple[str, bool]]
) -> None:
    play = Play(SessionRouter(num_replicas, margin=None, caller="asker/0"))
    for session, ends in asked:
        loads = play.router.loads
        choice = play.router.begin(session, "group")
        assert loads[choice.replica] == min(loads) and not choice.moved
        assert (play.router.num_sessions, play.router.num_groups) == (0, 0)
        if ends:
            play.router.end(choice.replica, 0)


@given(REPLICAS, MARGINS, st.integers(1, 5), st.lists(st.tuples(st.integers(0, 20), st.integers(0, 3))))
def test_the_table_is_bounded_and_what_was_used_least_recently_goes_first(
    num_replicas: int, margin: int, most: int, asked: list[tuple[int, int]]
) -> None:
    router = SessionRouter(num_replicas, margin=margin, caller="asker/0", most_sessions=most)
    recent: list[tuple[int, int]] = []
    """(session, group), the least recently used first; a session has one group."""
    for number, group in asked:
        session = number * 4 + group
        before = router.num_sessions
        router.end(router.begin(f"s{session}", f"g{group}").replica, 0)
        known = (session, group) in recent
        recent = [one for one in recent if one != (session, group)] + [(session, group)]
        assert router.num_sessions == min(most, before + (not known))
        recent = recent[-most:]
        assert router.num_sessions == len(recent)
        assert router.num_groups == len({group for _, group in recent})
    for session, _ in recent:
        router.forget(f"s{session}")
    assert (router.num_sessions, router.num_groups, router.loads) == (0, 0, (0,) * num_replicas)


@given(REPLICAS, MARGINS, st.integers(1, 8), st.integers(0, 8))
def test_a_group_goes_together_while_its_replica_has_no_more_than_the_margin(
    num_replicas: int, margin: int, size: int, busy: int
) -> None:
    router = SessionRouter(num_replicas, margin=margin, caller="asker/0")
    for _ in range(busy):
        router.begin()
    first = router.begin("m0", "group").replica
    for member in range(1, size):
        loads = router.loads
        chosen = router.begin(f"m{member}", "group").replica
        assert (chosen == first) == (loads[first] <= min(loads) + margin)


def test_members_that_ask_one_after_another_all_go_together() -> None:
    router = SessionRouter(3, margin=0, caller="asker/0")
    homes = {}
    for turn in range(3):
        for member in range(8):
            choice = router.begin(f"m{member}", "group")
            homes.setdefault(member, choice.replica)
            assert choice.replica == homes[0] and not choice.moved, turn
            router.end(choice.replica, 0)


def test_a_group_begins_anew_when_its_sessions_have_ended() -> None:
    router = SessionRouter(2, margin=5, caller="asker/0")
    first = router.begin("a", "group").replica
    router.forget("a")
    router.forget("a")
    assert router.begin("b", "group").replica != first, "the other has nothing open"


def heard(margin: int | None) -> SessionRouter:
    """A router of two replicas that have both replied: nobody else has anything open."""
    router = SessionRouter(2, margin=margin, caller="asker/0")
    for replica in [router.begin().replica for _ in range(2)]:
        router.end(replica, 0)
    return router


def test_a_session_moves_when_its_replica_has_more_than_the_margin_and_stays_there() -> None:
    router = heard(margin=2)
    home = router.begin("s").replica
    router.end(home, 3)
    choice = router.begin("s")
    assert choice == RoutedTo(1 - home, moved=True)
    router.end(choice.replica, 2)
    assert router.loads == (2, 2), "the old replica's report has faded by one"
    assert router.begin("s") == RoutedTo(1 - home, moved=False)


def test_a_replica_that_has_not_replied_counts_as_the_one_where_others_have_least() -> None:
    router = SessionRouter(3, margin=None, caller="asker/0")
    first, second, third = (router.begin().replica for _ in range(3))
    router.end(first, 7)
    assert [router.loads[replica] for replica in (first, second, third)] == [7, 8, 8]
    router.end(second, 5)
    assert [router.loads[replica] for replica in (first, second, third)] == [6, 5, 6], "the first has faded by one"
    router.end(third, 0)
    assert [router.loads[replica] for replica in (first, second, third)] == [5, 4, 0]


def test_what_others_have_open_counts_as_last_reported() -> None:
    router = heard(margin=None)
    first = router.begin().replica
    router.end(first, 4)
    assert router.loads[first] == 4
    assert [router.begin().replica for _ in range(4)] == [1 - first] * 4
    assert {router.begin().replica for _ in range(2)} == {0, 1}, "both have four"


def test_a_report_that_is_not_renewed_fades() -> None:
    """The replica that was busy once would otherwise never be asked again, and so never report that it is idle."""
    router = heard(margin=None)
    busy = router.begin().replica
    router.end(busy, 10)
    chosen = []
    for _ in range(11):
        chosen.append(router.begin().replica)
        router.end(chosen[-1], 0)
    assert chosen == [1 - busy] * 10 + [busy]


def test_a_report_is_kept_while_a_request_there_will_renew_it() -> None:
    router = SessionRouter(2, margin=None, caller="asker/0")
    busy = router.begin().replica
    router.begin()
    router.begin()
    router.end(busy, 10)
    assert router.loads[busy] == 11
    for _ in range(5):
        router.end(router.begin().replica, 0)
    assert router.loads[busy] == 11


@pytest.mark.parametrize("num_replicas", [2, 3, 5])
def test_callers_that_have_heard_nothing_begin_at_different_replicas(num_replicas: int) -> None:
    for node in ("environment", "player", "env"):
        callers = [f"{node}/{index}" for index in range(num_replicas)]
        first = [SessionRouter(num_replicas, margin=2, caller=caller).begin("s").replica for caller in callers]
        assert sorted(first) == list(range(num_replicas))
        again = [SessionRouter(num_replicas, margin=2, caller=caller).begin("s").replica for caller in callers]
        assert again == first


def test_equals_take_it_by_rotation() -> None:
    router = SessionRouter(3, margin=2, caller="asker/1")
    chosen = []
    for index in range(9):
        chosen.append(router.begin(f"s{index}").replica)
        router.end(chosen[-1], 0)
    assert sorted(chosen[:3]) == [0, 1, 2] and chosen == chosen[:3] * 3


def test_a_replica_out_of_service_is_chosen_no_more_and_its_sessions_and_groups_move() -> None:
    router = SessionRouter(3, margin=2, caller="asker/0")
    home = router.begin("s0", "a").replica
    router.end(home, 0)
    router.leave(home)
    assert router.num_in_service == 2
    moved, member = router.begin("s0", "a"), router.begin("s1", "a")
    assert moved.moved and home not in (moved.replica, member.replica)
    assert router.begin("s0", "a") == RoutedTo(moved.replica, moved=False), "it stays where it has moved"
    others = {replica for _ in range(6) if (replica := router.begin().replica) is not None}
    assert others == {0, 1, 2} - {home}


def test_the_load_of_a_replica_out_of_service_does_not_bind_the_others() -> None:
    router = SessionRouter(3, margin=0, caller="asker/0")
    gone = router.begin().replica
    router.end(gone, 0)
    router.leave(gone)
    one, other = router.begin("s").replica, router.begin("t").replica
    assert {one, other} == {0, 1, 2} - {gone}
    assert router.begin("s") == RoutedTo(one, moved=False), "the idle one is out of service"
