"""Examines a chat template with vLLM's parsers in a process of its own, because only generators import vLLM.

`examine_with_parsers` waits for the process, which ends by itself, or after LIMIT_S by SIGKILL.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from typing import Any

from flowrl.agents.call_parser import reply_parser
from flowrl.agents.examination import Examination, examine
from flowrl.errors import ConfigError
from flowrl.models import Policy, known_tokenizer
from flowrl.models.chat import Messages
from flowrl.tasks import child

POLICY = ("trust_remote_code", "chat_template", "chat_template_kwargs")
"""What its tokenizer depends on besides the model."""
LIMIT_S = 300.0
"""vLLM's import takes some ten seconds of a core that has nothing else to do."""


def examine_with_parsers(
    policy: Policy, tools: Messages, *, tool_parser: str | None, reasoning_parser: str | None
) -> Examination:
    """`examine` with the parsers of these names, for a policy whose tokenizer is known.

    Raises ConfigError for a template without a boundary, and for parsers that cannot be used.
    """
    named = {"tool_parser": tool_parser, "reasoning_parser": reasoning_parser}
    asked = json.dumps(
        {
            "model": policy.model,
            "options": {name: getattr(policy, name) for name in POLICY},
            "tools": [dict(tool) for tool in tools],
            **named,
        }
    )
    command = [sys.executable, "-m", "flowrl.agents.parser_trial"]
    try:
        done = subprocess.run(command, input=asked, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"{_words(named)} could not be tried within {LIMIT_S:.0f} s; begin again when the machine has less to do"
        ) from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        raise ConfigError(f"{_words(named)} could not be tried: the process ended with {done.returncode} ({last})")
    found = json.loads(done.stdout)
    if "refused" in found:
        raise ConfigError(found["refused"])
    return Examination(**{**found, "rewrites": tuple(found["rewrites"])})


def _words(named: dict[str, str | None]) -> str:
    """ "vLLM's tool_parser=hermes" """
    return "vLLM's " + " and ".join(f"{option}={name}" for option, name in named.items() if name)


def main() -> None:
    """The life of the process: what it is asked on its standard input, the answer on its standard output."""
    child.die_with_parent()
    with os.fdopen(os.dup(1), "w") as outbox:
        os.dup2(2, 1)  # what libraries print
        print(json.dumps(_answer(json.load(sys.stdin))), file=outbox)


def _answer(asked: dict[str, Any]) -> dict[str, Any]:
    named = {option: asked[option] for option in ("tool_parser", "reasoning_parser")}
    try:
        tokenizer = known_tokenizer(Policy(asked["model"], **asked["options"]))
        return asdict(examine(tokenizer, asked["tools"], reply_parser(tokenizer, **named), named=_words(named)))
    except ConfigError as problem:
        return {"refused": str(problem)}


if __name__ == "__main__":
    main()
