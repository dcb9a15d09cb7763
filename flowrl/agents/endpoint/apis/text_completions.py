"""/v1/completions, as OpenAI defines it: prompts of text or token ids."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from flowrl.agents.endpoint.apis import fields
from flowrl.agents.endpoint.apis.api import Api, ApiCall, CallAnswer, data_event, invalid, usage_fields
from flowrl.agents.endpoint.apis.chat_completions import NO_INFLUENCE, includes_usage
from flowrl.agents.endpoint.session_tree import RawPrompt
from flowrl.environments.protocol import shorten_value
from flowrl.models.tokens.chat import Messages

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


class TextCompletions(Api):
    def read_call(self, body: Mapping[str, Any], responses: Mapping[str, Messages]) -> ApiCall:
        fields.check_fields(body, READ | NO_INFLUENCE, NEUTRAL)
        fields.check_numbers(body, "temperature", "top_p")
        n = fields.read_count(body, "n", fields.MOST_REPLIES) or 1
        if body.get("best_of") not in (None, n):
            raise fields.untrainable_field("best_of", body["best_of"])
        logprobs = body.get("logprobs")
        if logprobs is not None and logprobs != 0:  # 0 asks for those of the sampled tokens; no others are kept
            asked = shorten_value(logprobs)
            raise invalid("logprobs", f"logprobs={asked} asks for tokens that were not sampled; give 0")
        return ApiCall(
            model=fields.read_text("model", body.get("model")),
            prompts=read_prompts(body.get("prompt")),
            n=n,
            max_tokens=fields.read_count(body, "max_tokens"),
            stop=fields.read_stop(body),
            logprobs=logprobs is not None and logprobs is not False,
            stream=fields.read_flag(body, "stream"),
            include_usage=includes_usage(body),
            body=body,
        )

    def write_answer(self, call: ApiCall, answer: CallAnswer) -> Mapping[str, Any]:
        choices = []
        for n, choice in enumerate(answer.choices):
            ends = list(accumulate(len(token) for token in choice.tokens))
            logprobs = {
                "tokens": list(choice.tokens),
                "token_logprobs": choice.answer.logprobs.tolist(),
                "top_logprobs": None,
                "text_offset": [0, *ends[:-1]],
            }
            choices.append(
                {
                    "index": n,
                    "text": choice.text,
                    "logprobs": logprobs if call.logprobs else None,
                    "finish_reason": choice.answer.finish_reason,
                }
            )
        return {
            "id": f"cmpl-{answer.ident}",
            "object": "text_completion",
            "created": answer.created,
            "model": call.model,
            "choices": choices,
            "usage": usage_fields(answer),
        }

    def write_events(self, call: ApiCall, answer: CallAnswer) -> Iterator[bytes]:
        whole = dict(self.write_answer(call, answer))
        choices, usage = whole.pop("choices"), whole.pop("usage")
        for choice in choices:
            yield data_event({**whole, "choices": [choice]})
        if call.include_usage:
            yield data_event({**whole, "choices": [], "usage": usage})
        yield b"data: [DONE]\n\n"


def read_prompts(given: Any) -> Sequence[RawPrompt]:
    """One or several prompts, each text or token ids."""
    if isinstance(given, str) or (isinstance(given, list) and given and isinstance(given[0], int)):
        given = [given]
    prompts: list[RawPrompt] = []
    for n, prompt in enumerate(fields.read_items("prompt", given)):
        name = f"prompt[{n}]"
        if not prompt:
            raise invalid(name, f"{name} is empty; there has to be something to go on from")
        for token in () if isinstance(prompt, str) else fields.read_items(name, prompt):
            if not isinstance(token, int) or isinstance(token, bool) or token < 0:
                raise invalid(name, f"{name} has {shorten_value(token)}; it needs text or a list of token ids")
        prompts.append(prompt)
    if not prompts:
        raise invalid("prompt", "prompt has no prompts; give at least one")
    return prompts
