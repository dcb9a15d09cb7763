"""Responses as steps, and where a process reward model reads the score of each.

A step's score is read at the last token of its separator. The mask marks the token after that one, because everywhere a
mask marks the token that the value precedes. The last step is followed by the end token. Steps are tokenized one by
one, so that a response has the same tokens in training and in scoring, whichever model has sampled it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from flowrl.errors import ConfigError
from flowrl.messages import Bool, Int32
from flowrl.models.tokens.chat import Chat, Messages, continued_ids, end_texts, require_no_end, without_ends


def split_steps(text: str, separator: str) -> list[str]:
    """The steps of a response, without separators and without empty ones; at least one."""
    found = [step for step in text.split(separator) if step.strip()]
    return found or [text]


def step_tokens(chat: Chat, turns: Messages, steps: Sequence[str], separator: str) -> tuple[Int32, Bool]:
    """(ids, mask) of a prompt with the steps of its response; the mask has one token for each step.

    End tokens at the end of the last step are left out, because one follows it.
    """
    steps = [*steps[:-1], without_ends(steps[-1], end_texts(chat.tokenizer))]
    parts = [np.asarray(chat.prompt(turns)[1], np.int32)]
    ends = []
    for step in steps:
        parts.append(continued_ids(chat.tokenizer, step + separator))
        ends.append(sum(map(len, parts)))
    ids = np.append(np.concatenate(parts), np.int32(chat.tokenizer.eos_token_id)).astype(np.int32)
    mask = np.zeros(ids.size, np.bool_)
    mask[ends] = True
    return ids, mask


def require_steps(tokenizer: Any, steps: Sequence[str]) -> None:
    """Raise Unrendered if there is an end token in these steps but at their end, where generation would have
    stopped."""
    ends = end_texts(tokenizer)
    require_no_end([*steps[:-1], without_ends(steps[-1], ends)], ends)


def separator_of(text: str) -> str:
    """A separator as written on a command line, with \\n and \\t for newline and tab. Raises ConfigError."""
    found = text.replace("\\n", "\n").replace("\\t", "\t")
    if not found:
        raise ConfigError("the separator of steps is empty; write the text that ends a step, as '\\n'")
    return found
