"""The result of a request for tokens, as it grows. Pure; no heavy imports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from flowrl.messages import Float32, Int32
from flowrl.messages.sampling import Sampling

Spans = Sequence[tuple[str, int, int]]
"""(label of the weights, first token, token after the last)"""


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
    top_ids: Int32 | None = None
    """[N, K], the likeliest tokens at each place, if they were asked for."""
    top_logprobs: Float32 | None = None
    """[N, K]"""

    @classmethod
    def copy_of(
        cls,
        token_ids: Sequence[int],
        logprobs: Sequence[float] | Float32,
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

    def column_values(self, sampling: Sampling) -> dict[str, npt.NDArray[Any]]:
        """The values of the columns that `sampling` asks for, at the sampled tokens."""
        if not sampling.num_top:
            return {}
        parts = [part for part in self.parts if part.top_ids is not None and part.top_logprobs is not None]
        if not parts:
            nothing = np.zeros((0, sampling.num_top))
            return sampling.column_values(np.zeros(0), nothing.astype(np.int32), nothing.astype(np.float32))
        ids = np.concatenate([part.top_ids for part in parts if part.top_ids is not None])
        logprobs = np.concatenate([part.top_logprobs for part in parts if part.top_logprobs is not None])
        return sampling.column_values(self.logprobs, ids, logprobs)

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
