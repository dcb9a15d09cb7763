"""Times and token counts of one turn of an episode."""

from __future__ import annotations

from dataclasses import dataclass

from flowrl.episode import Reply


@dataclass(frozen=True)
class TurnFigures:
    """The figures of one request for a reply, without the environment's step after it."""

    generate_s: float
    """Seconds in vLLM."""
    slot_s: float
    """The other seconds until the reply: for a place on the edge, at the generator and in vLLM, and in transit."""
    context_tokens: int
    cached_tokens: int

    @classmethod
    def of(cls, reply: Reply, *, context_tokens: int, seconds: float) -> TurnFigures:
        """The figures of `reply`; `seconds` is the time from the request to the reply."""
        slot_s = max(seconds - reply.generated_s, 0.0)
        return cls(reply.generated_s, slot_s, context_tokens, reply.cached_tokens)
