"""Responses of one generator to requests for tokens, and its changes from one version of the weights to the next.

A response may take several requests to vLLM: a response that a checkpoint interrupted in an earlier life of the run
continues from its prefix. Every request waits at the gate, which an update or a checkpoint closes and opens. The end
of vLLM's process also ends that wait.

An update fetches, pauses, applies, labels, resumes and probes:

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
from dataclasses import dataclass

from flowrl.graph.node import Context
from flowrl.messages import Float32, Int32, Weights
from flowrl.messages.sampling import ReplySchema, Sampling
from flowrl.nodes.generation.completions import NOTHING, Completion, Response
from flowrl.nodes.generation.vllm_processes import EngineDied
from flowrl.nodes.generation.vllm_sampler import VllmSampler
from flowrl.weights.probe import ProbeCheck
from flowrl.weights.receive import Receiver
from flowrl.weights.shm import SegmentLost

Prefix = tuple[Int32, Float32, Int32]
"""token_ids, logprobs, versions of an unfinished response"""


@dataclass(frozen=True, eq=False)
class TokenRequest:
    """A request for one response."""

    key: str
    """Unique among the requests that are open."""
    token_ids: Int32
    """The context."""
    sampling: Sampling
    seed: int
    priority: int
    """vLLM serves the smaller one first."""
    prefix: Completion = NOTHING
    """The beginning of the response, sampled before."""
    kept: bool = False
    """Whether a checkpoint keeps the tokens so far, under `key`."""
    schema: ReplySchema | None = None
    """What the response has to be."""


class ResponseLost(EngineDied):
    """vLLM's process ended during a response; `response` has the tokens that had arrived."""

    def __init__(self, text: str, response: Response) -> None:
        super().__init__(text)
        self.response = response


class Responses:
    """The open requests of one sampler."""

    def __init__(self, sampler: VllmSampler, updates: WeightUpdates, gate: UpdateGate, context: Context) -> None:
        self._sampler = sampler
        self._updates = updates
        self._gate = gate
        self._context = context
        self._open: dict[str, Response] = {}
        """Key -> a response that has started, has not finished and is kept by checkpoints."""
        self.running: dict[str, tuple[Response, asyncio.Task[Completion]]] = {}
        """Request id in vLLM -> its response and its task."""
        self._checkpoint = asyncio.Event()
        """Set while a checkpoint is taken."""
        self._stopped_s = 0.0
        """When the last checkpoint began."""
        self._num_requests = 0

    async def sample_response(self, asked: TokenRequest) -> Response:
        """Sample until the response ends. Cancelling the call ends its request in vLLM. Raises ResponseLost."""
        response = Response([asked.prefix])
        if asked.kept:
            self._open[asked.key] = response
        try:
            while response.finish_reason in ("", "abort") and len(response) < asked.sampling.max_tokens:
                await self._wait_at_gate()
                response.started_s = response.started_s or time.monotonic()
                with self._context.busy("generate"):
                    response.parts.append(await self._request_part(asked, response))
        except EngineDied as death:
            response.parts.append(death.arrived)
            raise ResponseLost(str(death), response) from None
        finally:
            self._open.pop(asked.key, None)
        return response

    async def _wait_at_gate(self) -> None:
        while not self._gate.is_open:
            with self._context.waiting("new weights, or the end of a checkpoint"):
                async with self._sampler.required():
                    await self._gate.wait_open()

    async def _request_part(self, asked: TokenRequest, response: Response) -> Completion:
        self._num_requests += 1
        request_id = f"{asked.key}#{self._num_requests}"
        work = asyncio.create_task(
            self._sampler.complete(
                request_id,
                [*asked.token_ids.tolist(), *response.token_ids.tolist()],
                asked.sampling,
                generated=len(response),
                seed=asked.seed,
                salt=str(self._updates.version),
                priority=asked.priority,
                **({} if asked.schema is None else {"schema": asked.schema}),
            )
        )
        self.running[request_id] = response, work
        try:
            while not work.done():  # if a checkpoint finds it unfinished, it counts only after the checkpoint
                checkpoint = asyncio.ensure_future(self._checkpoint.wait())
                await asyncio.wait((work, checkpoint), return_when=asyncio.FIRST_COMPLETED)
                checkpoint.cancel()
                if not work.done():
                    await self._wait_at_gate()
            return work.result()
        finally:
            work.cancel()  # if this coroutine was cancelled, this ends the request in vLLM
            del self.running[request_id]

    async def snapshot(self) -> dict[str, Prefix]:
        """The tokens so far of the responses that checkpoints keep. Their invocations wait until `resume`."""
        self._stopped_s = time.monotonic()
        self._gate.close_for("checkpoint")
        while True:
            running = [(key, work) for key, (_, work) in self.running.items() if not work.done()]
            # vLLM has ended these, but their results have not arrived here yet. Their invocations continue to their
            # sends, which the checkpoint keeps.
            ended = [work for key, work in running if self._sampler.so_far(key) is None]
            if not ended:
                break
            await asyncio.wait(ended)
        self._checkpoint.set()
        parts = {id(response): self._sampler.so_far(key) for key, (response, _) in self.running.items()}
        prefixes = {key: Response([*r.parts, parts.get(id(r)) or NOTHING]) for key, r in self._open.items()}
        return {key: (r.token_ids, r.logprobs, r.versions) for key, r in prefixes.items() if len(r)}

    def resume(self) -> None:
        """Let the invocations continue after a checkpoint."""
        self._checkpoint.clear()
        self._gate.open_for("checkpoint")
        self._context.gauge("checkpoint_pause_s", time.monotonic() - self._stopped_s)


class UpdateGate:
    """The gate at which requests wait while at least one holder keeps it closed. Starts closed by "weights"."""

    def __init__(self) -> None:
        self._closers = {"weights"}
        self._open = asyncio.Event()

    def close_for(self, who: str) -> None:
        self._closers.add(who)
        self._open.clear()

    def open_for(self, who: str) -> None:
        self._closers.discard(who)
        if not self._closers:
            self._open.set()

    @property
    def is_open(self) -> bool:
        return not self._closers

    async def wait_open(self) -> None:
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

    async def take_version(self, manifest: Weights) -> bool:
        """Bring the sampler to the manifest's version; False if a newer version exists already."""
        if manifest.version <= self.version:
            return False
        async with AsyncExitStack() as stack:
            fetched = None
            if manifest.base_version != self._content:
                try:
                    if (info := self._receiver.join_engine(manifest)) is not None:
                        await self._sampler.join_transfer(info)
                    fetched = await self._context.blocking(self._receiver.fetch_version, manifest)
                except SegmentLost:
                    return False
                stack.callback(fetched.close)
                await self._sampler.wait_for_room()
            if self._running() and self._receiver.engine.one_by_one:
                await stack.enter_async_context(self._context.exclusive("weights"))
            self._gate.close_for("weights")
            began = time.perf_counter()
            await self._sampler.pause()
            if fetched is not None:
                self._context.gauge("weight_apply_s", await self._sampler.load_version(fetched.update, manifest))
            await self._sampler.label_tokens(manifest.version)
            self.version, self._content = manifest.version, manifest.base_version
            await self._sampler.resume()
            self._context.gauge("weight_update_pause_s", time.perf_counter() - began)
            self._gate.open_for("weights")
        self._context.ledger.holds(self._replica, manifest.policy, manifest.version)
        if manifest.probe_logprobs:
            found = await self._sampler.score_sequences(manifest.probe_token_ids)
            self._context.gauge("logprob_mismatch", self._probes.check(manifest, found))
        return True

    def skip_version(self, manifest: Weights) -> None:
        """Leave this version out but report it as held: nothing trained waits for it here, so no ticket has to."""
        self._context.ledger.holds(self._replica, manifest.policy, manifest.version)

    async def keep_version(self, version: int) -> None:
        """Used if no node sends weights: the loaded weights are `version` for the whole run."""
        await self._sampler.pause()
        await self._sampler.label_tokens(version)
        self.version = self._content = version
        await self._sampler.resume()
        self._gate.open_for("weights")


def skips_version(held: int, version: int, *, every: int) -> bool:
    """Whether a generator that holds version `held` (-1: none) skips `version` and waits for a later one."""
    return held >= 0 and version // every == held // every
