"""vLLM's parsers of tool calls and reasoning, by the names that its server takes.

These parsers never raise for a call that they cannot read: they log an error with a traceback and return the text. The
code here takes the error out of the log, where it would appear once for each bad reply.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from flowrl.agents.reply_parts import ReplyParts, SampledText, UnreadableReply
from flowrl.agents.vllm_parser_names import name_problem
from flowrl.errors import ConfigError
from flowrl.tasks.user_code import one_line

START_TOKENS = ("tool_call_start_token", "tool_calls_start_token", "bot_token", "bot_string")
"""Attributes with which vLLM's parsers name the text that a call begins with."""
TRIED_TOOLS = ({"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}},)


class VllmExtraction:
    """One tokenizer with one or two named parsers. Raises ConfigError if they do not go together."""

    def __init__(self, tokenizer: Any, tool_parser: str | None, reasoning_parser: str | None) -> None:
        self._tokenizer = tokenizer
        self._kind = _parser_class(tokenizer, tool_parser, reasoning_parser)
        try:
            self(SampledText("a", "a", (), "", TRIED_TOOLS))
        except NotImplementedError as problem:
            raise ConfigError(
                f"the parsers tool_parser={tool_parser} and reasoning_parser={reasoning_parser} do not parse a text "
                f"({problem}); use a tokenizer with a response_template, and leave them out"
            ) from None

    def __call__(self, sampled: SampledText) -> ReplyParts:
        """Raises UnreadableReply if the text has a call that cannot be read."""
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        tools = [dict(tool) for tool in sampled.tools] or None
        request = ChatCompletionRequest(messages=[], tools=tools)
        parser = self._kind(self._tokenizer, request.tools)
        with _errors_taken(parser.tool_parser) as errors:
            reasoning, content, calls = parser.parse(
                sampled.body, request, enable_auto_tools=True, model_output_token_ids=list(sampled.ids)
            )
        parts = ReplyParts(
            content or "",
            reasoning or "",
            [{"name": call.name, "arguments": call.arguments, "id": call.id} for call in calls or ()],
        )
        if tools and (why := errors[0] if errors else _unread(parser, sampled.body, parts)):
            raise UnreadableReply(why)
        return parts


def _parser_class(tokenizer: Any, tool_parser: str | None, reasoning_parser: str | None) -> Any:
    try:
        from vllm.parser import ParserManager
        from vllm.reasoning import ReasoningParserManager
        from vllm.tool_parsers import ToolParserManager
    except ImportError as problem:
        raise ConfigError(f"tool_parser and reasoning_parser name parsers of vLLM ({problem}); install vllm") from None
    _check_name("tool_parser", tool_parser, ToolParserManager.list_registered())
    _check_name("reasoning_parser", reasoning_parser, ReasoningParserManager.list_registered())
    try:
        return ParserManager.get_parser(
            tool_parser_name=tool_parser,
            reasoning_parser_name=reasoning_parser,
            enable_auto_tools=True,
            tokenizer=tokenizer,
        )
    except (TypeError, ImportError) as problem:
        why = problem.__cause__ or problem
        raise ConfigError(
            f"the parsers tool_parser={tool_parser} and reasoning_parser={reasoning_parser} cannot be used with this "
            f"tokenizer ({one_line(why)}); name those of its model"
        ) from None


def _check_name(kind: str, name: str | None, known: list[str]) -> None:
    if name and (problem := name_problem(kind, name, known)):
        raise ConfigError(problem)


def _unread(parser: Any, text: str, parts: ReplyParts) -> str:
    """Why a call in `text` was not read, where the parser did not say so itself."""
    if parts.calls:
        return ""
    for attribute in START_TOKENS:
        start = getattr(parser.tool_parser, attribute, None)
        if start and start in text and start not in parts.reasoning:
            return f"the text has {start!r}, and no call that could be read"
    dropped = _after(text, parts, getattr(parser.reasoning_parser, "reasoning_end_str", None))
    return f"the call {json.dumps(dropped[:80], ensure_ascii=False)} is incomplete" if dropped else ""


def _after(text: str, parts: ReplyParts, reasoning_end: str | None) -> str:
    """The text after everything that the parser returned: some parsers drop an incomplete call."""
    last = parts.content.strip() or parts.reasoning.strip()
    _, found, rest = text.rpartition(last) if last else ("", "", text)
    return rest.strip().removeprefix(reasoning_end or "").strip() if found or not last else ""


@contextmanager
def _errors_taken(parser: object) -> Iterator[list[str]]:
    """Collect the errors that the parser's modules log within the block; they are not shown."""
    errors: list[str] = []

    def take(record: logging.LogRecord) -> bool:
        if record.levelno < logging.ERROR:
            return True
        problem = record.exc_info[1] if record.exc_info else None
        errors.append(one_line(problem) if problem else record.getMessage())
        return False

    loggers = [logging.getLogger(kind.__module__) for kind in type(parser).__mro__ if kind is not object]
    for logger in loggers:
        logger.addFilter(take)
    try:
        yield errors
    finally:
        for logger in loggers:
            logger.removeFilter(take)
