"""Parses what a policy sampled into an assistant's message, with its tool calls: as the chat template says, or with
vLLM's parsers of tool calls and reasoning, by the names that its server takes.

`reply_parser` chooses the parser: the parsers of vLLM that are named, else the tokenizer's `response_template`, else
none. Parsing does not raise for any text: if a call in it cannot be read, `ParsedReply.malformed` says why, and the
message is the text.

A call keeps the policy's own id if the text contains one. Otherwise, its id is a hash of the context and the reply, so
that the same episode always has the same ids.

The names of vLLM's parsers are read from vLLM's source, because importing vllm takes seconds. If vLLM is not installed,
or keeps the names elsewhere, no name is known and any name passes; the generator's process, which imports vLLM, then
refuses wrong names. vLLM's parsers never raise for a call that they cannot read: they log an error with a traceback and
return the text. The code here takes the error out of the log, where it would appear once for each bad reply.
"""

from __future__ import annotations

import ast
import difflib
import functools
import hashlib
import importlib.util
import json
import logging
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowrl.errors import ConfigError
from flowrl.messages import Int32
from flowrl.models.tokens.chat import Messages
from flowrl.tasks.user_code import one_line

START_TOKENS = ("tool_call_start_token", "tool_calls_start_token", "bot_token", "bot_string")
"""Attributes with which vLLM's parsers name the text that a call begins with."""
TRIED_TOOLS = ({"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}},)


class UnreadableReply(Exception):
    """A call in a reply cannot be read; the text says why."""


@dataclass(frozen=True)
class SampledText:
    """What a parser is given."""

    whole: str
    """The text with its special tokens, including the end."""
    body: str
    """The text without the special token that ended it."""
    ids: tuple[int, ...]
    """Empty if the reply was given as text."""
    context: str
    tools: Messages


@dataclass(frozen=True)
class ReplyParts:
    """What a parser found. A call should be a mapping with `name`, `arguments` (a mapping or JSON text) and maybe
    `id`."""

    content: str
    reasoning: str = ""
    calls: Sequence[Any] = ()


Extract = Callable[[SampledText], ReplyParts]
"""May raise any exception, depending on the text."""


def extract_with_vllm(tokenizer: Any, tool_parser: str | None, reasoning_parser: str | None) -> Extract:
    """What one or two named parsers of vLLM find. Raises ConfigError if they do not go with the tokenizer."""
    try:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.parser import ParserManager
        from vllm.reasoning import ReasoningParserManager
        from vllm.tool_parsers import ToolParserManager
    except ImportError as problem:
        raise ConfigError(f"tool_parser and reasoning_parser name parsers of vLLM ({problem}); install vllm") from None
    for kind, name, known in (
        ("tool_parser", tool_parser, ToolParserManager.list_registered()),
        ("reasoning_parser", reasoning_parser, ReasoningParserManager.list_registered()),
    ):
        if name and (wrong := name_problem(kind, name, known)):
            raise ConfigError(wrong)
    named = f"the parsers tool_parser={tool_parser} and reasoning_parser={reasoning_parser}"
    try:
        make_parser: Any = ParserManager.get_parser(
            tool_parser_name=tool_parser,
            reasoning_parser_name=reasoning_parser,
            enable_auto_tools=True,
            tokenizer=tokenizer,
        )
    except (TypeError, ImportError) as problem:
        why = one_line(problem.__cause__ or problem)
        raise ConfigError(f"{named} cannot be used with this tokenizer ({why}); name those of its model") from None

    def extract(sampled: SampledText) -> ReplyParts:
        tools = [dict(tool) for tool in sampled.tools] or None
        request = ChatCompletionRequest(messages=[], tools=tools)
        parser = make_parser(tokenizer, request.tools)
        with collect_errors(parser.tool_parser) as errors:
            reasoning, content, calls = parser.parse(
                sampled.body, request, enable_auto_tools=True, model_output_token_ids=list(sampled.ids)
            )
        listed = [{"name": call.name, "arguments": call.arguments, "id": call.id} for call in calls or ()]
        parts = ReplyParts(content or "", reasoning or "", listed)
        if tools and (why := errors[0] if errors else unread_calls(parser, sampled.body, parts)):
            raise UnreadableReply(why)
        return parts

    try:
        extract(SampledText("a", "a", (), "", TRIED_TOOLS))
    except NotImplementedError as problem:
        raise ConfigError(
            f"{named} do not parse a text ({problem}); use a tokenizer with a response_template, and leave them out"
        ) from None
    return extract


def unread_calls(parser: Any, text: str, parts: ReplyParts) -> str:
    """Why a call in `text` was not read, where the parser did not say so itself."""
    if parts.calls:
        return ""
    for attribute in START_TOKENS:
        start = getattr(parser.tool_parser, attribute, None)
        if start and start in text and start not in parts.reasoning:
            return f"the text has {start!r}, and no call that could be read"
    # Some parsers drop an incomplete call, which then follows everything that they returned.
    last = parts.content.strip() or parts.reasoning.strip()
    _, found, rest = text.rpartition(last) if last else ("", "", text)
    reasoning_end = getattr(parser.reasoning_parser, "reasoning_end_str", None)
    dropped = rest.strip().removeprefix(reasoning_end or "").strip() if found or not last else ""
    return f"the call {json.dumps(dropped[:80], ensure_ascii=False)} is incomplete" if dropped else ""


@contextmanager
def collect_errors(parser: object) -> Iterator[list[str]]:
    """Collect the errors that the parser's modules log within the block; they are not shown."""
    errors: list[str] = []

    def take_record(record: logging.LogRecord) -> bool:
        if record.levelno < logging.ERROR:
            return True
        problem = record.exc_info[1] if record.exc_info else None
        errors.append(one_line(problem) if problem else record.getMessage())
        return False

    loggers = [logging.getLogger(kind.__module__) for kind in type(parser).__mro__ if kind is not object]
    for logger in loggers:
        logger.addFilter(take_record)
    try:
        yield errors
    finally:
        for logger in loggers:
            logger.removeFilter(take_record)


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
        extract = extract_with_vllm(tokenizer, tool_parser, reasoning_parser)
        return ReplyParser(tokenizer, extract, reads_calls=bool(tool_parser))
    if getattr(tokenizer, "response_template", None) is not None:
        return ReplyParser(tokenizer, extract_by_template(tokenizer))
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
        before = context if isinstance(context, str) else self._decode_ids(context)
        if isinstance(reply, str):
            sampled = SampledText(reply, self._end.sub("", reply), (), before, tools)
        else:
            ids = tuple(map(int, reply))
            body = ids[:-1] if ids and ids[-1] in self._special_ids else ids
            sampled = SampledText(self._decode_ids(ids), self._decode_ids(body), ids, before, tools)

        parts, calls, malformed = ReplyParts(sampled.body), list[dict[str, Any]](), ""
        try:
            found = self._extract(sampled)
            if sampled.body.strip() and not (found.content.strip() or found.reasoning.strip() or found.calls):
                raise UnreadableReply("the text has none of the forms that a reply can have")
            formed = [form_call(call, sampled, index) for index, call in enumerate(found.calls)]
            if tools or not formed:
                parts, calls = found, formed
        except UnreadableReply as problem:
            malformed = str(problem)
        except Exception as problem:  # the boundary to the parser, which is third-party code
            malformed = one_line(problem)

        message: dict[str, Any] = {"role": "assistant", "content": parts.content}
        if parts.reasoning:
            message[self._reasoning_key] = parts.reasoning
        if calls:
            message["tool_calls"] = calls
        return ParsedReply(message, replace_surrogates(malformed) if tools else "")

    def _decode_ids(self, ids: Ids) -> str:
        listed = [int(one) for one in ids]
        return str(self._tokenizer.decode(listed, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def extract_by_template(tokenizer: Any) -> Extract:
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


def form_call(call: Any, sampled: SampledText, index: int) -> dict[str, Any]:
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
    if nesting_depth(known) > MOST_NESTED:
        raise UnreadableReply(f"the arguments of {name[:60]} are nested deeper than {MOST_NESTED}")
    formed = {"name": replace_surrogates(name), "arguments": replace_surrogates(json.dumps(known, ensure_ascii=False))}
    own = call.get("id")
    if isinstance(own, str) and own and own in sampled.whole:
        own = replace_surrogates(own)
    else:  # vLLM's parsers make up a random id if the text has none; a hash is the same each time
        place = f"{index}/{len(sampled.context)}/{sampled.context}{sampled.whole}"
        own = hashlib.blake2b(place.encode("utf-8", "replace"), digest_size=8).hexdigest()[:ID_LENGTH]
    return {"id": own, "type": "function", "function": formed}


def nesting_depth(value: Any) -> int:
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return 1 + max(map(nesting_depth, inner), default=0)


def replace_surrogates(text: str) -> str:
    """`text` with lone surrogates replaced, which a policy can write as escapes in JSON."""
    return text.encode("utf-8", "replace").decode()


TABLES = {
    "tool_parser": ("tool_parsers", "_TOOL_PARSERS_TO_REGISTER"),
    "reasoning_parser": ("reasoning", "_REASONING_PARSERS_TO_REGISTER"),
}
"""Kind of parser -> vLLM's package of them, and the table in it whose keys are the names."""
OF_RESPONSE_TEMPLATE = "hf"
"""vLLM's name for the parser that reads the tokenizer's `response_template`."""


def parser_problems(*, tool_parser: str | None, reasoning_parser: str | None) -> Iterator[str]:
    """What is wrong with these names, as sentences. None and "" name no parser."""
    for kind, name in (("tool_parser", tool_parser), ("reasoning_parser", reasoning_parser)):
        if name and (problem := name_problem(kind, name, parser_names(kind))):
            yield problem


def name_problem(kind: str, name: str, known: Collection[str]) -> str:
    """Why `name` is none of the `known` parsers of this kind; "" if it is one, or if none is known."""
    if name == OF_RESPONSE_TEMPLATE:
        return f"{kind}={name} is the tokenizer's response_template, which is the default; leave it out"
    if name in known or not known:
        return ""
    close = difflib.get_close_matches(name, known, 1)
    hint = f" Did you mean {close[0]}?" if close else ""
    return f"vLLM has no {kind} {name!r}; it has {', '.join(sorted(known))}.{hint}"


@functools.cache
def parser_names(kind: str) -> tuple[str, ...]:
    """vLLM's parsers of a kind of `TABLES`, sorted; none if they are not known."""
    package, table = TABLES[kind]
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return ()
    source = Path(next(iter(spec.submodule_search_locations))) / package / "__init__.py"
    if not source.is_file():
        return ()
    for node in ast.parse(source.read_text(encoding="utf-8")).body:
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Dict):
            continue
        if any(isinstance(target, ast.Name) and target.id == table for target in node.targets):
            names = {str(key.value) for key in node.value.keys if isinstance(key, ast.Constant)}
            return tuple(sorted(names - {OF_RESPONSE_TEMPLATE}))
    return ()
