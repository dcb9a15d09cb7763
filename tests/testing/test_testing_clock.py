"""Virtual time: it passes when everything waits, and takes none of the test's."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from flowrl import In, Node, Out, Sample
from flowrl.testing import Stuck, VirtualClock, run_node, sample


@contextmanager
def at_once() -> Iterator[None]:
    """What is inside takes seconds of the machine's time at most."""
    began_s = time.monotonic()
    yield
    assert time.monotonic() - began_s < 60


def test_it_jumps_to_the_next_timer() -> None:
    order: list[str] = []
    clock = VirtualClock()

    async def sleep(name: str, for_s: float) -> None:
        await asyncio.sleep(for_s)
        order.append(name)

    async def long() -> float:
        await asyncio.gather(sleep("late", 5000.0), sleep("early", 3000.0), asyncio.to_thread(order.append, "thread"))
        return asyncio.get_running_loop().time()

    with at_once():
        assert clock.run(long()) == clock.now_s == pytest.approx(5000.0)
    assert order == ["thread", "early", "late"]
    clock.run(asyncio.sleep(1.0))
    assert clock.now_s == pytest.approx(5001.0), "it goes on where it was"


def test_it_does_not_pass_while_anything_can_go_on() -> None:
    async def busy() -> float:
        for _ in range(10_000):
            await asyncio.sleep(0)
        return asyncio.get_running_loop().time()

    async def main() -> None:
        async with asyncio.timeout(0.001):
            assert await busy() == 0.0

    VirtualClock().run(main())


def test_what_can_never_go_on_is_found_with_its_place() -> None:
    async def never() -> None:
        await asyncio.sleep(2)
        await asyncio.get_running_loop().create_future()

    with pytest.raises(
        Stuck, match=r"nothing is left that could happen, at 2\.000 s .*never \(test_testing_clock\.py:\d+\)"
    ):
        VirtualClock().run(never())


def test_what_never_comes_to_rest_is_found_too() -> None:
    async def spins() -> None:
        while True:  # noqa: ASYNC110
            await asyncio.sleep(0)

    with pytest.raises(Stuck, match=r"busy for more than 0\.1 s, at 0\.000 s of its own time"):
        VirtualClock(busy_s=0.1).run(spins())


def test_a_timeout_ends_a_wait_at_its_moment() -> None:
    async def main() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(30):
                await asyncio.sleep(31)

    clock = VirtualClock()
    clock.run(main())
    assert clock.now_s == pytest.approx(30.0)


class Patient(Node):
    """Tries each sample until it succeeds, waiting twice as long each time."""

    samples: In[Sample]
    judged: Out[Sample]

    async def run(self) -> None:
        await self.samples.each(self.judge, concurrency=8)

    async def judge(self, one: Sample) -> None:
        for attempt in range(one.member):
            await asyncio.sleep(2.0**attempt)
        await self.judged.send(one)


def test_a_node_waits_in_the_time_of_its_clock() -> None:
    clock = VirtualClock()
    with at_once():
        record = run_node(Patient(), {"samples": [sample(m) for m in (10, 0, 3)]}, clock=clock, timeout_s=2000)
    assert [one.member for one in record.sent("judged")] == [0, 3, 10]
    assert clock.now_s == pytest.approx(2.0**10 - 1)
