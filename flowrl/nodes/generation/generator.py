"""The generator turns prompts into samples; every token has its behavior logprob and version.

Invariants:

- Nothing is taken before the first message of the weights edge is applied, so every token has a version. If
  the graph ignores the weights port, the loaded weights keep their version for the whole run.
- A request is submitted only while no update is running, so its prefix-cache salt is the version that
  computes its prompt. Requests that run across an update continue with the KV they have.
- A generator that misses a version (overwritten on the latest edge, or its segment reused) takes the newest.
- If a replica's engine dies while other replicas serve the same callers, the replica answers no further requests and
  takes no weights (`Standby` decides). It still reports the versions that it leaves out as held, so tickets do not
  wait for it. If no other replica serves the callers, the run ends.
- A checkpoint stops no request: it reads the tokens that each request has so far while vLLM continues to sample.
  Requests that end during the checkpoint are handled after it.

Waits: an item waits for a free place (`Engine.concurrency`), then at the gate, which an update or a checkpoint
closes and opens. While requests are running, an update waits until no other replica updates, except over NCCL.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import replace
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np

from flowrl.agents import ReplyParser, parser_problems, reply_parser
from flowrl.agents.chat_template import ASKED, Templates
from flowrl.errors import ConfigError, FlowrlError, OutOfService, SampleFailed
from flowrl.graph.node import Context, Facts, Footprint, Node, Share
from flowrl.graph.ports import In, Out, Serve
from flowrl.graph.routes import through_hosts
from flowrl.messages import Int32, Message, Prompt, Sample, Weights, no_ids
from flowrl.messages.episode import Reply, Turn
from flowrl.messages.sampling import Sampling
from flowrl.models import Policy, check_model, end_problem, known_context, known_directory, resolve, with_template
from flowrl.models.model_layout import known_shape
from flowrl.models.tokens.chat import Chat
from flowrl.nodes.engine_options import CACHE_FLAGS, FP8, LEAST_CAPABILITY, AdapterSlots, Engine
from flowrl.nodes.generation.completions import NOTHING, Completion, Response
from flowrl.nodes.generation.responses import (
    Prefix,
    ResponseLost,
    Responses,
    TokenRequest,
    UpdateGate,
    WeightUpdates,
    skips_version,
)
from flowrl.nodes.generation.vllm_processes import (
    EngineDied,
    check_vllm_version,
    prepare_environment,
    stored_problems,
)
from flowrl.nodes.generation.vllm_sampler import EVALUATION, VllmSampler, priority_of
from flowrl.nodes.model_memory import generator_footprint
from flowrl.training.engine.requirements import check_python_headers
from flowrl.training.settings import LoRA
from flowrl.weights.receive import Receiver, make_receiver

Req = TypeVar("Req", bound=Message)
Rep = TypeVar("Rep", bound=Message)
TOP_NOTE = (
    "for entropy and top_logprobs vLLM finds the {} likeliest tokens at each place and sends them with each sampled "
    "token, samples have {} bytes more a token, and a resumed run begins unfinished responses again"
)
GENERATOR_DIED = "generator_died"
"""The recorded reason for abandoning a request that another replica is then asked."""


class Generator(Node):
    """Samples from a policy with vLLM.

    `sampling` is for training. With `trained=False` its samples are not trained on, and it may be greedy or truncated.
    `evaluation` is for `requests` (default: greedy, with the limits of `sampling`).
    `engine` has the options of vLLM. `lora` is the trainer's: if the trainer sends adapters, a request keeps the
    adapter it started with, and new requests use the newest. A replica with several GPUs splits the model among them:
    tensor parallel, unless `engine` also has pipeline_parallel_size or data_parallel_size; their product is the number
    of GPUs.

    `probe_tolerance` is the largest mean difference between the generator's and the trainer's logprobs of the probe;
    None: the difference that the dtypes of both and the engine's quantization explain.

    `turns` answers episodes and Ask ports with the `sampling` of training, or with `evaluation` what has no ticket; the
    oldest ticket comes first. Tool calls are parsed by the vLLM parsers that `tool_parser` and `reasoning_parser`
    name, or by the tokenizer's response template.

    With `every` = n, an opponent of the policy takes only every nth version: a version that n divides, or the next
    one that it can get. A resumed run starts with the newest version. On a GPU `every` has to be 1.
    """

    cpus = 1

    prompts: In[Prompt]
    rollouts: Out[Sample]
    weights: In[Weights]
    requests: Serve[Prompt, Sample]
    turns: Serve[Turn, Reply]

    _receiver: Receiver
    _sampler: VllmSampler
    _updates: WeightUpdates
    _responses: Responses
    _standby: Standby
    _parser: ReplyParser
    _templates: Templates
    _chat: Chat

    def __init__(
        self,
        policy: Policy,
        *,
        sampling: Sampling | None = None,
        evaluation: Sampling | None = None,
        lora: LoRA | None = None,
        engine: Engine | None = None,
        tool_parser: str | None = None,
        reasoning_parser: str | None = None,
        probe_tolerance: float | None = None,
        every: int = 1,
        trained: bool = True,
    ) -> None:
        self.policy, self.trained = policy, trained
        self.sampling = sampling or Sampling()
        self.evaluation = evaluation or replace(self.sampling, temperature=0.0)
        self._longest_response = max(self.sampling.max_tokens, self.evaluation.max_tokens)
        self.adapter_rank = lora.synced_rank if lora is not None else 0
        self.engine = engine or Engine()
        self.tool_parser = tool_parser
        self.reasoning_parser = reasoning_parser
        self.probe_tolerance = probe_tolerance
        self.every = every
        self._gate = UpdateGate()
        self._asleep = False

    # Declarations for the graph

    def facts(self) -> Facts:
        return Facts(
            longest_response=self.sampling.max_tokens,
            columns=self.sampling.columns,
            longest_answer=self._longest_response,
            max_model_len=self.engine.max_model_len,
            concurrency=self.engine.concurrency,
            adapter_rank=self.adapter_rank,
            weights_dtype=self.engine.dtype,
            fixed_weights=self.engine.fixed_weights(adapters=self.adapter_rank > 0),
            quantization=self.engine.quantization,
            least_capability=LEAST_CAPABILITY if self.engine.in_fp8 else 0.0,
            cpu_flags=frozenset() if self.gpus or not self.engine.kv_cache_dtype.startswith("fp8") else CACHE_FLAGS,
            optional=("requests", "turns"),
            stands_in=True,
            takes_schema=True,
        )

    def footprint(self, share: Share) -> Footprint | None:
        return generator_footprint(
            self.policy,
            share,
            self.engine,
            slots=2 * self.engine.concurrency,
            longest_response=self._longest_response,
        )

    def check(self, facts: Any) -> list[str]:
        problems = [f"sampling: {text}" for text in self.sampling.find_problems(trained=self.trained)]
        known = self.sampling.find_problems(trained=False)
        problems += [
            f"evaluation: {text}" for text in self.evaluation.find_problems(trained=False) if text not in known
        ]
        # Answers that leave no token for a prompt in the context, or in the engine's longest sequence.
        most, answer = None, self._longest_response
        where = f"the context of {self.policy.model}"
        with suppress(ConfigError):  # a config that names no context: vLLM knows more names, and preflight tells damage
            most = known_context(self.policy)
        if (asked := self.engine.max_model_len) is not None and (most is None or asked < most):
            most, where = asked, "--engine.max-model-len"
        if most is not None and answer >= most:
            problems.append(
                f"max_tokens is {answer}, but {where} has {most} tokens, for prompt and answer together; lower "
                f"--max-tokens to below {most}"
            )
        shape = known_shape(self.policy) if self.engine.in_fp8 else None
        problems += self.engine.find_problems(self.gpus, shape) + self.engine.parallel_problems(self.gpus)
        if self.probe_tolerance is not None and not self.probe_tolerance >= 0:
            problems.append(f"probe_tolerance is {self.probe_tolerance}; it has to be a number of at least 0")
        problems += parser_problems(tool_parser=self.tool_parser, reasoning_parser=self.reasoning_parser)
        if self.every < 1:
            problems.append(f"every is {self.every}; it needs at least 1; to keep version 0, ignore the weights port")
        return problems

    def notes(self) -> list[str]:
        top = self.sampling.num_top
        found = [TOP_NOTE.format(top, sum(column.value_bytes for column in self.sampling.columns))] if top else []
        if not self.engine.in_fp8:
            return found
        method = self.engine.quantization
        return [
            *found,
            f"--engine.quantization {method}: vLLM quantizes the layers' matrices of every version by {FP8[method]}; "
            "embeddings, norms and the output layer stay in 16 bits",
        ]

    def preflight(self) -> str | None:
        check_vllm_version()
        if self.policy.hub_name is not None:
            check_model(self.policy)  # it is downloaded, whichever node is the first
        if (model_dir := known_directory(self.policy)) is not None:
            stored = stored_problems(model_dir, self.engine, self.gpus)
            for problem in self.engine.head_problems(model_dir, self.gpus) + stored:
                raise ConfigError(problem)
        return end_problem(self.policy)

    # Lifecycle

    @property
    def replica_name(self) -> str:
        return f"{self.name}/{self.context.replica}"

    def preload(self) -> None:
        eager, runner = self.engine.enforce_eager is not False, self.engine.runner
        prepare_environment(cores=self.context.cores, on_gpu=bool(self.context.gpus), eager=eager, runner=runner)
        import vllm.v1.engine.async_llm  # noqa: F401  # for later

    async def setup(self) -> None:
        self._receiver, self._sampler = await self._open_engine()
        await self._sampler.listen()
        if self.turns.live is not None:
            tokenizer = with_template(self._sampler.tokenizer, self.policy)
            self._templates, self._chat = Templates(tokenizer), Chat(tokenizer)
            self._parser = reply_parser(
                tokenizer,
                tool_parser=self.tool_parser,
                reasoning_parser=self.reasoning_parser,
            )
        self._updates = WeightUpdates(
            self._sampler,
            self._receiver,
            self._gate,
            self.context,
            self.replica_name,
            running=lambda: bool(self._responses.running),
            probe_tolerance=self.probe_tolerance,
            quantization=self.engine.quantization,
        )
        self._responses = Responses(self._sampler, self._updates, self._gate, self.context)
        self._standby = Standby(self.context, self.replica_name)
        self.context.progress(f"vLLM is ready for sequences of up to {self._sampler.max_model_len} tokens")

    async def _open_engine(self) -> tuple[Receiver, VllmSampler]:
        """What brings new weights here, and vLLM with the model."""
        check_vllm_version()
        if self.context.gpus:
            check_python_headers("what Triton starts vLLM's kernels with")
        if self.every > 1 and self.context.gpus:
            raise ConfigError(
                f"{self.name} takes every {self.every}th version, but on GPUs a generator takes part in every transfer "
                "of weights; set every=1, or ignore its weights port to stay at version 0"
            )
        self.context.progress("finding the model")
        model_dir = await self.blocking(resolve, self.policy, progress=self.context.progress)
        self.context.progress("starting vLLM")
        routes, slots = self.context.weight_routes, None
        if self.adapter_rank:
            routes, slots = through_hosts(routes), AdapterSlots.slots_for(self.adapter_rank, self.context.max_staleness)
        receiver = make_receiver(routes, self.replica_name, self.context.run_id)
        sampler = await self.blocking(
            VllmSampler.start,
            model_dir,
            cores=self.context.cores,
            num_gpus=len(self.context.gpus),
            sleeps=self.context.time_shared,
            longest_asked=self.context.longest_asked,
            longest_response=self._longest_response,
            seed=self.context.seed,
            transfer=receiver.engine,
            slots=slots,
            engine=self.engine,
            trust_remote_code=self.policy.trust_remote_code,
        )
        return receiver, sampler

    async def run(self) -> None:
        required = self._sampler.required
        async with nullcontext() if self._standby.can_leave else required(), asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow_weights())
            async with required():  # before its first weights it has served no caller, so its death ends the run
                # An invocation before the first weights would hold devices that the trainer needs to publish them.
                with self.context.waiting("its first weights"):
                    await self._gate.wait_open()
            if self.requests.live is not None:
                answer = self._standby.guard_body(self._generate_held_out)
                tasks.create_task(self.requests.each(answer, concurrency=self.engine.concurrency))
            if self.turns.live is not None:
                reply = self._standby.guard_body(self._generate_reply)
                tasks.create_task(self.turns.each(reply, concurrency=self.engine.concurrency))
            await self.prompts.each(self._generate_sample, concurrency=self.engine.concurrency)
            self.rollouts.close()  # `run` continues: evaluation may continue, and the last step's weights still arrive

    async def close(self) -> None:
        if hasattr(self, "_sampler"):
            await self.blocking(self._sampler.close)
            self._receiver.close()

    async def _follow_weights(self) -> None:
        if not self.weights.connected:
            async with self.context.on_devices():
                await self._updates.keep_version(self.context.start_version)
            return
        async for manifest in self.weights:
            waits = skips_version(self._updates.version, manifest.version, every=self.every)
            update = self._updates.take_version
            if self._standby.has_left or waits or not await self._standby.goes_on(update(manifest)):
                self._updates.skip_version(manifest)
            self.weights.finish(manifest)
        if self._updates.version < 0:
            raise FlowrlError(
                f"{self.replica_name}: the weights edge ended before its first message; "
                "a trainer publishes its initial weights before its first batch"
            )

    # Checkpoints

    async def snapshot(self) -> dict[str, Prefix]:
        """The tokens so far of unfinished responses, by sample id, or by request id for a turn.

        The invocations of these responses wait until `resume`. Responses for evaluation are not included: they are
        requested again.
        """
        return await self._responses.snapshot()

    async def resume(self) -> None:
        """Let the invocations continue after a checkpoint."""
        self._responses.resume()

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

    async def _generate_sample(self, prompt: Prompt) -> None:
        if self.rollouts.was_sent():
            return
        sample = await self._sample_prompt(prompt, self.sampling, priority_of(self.prompts.ticket(prompt)))
        self.context.metric("tokens_generated", sample.response_tokens - len(prompt.prefix_token_ids))
        self.context.ledger.generated(sample)
        await self.rollouts.send(sample)

    async def _generate_held_out(self, prompt: Prompt) -> Sample:
        own: dict[str, Any] = {name: getattr(prompt, name) for name in ("temperature", "top_p", "top_k")}
        sampling = replace(self.evaluation, **{name: value for name, value in own.items() if value is not None})
        sample = await self._sample_prompt(prompt, sampling, EVALUATION)
        self.context.metric("tokens_evaluated", sample.response_tokens)
        return sample

    async def _sample_prompt(self, prompt: Prompt, sampling: Sampling, priority: int) -> Sample:
        """Generate one sample, with more than one request if checkpoints interrupt it."""
        asked = TokenRequest(
            prompt.sample_id,
            prompt.token_ids,
            sampling,
            prompt.seed,
            priority,
            prefix=NOTHING if sampling.num_top else prefix_of(prompt),
            kept=priority != EVALUATION and not sampling.num_top,
        )
        response = await self._responses.sample_response(asked)
        num_prompt, num_response = len(prompt.token_ids), len(response)
        mask = np.zeros(num_prompt + num_response, np.bool_)
        mask[num_prompt:] = True
        sample = Sample.of_prompt(
            prompt,
            response_text=self._sampler.decode_text(response.token_ids),
            token_ids=np.concatenate([prompt.token_ids, response.token_ids]).astype(np.int32),
            policy_mask=mask,
            behavior_logprobs=np.concatenate([np.zeros(num_prompt, np.float32), response.logprobs]),
            versions=np.concatenate([np.full(num_prompt, -1, np.int32), response.versions]),
            prompt_tokens=num_prompt,
            truncated=response.finish_reason != "stop",
            generator=self.replica_name,
            generated_s=time.time(),
        )
        found = response.column_values(sampling)
        for column in sampling.columns if priority != EVALUATION else ():
            values = column.make_zeros(num_prompt + num_response)
            values[num_prompt:] = found[column.name]
            sample = sample.with_column(column, values)
        return sample

    # Turns of episodes

    async def _generate_reply(self, turn: Turn) -> Reply:
        arrived_s, held_out = time.monotonic(), turn.ticket < 0
        context_ids = no_ids()
        if turn.messages:
            context_ids = await self.blocking(self._render_context, turn)
            turn = replace(turn, token_ids=context_ids, messages=())
        usual = turn.sampling or (self.evaluation if held_out else self.sampling)
        most, stop = min(usual.max_tokens, turn.max_tokens), (*usual.stop, *turn.stop)
        sampling = replace(usual, max_tokens=most, min_tokens=min(usual.min_tokens, most), stop=stop)
        priority = EVALUATION if held_out else priority_of(turn.ticket)
        asked = TokenRequest(
            turn.request_id,
            turn.token_ids,
            sampling,
            turn.seed,
            priority,
            prefix=NOTHING if sampling.num_top else prefix_of(turn),
            kept=not held_out and not sampling.num_top,
            schema=turn.schema,
        )
        try:
            response = await self._responses.sample_response(asked)
            reply = self._reply_of(turn, response, arrived_s, response.column_values(sampling))
        except ResponseLost as lost:
            # Another replica is asked. What was sampled here is booked, without the prefix that it has as well.
            sampled = Response(lost.response.parts[1:], lost.response.started_s)
            self._count_tokens(turn, len(sampled))
            after = replace(turn, token_ids=np.concatenate([turn.token_ids, turn.prefix_token_ids]))
            self.context.ledger.request_lost(after, self._reply_of(after, sampled, arrived_s), GENERATOR_DIED)
            raise
        self._count_tokens(turn, reply.token_ids.size - turn.prefix_token_ids.size)
        self.context.ledger.request(turn, reply)
        return replace(reply, context_ids=context_ids)

    def _render_context(self, turn: Turn) -> Int32:
        """The context that ends with the turn's messages. Raises SampleFailed if the template cannot render them."""
        try:
            if turn.token_ids.size == 0:
                return self._chat.with_tools(turn.tools).encode_prompt(turn.messages)[1]
            template, (reply, *new) = self._templates.with_tools(turn.tools), turn.messages
            sampled = turn.token_ids[turn.token_ids.size - turn.reply_tokens :]
            between = template.ids_following((ASKED, reply), sampled, new)
        except ConfigError as problem:
            raise SampleFailed(f"{self.name} cannot render what it is asked: {problem}") from None
        return np.concatenate([turn.token_ids, between])

    def _count_tokens(self, turn: Turn, num_tokens: int) -> None:
        """Count tokens that were sampled for the turn."""
        of_training = "tokens_generated" if turn.trained else "tokens_untrained"
        kind = "tokens_evaluated" if turn.ticket < 0 else of_training
        self.context.metric(kind, num_tokens)

    def _reply_of(
        self, turn: Turn, response: Response, arrived_s: float, columns: Mapping[str, Any] = MappingProxyType({})
    ) -> Reply:
        parsed = self._parser.parse(response.token_ids, turn.token_ids, turn.tools)
        return Reply(
            request_id=turn.request_id,
            token_ids=response.token_ids,
            behavior_logprobs=response.logprobs,
            versions=response.versions,
            finish_reason=response.finish_reason,
            message=parsed.message,
            malformed=parsed.malformed,
            cached_tokens=response.cached_tokens,
            queued_s=response.started_s - arrived_s,
            generated_s=time.monotonic() - response.started_s,
            generator=self.replica_name,
            columns=columns,
        )


def prefix_of(asked: Prompt | Turn) -> Completion:
    """The tokens generated before a checkpoint, as the response's first part; empty if there are none."""
    return Completion(asked.prefix_token_ids, asked.prefix_logprobs, asked.prefix_versions, "")


class Standby:
    """Whether one replica is in service. If its vLLM process dies, it ends the run, or leaves its work to the others.

    The replicas of a node that only answers requests stand in for each other (`flowrl.graph.analysis.branches` says
    when). A replica whose engine has died answers all requests, running and later ones, with OutOfService, and its
    callers ask another replica under the same request id. The replica stays out of service until the run ends. Its own
    process continues: it follows checkpoints, and reports the versions that it leaves out as held. The run ends when a
    caller has no replica left to ask. If the replica's own process dies, before or after its engine, the driver handles
    that.
    """

    def __init__(self, context: Context, replica: str) -> None:
        self._context = context
        self._replica = replica
        self.can_leave = context.others_stand_in
        """Whether the other replicas may do the work of this one."""
        self._death: EngineDied | None = None

    @property
    def has_left(self) -> bool:
        return self._death is not None

    def guard_body(self, body: Callable[[Req], Awaitable[Rep]]) -> Callable[[Req], Awaitable[Rep]]:
        """`body` for a Serve port: raises OutOfService once the engine has died, if other replicas can be asked."""

        async def answer_request(request: Req) -> Rep:
            if self._death is None:
                try:
                    return await body(request)
                except EngineDied as death:
                    self._leave_service(death)
            raise OutOfService(f"{self._replica}: {self._death}")

        return answer_request

    async def goes_on(self, work: Awaitable[Any]) -> bool:
        """Await `work`, which uses the engine; False if the engine has died and other replicas do its work."""
        try:
            await work
        except EngineDied as death:
            self._leave_service(death)
            return False
        return True

    def _leave_service(self, death: EngineDied) -> None:
        if not self.can_leave:
            raise death
        if self._death is None:
            self._death = death
            self._context.metric("generators_lost", 1)
            self._context.progress(f"out of service, its requests go to the other replicas: {death}")
