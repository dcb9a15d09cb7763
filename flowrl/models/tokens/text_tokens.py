"""Tokens of texts that are no conversation: plain texts, and responses as steps.

A plain text has the tokenizer's begin token, if it adds one, and its end token. `pieces`
divides a sequence that is too long. Every piece but the first begins with the last token of the previous piece, as
context that is not trained. So each token is predicted once, from what precedes it in its piece.

A process reward model reads a step's score at the last token of the step's separator. The mask marks the token after
that one, because everywhere a mask marks the token that the value precedes. The last step is followed by the end token.
Steps are tokenized one by one, so that a response has the same tokens in training and in scoring, whichever model has
sampled it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from flowrl.errors import ConfigError
from flowrl.messages import Bool, Int32
from flowrl.models.tokens.chat import Chat, Messages, continued_ids, end_texts, require_no_end, without_ends

AT_ONCE = 256
"""Number of texts that are passed to the tokenizer in one call."""


def text_tokens(tokenizer: Any, texts: Iterable[str]) -> Iterator[Int32]:
    """The ids of each text, followed by the end token. Raises ConfigError if the tokenizer has none."""
    end = tokenizer.eos_token_id
    if end is None:
        raise ConfigError(
            f"the tokenizer {tokenizer.name_or_path} has no end token to put between texts; add eos_token to its files"
        )
    remaining = iter(texts)
    while some := list(itertools.islice(remaining, AT_ONCE)):
        for ids in tokenizer(some)["input_ids"]:
            yield np.asarray(ids if ids and ids[-1] == end else [*ids, end], np.int32)


def split_pieces(num_tokens: int, most: int) -> Iterator[tuple[int, int]]:
    """(start, stop) of pieces of 2 to `most` tokens that overlap by one token. There is no piece of a single token."""
    for start in range(0, num_tokens - 1, most - 1):
        yield start, min(start + most, num_tokens)


def split_steps(text: str, separator: str) -> list[str]:
    """The steps of a response, without separators and without empty ones; at least one."""
    found = [step for step in text.split(separator) if step.strip()]
    return found or [text]


def step_tokens(chat: Chat, turns: Messages, steps: Sequence[str], separator: str) -> tuple[Int32, Bool]:
    """(ids, mask) of a prompt with the steps of its response; the mask has one token for each step.

    End tokens at the end of the last step are left out, because one follows it.
    """
    steps = [*steps[:-1], without_ends(steps[-1], end_texts(chat.tokenizer))]
    parts = [np.asarray(chat.encode_prompt(turns)[1], np.int32)]
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
