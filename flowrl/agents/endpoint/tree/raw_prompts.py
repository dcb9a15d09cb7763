"""Prompts of text or token ids without messages, from a session's calls of /v1/completions.

A prompt that continues an earlier prompt and its reply has the reply's sampled ids. If the client cut the reply, at a
stop text or its end token, the prompt has only those ids of the reply that it repeats, as context.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flowrl.agents.chat_template import TextBound
from flowrl.agents.conversation import Span
from flowrl.agents.endpoint.tree.sampled_branches import Asked, SampledBranches
from flowrl.messages import Int32

RawPrompt = str | Sequence[int]


@dataclass(frozen=True, eq=False)
class AskedPrompt(Asked):
    """The context of a prompt."""

    prompt: RawPrompt


@dataclass(frozen=True, eq=False)
class CompletedPrompt:
    """A prompt with its reply."""

    asked: AskedPrompt
    reply: Span
    shown: str
    """The reply's text as the client has it; "" if the prompt was given as ids."""

    @property
    def text(self) -> str:
        return f"{self.asked.prompt}{self.shown}"


class RawPrompts:
    """Ask for a prompt's context, sample, and add the answer."""

    def __init__(self, tokenizer: Any, branches: SampledBranches, bound: TextBound) -> None:
        self._tokenizer = tokenizer
        self._bound = bound
        self._branches = branches
        self._completed: list[CompletedPrompt] = []

    def asked(self, prompt: RawPrompt) -> AskedPrompt:
        """The context; the longest earlier one that the prompt continues keeps its ids. Raises TooMuchText."""
        if isinstance(prompt, str):
            self._bound.check(prompt)
        spans = self._text_spans(prompt) if isinstance(prompt, str) else self._id_spans(prompt)
        return AskedPrompt(tuple(span for span in spans if span.token_ids.size), prompt)

    def add(self, asked: AskedPrompt, reply: Span, shown: str) -> None:
        text = shown if isinstance(asked.prompt, str) else ""
        self._completed.append(CompletedPrompt(asked, reply, text))
        self._branches.add(asked, reply)

    def _text_spans(self, prompt: str) -> tuple[Span, ...]:
        continued = [one for one in self._completed if one.shown and prompt.startswith(one.text)]
        if not continued:
            return (Span(np.asarray(self._tokenizer(prompt)["input_ids"], np.int32), prompt),)
        longest = max(continued, key=lambda one: len(one.text))
        rest = prompt[len(longest.text) - len(longest.shown) :]
        kept, text = self._kept(longest.reply, rest)
        return (*longest.asked.spans, kept, self._fed(rest[len(text) :]))

    def _id_spans(self, prompt: Sequence[int]) -> tuple[Span, ...]:
        ids = np.asarray(prompt, np.int32)
        best: tuple[Span, ...] = ()
        for one in self._completed:
            spans = (*one.asked.spans, one.reply)
            if _size(spans) > _size(best) and np.array_equal(ids[: _size(spans)], _joined(spans)):
                best = spans
        return (*best, Span(ids[_size(best) :], ""))

    def _kept(self, reply: Span, rest: str) -> tuple[Span, str]:
        """(the part of the reply that `rest` begins with, its text); if that is the whole reply, the part is `reply`
        itself."""
        for size in range(reply.token_ids.size, 0, -1):
            text = self._decode(reply.token_ids[:size])
            if rest.startswith(text):
                return (reply if size == reply.token_ids.size else Span(reply.token_ids[:size], text)), text
        return Span(reply.token_ids[:0], ""), ""

    def _fed(self, text: str) -> Span:
        return Span(np.asarray(self._tokenizer(text, add_special_tokens=False)["input_ids"], np.int32), text)

    def _decode(self, ids: Int32) -> str:
        return str(self._tokenizer.decode(ids.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _size(spans: tuple[Span, ...]) -> int:
    return sum(span.token_ids.size for span in spans)


def _joined(spans: tuple[Span, ...]) -> Int32:
    return np.concatenate([span.token_ids for span in spans], dtype=np.int32)
