"""The output of /v1/responses: items, and the events in which a stream sends them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from flowrl.agents.endpoint.apis.api import ApiCall, CallAnswer, arguments_text, token_logprobs

OutputItem = Mapping[str, Any]


def output_items(call: ApiCall, answer: CallAnswer) -> list[OutputItem]:
    """The reasoning, text and calls of the reply, as far as it has them."""
    (choice,) = answer.choices
    status = "completed" if choice.answer.finish_reason == "stop" else "incomplete"
    items: list[OutputItem] = []
    if choice.reasoning:
        content = [{"type": "reasoning_text", "text": choice.reasoning}]
        items.append({"id": f"rs_{answer.ident}", "type": "reasoning", "summary": [], "content": content})
    if choice.text or not choice.calls:
        text: dict[str, Any] = {"type": "output_text", "text": choice.text, "annotations": []}
        text["logprobs"] = token_logprobs(choice) if call.logprobs else []
        said = {"id": f"msg_{answer.ident}", "type": "message", "role": "assistant", "status": status}
        items.append({**said, "content": [text]})
    for n, one in enumerate(choice.calls):
        called = {"id": f"fc_{answer.ident}_{n}", "type": "function_call", "call_id": one["id"], "status": status}
        items.append({**called, "name": one["function"]["name"], "arguments": arguments_text(one)})
    return items


def output_events(items: Sequence[OutputItem]) -> Iterator[dict[str, Any]]:
    for n, item in enumerate(items):
        yield {"type": "response.output_item.added", "output_index": n, "item": _begun(item)}
        at = {"item_id": item["id"], "output_index": n}
        if item["type"] == "function_call":
            yield from _call_events(item, at)
        else:
            yield from _text_events(item, {**at, "content_index": 0})
        yield {"type": "response.output_item.done", "output_index": n, "item": item}


def _begun(item: OutputItem) -> OutputItem:
    if item["type"] == "function_call":
        return {**item, "arguments": "", "status": "in_progress"}
    return {**item, "content": [], "status": "in_progress"}


def _call_events(item: OutputItem, at: OutputItem) -> Iterator[dict[str, Any]]:
    kind = "response.function_call_arguments"
    yield {"type": f"{kind}.delta", **at, "delta": item["arguments"]}
    yield {"type": f"{kind}.done", **at, "name": item["name"], "arguments": item["arguments"]}


def _text_events(item: OutputItem, at: OutputItem) -> Iterator[dict[str, Any]]:
    (part,) = item["content"]
    logprobs = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
    empty = {**part, "text": "", **({"logprobs": []} if logprobs else {})}
    yield {"type": "response.content_part.added", **at, "part": empty}
    yield {"type": f"response.{part['type']}.delta", **at, "delta": part["text"], **logprobs}
    yield {"type": f"response.{part['type']}.done", **at, "text": part["text"], **logprobs}
    yield {"type": "response.content_part.done", **at, "part": part}
