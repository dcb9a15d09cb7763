"""/v1/completions, as OpenAI defines it: prompts of text or token ids."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from flowrl.agents.endpoint.apis import fields
from flowrl.agents.endpoint.apis.api import (
    ApiCall,
    ApiProblem,
    CallAnswer,
    Choice,
    KnownResponses,
    data_event,
    invalid,
    usage_fields,
)
from flowrl.agents.endpoint.apis.chat_completions import NO_INFLUENCE, includes_usage
from flowrl.agents.endpoint.session_tree import RawPrompt

READ = {
    *("model", "prompt", "n", "max_tokens", "stop", "logprobs", "stream", "stream_options"),
    *("temperature", "top_p", "best_of"),
}
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "seed": (),
    "echo": (False,),
    "suffix": ("",),
}


class TextCompletions:
    keep_alive = b": waiting for the reply\n\n"

    def read_call(self, body: Mapping[str, Any], known: KnownResponses) -> ApiCall:
        fields.check_fields(body, READ | NO_INFLUENCE, NEUTRAL)
        fields.check_numbers(body, "temperature", "top_p")
        n = fields.read_count(body, "n", fields.MOST_REPLIES) or 1
        if body.get("best_of") not in (None, n):
            raise fields.untrainable_field("best_of", body["best_of"])
        return ApiCall(
            model=fields.read_text("model", body.get("model")),
            prompts=read_prompts(body.get("prompt")),
            n=n,
            max_tokens=fields.read_count(body, "max_tokens"),
            stop=fields.stop_texts(body),
            logprobs=_wants_logprobs(body.get("logprobs")),
            stream=fields.read_flag(body, "stream"),
            include_usage=includes_usage(body),
            body=body,
        )

    def write_answer(self, call: ApiCall, answer: CallAnswer) -> Mapping[str, Any]:
        return {
            **self._answer_head(call, answer),
            "choices": shown_choices(call, answer),
            "usage": usage_fields(answer),
        }

    def write_events(self, call: ApiCall, answer: CallAnswer) -> Iterator[bytes]:
        for choice in shown_choices(call, answer):
            yield data_event({**self._answer_head(call, answer), "choices": [choice]})
        if call.include_usage:
            yield data_event({**self._answer_head(call, answer), "choices": [], "usage": usage_fields(answer)})
        yield b"data: [DONE]\n\n"

    def write_error(self, problem: ApiProblem) -> Mapping[str, Any]:
        return problem.openai()

    def error_event(self, problem: ApiProblem) -> bytes:
        return data_event(problem.openai())

    def _answer_head(self, call: ApiCall, answer: CallAnswer) -> dict[str, Any]:
        return {
            "id": f"cmpl-{answer.ident}",
            "object": "text_completion",
            "created": answer.created,
            "model": call.model,
        }


def read_prompts(given: Any) -> Sequence[RawPrompt]:
    """One or several prompts, each text or token ids."""
    if isinstance(given, str) or (isinstance(given, list) and given and isinstance(given[0], int)):
        given = [given]
    prompts = fields.read_items("prompt", given)
    if not prompts:
        raise invalid("prompt", "prompt has no prompts; give at least one")
    return [read_prompt(f"prompt[{n}]", prompt) for n, prompt in enumerate(prompts)]


def read_prompt(name: str, prompt: Any) -> RawPrompt:
    if not prompt:
        raise invalid(name, f"{name} is empty; there has to be something to go on from")
    if isinstance(prompt, str):
        return prompt
    for token in fields.read_items(name, prompt):
        if not isinstance(token, int) or isinstance(token, bool) or token < 0:
            raise invalid(name, f"{name} has {fields.shorten_value(token)}; it needs text or a list of token ids")
    return list(prompt)


def _wants_logprobs(asked: Any) -> bool:
    """Whether logprobs are asked for. Only 0 is served, which asks for the sampled tokens' logprobs; no others are
    kept."""
    if asked is not None and asked != 0:
        raise invalid(
            "logprobs", f"logprobs={fields.shorten_value(asked)} asks for tokens that were not sampled; give 0"
        )
    return asked is not None and asked is not False


def shown_choices(call: ApiCall, answer: CallAnswer) -> list[Mapping[str, Any]]:
    return [
        {
            "index": n,
            "text": choice.text,
            "logprobs": text_logprobs(choice) if call.logprobs else None,
            "finish_reason": choice.answer.finish_reason,
        }
        for n, choice in enumerate(answer.choices)
    ]


def text_logprobs(choice: Choice) -> Mapping[str, Any]:
    ends = list(accumulate(len(token) for token in choice.tokens))
    return {
        "tokens": list(choice.tokens),
        "token_logprobs": choice.answer.logprobs.tolist(),
        "top_logprobs": None,
        "text_offset": [0, *ends[:-1]],
    }
