"""Keeps vLLM on CPU alive where a prompt is computed in several steps, and its request has a seed.

vLLM samples after each of these steps, and discards all but the last result. It then moves the request's generator back
by what the discarded draw has used, which a generator of a GPU can do; on CPU this raises an error that ends the
engine. A prompt is cut when those of one step exceed `max_num_batched_tokens`, as when many requests arrive at once.

Here discarded draws come from a generator of their own, so the request's is where it has to be.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


class SpareGenerator(torch.Generator):
    """Nobody needs what it draws, so it is never moved back."""

    def get_offset(self) -> int:
        return 0

    def set_offset(self, offset: int) -> torch.Generator:
        return self


@contextmanager
def spared(runner: Any) -> Iterator[None]:
    """Inside, requests of vLLM's model runner whose sample will be discarded draw from spare generators."""
    generators, count = runner.input_batch.generators, runner.input_batch.num_reqs
    discarded = np.flatnonzero(runner.discard_request_mask.np[:count]).tolist()
    own = {index: generators[index] for index in discarded if index in generators}
    generators.update({index: SpareGenerator() for index in own})
    try:
        yield
    finally:
        generators.update(own)


def spare_discarded(runner_class: Any) -> None:
    """Let all runners of this class sample so; does nothing the second time."""
    sample_tokens = runner_class.sample_tokens
    if getattr(sample_tokens, "spares", False):
        return

    @functools.wraps(sample_tokens)
    def spare(runner: Any, *args: Any, **kwargs: Any) -> Any:
        with spared(runner):
            return sample_tokens(runner, *args, **kwargs)

    spare.spares = True  # type: ignore[attr-defined]
    runner_class.sample_tokens = spare
