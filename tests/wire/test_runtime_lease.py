"""Leases of shared devices: several hosts and the driver over their control links, in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.errors import FlowrlError
from flowrl.graph.node import Node
from flowrl.runtime.driver.locks import Locks
from flowrl.wire.activity import Lease
from flowrl.wire.control import Control
from flowrl.wire.encoding.multiparts import Frame
from tests.rigs.ticks import ticks
from tests.wire.channel_rig import play


class Driver:
    """The driver's turns; frames between it and its hosts take a tick of the loop or two."""

    def __init__(self) -> None:
        self.turns = Locks()
        self.errors: list[BaseException] = []
        self._controls: dict[str, Control] = {}
        self._add("driver")
        self._controls["driver"].on("lock", self.turns.take_lock)
        self._controls["driver"].on("unlock", self.turns.release_lock)

    def _add(self, name: str) -> Control:
        def post(to: str, frame: Frame) -> None:
            loop = asyncio.get_running_loop()
            loop.call_soon(loop.call_soon, self._controls[to].receive_frame, name, frame)

        self._controls[name] = Control(post, self.errors.append)
        return self._controls[name]

    def lease(self, host: str, *nodes: Node) -> Lease:
        lease = Lease("gpu", host, self._add(host))
        lease.nodes = nodes
        return lease

    @property
    def idle(self) -> bool:
        """Nobody holds a turn or waits for one."""
        return not self.turns._holders and not any(self.turns._queues.values())


@dataclass
class Device:
    """Who is on it, from the beginning of its first `on_acquire` to the end of its last `on_release`."""

    on_it: set[str] = field(default_factory=set)
    log: list[str] = field(default_factory=list)
    moving: asyncio.Event = field(default_factory=asyncio.Event)
    """A hook has begun."""


class Model(Node):
    """Moves to the device and off it in a few ticks of the loop."""

    def __init__(self, device: Device, host: str, num_turns: int = 1) -> None:
        self.name = host
        self.context: Any = SimpleNamespace(replica=0)
        self._device = device
        self._num_turns = num_turns

    async def on_acquire(self) -> None:
        assert self.name not in self._device.on_it, "taken twice"
        self._device.on_it.add(self.name)
        assert len(self._device.on_it) == 1, "two hosts on one device"
        self._device.moving.set()
        await ticks(self._num_turns)
        self._device.log.append(f"{self.name} has it")

    async def on_release(self) -> None:
        assert self._device.on_it == {self.name}
        self._device.moving.set()
        await ticks(self._num_turns)
        self._device.on_it.remove(self.name)
        self._device.log.append(f"{self.name} gives it back")


class Turn:
    """A task that works under a lease until it is let go."""

    def __init__(self, lease: Lease, device: Device, host: str) -> None:
        self._go = asyncio.Event()
        self.working = False
        self.task = asyncio.ensure_future(self._work(lease, device, host))

    async def _work(self, lease: Lease, device: Device, host: str) -> None:
        await lease.begin()
        assert device.on_it == {host}
        self.working = True
        try:
            await self._go.wait()
            assert device.on_it == {host}
        finally:
            self.working = False
            await lease.end()

    def let_go(self) -> None:
        self._go.set()


@given(seed=st.integers(0, 2**32), num_steps=st.integers(0, 120))
@settings(max_examples=300, deadline=None)
def test_one_host_works_at_a_time_and_nothing_is_left_whatever_is_cancelled(seed: int, num_steps: int) -> None:
    async def main() -> None:
        random, device, driver = Random(seed), Device(), Driver()
        leases = {
            host: driver.lease(host, Model(device, host, random.randint(0, 3)))
            for host in ("one/0", "two/0", "three/0")
        }
        turns: list[Turn] = []
        for _ in range(num_steps):
            choice = random.random()
            if choice < 0.25:
                host = random.choice(list(leases))
                turns.append(Turn(leases[host], device, host))
            elif choice < 0.45 and turns:
                random.choice(turns).task.cancel()
            elif choice < 0.6 and turns:
                random.choice(turns).let_go()
            else:
                await ticks()
        for turn in turns:
            turn.let_go()
        await ticks(60 * (len(turns) + 1))
        assert all(turn.task.done() for turn in turns), "somebody waits for a turn that nobody holds"
        assert all(turn.task.cancelled() or turn.task.exception() is None for turn in turns)
        assert driver.idle and device.on_it == set() and driver.errors == []

    play(main())


def test_a_word_that_comes_when_the_wait_was_cancelled_gives_the_turn_back() -> None:
    """At every tick of the loop between asking and working."""

    async def main(num_turns: int) -> bool:
        device, driver = Device(), Driver()
        one = driver.lease("one/0", Model(device, "one/0"))
        two = driver.lease("two/0", Model(device, "two/0"))
        turn = Turn(one, device, "one/0")
        await ticks(num_turns)
        began = turn.working
        turn.task.cancel()
        other = Turn(two, device, "two/0")
        await ticks(60)
        assert turn.task.cancelled() and other.working
        other.let_go()
        await ticks(60)
        assert driver.idle and other.task.done()
        return began

    began = [play(main(num_turns)) for num_turns in range(16)]
    assert began == sorted(began) and began[0] is False and began[-1] is True


def test_a_hook_is_never_interrupted_and_the_cancel_comes_after_it() -> None:
    async def main() -> None:
        device, driver = Device(), Driver()
        lease = driver.lease("one/0", Model(device, "one/0", 20))
        turn = Turn(lease, device, "one/0")
        await device.moving.wait()
        for _ in range(3):
            turn.task.cancel()
            await ticks(2)
        await ticks(60)
        assert turn.task.cancelled() and device.log == ["one/0 has it", "one/0 gives it back"]
        turn = Turn(lease, device, "one/0")
        await ticks(60)
        device.moving.clear()
        turn.let_go()
        await device.moving.wait()
        turn.task.cancel()
        await ticks(60)
        assert turn.task.cancelled() and driver.idle and len(device.log) == 4

    play(main())


def test_turns_of_one_host_share_the_lease() -> None:
    async def main() -> None:
        device, driver = Device(), Driver()
        lease = driver.lease("one/0", Model(device, "one/0"))
        turns = [Turn(lease, device, "one/0") for _ in range(3)]
        await ticks(60)
        assert all(turn.working for turn in turns)
        turns[0].task.cancel()
        turns[1].let_go()
        await ticks(60)
        assert device.log == ["one/0 has it"]
        turns[2].let_go()
        await ticks(60)
        assert device.log == ["one/0 has it", "one/0 gives it back"] and driver.idle

    play(main())


class Cancelling(Node):
    """Its hook ends by a cancel that nobody asked for."""

    async def on_acquire(self) -> None:
        raise asyncio.CancelledError


class Failing(Node):
    async def on_release(self) -> None:
        raise ValueError("no memory on the host")


@pytest.mark.parametrize(
    ("node", "message"),
    [
        (Cancelling, "`on_acquire` of scorer/3 raised CancelledError"),
        (Failing, "`on_release` of scorer/3 raised ValueError: no memory on the host\n.*in on_release"),
    ],
)
def test_a_hook_that_fails_names_its_node_and_lets_the_others_go_on(node: Callable[[], Node], message: str) -> None:
    async def main() -> None:
        broken = node()
        broken.name, broken.context = "scorer", SimpleNamespace(replica=3)  # type: ignore[assignment]
        device, driver = Device(), Driver()
        one, two = driver.lease("one/0", broken), driver.lease("two/0", Model(device, "two/0"))

        async def work() -> None:
            await one.begin()
            await one.end()

        for _ in range(2):  # it stays failed
            with pytest.raises(FlowrlError, match=f"(?s){message}"):
                await work()
        await two.begin()
        await two.end()
        assert device.log == ["two/0 has it", "two/0 gives it back"]

    play(main())
