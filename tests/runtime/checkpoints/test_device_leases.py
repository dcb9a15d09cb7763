"""One GPU in turns: who is on it, from set-up to the last checkpoint, in whole runs and in the driver's locks."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from flowrl import Cluster, Machine
from flowrl.graph.analysis.plan import Plan, make_plan
from flowrl.graph.load import load_file
from flowrl.runtime.driver.locks import Locks
from flowrl.runtime.driver.run_checkpoints import lend_to_trainers
from flowrl.testing import VirtualClock, run_graph
from tests.rigs.run_process import ROOT
from tests.rigs.ticks import ticks
from tests.runtime.checkpoints.graphs_devices.device import DEVICE
from tests.wire.channel_rig import play

LEASES = ROOT / "tests" / "runtime" / "checkpoints" / "graphs_devices" / "leases.py"
ONE_GPU = Cluster((Machine(tuple(range(8)), memory_bytes=64 << 30, gpus=1),))


@pytest.fixture(autouse=True)
def empty_device() -> None:
    DEVICE.on_it = ""
    DEVICE.log.clear()


def run(directory: Path, steps: int, config: dict[str, Any] | None = None, **options: Any) -> Any:
    clock = VirtualClock()
    return run_graph(LEASES, directory, config, steps=steps, clock=clock, timeout_s=600, cluster=ONE_GPU, **options)


@pytest.mark.parametrize("staleness", [0, 1, 3])
@pytest.mark.parametrize("save_every", [0, 1, 2])
def test_one_node_is_on_the_device_from_its_set_up_to_the_last_checkpoint(
    tmp_path: Path, staleness: int, save_every: int
) -> None:
    ran = run(tmp_path / "run", 4, {"staleness": staleness}, save_every=save_every)
    assert ran.audit().ok and ran.states() == {"trained": 32}
    loads = [line for line in DEVICE.log if line.endswith("loads")]
    assert sorted(loads) == ["generator loads", "scorer loads", "trainer loads"]
    assert DEVICE.log[:3] == loads and DEVICE.log[3] == "trainer publishes 0", (
        "first everybody loads, then it publishes"
    )
    saves = DEVICE.log.count("trainer saves")
    assert saves == 2 * {0: 1, 1: 4, 2: 2}[save_every], "twice in each checkpoint; the last one comes at the end"
    assert [line for line in DEVICE.log if "publishes" in line] == [f"trainer publishes {v}" for v in range(5)]
    assert DEVICE.on_it == ""


def test_a_best_checkpoint_comes_while_the_generator_works(tmp_path: Path) -> None:
    """After an evaluation during training the trainers stand at no barrier, and generation goes on."""
    ran = run(tmp_path / "run", 6, {"staleness": 3, "every": 2, "generate_s": 1.0}, keep_best=True)
    assert ran.audit().ok and ran.states() == {"trained": 48}
    assert DEVICE.log.count("trainer saves") >= 4


def test_a_resumed_run_takes_turns_too(tmp_path: Path) -> None:
    run(tmp_path / "run", 3, {"staleness": 1}, save_every=1)
    ran = run(tmp_path / "run", 6, {"staleness": 1}, save_every=1, resume=True)
    assert ran.audit().ok and ran.steps == [4, 5, 6]


def test_a_node_that_has_the_device_to_itself_waits_for_nobody(tmp_path: Path) -> None:
    """`on_devices` outside of any turns."""
    ran = run_graph(ROOT / "benchmarks" / "runs" / "stages.py", tmp_path / "run", {}, steps=2, clock=VirtualClock())
    assert ran.audit().ok


def ask(node: str, claim: int = 1) -> dict[str, Any]:
    return {"name": "gpu", "claimant": f"{node}/0", "party": node, "claim": claim}


def test_a_reserved_lock_passes_by_those_who_may_not_have_it() -> None:
    async def main() -> None:
        locks, events = Locks(), list[str]()

        async def turn(node: str, hold: asyncio.Event | None = None) -> None:
            await locks.take_lock("h", ask(node))
            events.append(node)
            if hold is not None:
                await hold.wait()
            locks.release_lock("h", ask(node))

        go = asyncio.Event()
        tasks = [asyncio.ensure_future(turn("generator", go)), asyncio.ensure_future(turn("scorer"))]
        await ticks()

        async def checkpoint() -> None:
            async with locks.reserve_lock("gpu", {"trainer", "critic"}):
                events.append("reserved")
                await asyncio.gather(turn("trainer"), turn("critic"), turn("trainer"))
                await ticks(5)
                events.append("over")

        tasks.append(asyncio.ensure_future(checkpoint()))
        await ticks(5)
        assert events == ["generator"], "it waits for who has it"
        tasks.append(asyncio.ensure_future(turn("generator")))
        await ticks(5)
        assert events == ["generator"], "even its holder's party gets no more of it"
        go.set()
        await asyncio.gather(*tasks)
        assert events[:2] == ["generator", "reserved"]
        assert sorted(events[2:5]) == ["critic", "trainer", "trainer"] and events[5] == "over"
        assert sorted(events[6:]) == ["generator", "scorer"]
        assert not locks._holders and not any(locks._queues.values())

    play(main())


def test_a_reservation_that_is_cancelled_leaves_the_queue_moving() -> None:
    async def main() -> None:
        locks = Locks()
        await locks.take_lock("h", ask("generator"))

        async def reserve() -> None:
            async with locks.reserve_lock("gpu", {"trainer"}):
                raise AssertionError("the generator has it")

        reserving = asyncio.ensure_future(reserve())
        waiting = asyncio.ensure_future(locks.take_lock("h", ask("scorer")))
        await ticks(3)
        reserving.cancel()
        await ticks(3)
        locks.release_lock("h", ask("generator"))
        await asyncio.wait_for(waiting, 1)
        assert reserving.cancelled()

    play(main())


class Gates:
    """Stands for the driver's orders to the hosts."""

    def __init__(self, plan: Plan, locks: Locks) -> None:
        self.plan = plan
        self.locks = locks
        self.events: list[str] = []

    async def set_gate(self, replica_id: str, by: str, *, open_: bool) -> None:
        reserved = ", reserved" if self.locks._reserved else ""
        self.events.append(f"{'open' if open_ else 'close'} {replica_id}{reserved}")


def test_for_a_checkpoint_the_others_on_the_trainers_gpu_take_nothing_new() -> None:
    """Only then it is reserved: their open invocations end, and no others begin."""

    async def main() -> None:
        file = load_file(LEASES)
        locks = Locks()
        orders: Any = Gates(make_plan(file.build(file.parse([])), ONE_GPU), locks)
        async with lend_to_trainers(locks, orders):
            assert orders.events == ["close generator/0", "close scorer/0"]
            assert set(locks._reserved.values()) == {frozenset({"trainer"})}
        assert orders.events[2:] == ["open generator/0", "open scorer/0"] and not locks._reserved

    play(main())
