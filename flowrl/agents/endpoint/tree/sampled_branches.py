"""Token sequences of a session: a reply continues the sequence that is its context, or starts another one.

Invariants: a reply is in the loss of the one sequence that it was added to, and context in all others; a sequence
begins with what was asked first and ends with the last token that was sampled for it; between two replies of a sequence
that are in its loss there is context, so each of them is a run of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from flowrl.agents.conversation import Span, TokenSequence, token_sequence
from flowrl.messages import Int32


@dataclass(frozen=True, eq=False)
class Asked:
    """A context that a reply is to be sampled for: fed spans, and earlier replies as the spans with which they were
    added."""

    spans: tuple[Span, ...]

    @cached_property
    def token_ids(self) -> Int32:
        return np.concatenate([span.token_ids for span in self.spans], dtype=np.int32)


class SampledBranches:
    """Add each reply with its context, as it comes; ask for the sequences at the end."""

    def __init__(self) -> None:
        self._branches: list[list[Span]] = []
        self._ends: dict[Span, list[Span]] = {}
        """The reply that ends a branch -> the branch."""

    def add(self, asked: Asked, reply: Span) -> None:
        """`reply` has logprobs; of the spans asked, those that have them are replies that were added before."""
        sampled = [span for span in asked.spans if span.logprobs is not None]
        branch = self._ends.pop(sampled[-1], None) if sampled and not _ends_sampled(asked) else None
        if branch is None:
            branch = [_as_context(span) for span in asked.spans]
            self._branches.append(branch)
        else:
            branch += asked.spans[len(branch) :]
        branch.append(reply)
        self._ends[reply] = branch

    def sequences(self) -> tuple[TokenSequence, ...]:
        """The sequences, in the order in which they started."""
        return tuple(token_sequence(branch) for branch in self._branches)


def _ends_sampled(asked: Asked) -> bool:
    """Whether nothing was fed after the last reply."""
    spans = [span for span in asked.spans if span.token_ids.size]
    return bool(spans) and spans[-1].logprobs is not None


def _as_context(span: Span) -> Span:
    return span if span.logprobs is None else Span(span.token_ids, span.text)
