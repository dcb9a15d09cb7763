"""How a reply is sampled: what a request to a policy says about it. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from flowrl.errors import ConfigError
from flowrl.messages.base import Column, Message

Array = npt.NDArray[Any]
ENTROPY = Column("entropy")
ENTROPY_TOP = 20
"""The number of likeliest tokens that an entropy is computed of: as many as vLLM gives by default."""
MOST_TOP = 20
LEAST_MASS = 1e-6
"""Less is the rounding of float32 logprobs."""


@dataclass(frozen=True)
class Sampling(Message):
    """Options of one kind of request."""

    temperature: float = 1.0
    """Behavior logprobs are those after division by the temperature. 0 is greedy: for evaluation only."""
    max_tokens: int = 256
    """Most policy tokens of one sample, including those of a continued prefix."""
    min_tokens: int = 0
    top_p: float = 1.0
    """Below 1 for evaluation only: a trainer does not know the truncated distribution."""
    top_k: int = 0
    """0: all tokens. Other values for evaluation only."""
    stop: tuple[str, ...] = ()
    """Texts that end a response. They are kept in it, because the policy sampled them."""
    stop_token_ids: tuple[int, ...] = ()
    """Further ids that end a response, in addition to the model's end of sequence."""
    ignore_eos: bool = False
    """Ignore the end of sequence and sample up to `max_tokens`: for measurements."""
    entropy: bool = False
    """Samples have the column `entropy`: of the distribution that each token was drawn from, as `estimate_entropy` has
    it."""
    top_logprobs: int = 0
    """Samples have the columns `top_logprobs` and `top_token_ids`: the likeliest tokens, so many in place of each
    sampled one."""

    @property
    def num_top(self) -> int:
        """The number of likeliest tokens that vLLM is asked for at each place."""
        return max(self.top_logprobs, ENTROPY_TOP if self.entropy else 0)

    @property
    def columns(self) -> tuple[Column, ...]:
        """The columns that samples have by these options."""
        most = (self.top_logprobs,)
        top = (Column("top_logprobs", shape=most), Column("top_token_ids", "int32", most)) if self.top_logprobs else ()
        return (*((ENTROPY,) if self.entropy else ()), *top)

    def column_values(self, logprobs_N: Array, top_ids_NK: Array, top_logprobs_NK: Array) -> dict[str, Array]:
        """The values of the columns at sampled tokens, from their logprobs and those of the likeliest tokens."""
        most = self.top_logprobs
        top = {"top_logprobs": top_logprobs_NK[:, :most], "top_token_ids": top_ids_NK[:, :most]} if most else {}
        return {**({"entropy": estimate_entropy(logprobs_N, top_logprobs_NK)} if self.entropy else {}), **top}

    def find_problems(self, *, trained: bool) -> list[str]:
        """Problems of these options, as complete sentences; `trained` samples have stricter requirements."""
        found = []
        if self.max_tokens < 1:
            found.append(f"max_tokens is {self.max_tokens}; a response needs at least 1 token")
        if not 0 <= self.min_tokens <= self.max_tokens:
            found.append(f"min_tokens is {self.min_tokens}; it has to lie between 0 and max_tokens = {self.max_tokens}")
        if self.temperature < 0:
            found.append(f"temperature is {self.temperature}; it has to be 0 or more")
        if not 0 < self.top_p <= 1:
            found.append(f"top_p is {self.top_p}; it has to be above 0 and at most 1")
        if self.top_k < 0:
            found.append(f"top_k is {self.top_k}; it has to be 0, for all tokens, or more")
        if not 0 <= self.top_logprobs <= MOST_TOP:
            found.append(f"top_logprobs is {self.top_logprobs}; vLLM gives from 0 to {MOST_TOP}")
        if trained and self.temperature == 0:
            found.append("temperature is 0: all members of a group would be the same; sample with one above 0")
        if trained and (self.top_p != 1 or self.top_k):
            found.append(
                f"top_p = {self.top_p} and top_k = {self.top_k} truncate the distribution that samples for "
                "training are drawn from, so importance ratios would be wrong; set top_p=1 and top_k=0 here "
                "and put truncation into `evaluation`"
            )
        return found

    def vllm_arguments(self, *, generated: int = 0, seed: int | None = None) -> dict[str, Any]:
        """Keyword arguments for vLLM's SamplingParams, if `generated` tokens of the response exist already."""
        return {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "max_tokens": self.max_tokens - generated,
            "min_tokens": max(0, self.min_tokens - generated),
            "stop": list(self.stop) or None,
            "include_stop_str_in_output": True,
            "stop_token_ids": list(self.stop_token_ids) or None,
            "ignore_eos": self.ignore_eos,
            "seed": continued_seed(seed, generated) if self.temperature > 0 else None,
            "detokenize": bool(self.stop),
            "logprobs": self.num_top,
        }


def continued_seed(seed: int | None, generated: int) -> int | None:
    """The seed for the rest of a response. It differs from the first part's, so that random numbers do not repeat."""
    if seed is None:
        return None
    if generated == 0:
        return seed & (2**63 - 1)
    digest = hashlib.blake2b(f"{seed}/{generated}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def estimate_entropy(logprobs_N: Array, top_logprobs_NK: Array) -> Array:
    """The entropy in nats of each place's distribution: −Σ p log p of the K likeliest tokens and of the sampled one,
    with all others taken for one token of their whole mass r.

    It is exact if there are no others, and otherwise too low by at most r log(V − K) with V tokens in the vocabulary.
    """
    least = top_logprobs_NK.min(axis=1)
    apart = np.where(logprobs_N < least, logprobs_N, -np.inf)  # a sampled token that is not among the likeliest
    known = np.concatenate([top_logprobs_NK, apart[:, None]], axis=1).astype(np.float64)
    shares = np.exp(known)
    rest = np.clip(1.0 - shares.sum(axis=1), 0.0, 1.0)
    terms = np.where(shares > 0, shares * np.where(shares > 0, known, 0.0), 0.0).sum(axis=1)
    tail = np.where(rest > LEAST_MASS, rest * np.log(np.maximum(rest, LEAST_MASS)), 0.0)
    entropy: Array = np.maximum(-(terms + tail), 0.0).astype(np.float32)
    return entropy


@dataclass(frozen=True)
class ReplySchema(Message):
    """What a reply has to be. One of the fields is given; vLLM's structured outputs mask every token that breaks it."""

    json: Mapping[str, object] | None = None
    """A JSON schema: the reply is a JSON text of that form."""
    regex: str = ""
    """The whole reply matches this expression."""
    choice: tuple[str, ...] = ()
    """The reply is one of these texts."""
    grammar: str = ""
    """The reply is a word of this context-free grammar, in EBNF as xgrammar reads it."""

    def __post_init__(self) -> None:
        given = [name for name in ("json", "regex", "choice", "grammar") if getattr(self, name)]
        if len(given) != 1:
            raise ConfigError(
                f"a ReplySchema was given {' and '.join(given) or 'nothing'}; give json, regex, choice or grammar"
            )

    def vllm_arguments(self) -> dict[str, Any]:
        """Keyword arguments for vLLM's StructuredOutputsParams."""
        if self.json is not None:
            return {"json": dict(self.json)}
        if self.choice:
            return {"choice": list(self.choice)}
        return {"regex": self.regex} if self.regex else {"grammar": self.grammar}
