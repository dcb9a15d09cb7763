"""How a generator samples, and the result of a finished request. Pure; no heavy imports."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flowrl.messages import Float32, Int32

Spans = Sequence[tuple[str, int, int]]
"""(label of the weights, first token, token after the last)"""


@dataclass(frozen=True)
class Sampling:
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
        }


def continued_seed(seed: int | None, generated: int) -> int | None:
    """The seed for the rest of a response. It differs from the first part's, so that random numbers do not repeat."""
    if seed is None:
        return None
    if generated == 0:
        return seed & (2**63 - 1)
    digest = hashlib.blake2b(f"{seed}/{generated}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


@dataclass(frozen=True)
class Completion:
    """The result of one request to vLLM: arrays over its policy tokens."""

    token_ids: Int32
    logprobs: Float32
    versions: Int32
    finish_reason: str
    """stop | length | abort; "" for a part that is not the end."""
    cached_tokens: int = 0
    """Tokens of the context that vLLM's prefix cache had."""

    @classmethod
    def copy_of(
        cls,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        versions: Sequence[int] | Int32,
        finish_reason: str,
        cached_tokens: int = 0,
    ) -> Completion:
        """Create a completion from sequences of any type, which are copied."""
        ids, values, labels = (
            np.array(token_ids, np.int32),
            np.array(logprobs, np.float32),
            np.array(versions, np.int32),
        )
        return cls(ids, values, labels, finish_reason, cached_tokens)


NOTHING = Completion.copy_of([], [], [], "")


@dataclass
class Response:
    """A response as it grows over one or several requests. `parts` are in order."""

    parts: list[Completion] = field(default_factory=lambda: [NOTHING])
    started_s: float = 0.0
    """When the response's first request was sent to vLLM, on the monotonic clock; 0 before."""

    def __len__(self) -> int:
        return sum(len(part.token_ids) for part in self.parts)

    @property
    def token_ids(self) -> Int32:
        return np.concatenate([part.token_ids for part in self.parts])

    @property
    def logprobs(self) -> Float32:
        return np.concatenate([part.logprobs for part in self.parts])

    @property
    def versions(self) -> Int32:
        return np.concatenate([part.versions for part in self.parts])

    @property
    def finish_reason(self) -> str:
        return self.parts[-1].finish_reason

    @property
    def cached_tokens(self) -> int:
        """Tokens of the context that vLLM's prefix cache had when the response began."""
        return next((part.cached_tokens for part in self.parts if part.finish_reason), 0)


def spread_versions(spans: Spans, num_tokens: int) -> Int32:
    """One version per token from vLLM's (label, start, end) spans, which have to cover every token.

    Raises ValueError if a token has no version: it must not be trained on as if it had one.
    """
    versions = np.full(num_tokens, -1, np.int32)
    for label, start, end in spans:
        if not label.isdecimal():
            raise ValueError(f"tokens {start} to {end} have the label {label!r}, which is no version number")
        versions[start:end] = int(label)
    if num_tokens and versions.min() < 0:
        raise ValueError(f"vLLM named no weight version for {int((versions < 0).sum())} of {num_tokens} tokens")
    return versions
