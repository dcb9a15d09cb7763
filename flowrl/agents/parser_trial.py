"""Examines a chat template with vLLM's parsers in a process of its own, because only generators import vLLM.

Both functions wait for the process, which ends on its own, or is killed by SIGKILL after LIMIT_S.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from typing import Any

from flowrl.agents.call_parser import parser_names, reply_parser
from flowrl.agents.chat_template import ChatTemplate
from flowrl.agents.examination import ANY_TOOL, Examination, examine, parsed_back
from flowrl.errors import ConfigError
from flowrl.machine.orphans import die_with_parent, run_program
from flowrl.models import Policy, TokenizerOptions, known_tokenizer
from flowrl.models.tokens.chat import Messages

POLICY = ("trust_remote_code", "chat_template", "chat_template_kwargs")
"""What a policy's tokenizer depends on besides the model."""
OF_MANY_MODELS = ("hermes", "llama3_json", "mistral", "pythonic", "qwen3_coder")
LIMIT_S = 300.0
"""Seconds. The import of vLLM takes some ten seconds on an idle core."""


def examine_with_parsers(
    policy: Policy, tools: Messages, *, tool_parser: str | None, reasoning_parser: str | None
) -> Examination:
    """`examine` with the parsers of these names, for a policy whose tokenizer is known.

    Raises ConfigError for a template without a boundary, and for parsers that cannot be used.
    """
    named = {"tool_parser": tool_parser, "reasoning_parser": reasoning_parser}
    found = find_parsers(policy, tools, {"named": named}, list_words(named))
    return Examination(**{**found, "rewrites": tuple(found["rewrites"])})


def parsers_that_read(policy: Policy, tools: Messages) -> list[str]:
    """vLLM's tool parsers that read a call as the policy's chat template renders it, those of many models first.

    Raises ConfigError as above.
    """
    names: list[str] = find_parsers(policy, tools, {"names": parser_names("tool_parser")}, "vLLM's parsers")["reading"]
    return sorted(names, key=lambda name: name not in OF_MANY_MODELS)


def find_parsers(policy: Policy, tools: Messages, question: dict[str, Any], what: str) -> dict[str, Any]:
    """The answer of a new process to `question`. Raises ConfigError, whose text names `what` is tried."""
    options = {**{name: getattr(policy, name) for name in POLICY}, "tokenizer": asdict(policy.tokenizer)}
    asked = {"model": policy.model, "options": options, "tools": [dict(tool) for tool in tools], **question}
    command = [sys.executable, "-m", "flowrl.agents.parser_trial"]
    try:
        done = run_program(command, text=json.dumps(asked), within_s=LIMIT_S)
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"{what} could not be tried within {LIMIT_S:.0f} s; try again when the machine is less busy"
        ) from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        raise ConfigError(f"{what} could not be tried: the process ended with {done.returncode} ({last})")
    found: dict[str, Any] = json.loads(done.stdout)
    if "refused" in found:
        raise ConfigError(found["refused"])
    return found


def list_words(named: dict[str, str | None]) -> str:
    """ "vLLM's tool_parser=hermes" """
    return "vLLM's " + " and ".join(f"{option}={name}" for option, name in named.items() if name)


def main() -> None:
    """The program of the process: it reads the question from standard input and writes the answer to standard
    output."""
    die_with_parent()
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as outbox:
        os.dup2(2, 1)  # for what libraries print
        asked = json.load(sys.stdin)
        try:
            tokenizer = known_tokenizer(asked_policy(asked["model"], **asked["options"]))
            if "names" in asked:
                read = [name for name in asked["names"] if parser_reads(name, tokenizer, asked["tools"])]
                answer: dict[str, Any] = {"reading": read}
            else:
                named = asked["named"]
                parser = reply_parser(tokenizer, **named)
                answer = asdict(examine(tokenizer, asked["tools"], parser, named=list_words(named)))
        except ConfigError as problem:
            answer = {"refused": str(problem)}
        print(json.dumps(answer), file=outbox)


def asked_policy(model: str, *, tokenizer: dict[str, Any], **options: Any) -> Policy:
    """The policy of the question, whose tuples of tokens arrive as JSON lists."""
    lists = {name: tuple(tokens) for name, tokens in tokenizer.items() if isinstance(tokens, list)}
    return Policy(model, tokenizer=TokenizerOptions(**{**tokenizer, **lists}), **options)


def parser_reads(name: str, tokenizer: Any, tools: Messages) -> bool:
    """Whether vLLM's parser of this name reads the call that the template renders."""
    try:
        parser = reply_parser(tokenizer, tool_parser=name)
        why, _ = parsed_back(ChatTemplate(tokenizer, tuple(tools) or (ANY_TOOL,)), parser)
    except Exception:  # the boundary to vLLM's parsers, most of which are for other tokenizers
        return False
    return not why


if __name__ == "__main__":
    main()
