"""What a weight update costs: gather, copy, fetch, apply and pause, beside a memcpy of the same bytes.

    python -m benchmarks.channels.weights [--policy tiny smollm2] [--updates 50] [--ranks 2] [--json FILE]

ZeRO-3 ranks train and publish every version from processes of their own on the first core, while vLLM
answers requests without end on the last one and takes each version over as a generator node does. Every
update is one repetition; the table gives the median with the smallest, the largest and the 95th
percentile, and each line of JSON one quantity of one policy.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from time import perf_counter
from typing import Any

import numpy as np

from flowrl.messages import Weights
from flowrl.messages.sampling import Sampling
from flowrl.models import Policy, resolve
from flowrl.models.model_files import stored_dtype
from flowrl.nodes.engine_options import Engine
from flowrl.nodes.generation.responses import UpdateGate, WeightUpdates
from flowrl.nodes.generation.vllm_sampler import VllmSampler
from flowrl.weights.receive import SegmentReceiver

RUN_ID = "benchmark"
TARGET_PAUSE_S = {"tiny": 0.060, "smollm2": 0.7}
SEQUENCES, LENGTH = 4, 64
QUANTITIES = ("gather_s", "copy_s", "memcpy_s", "fetch_s", "weight_apply_s", "weight_update_pause_s")


@dataclass(frozen=True)
class Case:
    """One policy under one load."""

    policy: str
    model_dir: str
    ranks: int
    updates: int
    concurrency: int
    trainer_core: int
    generator_core: int


# The trainer's side: one process a rank


def rank_process(case: Case, rank: int, address: str, pipe: Connection | None) -> None:
    """Trains on random tokens and publishes every version, until the parent hangs up."""
    os.sched_setaffinity(0, {case.trainer_core})
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"
    import torch

    from flowrl.training.engine.gang import Gang
    from flowrl.training.engine.zero import ZeroEngine
    from flowrl.training.settings import ZeroSettings
    from flowrl.weights.publish import Publisher
    from flowrl.weights.send import Narrowing

    torch.set_num_threads(1)
    gang = Gang.meet_ranks(rank, case.ranks, address, torch.device("cpu"))
    engine = ZeroEngine(case.model_dir, ZeroSettings(), gang)
    narrowing = Narrowing(stored_dtype(case.model_dir))
    publisher = Publisher(engine, case.policy, run_id=RUN_ID, narrowing=narrowing, probe_every=10)
    version, more = 0, True
    while more:
        manifest = publisher.publish_version(version)
        if pipe is not None and manifest is not None:
            pipe.send((manifest, asdict(publisher.times) | {"memcpy_s": memcpy_s(manifest.num_bytes)}))
        train(engine, version)
        version += 1
        more = all(gang.gather_objects(pipe is None or not pipe.poll()))
    publisher.close()
    gang.leave_gang()


def train(engine: Any, seed: int) -> None:
    """One optimizer step on random sequences."""
    import torch

    from flowrl.training.model.row_layout import lay_out

    draw = np.random.default_rng((seed, engine.rank))
    tokens = [draw.integers(0, engine.vocab_size, LENGTH).astype(np.int32) for _ in range(SEQUENCES)]
    rows = lay_out(tokens, [np.ones(LENGTH, np.bool_)] * SEQUENCES, layout="padded", device=torch.device("cpu"))
    engine.set_lr(1e-5)
    logprobs_N, _ = engine.forward(rows, temperature=1.0)
    engine.add_gradient(-logprobs_N.mean() / engine.gang.size, last=True)
    engine.step_optimizer()


_buffers: dict[int, tuple[Any, Any]] = {}


def memcpy_s(num_bytes: int) -> float:
    """Seconds of one copy of `num_bytes` between two warm buffers."""
    if num_bytes not in _buffers:
        _buffers[num_bytes] = (np.ones(num_bytes, np.uint8), np.ones(num_bytes, np.uint8))
    source, target = _buffers[num_bytes]
    began = perf_counter()
    np.copyto(target, source)
    return perf_counter() - began


# The generator's side


@dataclass
class Context:
    """What `WeightUpdates` needs of a host."""

    seen: dict[str, list[float]] = field(default_factory=dict)
    taken: list[int] = field(default_factory=list)
    ledger: Any = None

    def __post_init__(self) -> None:
        self.ledger = self

    def gauge(self, name: str, value: float) -> None:
        self.seen.setdefault(name, []).append(value)

    def holds(self, replica: str, policy: str, version: int) -> None:
        self.taken.append(version)

    async def blocking(self, fn: Callable[..., Any], *args: Any) -> Any:
        began = perf_counter()
        result = await asyncio.to_thread(fn, *args)
        self.gauge("fetch_s", perf_counter() - began)
        return result

    @asynccontextmanager
    async def exclusive(self, name: str) -> AsyncIterator[None]:
        yield


class Traffic:
    """Requests without end, `concurrency` at a time, through the gate of the updates."""

    def __init__(self, sampler: VllmSampler, gate: UpdateGate, concurrency: int) -> None:
        self._sampler = sampler
        self._gate = gate
        self._tasks = [asyncio.create_task(self._ask(index)) for index in range(concurrency)]
        self.num_tokens = 0

    async def _ask(self, index: int) -> None:
        sampling = Sampling(max_tokens=64, ignore_eos=True)
        prompt = [5 + (index + k) % 60 for k in range(24)]
        count = 0
        while True:
            await self._gate.wait_open()
            done = await self._sampler.complete(f"{index}-{count}", prompt, sampling, seed=count)
            self.num_tokens += len(done.token_ids)
            count += 1

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)


async def generate(case: Case, pipe: Connection) -> dict[str, list[float]]:
    """Take over every version that arrives until there were enough; all measured quantities."""
    sampler = await asyncio.to_thread(
        VllmSampler.start,
        case.model_dir,
        cores=(case.generator_core,),
        engine=Engine(max_model_len=256, concurrency=-(-case.concurrency // 2)),
    )
    gate, context = UpdateGate(), Context()
    host: Any = context
    updates = WeightUpdates(sampler, SegmentReceiver(RUN_ID), gate, host, "generator/0", running=lambda: True)
    seen: dict[str, list[float]] = context.seen
    await updates.take_version((await newest(pipe))[0])
    traffic = Traffic(sampler, gate, case.concurrency)
    seen.clear()
    began = perf_counter()
    while len(context.taken) <= case.updates:
        manifest, times = await newest(pipe)
        if await updates.take_version(manifest):
            for name, value in times.items():
                seen.setdefault(name, []).append(value)
            seen["megabytes"] = [manifest.num_bytes / 1e6]
            progress(f"{case.policy}: update {len(context.taken) - 1} of {case.updates}")
    seen["tokens_per_s"] = [traffic.num_tokens / (perf_counter() - began)]
    seen["updates_per_s"] = [case.updates / (perf_counter() - began)]
    await traffic.stop()
    await asyncio.to_thread(sampler.close)
    return seen


async def newest(pipe: Connection) -> tuple[Weights, dict[str, float]]:
    """What a latest edge would hold: the last of all that has arrived, waiting for one."""
    item = await asyncio.to_thread(pipe.recv)
    while pipe.poll():
        item = pipe.recv()
    received: tuple[Weights, dict[str, float]] = item
    return received


def progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r{text:78}\r", end="", file=sys.stderr)


# One case, and what it says


@contextmanager
def ranks(case: Case) -> Iterator[Connection]:
    """The trainer's processes, ended in order."""
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    processes = [
        spawn.Process(target=rank_process, args=(case, rank, address, None if rank else there), daemon=True)
        for rank in range(case.ranks)
    ]
    for process in processes:
        process.start()
    try:
        yield here
        here.send("enough")
        drain(here, processes[0].sentinel)
    finally:
        for process in processes:
            process.join(30)
            process.kill()


def drain(pipe: Connection, sentinel: int) -> None:
    """Take what rank 0 still sends, so that it does not wait for room, until it has ended."""
    while sentinel not in multiprocessing.connection.wait([pipe, sentinel]):
        try:
            pipe.recv()
        except EOFError:
            return


def measure(policy: str, options: argparse.Namespace) -> dict[str, list[float]]:
    cores = sorted(os.sched_getaffinity(0))
    case = Case(
        policy=policy,
        model_dir=resolve(Policy(policy), progress=progress),
        ranks=options.ranks,
        updates=options.updates,
        concurrency=options.concurrency,
        trainer_core=cores[0],
        generator_core=cores[-1],
    )
    with ranks(case) as pipe:
        os.sched_setaffinity(0, {case.generator_core})
        try:
            return asyncio.run(generate(case, pipe))
        finally:
            os.sched_setaffinity(0, cores)


def table(policy: str, seen: dict[str, list[float]]) -> Iterator[dict[str, Any]]:
    """Prints the rows of one policy and yields them as records."""
    num_bytes = seen["megabytes"][0] * 1e6
    header = f"{policy}, {num_bytes / 1e6:,.1f} MB"
    print(f"{header:26}{'median ms':>12}{'min':>10}{'max':>10}{'p95':>10}{'GB/s':>10}")
    for name in QUANTITIES:
        values = np.array(seen[name]) * 1e3
        middle, p95 = float(np.median(values)), float(np.percentile(values, 95))
        rate = num_bytes / middle / 1e6
        print(f"  {name:24}{middle:12.2f}{values.min():10.2f}{values.max():10.2f}{p95:10.2f}{rate:10.2f}")
        yield {
            "benchmark": "weights",
            "case": policy,
            "system": "memcpy" if name == "memcpy_s" else "flowrl",
            "quantity": name,
            "value": middle / 1e3,
            "unit": "s",
            "min": float(values.min()) / 1e3,
            "max": float(values.max()) / 1e3,
            "p95": p95 / 1e3,
            "bytes": int(num_bytes),
            "repetitions": len(values),
        }
    print(f"  generating meanwhile: {seen['tokens_per_s'][0]:,.0f} tokens/s, {seen['updates_per_s'][0]:.2f} updates/s")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", nargs="+", default=["tiny", "smollm2"], help="tiny, smollm2, or model directories")
    parser.add_argument("--updates", type=int, default=50, help="updates measured for each policy")
    parser.add_argument("--ranks", type=int, default=2, help="ZeRO-3 ranks, all on the first core")
    parser.add_argument("--concurrency", type=int, default=32, help="requests running in vLLM")
    parser.add_argument("--json", default="-", help="file for the JSON lines, - for standard output")
    options = parser.parse_args()
    lines, met = [], True
    for policy in options.policy:
        seen = measure(policy, options)
        lines += list(table(policy, seen))
        if policy in TARGET_PAUSE_S:
            pause, target = float(np.median(seen["weight_update_pause_s"])), TARGET_PAUSE_S[policy]
            met &= pause <= target
            print(f"{'met   ' if pause <= target else 'MISSED'} {policy}: median pause {pause:.3f} s of {target} s\n")
    text = "".join(json.dumps(line) + "\n" for line in lines)
    if options.json == "-":
        print(text, end="")
    else:
        with open(options.json, "w") as file:
            file.write(text)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
