"""From a call that was read to its replies: contexts, limits, the backend, and the session's tree."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from flowrl.agents.chat_template import TooMuchText
from flowrl.agents.conversation import Span
from flowrl.agents.endpoint.apis import ApiCall, CallAnswer, Choice
from flowrl.agents.endpoint.apis.api import ApiProblem, invalid
from flowrl.agents.endpoint.backend import Backend, Busy, EndpointSettings, LimitReached, SampledAnswer, Unavailable
from flowrl.agents.endpoint.session_table import AgentSession, SampledCall
from flowrl.agents.endpoint.session_tree import Asked, AskedMessages, AskedPrompt
from flowrl.errors import ConfigError
from flowrl.messages import Int32

log = logging.getLogger(__name__)
LONG = 20_000
"""Characters of a call's texts from which its contexts are made in a thread. That takes some 50 ms, in which the
tokenizer lets other threads run."""


class CallSampler:
    """Samples replies to calls, and delivers them: what is delivered enters the session's tree."""

    def __init__(self, backend: Backend, tokenizer: Any, settings: EndpointSettings) -> None:
        self._backend = backend
        self._tokenizer = tokenizer
        self._settings = settings

    def check_call(self, call: ApiCall) -> None:
        """Raises ApiProblem for a model that is not served, or messages that no reply can follow."""
        if call.model not in self._settings.models:
            message = f"the model {call.model!r} is not served here; use {' or '.join(self._settings.models)}"
            raise ApiProblem(404, message, param="model", code="model_not_found")
        if call.prompts:
            size = len(self._tokenizer)
            for prompt in call.prompts:
                if not isinstance(prompt, str) and max(prompt) >= size:
                    raise invalid("prompt", f"prompt has the token {max(prompt)}, and the policy has {size} tokens")
        elif not call.messages:
            raise invalid("messages", "there are no messages; give at least one")
        elif call.messages[-1]["role"] == "assistant":
            message = "messages ends with one of the assistant, and flowrl does not continue a reply"
            raise invalid("messages", f"{message}; end with a message of the user or of a tool")

    async def sample_call(self, session: AgentSession, call: ApiCall) -> SampledCall:
        """The replies, `n` to each context. Raises ApiProblem; cancelling aborts all of them."""
        asked = [one for one in await self._find_context(session, call) for _ in range(call.n)]
        contexts = [one.token_ids for one in asked]
        session.full |= any(context.size >= self._settings.context_tokens for context in contexts)
        limits = [self.max_tokens(call, context.size) for context in contexts]
        if len(asked) == 1:
            return [(asked[0], await self._sample_reply(session, call, contexts[0], limits[0]))]
        try:
            async with asyncio.TaskGroup() as group:
                pairs = zip(contexts, limits, strict=True)
                tasks = [group.create_task(self._sample_reply(session, call, *pair)) for pair in pairs]
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return [(one, task.result()) for one, task in zip(asked, tasks, strict=True)]

    async def count_tokens(self, session: AgentSession, call: ApiCall) -> int:
        """The tokens of a call's messages. Raises ApiProblem."""
        self.check_call(call)
        count = functools.partial(session.tree.num_tokens, call.messages, call.tools)
        try:
            return await asyncio.to_thread(count) if is_long(call) else count()
        except TooMuchText as problem:
            raise self._too_long(problem.num_tokens) from None
        except ConfigError as problem:
            raise invalid("messages", str(problem)) from None

    def deliver_answer(self, session: AgentSession, call: ApiCall, sampled: SampledCall) -> CallAnswer:
        """What the client sees; from now on the replies are part of the session."""
        choices = []
        for asked, answer in sampled:
            session.request_ids.append(answer.request_id)
            ids = answer.token_ids.astype(np.int32)
            span = Span(ids, "", answer.logprobs.astype(np.float32), answer.versions.astype(np.int32))
            if isinstance(asked, AskedMessages):
                said = answer.message or {"content": answer.text}
                message = session.tree.add_reply(asked, span, said, stop_text=answer.stop_text)
            else:
                assert isinstance(asked, AskedPrompt)
                session.prompts.add_reply(asked, span, answer.text)
                message = {"content": answer.text}
            tokens = ids.tolist() if call.logprobs else ()
            texts = tuple(self._tokenizer.decode([token], skip_special_tokens=False) for token in tokens)
            choices.append(Choice(answer, message, texts))
        sizes = [asked.token_ids.size for asked, _ in sampled[:: call.n]]
        whole = CallAnswer(tuple(choices), sum(sizes), self.max_tokens(call, max(sizes)))
        if call.kept is not None:
            session.responses[whole.ident] = [*call.kept, choices[0].message]
        return whole

    def max_tokens(self, call: ApiCall, context_tokens: int) -> int:
        """The limit of a reply. Raises ApiProblem if the context leaves no place for one."""
        room = self._settings.context_tokens - context_tokens
        if room <= 0:
            raise self._too_long(context_tokens)
        return min(call.max_tokens or room, self._settings.turn_tokens, room)

    def _too_long(self, num_tokens: int) -> ApiProblem:
        # Harnesses recognise a full context by the words of OpenAI's or Anthropic's servers, not by the code.
        most = self._settings.context_tokens
        message = (
            f"prompt is too long: {num_tokens} tokens > {most - 1} maximum; this model's maximum context "
            f"length is {most} tokens with the reply; shorten the messages"
        )
        return ApiProblem(400, message, param="messages", code="context_length_exceeded")

    async def _find_context(self, session: AgentSession, call: ApiCall) -> Sequence[Asked]:
        """The contexts; those of long texts are made in a thread. One call of a session at a time: calls share nodes.

        A thread goes on although its call is cancelled, and the next call of the session waits for its end.
        """
        try:
            if not is_long(call):
                async with session.asking:
                    return self._find_contexts(session, call)
            await session.asking.acquire()
            made = asyncio.ensure_future(asyncio.to_thread(self._find_contexts, session, call))
            made.add_done_callback(functools.partial(release_asking, session))
            return await asyncio.shield(made)
        except TooMuchText as problem:
            session.full = True
            raise self._too_long(problem.num_tokens) from None
        except ConfigError as problem:
            raise invalid("messages", str(problem)) from None

    def _find_contexts(self, session: AgentSession, call: ApiCall) -> Sequence[Asked]:
        if call.prompts:
            return [session.prompts.find_context(prompt) for prompt in call.prompts]
        return [session.tree.find_context(call.messages, call.tools)]

    async def _sample_reply(
        self, session: AgentSession, call: ApiCall, context: Int32, max_tokens: int
    ) -> SampledAnswer:
        try:
            return await self._backend.reply(
                session.session_id, context, max_tokens=max_tokens, stop=call.stop, tools=call.tools
            )
        except Unavailable as problem:
            raise ApiProblem(503, str(problem), retry_after_s=problem.retry_after_s) from None
        except Busy as problem:
            raise ApiProblem(429, str(problem), retry_after_s=problem.retry_after_s) from None
        except LimitReached as problem:
            raise ApiProblem(409, str(problem), code="limit_reached") from None
        except Exception as problem:  # the boundary to the backend
            log.exception("sampling for the session %s failed", session.session_id)
            raise ApiProblem(500, f"sampling failed: {type(problem).__name__}: {problem}") from None


def release_asking(session: AgentSession, made: asyncio.Future[Sequence[Asked]]) -> None:
    session.asking.release()
    if not made.cancelled():
        made.exception()  # mark it as retrieved: the call may have been cancelled


def is_long(call: ApiCall) -> bool:
    """Whether the call's texts have more than LONG characters together; an id of a prompt counts as one."""
    length, values = 0, [call.messages, call.tools, call.prompts]
    while values and length <= LONG:
        value: Any = values.pop()
        if isinstance(value, str):
            length += len(value)
        elif isinstance(value, Mapping):
            values += value.values()
        elif isinstance(value, Sequence) and value and isinstance(value[0], int):
            length += len(value)
        elif isinstance(value, Sequence):
            values += value
    return length > LONG
