"""Texts without roles, for pretraining: cut into sequences in which every token except the first is trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from flowrl.cache import Progress
from flowrl.errors import ConfigError
from flowrl.graph.facts import Facts
from flowrl.graph.node import Node
from flowrl.graph.ports import In, Out
from flowrl.messages import Group, Int32, Prompt, Trainable
from flowrl.models import Policy, check_model, silent, tokenizer_of
from flowrl.models.token_store import HeldTokens, TokenFile
from flowrl.models.tokens.plain_tokens import text_tokens
from flowrl.nodes.sources.given_sample import given_sample
from flowrl.nodes.sources.row_source import RowPart
from flowrl.nodes.sources.source import PromptSource
from flowrl.nodes.sources.text_pieces import TextPiece, TextPieces
from flowrl.tasks import Row, Rows, Task, load_texts
from flowrl.tasks.row_reading.indexed_rows import IndexedRows, lowest

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

    def read(self) -> Rows:
        """All texts; a process reads them only once."""
        return load_texts(self.task, whole=self.part == "all")

    def sequences(self, rows: Sequence[Row], progress: Progress = silent) -> TextPieces:
        """The sequences of these texts, in their order. If the texts stay on disk, their tokens are on disk as well."""
        tokens = text_tokens(tokenizer_of(self.policy, progress=progress), (row.prompt for row in rows))
        store = TokenFile() if isinstance(rows, IndexedRows) else HeldTokens()
        return TextPieces(tokens, store, self.max_tokens, joined=self.cut == "wrapped")


class TextSource(PromptSource):
    """Sends every sequence of `texts` as a prompt; the prompt's tokens are those of the sequence."""

    def __init__(self, texts: Texts, *, epochs: int | None = None) -> None:
        super().__init__(texts.task, texts.policy, epochs=epochs, max_prompt_tokens=texts.max_tokens, part=texts.part)
        self.texts = texts

    def facts(self) -> Facts:
        return replace(super().facts(), longest_prompt=None)

    def preflight(self) -> str | None:
        check_model(self.policy)
        self.texts.read()
        return None

    def read(self) -> Rows:
        return self.texts.read()

    def rows(self) -> TextPieces:  # type: ignore[override]
        found = self.read()
        self._num_texts = len(rows := self.chosen(found.train, found.held_out))
        self._pieces = self.texts.sequences(rows)
        return self._pieces

    def _say(self, found: Rows) -> None:
        unused = len(found.train) + len(found.held_out) - self._num_texts
        others = f", {unused} texts held out" if unused else ""
        self.context.progress(
            f"{self._num_texts} texts, {len(self._rows)} sequences, {self._pieces.num_trained} tokens{others}"
        )
        self.say_skipped(found)

    def group(self, row: TextPiece, epoch: int) -> list[Prompt]:  # type: ignore[override]
        text = self._chat.tokenizer.decode(row.token_ids[1:])
        return self.members(row.prompt_id, epoch, text=text, token_ids=row.token_ids)


class TextDataset(Node):
    """Makes a sample of each sequence that a `TextSource` sends: the first token is context, all others are trained."""

    prompts: In[Prompt]
    groups: Out[Group]

    def __init__(self, texts: Texts) -> None:
        self.texts = texts

    @property
    def part(self) -> RowPart:
        return self.texts.part

    @property
    def max_tokens(self) -> int:
        return self.texts.max_tokens

    def facts(self) -> Facts:
        return Facts(group_size=1, longest_response=self.texts.max_tokens, keeps_lineage=False)

    async def run(self) -> None:
        async for prompt in self.prompts:
            sample = _sample(
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
        if not self.texts.read().held_out:
            raise ConfigError(
                f"{self.texts.task.name!r} has no held-out text to measure the loss on (one text in eight is held "
                "out, and a .txt file is one text); name more texts, or leave held_out out"
            )

    def held_out_samples(self, most: int, progress: Progress) -> list[Trainable]:
        rows = lowest(self.texts.read().held_out, None)
        found = self.texts.sequences(rows, progress).lowest(most)
        return [
            _sample(one.token_ids, "", sample_id=one.prompt_id, group_id=one.prompt_id, prompt_id=one.prompt_id)
            for one in found
        ]


def _sample(token_ids: Int32, text: str, **fields: str | int) -> Trainable:
    mask = np.ones(len(token_ids), np.bool_)
    mask[0] = False
    return given_sample(token_ids, mask, prompt_text="", response_text=text, **fields)
