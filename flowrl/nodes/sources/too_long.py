"""What happens to prompts and conversations that have more tokens than a limit, or that no template renders."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar, get_args

import numpy as np

from flowrl.errors import ConfigError
from flowrl.graph.node import Context
from flowrl.messages import Bool, Int32, Prompt, Sample, Trainable
from flowrl.models import Chat
from flowrl.models.tokens.chat import Unrendered
from flowrl.nodes.sources.row_trial import place_of
from flowrl.tasks import Row
from flowrl.tasks.row_reading.indexed_rows import picked

R = TypeVar("R")
T = TypeVar("T")
TooLong = Literal["drop", "truncate", "error"]


@dataclass(frozen=True)
class PromptLimit:
    """How many tokens a prompt may have."""

    tokens: int | None = None
    """Most tokens of a prompt; None: as many as fit the model's context, or the longest sequence that its engine
    takes, together with one token of an answer."""
    too_long: TooLong = "drop"
    """Longer prompts are left out and counted, lose their beginning, or are an error before training."""
    option: str = "evaluate_max_prompt_tokens"
    """The option with which a user raises `tokens`."""
    engine: int | None = None
    """The longest sequence that the generator's engine takes (`Engine.max_model_len`), if it is below the context."""

    def problems(self) -> list[str]:
        """What is wrong with the limit, as complete sentences."""
        found = (
            [] if self.tokens is None or self.tokens > 0 else [f"{self.option} is {self.tokens}; it needs at least 1"]
        )
        if self.too_long not in get_args(TooLong):
            found.append(f"too_long is {self.too_long!r}; choose one of {', '.join(get_args(TooLong))}")
        return found


def within(rows: Sequence[Row], chat: Chat, most: int, limit: PromptLimit, *, task: str) -> tuple[Sequence[Row], int]:
    """The held-out rows of `task` that are asked, and how many prompts have more than `most` tokens.

    `limit` says whether such long prompts are asked without their beginning, or not asked. Raises ConfigError if they
    are an error, or if no prompt is left to ask.
    """
    lengths = [prompt_length(chat, row) for row in rows]
    fitting = [index for index, length in enumerate(lengths) if length <= most]
    num_long = len(rows) - len(fitting)
    if not num_long or limit.too_long == "truncate":
        return rows, num_long
    if fitting and limit.too_long == "drop":
        return picked(rows, fitting), num_long
    bound, change = f"{limit.option} = {most}", "raise it"
    if limit.tokens is None:
        bound, change = f"the {most} tokens that the model's context has room for", "shorten them"
        if limit.engine == most + 1:
            bound, change = f"the {most} tokens that --engine.max-model-len {limit.engine} has room for", "raise it"
    raise ConfigError(
        f"{num_long} of {len(rows)} held-out prompts of {task!r} are longer than {bound}, the longest has "
        f"{max(lengths)}; {change}, or set too_long to {'truncate' if not fitting else 'drop or truncate'}"
    )


def prompt_length(chat: Chat, row: Row) -> int:
    """Number of tokens of a row's prompt."""
    return len(chat.with_tools(row.tools).prompt(row.turns)[1])


def shortened(token_ids: Int32, mask: Bool, most: int) -> tuple[Int32, Bool]:
    """The last `most` tokens; all tokens if the last trained turn would lose its beginning or its whole prompt."""
    excess = len(token_ids) - most
    return (token_ids[excess:], mask[excess:]) if 0 < excess < answer_start(mask) else (token_ids, mask)


def answer_start(mask: Bool) -> int:
    """Where the last trained turn begins."""
    places = np.flatnonzero(~mask[: int(np.flatnonzero(mask)[-1])])
    return int(places[-1]) + 1 if places.size else 0


def within_limit(samples: Iterable[Trainable | Sample | Prompt], most: int) -> bool:
    """Whether none of the samples of a row has more than `most` tokens: else the row is dropped whole."""
    return all(len(sample.token_ids) <= most for sample in samples)


class DroppedRows:
    """Counts the rows that a node drops one after the other because they are too long, or because the chat template
    does not render them.

    A dropped group counts for no optimizer step, so a run whose rows are all dropped would never end.
    """

    def __init__(
        self, num_rows: int, most: int, *, option: str, task: str, context: Context, noun: str = "conversations"
    ) -> None:
        self._noun = noun
        self._context = context
        self._unrendered = 0
        self._num_rows = num_rows
        self._most = most
        self._option = option
        self._task = task
        self._number = 0

    def fits(self, samples: Iterable[Trainable | Sample | Prompt]) -> bool:
        """Whether the samples of a row are short enough; else the caller drops the row. Raises ConfigError if as many
        rows as there are were too long, one after the other."""
        fits = within_limit(samples, self._most)
        self._number = 0 if fits else self._number + 1
        if self._number >= self._num_rows:
            raise ConfigError(
                f"all {self._num_rows} {self._noun} of {self._task!r} are longer than {self._option} = {self._most}; "
                "raise it, or set too_long to truncate"
            )
        return fits

    def rendered(self, row: Row, render: Callable[[], T]) -> T | None:
        """What `render` makes of the row; None if the template does not render it, so that the caller drops the row.

        The first such row is named, and all are counted (`rows_unrendered`): a trial before the run names them unless
        they are to be left out, or it had no time for all. Raises ConfigError as `fits` does.
        """
        try:
            return render()
        except Unrendered as problem:
            self._number += 1
            if not self._unrendered:
                self._context.progress(f"a row is left out: {place_of(row)}: {problem}")
            self._unrendered += 1
            self._context.metric("rows_unrendered", 1)
            if self._number >= self._num_rows:
                raise ConfigError(
                    f"all {self._num_rows} rows of {self._task!r} are left out; the last one, {place_of(row)}, cannot "
                    f"be rendered: {problem}"
                ) from None
            return None


def rendered_alone(rows: Iterable[R], render: Callable[[R], T]) -> Iterator[T]:
    """What `render` makes of each row (or of its id), without those that the template does not
    render: a trial before the run has named them."""
    for row in rows:
        try:
            yield render(row)
        except Unrendered:
            continue


def refuse_long(lengths: Iterable[int], most: int, *, option: str, task: str, noun: str = "conversations") -> None:
    """Raise ConfigError if one of these lengths is above `most`."""
    lengths = list(lengths)
    if long := [length for length in lengths if length > most]:
        raise ConfigError(
            f"{len(long)} of {len(lengths)} {noun} of {task!r} are longer than {option} = {most}, the longest "
            f"has {max(long)}; raise it, or set too_long to drop or truncate"
        )
