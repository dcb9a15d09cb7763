"""Draws what a seed stands for, one decision after the other.

A graph is a chain of stages from the prompts to each trainer. A stage takes one Out port to another: a node that works
on each item, a way through messages of the user's own, a question to a server, two ways that meet again, branches
that are joined. Taps leave the chain anywhere and reach no trainer.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import get_args

from flowrl.nodes.groups.replay import Replay, ReplayOrder
from tests.random_graphs.dice import Dice
from tests.random_graphs.shape import FEATURES, Life, Link, Part, Shape

CAPACITIES = (None, None, 1, 1, 2, 3, 8, 64)
DELAYS_S = (0.0, 0.0, 0.0, 0.001, 0.005, 0.02, 0.05)
LONGEST_CHAIN = 2
DEEPEST = 2


@functools.lru_cache(maxsize=16)
def draw(seed: int, without: tuple[str, ...] = ()) -> Shape:
    """The graph of a seed, but for the features of these names. Every host asks for it."""
    if unknown := set(without) - set(FEATURES):
        raise ValueError(f"no such features: {', '.join(sorted(unknown))}; there are {', '.join(FEATURES)}")
    drawing = Drawing(seed, without)
    drawing.numbers()
    drawing.nodes()
    drawing.schedule()
    return drawing.shape


class Drawing:
    """A shape that is being drawn. A stage's name begins with that of the chain that it is in."""

    def __init__(self, seed: int, without: tuple[str, ...]) -> None:
        self.dice = Dice(seed)
        self.shape = Shape(seed)
        self._without = without
        self.split = ""
        self.most_unpublished = 1
        """Versions of one trainer without a publication, the published one included."""
        self._ways: list[str] = []
        """Names of the chains that some members of a group do not come by."""

    def has(self, feature: str, probability: float, *name: object) -> bool:
        return feature not in self._without and self.dice.chance(probability, feature, *name)

    def numbers(self) -> None:
        """Trainers that train different batches have their versions each, so none is masked by the other's."""
        shape, dice = self.shape, self.dice
        shape.group_size, shape.groups_per_step = dice.number(1, 4, "K"), dice.number(1, 4, "P")
        self.split = self._split()
        own_clock = self.split not in ("", "batches")
        shape.staleness = dice.number(int(own_clock), 4, "S")
        shape.on_limit = "mask" if self.has("mask", 0.25) and not own_clock else "wait"
        if shape.on_limit == "wait" and self.has("look_ahead", 0.4):
            most = (shape.staleness - own_clock) * shape.groups_per_step + 1
            shape.look_ahead = dice.number(1, min(most, 8), "W")
        self.most_unpublished = (shape.ahead + 1) // 2 if own_clock else shape.ahead + 1

        if self.has("replay", 0.4) and shape.on_limit == "wait" and not own_clock:
            shape.replay = Replay(
                groups=dice.number(1, 3, "again"),
                keep=dice.one_of((1, 2, 8, 64), "keep"),
                max_uses=dice.number(2, 4, "uses"),
                max_age=dice.number(1, 4, "age"),
                prefer=dice.one_of(get_args(ReplayOrder), "prefer"),
            )

    def _split(self) -> str:
        """What both trainers get a copy of, "parted" what goes to one of them; "" where there is one."""
        if not self.has("second", 0.35):
            return ""
        weights = {"samples": 2, "groups": 2, "batches": 2, "parted": 1, "parted_groups": 1}
        split = self.dice.weighed(weights, "split")
        return "groups" if split.startswith("parted") and "parted" in self._without else split

    def schedule(self) -> None:
        shape, dice = self.shape, self.dice
        shape.lag = self.has("lag", 0.5)
        length = dice.number(2, 8, "steps")
        if self.has("data_end", 0.5):
            shape.total = max(1, length * shape.groups_per_step - dice.number(0, 5, "partial"))
        if not shape.total or dice.chance(0.2, "both"):
            shape.steps = length
        if self.has("checkpoints", 0.7):
            shape.save_every = dice.number(1, 3, "save_every")
        shape.lives = [self._life(index, length) for index in range(dice.number(0, 3, "lives"))]

    def _life(self, index: int, length: int) -> Life:
        end = self.dice.weighed({"crash": 3, "interrupt": 1}, "end", index)
        delay_s = self.dice.one_of((0.0, 0.01, 0.1, 0.3), "scale", index) * self.dice.share("delay", index)
        version = self.dice.number(0, length, "version", index)
        turns = self.dice.one_of((0, 10, 100, 400), "turns", index)
        return Life("" if end in self._without else end, version, delay_s, self.dice.number(0, turns, "turn", index))

    # Nodes

    def nodes(self) -> None:
        self.part("prompts", "source", most=1)
        solver = self.has("solvers", 0.3)
        self.part("generator", "solver" if solver else "generator", losses=0.3)
        if solver:
            self.part("sampler", "sampler", most=2)
            self.shape.links.append(Link("generator.policy", "sampler.turns", "call", self._capacity("sampler")))
        self.link("prompts.prompts", "generator.prompts")
        out = self.derived("generator.samples", "derive", 0.3)
        out = self.derived(self.chain(out, "head", "sample"), "again", 0.1)
        if self.split in ("samples", "parted"):
            left, right = self.route(out, "parting", "sample") if self.split == "parted" else (out, out)
            ways = {"actor": self.grouped(left, "actor"), "critic": self.grouped(right, "critic")}
        else:
            out = self.grouped(out, "actor")
            left, right = self.route(out, "parting", "group") if self.split == "parted_groups" else (out, out)
            ways = {"actor": left}
            if self.split in ("groups", "parted_groups"):
                ways["critic"] = self.chain(right, "critic_groups", "group")
        for name, way in ways.items():
            self.batched(way, name)
            self.trained(f"{name}_batcher.batches", name)
        if self.split == "batches":
            self.trained("actor_batcher.batches", "critic")
        if self.has("sharing", 0.15):
            self.shape.sharing = (self.shape.sampler, "actor")
            for name in self.shape.sharing:
                self.shape.parts[name] = replace(self.shape.parts[name], own=True)

    def batched(self, out: str, name: str) -> None:
        self.part(f"{name}_batcher", "batcher", most=1)
        self.link(out, f"{name}_batcher.groups")

    def trained(self, batches: str, name: str) -> None:
        shape = self.shape
        ranks = min(shape.group_size * shape.groups_per_step, 3)
        counted = name == "actor" or self.has("until", 0.6)
        every = self.dice.number(1, self.most_unpublished, name, "every") if self.has("publish_every", 0.3, name) else 1
        self.part(name, "trainer", most=ranks, publish_every=every)
        shape.trainers.append(name)
        self.link(batches, f"{name}.batches", dispatch="gang")
        if counted:
            port = f"{shape.sampler}.weights" if name == "actor" else f"{shape.sampler}.values"
            shape.links.append(Link(f"{name}.weights", port, "latest"))
            shape.until.append(port)
        else:
            shape.ignored.append(f"{name}.weights")

    def grouped(self, out: str, where: str) -> str:
        """From samples to groups, through whatever is on the way."""
        out = self.derived(self.chain(out, f"{where}_samples", "sample"), f"{where}_derive", 0.1)
        out = self.group(out, where)
        return self.chain(out, f"{where}_groups", "group")

    def group(self, out: str, where: str) -> str:
        name = f"{where}_group"
        if self.has("joins", 0.2, name):
            self.part(name, "join_groups", losses=0.3)
            for port in ("first", "second"):
                self.keyed(self.chain(out, f"{name}_{port}", "sample", DEEPEST), f"{name}.{port}")
        else:
            self.part(name, "group", losses=0.4)
            self.keyed(out, f"{name}.samples")
        return f"{name}.groups"

    def chain(self, out: str, where: str, level: str, depth: int = 0) -> str:
        """Some stages one after the other; the Out port of the last."""
        for index in range(self.dice.number(0, LONGEST_CHAIN, where, "length")):
            out = self.stage(out, f"{where}{index}", level, depth)
            if depth < DEEPEST and self.has("taps", 0.2, where, index):
                self.tap(out, f"{where}{index}_tap", level)
        return out

    def stage(self, out: str, name: str, level: str, depth: int) -> str:
        if level == "group":
            router = depth < DEEPEST and self.has("routers", 0.3, name)
            return self.ways(out, name, level, depth) if router else self.work(out, name, "group_work")
        stages = {"works": 4, "wraps": 1, "calls": 1, **({"routers": 1, "joins": 1} if depth < DEEPEST else {})}
        drawn = self.dice.weighed(stages, name, "stage")
        if drawn in self._without or drawn == "works":
            return self.work(out, name, "work")
        if drawn == "wraps":
            return self.wrapped(out, name)
        if drawn == "calls":
            return self.judged(out, name) if self.has("judges", 0.5, name) else self.asked(out, name)
        return self.ways(out, name, level, depth) if drawn == "routers" else self.joined(out, name, depth)

    def work(self, out: str, name: str, kind: str, losses: float = 0.5) -> str:
        self.part(name, kind, losses=losses)
        self.link(out, f"{name}.items")
        return f"{name}.done"

    def derived(self, out: str, name: str, probability: float) -> str:
        """A node that derives samples is passed by all samples that come together again after it."""
        if not self.has("derives", probability, name):
            return out
        self.part(name, "derive", losses=0.5)
        self.keyed(out, f"{name}.items")  # ways may meet there
        return f"{name}.done"

    def wrapped(self, out: str, name: str) -> str:
        out = self.work(out, f"{name}_wrap", "wrap", losses=0.1)
        if self.dice.chance(0.7, name, "between"):
            out = self.work(out, f"{name}_wrapped", "wrapped_work")
        return self.work(out, f"{name}_unwrap", "unwrap", losses=0.1)

    def asked(self, out: str, name: str) -> str:
        self.part(f"{name}_server", "server", losses=0.5)
        self.part(name, "ask")
        self.link(out, f"{name}.items")
        self.shape.links.append(Link(f"{name}.ask", f"{name}_server.asked", "call", self._capacity(name)))
        return f"{name}.done"

    def judged(self, out: str, name: str) -> str:
        self.part(f"{name}_server", "judge", losses=0.5)
        self.part(name, "judged")
        self.link(out, f"{name}.items")
        self.shape.links.append(Link(f"{name}.judge", f"{name}_server.turns", "call", self._capacity(name)))
        return f"{name}.done"

    def route(self, out: str, name: str, level: str) -> tuple[str, str]:
        self.part(name, "router" if level == "sample" else "group_router", losses=0.2)
        self.link(out, f"{name}.items")
        return f"{name}.left", f"{name}.right"

    def ways(self, out: str, name: str, level: str, depth: int) -> str:
        """Two ways that meet again in one In port."""
        outs = self.route(out, name, level)
        self._ways += [f"{name}_{index}" for index in range(2) if level == "sample"]
        parting = depth == 0 and self.has("parted", 0.2, name)
        ends = [self.chain(out, f"{name}_{index}", level, depth + 1) for index, out in enumerate(outs)]
        if parting:
            self.sink(ends.pop(), f"{name}_end", level)
        self.part(f"{name}_meet", "work" if level == "sample" else "group_work")
        for end in ends:
            self.link(end, f"{name}_meet.items")
        return f"{name}_meet.done"

    def joined(self, out: str, name: str, depth: int) -> str:
        ports = ("first", "second", "third")[: self.dice.number(2, 3, name, "branches")]
        self.part(name, f"join{len(ports)}", losses=0.3)
        for port in ports:
            self.keyed(self.chain(out, f"{name}_{port}", "sample", depth + 1), f"{name}.{port}")
        return f"{name}.done"

    def tap(self, out: str, name: str, level: str) -> None:
        out = self.chain(out, name, level, DEEPEST - 1)
        if level == "sample" and self._gets_groups(name) and self.dice.chance(0.5, name, "groups"):
            out, level = self.group(out, name), "group"
            out = self.chain(out, f"{name}_after", level, DEEPEST)
        self.sink(out, name, level)

    def _gets_groups(self, name: str) -> bool:
        return "parted" not in self._without or not name.startswith(tuple(self._ways))

    def sink(self, out: str, name: str, level: str) -> None:
        self.part(f"{name}_sink", f"{level}_sink")
        several = self.shape.parts[f"{name}_sink"].replicas > 1
        broadcast = several and self.has("broadcast", 0.5, name)
        self.link(out, f"{name}_sink.items", dispatch="broadcast" if broadcast else "share")

    # Parts

    def part(self, name: str, kind: str, *, most: int = 3, losses: float = 0.0, publish_every: int = 1) -> None:
        dice = self.dice
        styles = {"each": 6, "loop": 2, "later": 2, "impatient": 1}
        style = dice.weighed(styles, name, "style")
        self.shape.parts[name] = Part(
            name,
            kind,
            replicas=dice.number(2, most, name, "replicas") if most > 1 and self.has("replicas", 0.3, name) else 1,
            own=self.has("hosts", 0.3, name),
            concurrency=dice.one_of((1, 2, 8, 64), name, "concurrency"),
            style="loop" if style in self._without else style,
            delay_s=dice.one_of(DELAYS_S, name, "delay") if "delays" not in self._without else 0.0,
            losses=self._losses(name) if self.has("losses", losses, name) else (),
            publish_every=publish_every,
            masks=dice.one_of((0.1, 0.5), name, "masks") if self.has("loss_masks", 0.2, name) else 0.0,
        )

    def _losses(self, name: str) -> tuple[tuple[str, float], ...]:
        ways = [how for how in ("drop", "filter", "fail", "late") if self.dice.chance(0.5, name, how)]
        share = self.dice.one_of((0.02, 0.1, 0.3), name, "share")
        return tuple((how, share / len(ways)) for how in ways if how not in self._without)

    def link(self, out: str, into: str, dispatch: str = "share") -> None:
        self.shape.links.append(Link(out, into, "queue", self._capacity(out, into), dispatch))

    def keyed(self, out: str, into: str) -> None:
        """To a node that remembers items by group."""
        several = self.shape.parts[into.split(".")[0]].replicas > 1
        self.link(out, into, "key" if several else "share")

    def _capacity(self, *name: str) -> int | None:
        return self.dice.one_of(CAPACITIES, *name, "capacity") if "capacities" not in self._without else None
