"""A generator without a run around it: in-memory ports, a context that records, the real vLLM behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import numpy as np

from flowrl.errors import SampleFailed
from flowrl.messages import Prompt, Sample


class MemoryIn:
    """An in port fed from a queue; None ends it."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[Any] = asyncio.Queue()

    async def iterate(self) -> AsyncIterator[Any]:
        while (item := await self.queue.get()) is not None:
            yield item

    async def each(self, body: Callable[[Any], Awaitable[None]], concurrency: int) -> None:
        slots = asyncio.Semaphore(concurrency)

        async def turn(item: Any) -> None:
            try:
                await body(item)
            except SampleFailed:
                pass
            finally:
                slots.release()

        async with asyncio.TaskGroup() as tasks:
            async for item in self.iterate():
                await slots.acquire()
                tasks.create_task(turn(item))

    def finish(self, item: Any) -> None:
        pass


class MemoryOut:
    """An out port that keeps what is sent; `arrived(n)` waits for the nth message."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.closed = False
        self.kept = False
        """What is asked for is said to be in a checkpoint already."""
        self.asked = asyncio.Event()
        self._changed = asyncio.Condition()

    def was_sent(self) -> bool:
        self.asked.set()
        return self.kept

    async def send(self, item: Any, made_from: Any) -> None:
        async with self._changed:
            self.sent.append(item)
            self._changed.notify_all()

    async def arrived(self, count: int) -> list[Any]:
        async with self._changed:
            await self._changed.wait_for(lambda: len(self.sent) >= count)
        return self.sent

    def close(self) -> None:
        self.closed = True


class MemoryServe:
    """A serve port: `ask` answers through the node's body once the node serves."""

    def __init__(self) -> None:
        self._body: asyncio.Future[Callable[[Any], Awaitable[Any]]] = asyncio.get_running_loop().create_future()
        self.closed = asyncio.Event()

    async def serve(self, body: Callable[[Any], Awaitable[Any]], concurrency: int) -> None:
        self._body.set_result(body)
        await self.closed.wait()

    async def ask(self, request: Any) -> Any:
        return await (await self._body)(request)


class RecordingContext:
    """A node's context that keeps metrics and ledger calls."""

    def __init__(self, *, cores: tuple[int, ...] = ()) -> None:
        self.replica, self.num_replicas = 0, 1
        self.run_dir, self.run_id, self.seed, self.steps = "", "test", 0, None
        self.cores, self.gpus = cores, ()
        self.resume_dir, self.start_version, self.gang_address = None, 0, ""
        self.max_staleness: int | None = 1
        self.weight_routes: tuple[Any, ...] = ()
        self.ledger = self
        self.gauges: dict[str, list[float]] = {}
        self.counters: dict[str, float] = {}
        self.held: list[tuple[str, str, int]] = []
        self.exclusive_uses = 0
        self._observed = asyncio.Event()

    async def blocking(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return await asyncio.to_thread(fn, *args, **kwargs)

    def metric(self, name: str, value: float) -> None:
        self.counters[name] = self.counters.get(name, 0.0) + value

    def gauge(self, name: str, value: float) -> None:
        self.gauges.setdefault(name, []).append(value)
        self._observed.set()

    async def observed(self, name: str, count: int) -> None:
        """Returns when the gauge `name` has had `count` values."""
        while len(self.gauges.get(name, ())) < count:
            self._observed.clear()
            await self._observed.wait()

    def progress(self, text: str) -> None:
        pass

    @contextmanager
    def busy(self, name: str) -> Any:
        yield

    @contextmanager
    def waiting(self, what: str) -> Any:
        yield

    @asynccontextmanager
    async def exclusive(self, name: str) -> AsyncIterator[None]:
        self.exclusive_uses += 1
        yield

    def generated(self, sample: Sample) -> None:
        pass

    def holds(self, replica: str, policy: str, version: int) -> None:
        self.held.append((replica, policy, version))


def make_prompt(number: int, *, length: int = 12, member: int = 0, **more: Any) -> Prompt:
    draw = np.random.default_rng(number)
    return Prompt(
        sample_id=f"s{number}/{member}",
        group_id=f"g{number}",
        prompt_id=f"p{number}",
        epoch=0,
        member=member,
        group_size=1,
        seed=1000 + number,
        text="",
        token_ids=draw.integers(4, 99, length).astype(np.int32),
        **more,
    )
