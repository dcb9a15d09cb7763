"""What the small graphs here are made of: the stages of benchmarks/runs/stages.py, and nodes that go wrong."""

from __future__ import annotations

import asyncio
import ctypes
import os
import pickle
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.runs.stages import Collect, Numbers, SleepingGenerator, SleepingTrainer, record
from flowrl import In, Node, Out, Sample
from flowrl.errors import SampleFailed
from flowrl.graph.node import Facts
from flowrl.runtime.ledger.ledger_client import Use
from flowrl.weights.shm import SegmentPool

__all__ = ["Collect", "Faulty", "Generator", "Numbers", "Ranks", "Trainer"]


def leave_word(node: Node, text: str = "") -> None:
    """A file NODE-REPLICA in the run directory that grows by one line: for tests to read."""
    with open(Path(node.context.run_dir) / f"{node.name}-{node.context.replica}", "a") as file:
        file.write(f"{text or os.getpid()}\n")


class Generator(SleepingGenerator):
    cpus = 0

    def __init__(self, seconds: float, concurrency: int, close_s: float = 0.0) -> None:
        super().__init__(seconds, concurrency)
        self.close_s = close_s

    async def setup(self) -> None:
        leave_word(self)

    async def close(self) -> None:
        await asyncio.sleep(self.close_s)  # an engine that is slow to end


class Trainer(SleepingTrainer):
    """Its first rank has weights in shared memory, as a real one has."""

    cpus = 0
    pool: SegmentPool | None = None

    async def setup(self) -> None:
        leave_word(self)
        if self.context.replica == 0:
            self.pool = SegmentPool(self.context.run_id, self.name)
            segment = self.pool.take_writable()
            self.pool.publish_segment(segment, 0, 0)
            leave_word(self, segment.name)

    async def close(self) -> None:
        if self.pool is not None:
            self.pool.close()


class Ranks(Trainer):
    """A gang: every rank trains its part of the batch, and the first books the uses of all.

    The others leave theirs as a file of the run directory, which stands for the collective of a real gang.
    """

    async def run(self) -> None:
        version = self.context.start_version
        await self.publish(version)
        async for batch in self.batches:
            version += 1
            if self.context.replica == 0:
                self.report(version, [*batch.samples, *await self.of_the_others(version)])
                await self.publish(version)
            else:
                part = self.part(version, self.context.replica)
                part.with_suffix(".tmp").write_bytes(pickle.dumps(batch.samples))
                part.with_suffix(".tmp").rename(part)
            self.batches.finish(batch)
            await self.context.step_done(version)

    def part(self, version: int, rank: int) -> Path:
        return Path(self.context.run_dir) / f"part-{version}-{rank}"

    async def of_the_others(self, version: int) -> list[Sample]:
        others = [self.part(version, rank) for rank in range(1, self.context.num_replicas)]
        return [sample for part in others for sample in await self.blocking(take_when_there, part)]

    def report(self, version: int, samples: Sequence[Sample]) -> None:
        self.context.ledger.step(record(version, samples), list(map(Use.of, samples)), policy=self.name)


def take_when_there(path: Path) -> list[Sample]:
    while not path.exists():
        time.sleep(0.005)  # in place of a collective, which ranks without torch have not
    samples: list[Sample] = pickle.loads(path.read_bytes())
    path.unlink()
    return samples


class Faulty(Node):
    """Lets samples pass, and does `fault` with those of group number `at`."""

    samples: In[Sample]
    passed: Out[Sample]

    def __init__(self, fault: str, at: int) -> None:
        self.fault = fault
        self.at = at

    def facts(self) -> Facts:
        return Facts(drops=True)

    async def setup(self) -> None:
        leave_word(self)
        if self.fault == "setup":
            raise RuntimeError("no such device")

    async def run(self) -> None:
        if self.fault == "raise_in_loop":
            async for sample in self.samples:
                await self.treat(sample)
        else:
            await self.samples.each(self.treat, concurrency=2)

    async def treat(self, sample: Sample) -> None:
        if sample.group_id == f"group{self.at}":
            match self.fault:
                case "raise" | "raise_in_loop":
                    raise ZeroDivisionError("the reward divided by zero")
                case "forget":
                    return
                case "hang":
                    time.sleep(3600)  # noqa: ASYNC251 - the event loop stands, which is under test
                case "gil":
                    ctypes.PyDLL(None).sleep(12)  # no other thread of the process runs meanwhile
                case "fail" if sample.member == 0:
                    raise SampleFailed("no_answer")
        await self.passed.send(sample)
