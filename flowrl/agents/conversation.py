"""An episode's conversation as token ids: what was fed and what was sampled, never tokenized twice.

Invariants: a context is a concatenation of fed pieces and of sampled replies, which keep the ids that were sampled; a
sampled token is in the loss of exactly one sequence, the first that has it; a sequence ends with the last token that
was sampled for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from flowrl.agents.chat_template import ChatTemplate
from flowrl.errors import ConfigError
from flowrl.messages import Bool, Float32, Int32
from flowrl.models.tokens.chat import Messages

History = Literal["append", "template"]
"""append: the context keeps what was sampled. template: the context is what the template makes of the messages."""


@dataclass(frozen=True)
class TokenSequence:
    """One sequence of an episode; the arrays are equally long and read-only.

    As in `Sample`, logprobs and versions are meaningful where the mask is true, and 0 and -1 elsewhere.
    """

    token_ids: Int32
    policy_mask: Bool
    """Tokens that enter this sequence's loss: sampled, and in no earlier sequence."""
    behavior_logprobs: Float32
    versions: Int32


@dataclass(frozen=True, eq=False)
class Span:
    """Neighbouring tokens of one origin; branches share spans, so a span is equal only to itself."""

    token_ids: Int32
    text: str
    logprobs: Float32 | None = None
    """None for tokens that are context: fed tokens, and replies in a branch that repeats them."""
    versions: Int32 | None = None


class Conversation:
    """Feed messages, ask for the context, hand in what was sampled, and so on.

    With `history="template"`, a context that does not continue the previous one starts a branch: a further sequence.
    Raises ConfigError where the template cannot render the messages.
    """

    def __init__(self, template: ChatTemplate, *, history: History = "append") -> None:
        if history not in get_args(History):
            raise ConfigError(f"history={history!r} is neither 'append' nor 'template'; name one of them")
        self.template = template
        self.history = history
        self._messages: list[Mapping[str, Any]] = []
        self._fed: list[Mapping[str, Any]] = []
        """Messages since the last reply."""
        self._replies: dict[int, Span] = {}
        """Index among the messages -> what was sampled."""
        self._branches: list[tuple[Span, ...]] = []
        self._asked: tuple[Span, ...] | None = None
        """The spans of the context to be answered; None until it is asked for."""

    @property
    def messages(self) -> tuple[Mapping[str, Any], ...]:
        """Everything fed and answered so far."""
        return (*self._messages, *self._fed)

    def feed(self, messages: Messages) -> None:
        """Add what the environment says: the first messages, a tool's answer, the next question."""
        self._fed += messages
        self._asked = None

    def context(self) -> Int32:
        """All token ids of the next request, up to where the policy continues. It stays the same until something is
        fed."""
        return join_arrays([span.token_ids for span in self._context_of()], np.int32)

    def sampled(
        self,
        token_ids: npt.ArrayLike,
        logprobs: npt.ArrayLike,
        versions: npt.ArrayLike,
        message: Mapping[str, Any] | None = None,
    ) -> None:
        """Add the policy's reply to the context, its end token included if it was sampled.

        `message` is the reply as parsed; without one it is the text without its end, and has no tool calls.
        """
        context = self._context_of()
        arrays = np.array(token_ids, np.int32), np.array(logprobs, np.float32), np.array(versions, np.int32)
        sizes = [array.size for array in arrays]
        if len(set(sizes)) > 1:
            raise ConfigError("a reply has {} token ids, {} logprobs and {} versions; give one of each".format(*sizes))
        ids = arrays[0]
        span = Span(ids, self.template.decode(ids), arrays[1], arrays[2])
        if message is None:
            message = {"role": "assistant", "content": self.template.decode(self.template.content_ids(ids))}

        current = self._branches[-1] if self._branches else ()
        if current == context[: len(current)]:
            self._branches[-1:] = [(*context, span)]
        else:
            self._branches.append((*context, span))
        self._replies[len(self.messages)] = span
        self._messages += [*self._fed, message]
        self._fed, self._asked = [], None

    def sequences(self) -> tuple[TokenSequence, ...]:
        """One for each branch, in the order in which they started; with `history="append"` at most one."""
        return tuple(token_sequence(branch) for branch in self._branches)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all sequences."""
        return sum(span.token_ids.size for branch in self._branches for span in branch)

    def _context_of(self) -> tuple[Span, ...]:
        if not self._fed:
            raise ConfigError("nothing was fed since the last reply; feed a message before the next request")
        if self._asked is None:
            self._asked = self._render_context()
        return self._asked

    def _render_context(self) -> tuple[Span, ...]:
        if not self._branches:
            text = self.template.render_text(self._fed)
            return (Span(self.template.render_ids(text), text),)
        branch = self._branches[-1]
        if self.history == "append":
            ids = self.template.ids_following(self._messages, branch[-1].token_ids, self._fed)
            return (*branch, Span(ids, self.template.decode(ids)))
        text = self.template.render_text(self.messages)
        current = "".join(span.text for span in branch)
        if text.startswith(current):
            rest = text[len(current) :]
            return (*branch, Span(self.template.ids_after_reply(rest), rest))

        # The template rewrites the history: replies that the rendering keeps also keep their ids.
        closing = self.template.decode(self.template.boundary_before("user").token_ids[:1])
        spans: list[Span] = []
        end = 0
        starts = self.template.marked_starts(self.messages, [*self._replies], text)
        for reply, start in zip(self._replies.values(), starts, strict=True):
            for ids in (reply.token_ids, self.template.content_ids(reply.token_ids)):  # with its end, or without
                shown = self.template.decode(ids)
                follows = "" if self.template.is_ended(ids) else closing
                if start >= end and text.startswith(shown + follows, start):
                    spans += [self._fed_span(text[end:start], first=not spans), Span(ids, shown)]
                    end = start + len(shown)
                    break
        return (*spans, self._fed_span(text[end:], first=not spans))

    def _fed_span(self, text: str, *, first: bool) -> Span:
        return Span(self.template.render_ids(text) if first else self.template.ids_after_reply(text), text)


def token_sequence(spans: Sequence[Span]) -> TokenSequence:
    """The spans, one after the other; those with logprobs are in the loss."""
    sizes = [span.token_ids.size for span in spans]
    masks = [np.full(n, span.logprobs is not None) for n, span in zip(sizes, spans, strict=True)]
    logprobs = [np.zeros(s.token_ids.size) if s.logprobs is None else s.logprobs for s in spans]
    versions = [np.full(s.token_ids.size, -1) if s.versions is None else s.versions for s in spans]
    return TokenSequence(
        join_arrays([span.token_ids for span in spans], np.int32),
        join_arrays(masks, np.bool_),
        join_arrays(logprobs, np.float32),
        join_arrays(versions, np.int32),
    )


def join_arrays(arrays: Sequence[npt.NDArray[Any]], dtype: type[np.generic]) -> npt.NDArray[Any]:
    """The arrays, one after the other, as one that is read-only."""
    joined: npt.NDArray[Any] = np.concatenate(arrays, dtype=dtype, casting="same_kind")
    joined.flags.writeable = False
    return joined
