"""Texts without roles, for pretraining: cut into sequences in which every token except the first is trained."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, overload

import numpy as np

from flowrl.errors import ConfigError
from flowrl.graph.node import Facts, Node
from flowrl.graph.ports import In, Out
from flowrl.machine.cache import Progress
from flowrl.messages import Group, Int32, Prompt, Trainable
from flowrl.models import Policy, check_model, ignore_progress, tokenizer_of
from flowrl.models.token_store import HeldTokens, TokenFile, TokenStore
from flowrl.models.tokens.text_tokens import split_pieces, text_tokens
from flowrl.nodes.sources.given_rows import given_sample
from flowrl.nodes.sources.row_source import PromptSource, RowPart
from flowrl.tasks import Row, Rows, Task, load_texts
from flowrl.tasks.row_reading.rows_on_disk import IndexedRows, Ints, hex_digests, lowest_rows

CutBy = Literal["split", "wrapped"]


@dataclass(frozen=True)
class Texts:
    """Which texts to train on, and how to cut them: plain data, for the nodes that need it.

    `split`: a text of more than `max_tokens` tokens is cut into several sequences, and no sequence contains two texts,
    so a token sees only its own text. `wrapped`: all texts are joined, an end token after each, and cut every
    `max_tokens` tokens; a token also sees the text before its own, as usual in pretraining.
    """

    task: Task
    policy: Policy
    max_tokens: int = 2048
    cut: CutBy = "split"
    part: RowPart = "train"

    def __post_init__(self) -> None:
        if self.max_tokens < 2:
            raise ConfigError(f"max_tokens is {self.max_tokens}; a sequence needs at least 2")
        if self.cut not in ("split", "wrapped"):
            raise ConfigError(f"cut is {self.cut!r}; choose split or wrapped")

    def read_texts(self) -> Rows:
        """All texts; a process reads them only once."""
        return load_texts(self.task, whole=self.part == "all")

    def cut_sequences(self, rows: Sequence[Row], progress: Progress = ignore_progress) -> TextPieces:
        """The sequences of these texts, in their order. If the texts stay on disk, their tokens are on disk as well."""
        tokens = text_tokens(tokenizer_of(self.policy, progress=progress), (row.prompt for row in rows))
        store = TokenFile() if isinstance(rows, IndexedRows) else HeldTokens()
        return TextPieces(tokens, store, self.max_tokens, joined=self.cut == "wrapped")


class TextSource(PromptSource):
    """Sends every sequence of `texts` as a prompt; the prompt's tokens are those of the sequence."""

    prompts_alone = False

    def __init__(self, texts: Texts, *, epochs: int | None = None) -> None:
        super().__init__(texts.task, texts.policy, epochs=epochs, max_prompt_tokens=texts.max_tokens, part=texts.part)
        self.texts = texts

    def preflight(self) -> str | None:
        check_model(self.policy)
        self.texts.read_texts()
        return None

    def read_rows(self) -> Rows:
        return self.texts.read_texts()

    def rows(self) -> TextPieces:  # type: ignore[override]
        self._num_texts = len(rows := self.part_rows(self.read_rows()))
        self._pieces = self.texts.cut_sequences(rows)
        return self._pieces

    def _report_rows(self, found: Rows) -> None:
        unused = len(found.train) + len(found.held_out) - self._num_texts
        others = f", {unused} texts held out" if unused else ""
        self.context.progress(
            f"{self._num_texts} texts, {len(self._rows)} sequences, {self._pieces.num_trained} tokens{others}"
        )
        self.report_skipped(found)

    def group(self, row: TextPiece, epoch: int) -> list[Prompt]:  # type: ignore[override]
        text = self._chat.tokenizer.decode(row.token_ids[1:])
        return self.make_members(row.prompt_id, epoch, text=text, token_ids=row.token_ids)


class TextDataset(Node):
    """Makes a sample of each sequence that a `TextSource` sends: the first token is context, all others are trained."""

    prompts: In[Prompt]
    groups: Out[Group]

    option = "max_tokens"
    group_size = 1

    def __init__(self, texts: Texts) -> None:
        self.texts = texts
        self.part: RowPart = texts.part
        self.max_tokens = texts.max_tokens

    def facts(self) -> Facts:
        return Facts(group_size=1, longest_response=self.texts.max_tokens, keeps_lineage=False)

    async def run(self) -> None:
        async for prompt in self.prompts:
            sample = text_sample(
                prompt.token_ids,
                prompt.text,
                sample_id=prompt.sample_id,
                group_id=prompt.group_id,
                prompt_id=prompt.prompt_id,
                epoch=prompt.epoch,
                generator=f"{self.name}/{self.context.replica}",
            )
            self.context.metric("tokens_generated", sample.response_tokens)
            self.context.ledger.generated(sample)
            await self.groups.send(Group(prompt.group_id, (sample,), 1))

    def require_held_out(self) -> None:
        if not self.texts.read_texts().held_out:
            raise ConfigError(
                f"{self.texts.task.name!r} has no held-out text to measure the loss on (one text in eight is held "
                "out, and a .txt file is one text); name more texts, or leave held_out out"
            )

    def held_out_samples(self, most: int, progress: Progress) -> list[Trainable]:
        rows = lowest_rows(self.texts.read_texts().held_out, None)
        found = self.texts.cut_sequences(rows, progress).lowest_pieces(most)
        return [
            text_sample(one.token_ids, "", sample_id=one.prompt_id, group_id=one.prompt_id, prompt_id=one.prompt_id)
            for one in found
        ]


def text_sample(token_ids: Int32, text: str, **fields: str | int) -> Trainable:
    """The sample of a sequence: the first token is context."""
    mask = np.ones(len(token_ids), np.bool_)
    mask[0] = False
    return given_sample(token_ids, mask, prompt_text="", response_text=text, **fields)


@dataclass(frozen=True)
class TextPiece:
    """A sequence of `token_ids`; the first token is context, all others are trained."""

    prompt_id: str
    token_ids: Int32


class TextPieces(Sequence[TextPiece]):
    """Sequences of up to `most` tokens, cut from each text separately or from all texts joined; kept in `tokens`."""

    def __init__(self, texts: Iterable[Int32], tokens: TokenStore, most: int, *, joined: bool) -> None:
        found, length = array("q"), 0
        for text in texts:
            tokens.add_tokens(text)
            for start, stop in () if joined else split_pieces(len(text), most):
                found.extend((length + start, length + stop))
            length += len(text)
        for bounds in split_pieces(length, most) if joined else ():
            found.extend(bounds)
        self._tokens = tokens
        self._bounds: Ints = np.array(found, np.int64).reshape(-1, 2)
        """Start and stop of each sequence among the tokens."""
        self._ids = np.fromiter((_digest_of(self._token_ids(n), 0) for n in range(len(self))), np.uint64, len(self))
        # A repeated sequence gets the digest of its tokens and of the number of earlier ones with the same tokens.
        order = np.argsort(self._ids, kind="stable")
        _, starts, group = np.unique(self._ids[order], return_index=True, return_inverse=True)
        occurrences = np.arange(len(self)) - starts[group]
        for place in np.flatnonzero(occurrences):
            index = int(order[place])
            self._ids[index] = _digest_of(self._token_ids(index), int(occurrences[place]))

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
        return hex_digests(self._ids)

    def lowest_pieces(self, most: int) -> list[TextPiece]:
        """Up to `most` sequences: those with the lowest ids."""
        return [self[int(index)] for index in np.argsort(self._ids, kind="stable")[:most]]

    @property
    def num_trained(self) -> int:
        """Number of tokens that are trained."""
        return int((self._bounds[:, 1] - self._bounds[:, 0] - 1).sum())

    def _token_ids(self, index: int) -> Int32:
        start, stop = map(int, self._bounds[index])
        return self._tokens.read_tokens(start, stop)


def _digest_of(token_ids: Int32, occurrence: int) -> int:
    name = hashlib.blake2b(token_ids.tobytes() + occurrence.to_bytes(8, "big"), digest_size=8)
    return int.from_bytes(name.digest(), "big")
