"""The sequences that texts are cut into. Each is read from the stored tokens of all texts when it is needed."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np

from flowrl.messages import Int32
from flowrl.models.token_store import TokenStore
from flowrl.models.tokens.plain_tokens import pieces
from flowrl.tasks.row_reading.indexed_rows import Ints, hexadecimal


@dataclass(frozen=True)
class TextPiece:
    """A sequence of `token_ids`; the first token is context, all others are trained."""

    prompt_id: str
    token_ids: Int32


class TextPieces(Sequence[TextPiece]):
    """Sequences of up to `most` tokens, cut from each text separately or from all texts joined; kept in `tokens`."""

    def __init__(self, texts: Iterable[Int32], tokens: TokenStore, most: int, *, joined: bool) -> None:
        self._tokens, self._bounds = tokens, _bounds(texts, tokens, most, joined=joined)
        self._ids = self._named()

    def __len__(self) -> int:
        return len(self._bounds)

    @overload
    def __getitem__(self, index: int) -> TextPiece: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[TextPiece]: ...

    def __getitem__(self, index: int | slice) -> TextPiece | Sequence[TextPiece]:
        if isinstance(index, slice):
            return [self[one] for one in range(len(self))[index]]
        return TextPiece(f"{int(self._ids[index]):016x}", self._token_ids(index))

    def prompt_ids(self) -> Iterator[str]:
        """The `prompt_id` of each sequence, without reading the sequence."""
        return hexadecimal(self._ids)

    def lowest(self, most: int) -> list[TextPiece]:
        """Up to `most` sequences: those with the lowest ids."""
        return [self[int(index)] for index in np.argsort(self._ids, kind="stable")[:most]]

    @property
    def num_trained(self) -> int:
        """Number of tokens that are trained."""
        return int((self._bounds[:, 1] - self._bounds[:, 0] - 1).sum())

    def _token_ids(self, index: int) -> Int32:
        start, stop = map(int, self._bounds[index])
        return self._tokens.read(start, stop)

    def _named(self) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
        """The digest of each sequence: of its tokens, and of the number of earlier sequences with the same tokens."""
        found = np.fromiter((_digest(self._token_ids(n), 0) for n in range(len(self))), np.uint64, len(self))
        order = np.argsort(found, kind="stable")
        _, starts, group = np.unique(found[order], return_index=True, return_inverse=True)
        occurrences = np.arange(len(self)) - starts[group]
        for place in np.flatnonzero(occurrences):
            index = int(order[place])
            found[index] = _digest(self._token_ids(index), int(occurrences[place]))
        return found


def _digest(token_ids: Int32, occurrence: int) -> int:
    name = hashlib.blake2b(token_ids.tobytes() + occurrence.to_bytes(8, "big"), digest_size=8)
    return int.from_bytes(name.digest(), "big")


def _bounds(texts: Iterable[Int32], tokens: TokenStore, most: int, *, joined: bool) -> Ints:
    """Start and stop of each sequence; adds the tokens of `texts` to `tokens`."""
    found, length = array("q"), 0
    for text in texts:
        tokens.add(text)
        for start, stop in () if joined else pieces(len(text), most):
            found.extend((length + start, length + stop))
        length += len(text)
    for bounds in pieces(length, most) if joined else ():
        found.extend(bounds)
    return np.array(found, np.int64).reshape(-1, 2)
