"""How a generator changes from one version to the next: fetch, pause, apply, label, resume, probe.

Invariants:

- The fetch, which reads every byte, is complete before anything is paused.
- Between pause and resume no step runs and no request is submitted; a failure in between is final, since
  the model may be half loaded.
- The label changes only while paused, so vLLM's version spans are exact.

An adapter is loaded in addition to the adapters that running requests keep, so its update first waits for a free slot.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AsyncExitStack

from flowrl.graph.node import Context
from flowrl.messages import Weights
from flowrl.nodes.vllm_engine.vllm_sampler import VllmSampler
from flowrl.weights.probe import ProbeCheck
from flowrl.weights.receive import Fetched, Receiver
from flowrl.weights.shm import SegmentLost


class UpdateGate:
    """The gate at which requests wait while at least one holder keeps it closed. Starts closed by "weights"."""

    def __init__(self) -> None:
        self._closers = {"weights"}
        self._open = asyncio.Event()

    def close(self, who: str) -> None:
        self._closers.add(who)
        self._open.clear()

    def open(self, who: str) -> None:
        self._closers.discard(who)
        if not self._closers:
            self._open.set()

    @property
    def is_open(self) -> bool:
        return not self._closers

    async def passed(self) -> None:
        await self._open.wait()


class WeightUpdates:
    """The version that one sampler holds. `running()` says whether requests are in vLLM."""

    def __init__(
        self,
        sampler: VllmSampler,
        receiver: Receiver,
        gate: UpdateGate,
        context: Context,
        replica: str,
        *,
        running: Callable[[], bool],
        probe_tolerance: float | None = None,
        quantization: str = "",
    ) -> None:
        self.version = -1
        self._content = -1
        """The version whose tensors are loaded; older than `version` after an unchanged version."""
        self._sampler = sampler
        self._receiver = receiver
        self._gate = gate
        self._context = context
        self._replica = replica
        self._running = running
        self._probes = ProbeCheck(replica, sampler.dtype, bool(context.gpus), probe_tolerance, quantization)

    async def take(self, manifest: Weights) -> bool:
        """Bring the sampler to the manifest's version; False if a newer version exists already."""
        if manifest.version <= self.version:
            return False
        async with AsyncExitStack() as stack:
            fetched = None
            if manifest.base_version != self._content:
                try:
                    fetched = await self._fetch(manifest)
                except SegmentLost:
                    return False
                stack.callback(fetched.close)
                await self._sampler.room()
            if self._running() and self._receiver.engine.one_by_one:
                await stack.enter_async_context(self._context.exclusive("weights"))
            await self._exchange(manifest, fetched)
        self._context.ledger.holds(self._replica, manifest.policy, manifest.version)
        await self._probe(manifest)
        return True

    def skip(self, manifest: Weights) -> None:
        """Leave this version out but report it as held: nothing trained waits for it here, so no ticket has to."""
        self._context.ledger.holds(self._replica, manifest.policy, manifest.version)

    async def stay(self, version: int) -> None:
        """Used if no node sends weights: the loaded weights are `version` for the whole run."""
        await self._sampler.pause()
        await self._sampler.label(version)
        self.version = self._content = version
        await self._sampler.resume()
        self._gate.open("weights")

    async def _fetch(self, manifest: Weights) -> Fetched:
        info = self._receiver.join(manifest)
        if info is not None:
            await self._sampler.join(info)
        return await self._context.blocking(self._receiver.fetch, manifest)

    async def _exchange(self, manifest: Weights, fetched: Fetched | None) -> None:
        self._gate.close("weights")
        began = time.perf_counter()
        await self._sampler.pause()
        if fetched is not None:
            self._context.gauge("weight_apply_s", await self._sampler.load(fetched.update, manifest))
        await self._sampler.label(manifest.version)
        self.version, self._content = manifest.version, manifest.base_version
        await self._sampler.resume()
        self._context.gauge("weight_update_pause_s", time.perf_counter() - began)
        self._gate.open("weights")

    async def _probe(self, manifest: Weights) -> None:
        if not manifest.probe_logprobs:
            return
        found = await self._sampler.score(manifest.probe_token_ids)
        self._context.gauge("logprob_mismatch", self._probes.check(manifest, found))


def skips(held: int, version: int, *, every: int) -> bool:
    """Whether a generator that holds version `held` (-1: none) skips `version` and waits for a later one."""
    return held >= 0 and version // every == held // every
