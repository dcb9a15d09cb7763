"""The generator turns prompts into samples; every token has its behavior logprob and version.

Invariants:

- Nothing is sampled before the first message of the weights edge is applied, so every token has a version. If
  the graph ignores the weights port, the loaded weights keep their version for the whole run.
- A request is submitted only while no update is running, so its prefix-cache salt is the version that
  computes its prompt. Requests that run across an update continue with the KV they have.
- A generator that misses a version (overwritten on the latest edge, or its segment reused) takes the newest.
- A checkpoint stops no request: it reads the tokens of each so far while vLLM continues to sample. Requests that
  end during the checkpoint are handled after it.

Waits: an item waits for a free slot (`concurrency`), then at the gate, which an update or a checkpoint
closes and opens; an update waits for its turn among the replicas while requests are running.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from flowrl.errors import FlowrlError
from flowrl.graph.facts import Facts
from flowrl.graph.node import Node
from flowrl.graph.ports import In, Out, Serve
from flowrl.graph.routes import through_hosts
from flowrl.messages import Float32, Int32, Prompt, Sample, Weights
from flowrl.models import Policy, resolve
from flowrl.nodes.sampling import NOTHING, Completion, Response, Sampling
from flowrl.nodes.vllm_adapters import AdapterSlots
from flowrl.nodes.vllm_sampler import EVALUATION, TRAINING, VllmSampler
from flowrl.nodes.vllm_start import check_vllm_version, refused_arguments
from flowrl.nodes.weight_updates import UpdateGate, WeightUpdates
from flowrl.training.settings import LoRA
from flowrl.weights.backends import receiver
from flowrl.weights.fetched import Receiver

Prefix = tuple[Int32, Float32, Int32]
"""token_ids, logprobs, versions of an unfinished response"""


class Generator(Node):
    """Samples from a policy with vLLM.

    `sampling` is for training, `evaluation` for `requests` (default: greedy, with the limits of `sampling`).
    `concurrency` is the number of prompts that one replica processes at a time; evaluation has the same number
    of additional slots, at lower priority. `dtype` "auto" is the model's own. `kv_cache_bytes` None means: on a
    GPU what vLLM finds free; on CPU space for a prompt and a response in every slot, at most 1 GiB. `lora` is the
    trainer's: if the trainer sends adapters, a request keeps the adapter it started with, and new requests use
    the newest. `engine` passes further options to vLLM's AsyncEngineArgs.
    """

    cpus = 1

    prompts: In[Prompt]
    rollouts: Out[Sample]
    weights: In[Weights]
    requests: Serve[Prompt, Sample]

    _receiver: Receiver
    _sampler: VllmSampler
    _updates: WeightUpdates

    def __init__(
        self,
        policy: Policy,
        *,
        sampling: Sampling | None = None,
        evaluation: Sampling | None = None,
        concurrency: int = 128,
        dtype: str = "auto",
        max_model_len: int | None = None,
        kv_cache_bytes: int | None = None,
        lora: LoRA | None = None,
        engine: Mapping[str, Any] | None = None,
    ) -> None:
        self.policy = policy
        self.sampling = sampling or Sampling()
        self.evaluation = evaluation or replace(self.sampling, temperature=0.0)
        self.concurrency = concurrency
        self.dtype = dtype
        self.max_model_len = max_model_len
        self.kv_cache_bytes = kv_cache_bytes
        self.adapter_rank = lora.synced_rank if lora is not None else 0
        self.engine = dict(engine or {})
        self._gate = UpdateGate()
        self._open: dict[str, Response] = {}
        """sample_id: responses for training that are started and not finished."""
        self._running: dict[str, tuple[Response, asyncio.Task[Completion]]] = {}
        """request_id: requests that run in vLLM."""
        self._checkpoint = asyncio.Event()
        """Set while a checkpoint is taken."""
        self._num_requests = 0
        self._asleep = False

    # Declarations for the graph

    def facts(self) -> Facts:
        return Facts(
            longest_response=self.sampling.max_tokens,
            concurrency=self.concurrency,
            adapter_rank=self.adapter_rank,
            optional=("requests",),
        )

    def check(self, facts: Any) -> list[str]:
        problems = [f"sampling: {text}" for text in self.sampling.problems(trained=True)]
        known = self.sampling.problems(trained=False)
        problems += [f"evaluation: {text}" for text in self.evaluation.problems(trained=False) if text not in known]
        problems += refused_arguments(self.engine)
        if self.concurrency < 1:
            problems.append(f"concurrency is {self.concurrency}; a generator needs at least 1 slot")
        return problems

    def preflight(self) -> None:
        check_vllm_version()

    # Lifecycle

    @property
    def replica_name(self) -> str:
        return f"{self.name}/{self.context.replica}"

    async def setup(self) -> None:
        check_vllm_version()
        self.context.progress("finding the model")
        model_dir = await self.blocking(resolve, self.policy, progress=self.context.progress)
        self.context.progress("starting vLLM")
        routes, slots = self.context.weight_routes, None
        if self.adapter_rank:
            routes, slots = through_hosts(routes), AdapterSlots.of(self.adapter_rank, self.context.max_staleness)
        self._receiver = receiver(routes, self.replica_name, self.context.run_id)
        self._sampler = await self.blocking(
            VllmSampler.start,
            model_dir,
            cores=self.context.cores,
            on_gpu=bool(self.context.gpus),
            dtype=self.dtype,
            max_model_len=self.max_model_len,
            max_num_seqs=2 * self.concurrency,
            longest_response=max(self.sampling.max_tokens, self.evaluation.max_tokens),
            kv_cache_bytes=self.kv_cache_bytes,
            seed=self.context.seed,
            transfer=self._receiver.engine,
            slots=slots,
            engine=self.engine,
        )
        await self._sampler.listen()
        self._updates = WeightUpdates(
            self._sampler,
            self._receiver,
            self._gate,
            self.context,
            self.replica_name,
            running=lambda: bool(self._running),
        )
        self.context.progress("vLLM is ready")

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow_weights())
            tasks.create_task(self._serve())
            await self.prompts.each(self._generate, concurrency=self.concurrency)
            self.rollouts.close()  # `run` continues: evaluation may go on, and the last step's weights still arrive

    async def close(self) -> None:
        if hasattr(self, "_sampler"):
            await self.blocking(self._sampler.close)
            self._receiver.close()

    async def _serve(self) -> None:
        if self.requests.live is not None:
            await self.requests.each(self._answer, concurrency=self.concurrency)

    async def _follow_weights(self) -> None:
        if not self.weights.connected:
            await self._updates.stay(self.context.start_version)
            return
        async for manifest in self.weights:
            await self._updates.take(manifest)
            self.weights.finish(manifest)
        if self._updates.version < 0:
            raise FlowrlError(
                f"{self.replica_name}: the weights edge ended before its first message; "
                "a trainer publishes its initial weights before its first batch"
            )

    # Checkpoints

    async def snapshot(self) -> dict[str, Prefix]:
        """The tokens of unfinished responses so far, by sample id. Their invocations wait until `resume`.

        Responses for evaluation are not included: they are requested again.
        """
        self._gate.close("checkpoint")
        while ended := self._ended_in_vllm():
            await asyncio.wait(ended)  # their invocations continue to their sends, which the checkpoint keeps
        self._checkpoint.set()
        parts = {id(response): self._sampler.so_far(key) for key, (response, _) in self._running.items()}
        prefixes = {key: Response([*r.parts, parts.get(id(r)) or NOTHING]) for key, r in self._open.items()}
        return {key: (r.token_ids, r.logprobs, r.versions) for key, r in prefixes.items() if len(r)}

    def _ended_in_vllm(self) -> list[asyncio.Task[Completion]]:
        """The requests that vLLM has ended, but whose result has not arrived here yet."""
        running = [(work, self._sampler.so_far(key)) for key, (_, work) in self._running.items() if not work.done()]
        return [work for work, so_far in running if so_far is None]

    async def resume(self) -> None:
        """Let the invocations continue after a checkpoint."""
        self._checkpoint.clear()
        self._gate.open("checkpoint")

    # Shared devices

    async def on_acquire(self) -> None:
        if self.context.gpus and self._asleep:
            await self._sampler.wake()
            self._asleep = False

    async def on_release(self) -> None:
        """On CPU the cores are free as soon as the node does not use them; a GPU's memory has to be released."""
        if self.context.gpus:
            await self._sampler.sleep()
            self._asleep = True

    # Samples

    async def _generate(self, prompt: Prompt) -> None:
        if self.rollouts.was_sent():
            return
        sample = await self._sample(prompt, self.sampling, TRAINING)
        self.context.metric("tokens_generated", sample.response_tokens - len(prompt.prefix_token_ids))
        self.context.ledger.generated(sample)
        await self.rollouts.send(sample)

    async def _answer(self, prompt: Prompt) -> Sample:
        sample = await self._sample(prompt, self.evaluation, EVALUATION)
        self.context.metric("tokens_evaluated", sample.response_tokens)
        return sample

    async def _sample(self, prompt: Prompt, sampling: Sampling, priority: int) -> Sample:
        """Generate one sample, with more than one request if checkpoints interrupt it."""
        response = Response([_prefix(prompt)])
        if priority == TRAINING:
            self._open[prompt.sample_id] = response
        try:
            while response.finish_reason in ("", "abort") and len(response) < sampling.max_tokens:
                await self._at_gate()
                with self.context.busy("generate"):
                    response.parts.append(await self._request(prompt, response, sampling, priority))
        finally:
            self._open.pop(prompt.sample_id, None)
        return self._finished(prompt, response)

    async def _at_gate(self) -> None:
        while not self._gate.is_open:
            with self.context.waiting("new weights, or the end of a checkpoint"):
                await self._gate.passed()

    async def _request(self, prompt: Prompt, response: Response, sampling: Sampling, priority: int) -> Completion:
        self._num_requests += 1
        request_id = f"{prompt.sample_id}#{self._num_requests}"
        work = asyncio.create_task(
            self._sampler.complete(
                request_id,
                [*prompt.token_ids.tolist(), *response.token_ids.tolist()],
                sampling,
                generated=len(response),
                seed=prompt.seed,
                salt=str(self._updates.version),
                priority=priority,
            )
        )
        self._running[request_id] = response, work
        try:
            return await self._outcome(work)
        finally:
            work.cancel()  # if this coroutine was cancelled, this ends the request in vLLM
            del self._running[request_id]

    async def _outcome(self, work: asyncio.Task[Completion]) -> Completion:
        """The result of `work`. If a checkpoint found it unfinished, it is returned only after that checkpoint."""
        while not work.done():
            checkpoint = asyncio.ensure_future(self._checkpoint.wait())
            await asyncio.wait((work, checkpoint), return_when=asyncio.FIRST_COMPLETED)
            checkpoint.cancel()
            if not work.done():
                await self._at_gate()
        return work.result()

    def _finished(self, prompt: Prompt, response: Response) -> Sample:
        num_prompt, num_response = len(prompt.token_ids), len(response)
        mask = np.zeros(num_prompt + num_response, np.bool_)
        mask[num_prompt:] = True
        return Sample(
            sample_id=prompt.sample_id,
            group_id=prompt.group_id,
            prompt_id=prompt.prompt_id,
            epoch=prompt.epoch,
            member=prompt.member,
            group_size=prompt.group_size,
            prompt_text=prompt.text,
            response_text=self._sampler.text(response.token_ids),
            token_ids=np.concatenate([prompt.token_ids, response.token_ids]).astype(np.int32),
            policy_mask=mask,
            behavior_logprobs=np.concatenate([np.zeros(num_prompt, np.float32), response.logprobs]),
            versions=np.concatenate([np.full(num_prompt, -1, np.int32), response.versions]),
            prompt_tokens=num_prompt,
            truncated=response.finish_reason != "stop",
            generator=self.replica_name,
            columns=prompt.columns,
            generated_s=time.time(),
        )


def _prefix(prompt: Prompt) -> Completion:
    """The tokens generated before a checkpoint, as the first part; empty for a fresh prompt."""
    return Completion(prompt.prefix_token_ids, prompt.prefix_logprobs, prompt.prefix_versions, "")
