"""The least time of a step, from the user's estimate of the average time of an episode.

A batch is P·K episodes, and there are tickets for (S + 1) batches. If an episode takes T seconds and an update U, a
ticket is in use for T + U, so a step takes (T + U) / (S + 1), or U if that is longer: never less than T / (S + 1). The
trainer waits for episodes if S·U < T, because S batches are played while one is trained. With room for E episodes at a
time, a step takes P·K·T / E or more (Little's law). This bound is the larger one if E is less than the tickets allow.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from flowrl.graph.analysis.flow import past
from flowrl.graph.analysis.numbers import Numbers
from flowrl.graph.graph import Graph


@dataclass(frozen=True)
class EpisodeTime:
    """The time of the episodes that one node plays for the trainer."""

    node: str
    seconds: float
    """T"""
    places: int
    """E, at most the episodes of all tickets."""
    batch: int
    """P·K"""
    ahead: int
    """S"""

    @property
    def admitted(self) -> int:
        """The number of episodes for which there are tickets."""
        return (self.ahead + 1) * self.batch

    @property
    def step_s(self) -> float:
        """The least time of a step."""
        return self.batch * self.seconds / self.places

    @property
    def update_s(self) -> float | None:
        """If an update is shorter than this, the trainer waits for episodes. None: the trainer waits at every step."""
        return max(self.seconds / self.ahead, self.step_s) if self.ahead else None


def notes(graph: Graph, numbers: Numbers) -> Iterator[str]:
    """The time of a step, for each node whose episodes have an expected time."""
    for one in _times(graph, numbers):
        step = (
            f"{one.node}: {one.places} episodes of {one.seconds:g} s at a time (limits.expected_s) give "
            f"{one.places / one.seconds:.2g} a second, so a step of {one.batch} takes {one.step_s:.3g} s or more"
        )
        if one.update_s is None:
            yield f"{step}, and its update besides: with a staleness of 0 nothing is played meanwhile"
        else:
            yield f"{step}; the trainer waits for episodes where an update takes less than {one.update_s:.3g} s"


def warnings(graph: Graph, numbers: Numbers) -> Iterator[str]:
    """Check 10: episodes that wait for a place, although there are tickets for them."""
    for one in _times(graph, numbers):
        if one.places < one.admitted:
            yield (
                f"{one.node} has places for {one.places} episodes at a time, of {one.seconds:g} s each, so a step of "
                f"{one.batch} takes {one.step_s:.3g} s or more, where its tickets allow "
                f"{one.seconds / (one.ahead + 1):.3g} s; raise limits.episodes and processes to {one.admitted}."
            )


def _times(graph: Graph, numbers: Numbers) -> Iterator[EpisodeTime]:
    ahead, groups = numbers.ahead, numbers.groups_per_batch
    if graph.admission is None or ahead is None or ahead < 0 or not groups:
        return
    for name in sorted(past(graph, graph.admission.out)):
        facts, replicas = graph.nodes[name].facts(), graph.placed[name].replicas
        if facts.expected_s is None or facts.expected_s <= 0:
            continue
        batch = groups * (numbers.group_size or 1)
        rooms = [room * replicas for room in (facts.episodes, facts.processes) if room is not None]
        places = max(1, min([*rooms, (ahead + 1) * batch]))
        yield EpisodeTime(name, facts.expected_s, places, batch, ahead)
