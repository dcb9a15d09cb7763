"""The check for computations that only take samples with one sequence."""

from __future__ import annotations

from collections.abc import Iterable

from flowrl.errors import ConfigError
from flowrl.messages import Sample


def require_one_sequence(samples: Iterable[Sample], user: str) -> None:
    """Raise ConfigError if an episode has several sequences, which `user` ("a critic") cannot take."""
    for sample in samples:
        if sample.branches:
            raise ConfigError(
                f"sample {sample.sample_id!r} has {len(sample.sequences)} sequences, because its context was "
                f"rewritten, but {user} takes samples of one; set history='append' of the Environment, or let the "
                "agent go on from the messages that it sent before"
            )
