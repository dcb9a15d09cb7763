"""What has to become of every sample, worked out from the graph's shape and the fates that its nodes deal out.

For each port it is worked out what can come to it of a sample: the sample itself (ITEM), the word that it is lost
(as "state: reason"), or nothing (AWAY: it went another way). Usually there is one possibility; a sample that is sent
and then failed has two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tests.random_graphs.kinds import KINDS
from tests.random_graphs.nodes import STATES, Passing, fate, goes_left, response_length
from tests.random_graphs.shape import Part, Shape

ITEM, AWAY = "item", "dropped: not_routed"
Ways = frozenset[str]
"""What can come of a sample."""
SERVED = "_server"


@dataclass
class Expected:
    """The ways of the samples of one shape; everything is worked out when it is asked for."""

    shape: Shape
    derived: Mapping[str, str]
    """Derived sample -> what it was derived from."""
    _known: dict[tuple[str, str], Ways] = field(default_factory=dict)

    def trained(self, trainer: str, sample_id: str) -> Ways:
        """What can come to the batcher of `trainer`."""
        (batches,) = (link.out for link in self.shape.into(trainer) if link.kind == "queue")
        return self.at(f"{batches.split('.')[0]}.groups", sample_id)

    def at(self, port: str, sample_id: str) -> Ways:
        """What can come to an In port."""
        key = (port, sample_id)
        if key not in self._known:
            links = [link for link in self.shape.links if link.into == port and link.kind == "queue"]
            ways = [self._of(*link.out.split("."), sample_id) for link in links]
            present = [way for way in ways if way != {AWAY}]
            self._known[key] = frozenset().union(*present) if present else frozenset({AWAY})
        return self._known[key]

    def groups_at(self, node: str, group_ids: list[str]) -> dict[str, tuple[int, int]]:
        """How often each group has to come to user code of a node that takes groups: at least, at most."""
        return {group_id: self._times(node, group_id) for group_id in group_ids}

    def samples_at(self, node: str, sample_ids: list[str]) -> dict[str, tuple[int, int]]:
        """The same of samples."""
        ways = {sample_id: self._into(node, sample_id) for sample_id in sample_ids}
        return {sample_id: (int(way == {ITEM}), int(ITEM in way)) for sample_id, way in ways.items()}

    def _times(self, node: str, group_id: str) -> tuple[int, int]:
        """Once if a member of it comes. Of a node that groups joined ports: that comes to all of them."""
        ways = [self._into(node, sample_id) for sample_id in self.members(group_id)]
        return int(any(way == {ITEM} for way in ways)), int(any(ITEM in way for way in ways))

    def tokens(self, sample_id: str) -> int:
        """What the generator makes of it."""
        lost = fate(self.shape.seed, self.shape.parts[self._maker(sample_id)], sample_id) in ("drop", "filter", "fail")
        if (parent := self.derived.get(sample_id)) is not None:
            lost = lost or self._failed_parent(self.shape.parts[self._maker(sample_id)], parent)
        return 0 if lost else response_length(self.shape.seed, sample_id)

    def members(self, group_id: str) -> list[str]:
        admitted = [f"{group_id}:{member}" for member in range(self.shape.group_size)]
        return admitted + [sample_id for sample_id in self.derived if sample_id.split(":")[0] == group_id]

    def _maker(self, sample_id: str) -> str:
        """The node that makes the sample's tokens."""
        return sample_id.rpartition("/")[2].partition(".")[0] if sample_id in self.derived else "generator"

    def _failed_parent(self, part: Part, parent: str) -> bool:
        """Whether the node fails with what it has derived samples from, before it sends these."""
        return part.style == "each" and fate(self.shape.seed, part, f"{parent}/") == "fail"

    def _into(self, node: str, sample_id: str) -> Ways:
        """What can come to a node, over all its In ports."""
        ports = dict.fromkeys(link.into for link in self.shape.into(node) if link.kind == "queue")
        ways = [self.at(port, sample_id) for port in ports]
        lost = frozenset().union(*ways) - {ITEM}
        return lost | ({ITEM} if all(ITEM in way for way in ways) else frozenset())

    def _of(self, node: str, port: str, sample_id: str) -> Ways:
        """What can leave a node by an Out port."""
        part = self.shape.parts[node]
        if part.kind == "source":
            return frozenset({AWAY if sample_id in self.derived else ITEM})
        if self._maker(sample_id) == node != "generator":
            return self._made_derived(part, sample_id)
        incoming = self._into(node, sample_id)
        if ITEM not in incoming:
            return incoming
        made = self._made(part, port, sample_id)
        return made | (incoming - {ITEM})

    def _made_derived(self, part: Part, sample_id: str) -> Ways:
        if self._failed_parent(part, self.derived[sample_id]):
            return frozenset({f"failed: {part.name}_fail"})
        how = fate(self.shape.seed, part, sample_id)
        lost = how in ("drop", "filter", "fail")
        return frozenset({f"{STATES[how]}: {part.name}_{how}" if lost else ITEM})

    def _made(self, part: Part, port: str, sample_id: str) -> Ways:
        """What a node makes of a sample that has come to it."""
        key = sample_id.split(":")[0] if part.kind in ("group_work", "group_router") else sample_id
        if part.kind in ("ask", "judged") and self._refused(part, sample_id):
            return frozenset({f"failed: {part.name}{SERVED}_fail"})
        how = fate(self.shape.seed, part, key)
        if part.kind == "derive" and how in ("pass", "late") and self._failed_parent(part, key):
            how = "fail"
        lost = f"{STATES.get(how, '')}: {part.name}_{how}"
        if how in ("drop", "filter", "fail"):
            return frozenset({lost})
        late = frozenset({lost}) if how == "late" and _can_fail_late(part) else frozenset()
        if part.kind in ("router", "group_router") and goes_left(self.shape.seed, part, key) != (port == "left"):
            return frozenset({AWAY}) | late
        return frozenset({ITEM}) | late

    def _refused(self, part: Part, sample_id: str) -> bool:
        server = self.shape.parts[f"{part.name}{SERVED}"]
        return fate(self.shape.seed, server, sample_id) != "pass"


def _can_fail_late(part: Part) -> bool:
    """Only what is raised in the body of `each` comes after a send; the others pass such a sample on."""
    return part.kind in ("generator", "solver") or (part.style == "each" and issubclass(KINDS[part.kind], Passing))
