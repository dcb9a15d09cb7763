"""Texts without roles as tokens: each with the tokenizer's begin token, if it adds one, and its end token.

`pieces` divides a sequence that is too long. Every piece but the first begins with the last token of the previous
piece, as context that is not trained. So each token is predicted once, from what precedes it in its piece.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from flowrl.errors import ConfigError
from flowrl.messages import Int32

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


def pieces(num_tokens: int, most: int) -> Iterator[tuple[int, int]]:
    """(start, stop) of pieces of 2 to `most` tokens that overlap by one token. There is no piece of a single token."""
    for start in range(0, num_tokens - 1, most - 1):
        yield start, min(start + most, num_tokens)
