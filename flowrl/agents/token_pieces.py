"""The text of each single token, so that tokens can be shown without their tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

UNFINISHED = "\ufffd"
"""What a decoder writes for bytes that do not form a whole character yet."""
LONGEST_RUN = 8
"""Maximum number of tokens that share one character; a longer run is not a character."""


class TokenPieces:
    """Divides token ids into their texts. Remembers each token's text, so an object is for one tokenizer only."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}
        ids = tokenizer("a", add_special_tokens=False)["input_ids"]
        self._before = ids[-1:]
        """A token after which others are decoded: without one, some decoders strip a token's leading space."""
        self._text_before = self._decoded(self._before)

    def of(self, token_ids: Sequence[int]) -> list[str]:
        """One text for each id; a character that takes several tokens is in the text of the last one."""
        pieces: list[str] = []
        run: list[int] = []
        for token_id in token_ids:
            run.append(token_id)
            text = self._piece(token_id) if len(run) == 1 else self._after(run)
            unfinished = text.endswith(UNFINISHED) and len(run) < LONGEST_RUN
            pieces.append("" if unfinished else text)
            if not unfinished:
                run = []
        if run:
            pieces[-1] = self._after(run)
        return pieces

    def _piece(self, token_id: int) -> str:
        if token_id not in self._known:
            self._known[token_id] = self._after([token_id])
        return self._known[token_id]

    def _after(self, ids: list[int]) -> str:
        text = self._decoded([*self._before, *ids])
        return text[len(self._text_before) :] if text.startswith(self._text_before) else self._decoded(ids)

    def _decoded(self, ids: list[int]) -> str:
        decode = self._tokenizer.decode
        return str(decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
