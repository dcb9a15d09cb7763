"""What a seed stands for: a legal graph and the schedule of its lives, as plain data; `drawing` draws it."""

from __future__ import annotations

from dataclasses import dataclass, field

from flowrl.nodes.groups.replay import Replay

FEATURES = {
    "taps": "branches that reach no trainer",
    "routers": "nodes that send each item one of two ways, which meet again",
    "parted": "ways that do not meet again: to another trainer, or into a tap",
    "joins": "branches matched by sample",
    "calls": "questions to a server",
    "judges": "asks whose replies are not trained",
    "solvers": "a node that makes the samples of what it asks, in the generator's place",
    "wraps": "messages of the user's own around a sample",
    "losses": "drops, filters and failures",
    "late": "failures of what has been sent",
    "loss_masks": "tokens that a node keeps out of the loss",
    "later": "items on hold that a task of the node sends",
    "derives": "nodes that derive further samples",
    "second": "a second trainer",
    "until": "a second trainer whose weights end tickets",
    "replicas": "several replicas and ranks",
    "hosts": "processes of their own",
    "sharing": "a generator and a trainer that work by turns, on the same devices",
    "broadcast": "sinks of which each replica gets everything",
    "capacities": "capacities from 1 to 64",
    "impatient": "nodes that do not wait for an item for long, but ask again",
    "delays": "work that takes its time",
    "mask": 'on_limit="mask"',
    "look_ahead": "windows",
    "replay": "groups that are trained again",
    "publish_every": "versions that are not published",
    "lag": "replicas that load weights late",
    "data_end": "data that end",
    "checkpoints": "checkpoints every n steps",
    "crash": "lives that end in a crash",
    "interrupt": "lives that are interrupted",
}


NO_REPLAY = Replay()


@dataclass(frozen=True)
class Part:
    """A node."""

    name: str
    kind: str
    """Of `nodes.KINDS`."""
    replicas: int = 1
    own: bool = False
    """Its replicas have processes of their own."""
    concurrency: int = 1
    style: str = "each"
    delay_s: float = 0.0
    losses: tuple[tuple[str, float], ...] = ()
    """(how, share): drop, filter, fail, or late (sent, then failed)."""
    publish_every: int = 1
    masks: float = 0.0
    """Share of tokens that a node which makes groups keeps out of the loss."""


@dataclass(frozen=True)
class Link:
    """An edge."""

    out: str
    into: str
    kind: str = "queue"
    capacity: int | None = None
    dispatch: str = "share"


@dataclass(frozen=True)
class Life:
    """How one process of the run ends, if nothing else ends it."""

    end: str
    """crash, interrupt, or "" """
    version: int
    """Of the first trainer: the end comes so long after it is made."""
    delay_s: float
    turns: int = 0
    """Ticks of the event loop after that: a checkpoint takes no virtual time."""


@dataclass
class Shape:
    """A graph and its schedule."""

    seed: int
    group_size: int = 1
    groups_per_step: int = 1
    staleness: int = 0
    on_limit: str = "wait"
    look_ahead: int = 1
    total: int = 0
    """Groups in the data; 0: no end."""
    steps: int | None = None
    save_every: int = 0
    replay: Replay = NO_REPLAY
    lag: bool = False
    """Replicas load weights some time after they come."""
    parts: dict[str, Part] = field(default_factory=dict)
    links: list[Link] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    until: list[str] = field(default_factory=list)
    trainers: list[str] = field(default_factory=list)
    """The first is the policy's."""
    sharing: tuple[str, ...] = ()
    """Nodes that share devices by turns."""
    lives: list[Life] = field(default_factory=list)

    @property
    def sampler(self) -> str:
        """The node that has the weights."""
        return "sampler" if "sampler" in self.parts else "generator"

    @property
    def ahead(self) -> int:
        """S"""
        return self.staleness - -(-(self.look_ahead - 1) // self.groups_per_step)

    @property
    def bound(self) -> int:
        if self.on_limit == "mask":
            return self.staleness
        return self.staleness if self.ahead else 0

    @property
    def shares_batches(self) -> bool:
        """Every trainer gets each batch, so there is one count of versions."""
        batches = {link.out for link in self.links for trainer in self.trainers if link.into == f"{trainer}.batches"}
        return len(batches) == 1

    def into(self, node: str) -> list[Link]:
        return [link for link in self.links if link.into.split(".")[0] == node]

    def _of_replay(self) -> str:
        of = self.replay
        uses = f"{of.max_uses} uses, age {of.max_age}, {of.prefer} of {of.keep}"
        return f"{of.groups} again ({uses}), " if of.groups else ""

    def describe(self) -> str:
        """One line about the run, one a node, one an edge that has something to say."""
        limit = "mask" if self.on_limit == "mask" else f"wait, look_ahead {self.look_ahead}"
        lives = ", ".join(
            f"{life.end} {life.delay_s:.3f} s, {life.turns} turns after {life.version}"
            for life in self.lives
            if life.end
        )
        lag = ", weights load late" if self.lag else ""
        lines = [
            f"seed {self.seed}: K {self.group_size}, P {self.groups_per_step}, S {self.staleness} ({limit}), "
            f"{self.total or 'endless'} groups, {self._of_replay()}steps {self.steps}, save_every {self.save_every}"
            f"{lag}; {lives or 'one life'}"
        ]
        lines += [f"  {' and '.join(self.sharing)} share their devices"] if self.sharing else []
        lines += [f"  {part}" for part in map(_of_part, self.parts.values())]
        lines += [f"  {_of_link(link)}" for link in self.links]
        return "\n".join(lines)


def _of_part(part: Part) -> str:
    losses = "".join(f", {how} {share:.2f}" for how, share in part.losses)
    own = ", own processes" if part.own else ""
    masks = f", masks {part.masks}" if part.masks and part.kind in ("group", "join_groups") else ""
    every = f", publishes every {part.publish_every}" if part.publish_every > 1 else ""
    return (
        f"{part.name}: {part.kind} x{part.replicas}, {part.style}, {part.concurrency} at once, {part.delay_s} s"
        f"{losses}{masks}{every}{own}"
    )


def _of_link(link: Link) -> str:
    capacity = f" capacity {link.capacity}" if link.capacity else ""
    rule = {"queue": link.dispatch}.get(link.kind, link.kind)
    return f"{link.out} -> {link.into} ({rule}{capacity})"
