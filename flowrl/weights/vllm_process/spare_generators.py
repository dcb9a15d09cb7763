"""Prevents a crash of vLLM on CPU when a prompt is computed in several steps and its request has a seed.

vLLM samples after each of these steps, and discards all but the last result. It then moves the request's random
generator back by what the discarded draw has used. A GPU's generator can do that; on CPU it raises an error that ends
the engine. A prompt is split when the prompts of one step exceed `max_num_batched_tokens`, for example when many
requests arrive at once.

Here discarded draws come from a separate generator, so the request's generator does not have to be moved back.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


class SpareGenerator(torch.Generator):
    """Its draws are discarded, so it is never moved back."""

    def get_offset(self) -> int:
        return 0

    def set_offset(self, offset: int) -> torch.Generator:
        return self


@contextmanager
def spared(runner: Any) -> Iterator[None]:
    """Within this context, requests of vLLM's runner whose sample will be discarded draw from spare generators."""
    generators, count = runner.input_batch.generators, runner.input_batch.num_reqs
    discarded = np.flatnonzero(runner.discard_request_mask.np[:count]).tolist()
    own = {index: generators[index] for index in discarded if index in generators}
    generators.update({index: SpareGenerator() for index in own})
    try:
        yield
    finally:
        generators.update(own)


def spare_discarded(runner_class: Any) -> None:
    """Make all runners of this class sample in `spared`; does nothing the second time."""
    sample_tokens = runner_class.sample_tokens
    if getattr(sample_tokens, "spares", False):
        return

    @functools.wraps(sample_tokens)
    def spare(runner: Any, *args: Any, **kwargs: Any) -> Any:
        with spared(runner):
            return sample_tokens(runner, *args, **kwargs)

    spare.spares = True  # type: ignore[attr-defined]
    runner_class.sample_tokens = spare
