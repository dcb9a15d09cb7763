"""Accounting under news that come in any order between hosts, twice, or not at all before a failure."""

from __future__ import annotations

import asyncio
import json
import random
import sqlite3
from contextlib import closing
from pathlib import Path

import msgpack
import pytest

from flowrl.messages import Scored, Tombstone
from flowrl.runtime.audit.audit import audit
from flowrl.runtime.ledger.accounting import Accounting, LedgerClient, Use
from flowrl.wire.tickets import Tickets
from tests.runtime.ledger.small_run import POLICY, Wire, lost, prompts, sample

GROUPS = 24
PER_BATCH = 2


class Hosts:
    """One client a host. What a host says arrives in its order, but late by a random number of deliveries."""

    def __init__(self, rng: random.Random, accounting: Accounting) -> None:
        self.rng = rng
        self.accounting = accounting
        self.wires = {name: Wire() for name in ("core", "generator", "trainer")}
        for wire in self.wires.values():
            accounting.register_handlers(wire)
            wire.held = []
        self.clients = {name: LedgerClient(wire, f"{name}/0") for name, wire in self.wires.items()}

    def deliver(self, chance: float) -> None:
        """Let every host's oldest notifications arrive, each with this chance to go on."""
        for name in self.rng.sample(sorted(self.wires), len(self.wires)):
            self.clients[name].flush()
            held = self.wires[name].held
            assert held is not None
            while held and self.rng.random() < chance:
                kind, packed = held.pop(0)
                self.wires[name].handlers[kind](name, msgpack.unpackb(packed))


class Life:
    """Groups on their way through the graph, each member with a fate of its own."""

    def __init__(self, directory: Path, seed: int) -> None:
        (directory / "graph.json").write_text(json.dumps({"tickets": 2 * PER_BATCH, "max_staleness": 1}))
        self.rng = random.Random(seed)
        self.tickets = Tickets(PER_BATCH, 1, consumers=[("generator/0", POLICY)])
        self.accounting = Accounting(directory, self.tickets, on_step=lambda record: None)
        self.hosts = Hosts(self.rng, self.accounting)
        self.version = 0
        self.expected: dict[str, set[str]] = {}
        """Sample -> the states that its fate allows."""

    async def run(self, groups: int) -> None:
        finished: list[list[Scored]] = []
        for group in range(groups):
            while self.tickets.why_waiting():
                if len(finished) >= PER_BATCH:
                    self.train(finished[:PER_BATCH])
                    finished = finished[PER_BATCH:]
                self.hosts.deliver(0.7)
            await self.hosts.clients["core"].admit("prompts/0", prompts(group))
            done = self.live(group)
            finished += [done] if done else []
            self.hosts.deliver(0.3)

    def live(self, group: int) -> list[Scored]:
        """The members that come through; now and then the whole group is filtered or cancelled."""
        whole = self.rng.choices(["comes", "filtered", "cancelled"], [8, 1, 1])[0]
        made = [one for prompt in prompts(group) if (one := self.member(prompt))]
        if whole == "comes":
            for one in made:
                self.expected[one.sample_id] = {"trained"}
            return made
        state = "filtered" if whole == "filtered" else "dropped"
        ids = tuple(one.sample_id for one in made)
        marker = Tombstone(f"g{group}", -1, state, whole, "advantage/0", ids, 3)
        for _ in range(self.rng.choice([1, 1, 2]) if ids else 0):
            self.hosts.clients["core"].lost(marker)
        self.expected |= {one.sample_id: {state} for one in made}
        return []

    def member(self, prompt: object) -> Scored | None:
        made = sample(prompt, [self.version] * self.rng.randint(1, 6))  # type: ignore[arg-type]
        fate = self.rng.choices(["comes", "aborted", "failed"], [8, 1, 1])[0]
        if fate == "aborted":
            self.hosts.clients["generator"].lost(lost(made, "dropped", "cancelled", tokens=2))
            self.expected[made.sample_id] = {"dropped"}
            return None
        self.hosts.clients["generator"].generated(made)
        if fate == "failed":
            self.hosts.clients["core"].lost(lost(made, "failed", "reward_raised"))
            self.expected[made.sample_id] = {"failed"}
            return None
        self.hosts.clients["core"].scored(made)
        return made

    def train(self, groups: list[list[Scored]]) -> None:
        self.version += 1
        uses = [Use.of(one) for group in groups for one in group]
        self.hosts.clients["trainer"].step({"step": self.version}, uses, policy=POLICY)
        self.hosts.clients["generator"].holds("generator/0", POLICY, self.version)


def states(directory: Path) -> dict[str, str]:
    with closing(sqlite3.connect(directory / "ledger.sqlite")) as db:
        return dict(db.execute("SELECT sample_id, state FROM samples"))


@pytest.mark.parametrize("seed", range(40))
def test_every_sample_ends_as_its_fate_says_and_every_ticket_returns(tmp_path: Path, seed: int) -> None:
    async def body() -> None:
        life = Life(tmp_path, seed)
        await life.run(GROUPS)
        life.hosts.deliver(1.0)
        untrained = set(life.accounting.in_flight())
        life.accounting.close(orderly=True)
        report = audit(tmp_path)
        assert report.ok, str(report)
        for sample_id, state in states(tmp_path).items():
            left_over = sample_id.split("/")[0] in untrained and life.expected[sample_id] == {"trained"}
            assert state in ({"dropped"} if left_over else life.expected[sample_id]), sample_id
        assert life.accounting.in_flight() == {}
        assert life.tickets.untrained() == []

    asyncio.run(body())


@pytest.mark.parametrize("seed", range(100, 120))
def test_a_failure_at_any_point_leaves_books_that_add_up(tmp_path: Path, seed: int) -> None:
    async def body() -> None:
        life = Life(tmp_path, seed)
        await life.run(life.rng.randint(1, GROUPS))
        life.hosts.deliver(0.5)
        life.accounting.close(orderly=False)
        report = audit(tmp_path)  # though the last words of a generator that died may be lost
        assert report.ok, str(report)
        in_flight = {sample_id for sample_id, state in states(tmp_path).items() if state == "in_flight"}
        reopened = Accounting(tmp_path, life.tickets, on_step=lambda record: None, resume=True)
        assert {f"{group}/{m}" for group in reopened.in_flight() for m in range(3)} >= in_flight
        assert reopened.tickets.untrained() == sorted(reopened.in_flight().values())
        reopened.close(orderly=True)

    asyncio.run(body())
