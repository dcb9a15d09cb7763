"""Checks of an environment and a policy before a run: lengths, and the chat template with the tools."""

from __future__ import annotations

from collections.abc import Iterator

from flowrl.agents import examine
from flowrl.agents.examination import Examination
from flowrl.agents.parser_trial import examine_with_parsers, parsers_that_read
from flowrl.errors import ConfigError
from flowrl.models import Policy, known_context, known_tokenizer
from flowrl.models.tokens.chat import Messages
from flowrl.nodes.episodes.limits import Limits
from flowrl.nodes.generation.generator import Generator


def length_problems(limits: Limits, policy: Policy, token_budget: int | None) -> Iterator[str]:
    """Problems of episodes that may become longer than the model's context, or than a micro-batch."""
    longest = known_context(policy)
    if longest is None:
        return
    if limits.tokens is not None and limits.tokens > longest:
        yield f"limits.tokens is {limits.tokens}, but the context of {policy.model} takes {longest} tokens; lower it"
    if limits.tokens is None and token_budget is not None and token_budget < longest:
        yield (
            f"an episode may have as many tokens as the context of {policy.model}, {longest}, but a micro-batch takes "
            f"token_budget={token_budget}; set limits.tokens, or raise token_budget to {longest}"
        )


def template_findings(policy: Policy, environment: str, tools: Messages | None, generator: object = None) -> str | None:
    """What an examination of the chat template finds; None for a model whose tokenizer is not known yet.

    `tools` is None if the tools are known only from the episodes. `generator` is the node that answers; if it names
    vLLM's parsers, replies are parsed with these. Raises ConfigError for tools that the template cannot take, and for
    tools whose calls no parser reads.
    """
    tokenizer = known_tokenizer(policy)
    if tokenizer is None:
        return None
    if isinstance(generator, Generator) and (generator.tool_parser or generator.reasoning_parser):
        examination = examine_with_parsers(
            policy, tools or (), tool_parser=generator.tool_parser, reasoning_parser=generator.reasoning_parser
        )
    else:
        examination = examine(tokenizer, tools or ())
    if tools and examination.no_tools:
        raise ConfigError(
            f"environment {environment!r} has tools, but the chat template of {policy.model} cannot take them "
            f"({examination.no_tools}); choose a model for tool calls, or an environment without tools"
        )
    if examination.no_calls and isinstance(generator, Generator):
        if tools:
            raise ConfigError(
                f"environment {environment!r} has tools, but nothing reads the policy's calls "
                f"({examination.no_parsing}), so each would be taken for its final answer; "
                f"{_parser_to_name(policy, tools)}"
            )
        if tools is None:
            return f"{_of_template(policy, examination)} {CALLS_AS_TEXT}"
    return _of_template(policy, examination.history() if tools is not None and not tools else examination)


CALLS_AS_TEXT = (
    "Warning: if requests have tools, agents get the calls of replies as text, not as calls; name vLLM's parser for "
    "the model with --tool-parser, or Generator(tool_parser=...)."
)


def _of_template(policy: Policy, found: Examination | str) -> str:
    return f"the chat template of {policy.model}: {found}"


def _parser_to_name(policy: Policy, tools: Messages) -> str:
    """The advice on which parser to name. It tries all of vLLM's parsers, which takes some seconds."""
    change = "name vLLM's parser for the model, as in --tool-parser hermes, or Generator(tool_parser=...)"
    try:
        reading = parsers_that_read(policy, tools)
    except ConfigError:  # vLLM is not installed, or cannot be tried
        return change
    if not reading:
        return f"none of vLLM's parsers reads a call that its chat template renders; {change}, or another model"
    return f"name one of vLLM's parsers that do: --tool-parser {reading[0]}" + (
        f" (or {', '.join(reading[1:])})" if reading[1:] else ""
    )
