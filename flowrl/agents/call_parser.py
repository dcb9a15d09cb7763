"""Parses what a policy sampled into an assistant's message, with its tool calls.

`reply_parser` chooses the parser: the parsers of vLLM that are named, else the tokenizer's `response_template`, else
none. Parsing does not raise for any text: if a call in it cannot be read, `ParsedReply.malformed` says why, and the
message is the text.

A call keeps the policy's own id if the text contains one. Otherwise, its id is a hash of the context and the reply, so
that the same episode always has the same ids.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flowrl.agents.reply_parts import Extract, ReplyParts, SampledText, UnreadableReply
from flowrl.errors import ConfigError
from flowrl.messages import Int32
from flowrl.models.tokens.chat import Messages
from flowrl.tasks.user_code import one_line

ID_LENGTH = 9
"""Number of letters and digits in a call's id; the templates of Mistral's models take exactly 9."""
MOST_NESTED = 32
"""Maximum nesting depth of a call's arguments."""
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
"""Keys under which chat templates take reasoning."""
Ids = Sequence[int] | Int32


@dataclass(frozen=True)
class ParsedReply:
    """A reply as a message that chat templates take."""

    message: Mapping[str, Any]
    """`role`, `content` and, if there are any, `tool_calls` in the form of OpenAI's API, and reasoning.

    All values are text, lists and mappings: the arguments of a call are JSON text.
    """
    malformed: str = ""
    """Why a call in the text could not be read, in which case the message has no calls; "" if there was no problem."""


def reply_parser(tokenizer: Any, *, tool_parser: str | None = None, reasoning_parser: str | None = None) -> ReplyParser:
    """The parser of replies to this tokenizer's model; `tool_parser` and `reasoning_parser` name parsers of vLLM.

    Raises ConfigError for names that vLLM does not have, and for parsers that do not work with the tokenizer. Naming a
    parser imports vLLM.
    """
    if tool_parser or reasoning_parser:
        from flowrl.agents.vllm_parser import VllmExtraction

        extract = VllmExtraction(tokenizer, tool_parser, reasoning_parser)
        return ReplyParser(tokenizer, extract, reads_calls=bool(tool_parser))
    if getattr(tokenizer, "response_template", None) is not None:
        return ReplyParser(tokenizer, _of_response_template(tokenizer))
    return ReplyParser(tokenizer, lambda sampled: ReplyParts(sampled.body), reads_calls=False)


class ReplyParser:
    """`parse` keeps nothing between replies. Without `reads_calls` no text is ever a call."""

    def __init__(self, tokenizer: Any, extract: Extract, *, reads_calls: bool = True) -> None:
        self._tokenizer, self._extract = tokenizer, extract
        self.reads_calls = reads_calls
        special = dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
        special |= {index: str(token) for index, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._special_ids = frozenset(special)
        self._end = re.compile(rf"(?:{'|'.join(map(re.escape, special.values()))})?\Z")
        template = str(tokenizer.chat_template or "")
        read = (key for key in REASONING_KEYS if re.search(rf"[.'\"]{key}\b", template))
        self._reasoning_key = next(read, REASONING_KEYS[0])

    def parse(self, reply: Ids | str, context: Ids | str, tools: Messages = ()) -> ParsedReply:
        """The reply as a message. `reply`, and `context` (everything before it), are ids, or text with its special
        tokens.

        Without tools nothing is a call, even if the text looks like one.
        """
        sampled = self._sampled(reply, context, tools)
        parts, malformed = self._parts(sampled)
        if malformed or (parts.calls and not tools):
            parts = ReplyParts(sampled.body)
        message: dict[str, Any] = {"role": "assistant", "content": parts.content}
        if parts.reasoning:
            message[self._reasoning_key] = parts.reasoning
        if parts.calls:
            message["tool_calls"] = list(parts.calls)
        return ParsedReply(message, _sendable(malformed) if tools else "")

    def _parts(self, sampled: SampledText) -> tuple[ReplyParts, str]:
        """(the parts of the reply, with calls in OpenAI's form; why the reply cannot be read, "" if it can)."""
        try:
            found = self._extract(sampled)
            if sampled.body.strip() and not (found.content.strip() or found.reasoning.strip() or found.calls):
                raise UnreadableReply("the text has none of the forms that a reply can have")
            calls = [_formed(call, sampled, index) for index, call in enumerate(found.calls)]
            return ReplyParts(found.content, found.reasoning, calls), ""
        except UnreadableReply as problem:
            return ReplyParts(sampled.body), str(problem)
        except Exception as problem:  # the boundary to the parser, which is third-party code
            return ReplyParts(sampled.body), one_line(problem)

    def _sampled(self, reply: Ids | str, context: Ids | str, tools: Messages) -> SampledText:
        before = context if isinstance(context, str) else self._decoded(context)
        if isinstance(reply, str):
            return SampledText(reply, self._end.sub("", reply), (), before, tools)
        ids = tuple(map(int, reply))
        body = ids[:-1] if ids and ids[-1] in self._special_ids else ids
        return SampledText(self._decoded(ids), self._decoded(body), ids, before, tools)

    def _decoded(self, ids: Ids) -> str:
        listed = [int(one) for one in ids]
        return str(self._tokenizer.decode(listed, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _of_response_template(tokenizer: Any) -> Extract:
    from transformers.utils.chat_parsing.response_templates import load_response_template

    try:
        load_response_template(tokenizer.response_template)
    except (ValueError, TypeError, KeyError) as problem:
        raise ConfigError(f"the tokenizer's response_template cannot be used ({problem}); correct it") from None

    def extract(sampled: SampledText) -> ReplyParts:
        tools = [dict(tool) for tool in sampled.tools] or None
        found = tokenizer.parse_response(sampled.whole, prefix=sampled.context, tools=tools)
        reasoning = next((found[key] for key in REASONING_KEYS if found.get(key)), "")
        return ReplyParts(str(found.get("content") or ""), str(reasoning), found.get("tool_calls") or ())

    return extract


def _formed(call: Any, sampled: SampledText, index: int) -> dict[str, Any]:
    """The call in the form of OpenAI's API. Raises UnreadableReply."""
    function = call.get("function", call) if isinstance(call, Mapping) else call
    if not isinstance(function, Mapping):
        raise UnreadableReply(f"call {index + 1} is {str(function)[:60]!r}; it needs an object of name and arguments")
    name, arguments = function.get("name"), function.get("arguments")
    if not isinstance(name, str) or not name.strip():
        raise UnreadableReply(f"the name of call {index + 1} is {str(name)[:60]!r}; it needs text")
    known = json.loads(arguments) if isinstance(arguments, str) else arguments
    if not isinstance(known, Mapping):
        raise UnreadableReply(f"the arguments of {name[:60]} are a {type(known).__name__}; they need an object")
    if _depth(known) > MOST_NESTED:
        raise UnreadableReply(f"the arguments of {name[:60]} are nested deeper than {MOST_NESTED}")
    formed = {"name": _sendable(name), "arguments": _sendable(json.dumps(known, ensure_ascii=False))}
    return {"id": _call_id(call.get("id"), sampled, index), "type": "function", "function": formed}


def _depth(value: Any) -> int:
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return 1 + max(map(_depth, inner), default=0)


def _call_id(given: Any, sampled: SampledText, index: int) -> str:
    """The policy's own id if the text contains it, else a hash: vLLM's parsers make up a random id if the text has
    none."""
    if isinstance(given, str) and given and given in sampled.whole:
        return _sendable(given)
    place = f"{index}/{len(sampled.context)}/{sampled.context}{sampled.whole}"
    return hashlib.blake2b(place.encode("utf-8", "replace"), digest_size=8).hexdigest()[:ID_LENGTH]


def _sendable(text: str) -> str:
    """`text` with lone surrogates replaced, which a policy can write as escapes in JSON."""
    return text.encode("utf-8", "replace").decode()
