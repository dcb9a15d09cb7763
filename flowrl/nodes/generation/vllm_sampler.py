"""The generator's interface to vLLM: token ids in, completions with versions out, and updates in between.

`start` may run in any thread (it blocks for many seconds); afterwards the sampler belongs to the event loop
that calls `listen`. Every call of vLLM outside its documented interface is in this file.

LoRA adapters: one for every version, kept while a request samples with it.

- A request keeps the adapter it started with: all its tokens have one version, even if others are loaded meanwhile.
  That version is not older than the one its group was admitted under, so the staleness bound still holds.
- An adapter is removed when a newer adapter is current and its own last request has ended, to free its slot. The load
  of another one waits for a slot.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import replace
from multiprocessing import active_children
from typing import Any, TypeVar

import numpy as np

from flowrl.errors import SampleFailed
from flowrl.messages import Int32, Weights
from flowrl.messages.episode import LAST_PLACE
from flowrl.messages.sampling import ReplySchema, Sampling
from flowrl.nodes.engine_options import AdapterSlots, Engine
from flowrl.nodes.generation.completions import NOTHING, Completion, Spans, spread_versions
from flowrl.nodes.generation.vllm_processes import (
    EngineDied,
    EngineProcesses,
    engine_arguments,
    engine_died,
    kv_cache_room,
    longest_sequence,
    prepare_environment,
    reported_start,
)
from flowrl.weights.receive import SEGMENT_ENGINE, TransferEngine
from flowrl.weights.vllm_process.engine_process import begun_by_us
from flowrl.wire.activity import apart

T = TypeVar("T")
TRAINING, EVALUATION = 0, LAST_PLACE
"""Priorities: vLLM schedules the smaller value first. The priorities of tickets are between the two."""
CLOSE_S = 5.0


class VllmSampler:
    """One AsyncLLM and its tokenizer."""

    def __init__(self, engine: Any, processes: EngineProcesses, slots: AdapterSlots | None = None) -> None:
        self._engine = engine
        self._processes = processes
        self._adapters = Adapters(engine, slots) if slots is not None else None
        self._version = -1
        self._cache_sleeps = False
        """The weights are awake, but the KV cache is not."""
        self._waking: asyncio.Task[None] | None = None
        self.tokenizer = engine.get_tokenizer()
        self._num_requests = 0
        self._begun: dict[str, tuple[str, int]] = {}
        """Request -> its id inside vLLM, and the version it started with."""
        config = engine.vllm_config.model_config
        self.dtype = str(config.dtype).removeprefix("torch.")
        self.max_model_len = int(config.max_model_len)

    @classmethod
    def start(
        cls,
        model_dir: str,
        *,
        cores: tuple[int, ...] = (),
        num_gpus: int = 0,
        sleeps: bool = False,
        longest_asked: int | None = None,
        longest_response: int = 512,
        seed: int = 0,
        transfer: TransferEngine = SEGMENT_ENGINE,
        slots: AdapterSlots | None = None,
        engine: Engine | None = None,
        trust_remote_code: bool = False,
    ) -> VllmSampler:
        """Load the model in a child process. Blocks; the child process ends with this process.

        `longest_asked` is the number of tokens of the longest prompt; None: the model's context decides.
        `sleeps` says whether the engine has to release its GPUs for other nodes.
        With `slots`, versions are LoRA adapters of the model in `model_dir`, otherwise whole weights.
        """
        engine = engine or Engine()
        prepare_environment(
            cores=cores, on_gpu=bool(num_gpus), eager=engine.enforce_eager is not False, runner=engine.runner
        )
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.async_llm import AsyncLLM

        arguments = engine_arguments(
            model_dir,
            seed=seed,
            num_gpus=num_gpus,
            sleeps=sleeps,
            transfer=transfer,
            slots=slots,
            engine=engine,
            longest=longest_sequence(model_dir, longest_asked, longest_response),
        )
        arguments["trust_remote_code"] = trust_remote_code
        config = AsyncEngineArgs(**arguments).create_engine_config(UsageContext.ENGINE_CONTEXT)
        if engine.kv_cache_bytes is None and not num_gpus:
            config.cache_config.kv_cache_memory_bytes = kv_cache_room(config, longest_response)
        others = set(active_children())
        with begun_by_us(), reported_start():
            started = AsyncLLM.from_vllm_config(config, disable_log_stats=True)
        pids = (child.pid for child in active_children() if child not in others)
        return cls(started, EngineProcesses(pid for pid in pids if pid is not None), slots)

    async def listen(self) -> None:
        """Start on this loop. vLLM's tasks only forward what callers request and await, so they belong to no node."""
        with apart():
            self._processes.listen()
            self._engine._run_output_handler()
            # The first call creates vLLM's sockets and their reader on this loop.
            await self._await_answer(self._engine.is_sleeping())

    @asynccontextmanager
    async def required(self) -> AsyncIterator[None]:
        """The block is cancelled, and EngineDied raised, if vLLM's engine process ends before it does."""
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            async with self._processes.required():
                yield
        except EngineDeadError:
            raise engine_died() from None

    async def _await_answer(self, call: Awaitable[T]) -> T:
        async with self.required():
            return await call

    async def complete(
        self,
        request_id: str,
        token_ids: Sequence[int],
        sampling: Sampling,
        *,
        generated: int = 0,
        seed: int | None = None,
        salt: str = "",
        priority: int = TRAINING,
        schema: ReplySchema | None = None,
    ) -> Completion:
        """Continue `token_ids` by sampling. Cancelling this aborts the request. Raises EngineDied, or SampleFailed if
        vLLM refuses the request.

        `salt` separates the prefix caches of different versions.
        """
        from vllm import SamplingParams
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

        params = SamplingParams(
            **sampling.vllm_arguments(generated=generated, seed=seed),
            flat_logprobs=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_clone=True,
            structured_outputs=None if schema is None else StructuredOutputsParams(**schema.vllm_arguments()),
        )
        prompt = tokens_input(list(token_ids), cache_salt=salt or None)
        version = self._version
        last = await self._run_request(prompt, params, request_id, priority)
        output = last.outputs[0]
        spans = [(span.version, span.start, span.end) for span in output.weight_versions or ()]
        completion = self._completion_of(output.token_ids, output.logprobs, spans, version, output.finish_reason)
        return replace(completion, cached_tokens=last.num_cached_tokens or 0)

    def so_far(self, request_id: str) -> Completion | None:
        """The tokens that a running `complete` has sampled so far; None if vLLM has already ended the request.

        The finish reason is "". Every token arrived with its version's label, so output that is still in transit from
        vLLM does not matter.
        """
        if request_id not in self._begun:
            return NOTHING
        inside, version = self._begun[request_id]
        state = self._engine.output_processor.request_states.get(inside)
        if state is None:
            return None
        token_ids, starts = state.detokenizer.output_token_ids, state.weight_version_starts
        ends = [*(start for _, start in starts[1:]), len(token_ids)]
        spans = [(label, start, end) for (label, start), end in zip(starts, ends, strict=False)]
        return self._completion_of(token_ids, state.logprobs_processor.logprobs, spans, version, "")

    def _completion_of(
        self, token_ids: Sequence[int], logprobs: Any, spans: Spans, version: int, finish_reason: str
    ) -> Completion:
        """`version` is that of the request's adapter; without adapters, vLLM's spans give the version of each token."""
        if self._adapters is not None:
            spans = [(str(version), 0, len(token_ids))]
        size = len(token_ids)
        versions = spread_versions(spans, size)
        if len(logprobs.logprobs) == len(logprobs.start_indices):
            return Completion.copy_of(token_ids, logprobs.logprobs[:size], versions, finish_reason)
        # At each place vLLM has the sampled token first, then the likeliest ones, the sampled one among them or not.
        places = len(logprobs.start_indices)
        ids = np.array(logprobs.token_ids, np.int32).reshape(places, -1)[:size]
        values = np.array(logprobs.logprobs, np.float32).reshape(places, -1)[:size]
        made = Completion.copy_of(token_ids, values[:, 0], versions, finish_reason)
        return replace(made, top_ids=ids[:, 1:], top_logprobs=values[:, 1:])

    async def score_sequences(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """log p(token t | tokens before t) for t = 1 ... T-1 of each sequence, under the current weights."""
        from vllm import SamplingParams
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        rows = []
        for sequence in sequences:
            self._num_requests += 1
            params = SamplingParams(
                max_tokens=1,
                prompt_logprobs=0,
                flat_logprobs=True,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            request_id = f"score-{self._num_requests}"
            output = await self._run_request(
                tokens_input(list(sequence), cache_salt=request_id), params, request_id, TRAINING
            )
            flat = output.prompt_logprobs
            rows.append([flat.logprobs[start] for start in flat.start_indices[1:]])
        return rows

    async def _run_request(self, prompt: Any, params: Any, request_id: str, priority: int) -> Any:
        from vllm.exceptions import VLLMValidationError

        await self.wake_cache()
        with self._adapters.use_current() if self._adapters is not None else nullcontext() as adapter_id:
            adapter, version = None, self._version
            if adapter_id is not None:
                from vllm.lora.request import LoRARequest

                adapter = LoRARequest(f"adapter-{adapter_id}", adapter_id, "held in memory")
            try:
                async with self.required():
                    outputs = await self._engine.add_request(
                        request_id, prompt, params, lora_request=adapter, priority=priority
                    )
                    self._begun[request_id] = outputs.request_id, version  # for `so_far`
                    return await self._last_output(outputs)
            except VLLMValidationError as refusal:
                raise SampleFailed(f"vLLM refused the request: {refusal}") from None
            except EngineDied as death:
                death.arrived = self.so_far(request_id) or NOTHING
                raise
            finally:
                self._begun.pop(request_id, None)

    async def _last_output(self, outputs: Any) -> Any:
        """The last output of a request, as vLLM's `generate` waits for it."""
        try:
            while not (output := outputs.get_nowait() or await outputs.get()).finished:
                pass
            return output
        except asyncio.CancelledError:
            if not self._processes.have_ended:  # `so_far` needs the state that an abort removes
                await self._engine.abort(outputs.request_id, internal=True)
            raise
        finally:
            outputs.close()

    async def pause(self) -> None:
        """Pause running requests and keep their KV; returns when no step is running.

        Calls the engine core directly: `AsyncLLM.pause_generation` sleeps another 20 ms for an output order
        that nothing here relies on.
        """
        await self._await_answer(self._engine.engine_core.pause_scheduler_async(mode="keep", clear_cache=False))

    async def resume(self) -> None:
        await self.wake_cache()
        await self._await_answer(self._engine.resume_generation())

    async def label_tokens(self, version: int) -> None:
        """Label tokens sampled from now on with `version`. Only while paused."""
        await self._await_answer(self._engine.update_weight_version(str(version)))
        self._version = version

    async def join_transfer(self, init_info: Mapping[str, Any]) -> None:
        """Set up vLLM's transfer engine; for NCCL this returns when the whole group has joined."""
        arguments = {"init_info": dict(init_info)}
        await self._await_answer(self._engine.collective_rpc("init_weight_transfer_engine", kwargs=arguments))

    async def wait_for_room(self) -> None:
        """Wait until one more version fits; returns immediately for whole weights. Not while paused."""
        if self._adapters is not None:
            await self._await_answer(self._adapters.wait_for_room())

    async def load_version(self, update: Mapping[str, Any], manifest: Weights) -> float:
        """Load one version into the model in every worker; return the slowest worker's seconds. Only while paused."""
        if self._adapters is not None:
            return await self._await_answer(
                self._adapters.load_adapter(update, manifest.adapter, manifest.base_version)
            )
        applied: Awaitable[list[float]] = self._engine.collective_rpc("apply_weights", args=(dict(update),))
        seconds = await self._await_answer(applied)
        return max(seconds)

    async def sleep(self) -> None:
        """Free the GPU for another process: move weights to host memory, drop the KV. Only if no request is running."""
        await self.wake_cache()  # otherwise vLLM would release memory again that it has released already
        await self._await_answer(self._engine.sleep(level=1))

    async def wake(self) -> None:
        """Bring the weights back; the KV cache follows with `resume` or the first request.

        So an update can use the cache's memory, and an update comes first if both an update and requests wait.
        """
        self._cache_sleeps = True
        await self._await_answer(self._engine.wake_up(["weights"]))

    async def wake_cache(self) -> None:
        """Bring the KV cache back, if it sleeps. Cancelling this call does not interrupt that."""
        if self._cache_sleeps:
            self._waking = self._waking or asyncio.create_task(self._wake_cache())
            await asyncio.shield(self._waking)

    async def _wake_cache(self) -> None:
        try:
            await self._await_answer(self._engine.wake_up(["kv_cache"]))
            self._cache_sleeps = False
        finally:
            self._waking = None

    def decode_text(self, token_ids: Int32) -> str:
        return str(self.tokenizer.decode(token_ids.tolist(), skip_special_tokens=True))

    def close(self) -> None:
        """End the child process: request its shutdown, and kill it after `CLOSE_S`."""
        self._processes.expect_end()
        engine, self._engine = self._engine, None
        outputs = engine.output_handler
        if outputs is not None:  # otherwise it would log the end of the child as a failure
            outputs.get_loop().call_soon_threadsafe(outputs.cancel)
        engine.shutdown(timeout=CLOSE_S)


def priority_of(ticket: int) -> int:
    """The priority of requests under that ticket: the oldest ticket comes first. -1 means no ticket."""
    return min(max(ticket, TRAINING), EVALUATION - 1)


class Adapters:
    """The adapters that one engine holds."""

    def __init__(self, engine: Any, slots: AdapterSlots) -> None:
        self._engine = engine
        self._slots = slots
        self._users: dict[int, int] = {}
        """Adapter id: number of requests that sample with it."""
        self._current = 0
        self._freed = asyncio.Event()

    async def wait_for_room(self) -> None:
        """Wait until one more adapter fits."""
        while True:
            for adapter_id in [key for key, users in self._users.items() if not users and key != self._current]:
                await self._engine.remove_lora(adapter_id)
                del self._users[adapter_id]
            if len(self._users) < self._slots.count:
                return
            self._freed.clear()
            await self._freed.wait()

    async def load_adapter(self, update: Mapping[str, Any], adapter: Mapping[str, Any], version: int) -> float:
        """Make the adapter of `version` current; return the slowest worker's seconds. Call `wait_for_room` first."""
        adapter_id = version + 1
        seconds: list[float] = await self._engine.collective_rpc(
            "load_adapter", args=(dict(update), dict(adapter), adapter_id)
        )
        self._users[adapter_id] = 0
        self._current = adapter_id
        return max(seconds)

    @contextmanager
    def use_current(self) -> Iterator[int]:
        """The id of the current adapter, which is kept until the end of the block."""
        adapter_id = self._current
        self._users[adapter_id] += 1
        try:
            yield adapter_id
        finally:
            self._users[adapter_id] -= 1
            self._freed.set()
