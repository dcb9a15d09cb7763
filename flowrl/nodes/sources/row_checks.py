"""Which rows can be used: those that the model's chat template renders, and that are short enough.

A template is a program of the model's author and may refuse a row, or show it in a form in which its answer cannot be
found. Such a row is named before the run, or left out with `malformed=skip`; it would be lost in the run's middle. So a
trial before the run renders every row by itself.

Only texts are rendered in the trial: that is what a template can refuse, and takes less time than tokenizing. Rows are
tried in an order in which any beginning is spread over all of them, so that a share, where time is short, says
something of all.
"""

from __future__ import annotations

import itertools
import math
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, get_args

import numpy as np

from flowrl.errors import ConfigError
from flowrl.graph.node import Context
from flowrl.machine.cache import Progress
from flowrl.machine.orphans import die_with_parent
from flowrl.messages import Bool, Int32
from flowrl.models import Policy, ignore_progress, known_tokenizer, tokenizer_of
from flowrl.models.tokens.chat import Chat, Messages, ReplyMessage, Unrendered
from flowrl.models.tokens.text_tokens import require_steps
from flowrl.tasks import Row, Task
from flowrl.tasks.row_reading.rows_on_disk import pick_rows
from flowrl.tasks.rows import OF_TASK

TRIAL_S = 60.0
"""Longest time that a trial takes."""
ALONE_S = 5.0
"""What takes longer is tried in several processes, each of which takes a second or two to start."""
CHUNK = 128
"""Rows that are tried between two looks at the clock."""
BITS = 10
"""Rows are tried in 2 ** BITS sweeps over all, each between the rows of those before."""

PROGRAM = (sys.executable, "-c", f"from {__name__} import try_sent_rows; try_sent_rows()")
"""What a process runs that tries rows."""


@dataclass(frozen=True)
class RowTexts:
    """What a node renders of a row: its prompt, with each of the replies; without one, the prompt alone."""

    turns: Messages
    replies: tuple[ReplyMessage, ...] = ()
    tools: Messages = ()
    steps: tuple[str, ...] = ()
    """The steps of a response, which follow the prompt as they are."""
    every_turn: bool = False
    """Whether earlier turns of the assistant are trained too."""

    def why_unrendered(self, chat: Chat) -> str:
        """Why the chat cannot render it; "" if it can."""
        chat, first = chat.with_tools(self.tools), 0 if self.every_turn else len(self.turns)
        try:
            if not self.replies:
                chat.prompt_text(self.turns)
            if self.steps:
                require_steps(chat.tokenizer, self.steps)
            for reply in self.replies:
                chat.find_turns(self.turns, reply, first=first)
        except Unrendered as problem:
            return str(problem)
        return ""


def prompt_texts(row: Row) -> RowTexts:
    """What is rendered of a row whose prompt alone is asked."""
    return RowTexts(row.turns, tools=row.tools)


@dataclass
class Trial:
    """What was found."""

    num_rows: int
    tried: int = 0
    problems: dict[int, str] = field(default_factory=dict)
    """Index of a row -> why it cannot be rendered."""

    def add_rows(self, numbers: Sequence[int], found: Sequence[str]) -> None:
        self.tried += len(numbers)
        self.problems |= {number: why for number, why in zip(numbers, found, strict=True) if why}


def require_rendered(policy: Policy, task: Task, rows: Sequence[Row], texts: Callable[[Row], RowTexts]) -> str | None:
    """Try the rows of a task before a run. Raises ConfigError for the first that is neither rendered nor skipped.

    Returns what is to be said: how many rows are left out, and how many were tried if that was not all. Nothing is
    tried if the model has yet to be made.
    """
    if (tokenizer := known_tokenizer(policy)) is None:
        return None
    found = try_rows(policy, Chat(tokenizer, task.system_prompt), rows, texts)
    skipped: dict[int, str] = {}
    for number, why in found.problems.items():
        source = Task(str(rows[number].columns[OF_TASK])) if len(task.sources) > 1 else task
        if source.options.get("malformed") == "skip":
            skipped[number] = why
    if stopping := [number for number in found.problems if number not in skipped]:
        first = min(stopping)
        wrong = (
            f"{len(stopping)} of {found.tried} rows of {task.name!r} cannot be rendered for {policy.model}, the first"
        )
        remedy = "mend it" + (", or leave such rows out with malformed=skip" if rows[first].place else "")
        if len(stopping) == found.tried and task.system_prompt:
            remedy = "leave out the system prompt, or use another template"
        raise ConfigError(f"{wrong} at {place_of(rows[first])}: {found.problems[first]}; {remedy}")
    said = []
    if skipped:
        first = min(skipped)
        text = f"{len(skipped)} of {found.tried} rows cannot be rendered and are left out, the first at "
        said.append(f"{text}{place_of(rows[first])}: {skipped[first]}")
    if found.tried < found.num_rows:
        share = f"{found.tried:,} of {found.num_rows:,} rows, {found.tried / found.num_rows:.0%},"
        said.append(f"{share} were rendered as a trial within {TRIAL_S:.0f} s; others that cannot be are left out")
    return "; ".join(said) or None


def place_of(row: Row) -> str:
    """Where a row was read, or its prompt if it was generated."""
    return row.place or f"the row of the prompt {row.prompt[:60]!r}"


def try_rows(
    policy: Policy, chat: Chat, rows: Sequence[Row], texts: Callable[[Row], RowTexts], *, limit_s: float = TRIAL_S
) -> Trial:
    """Render the rows until all are done, or the time is over. `chat` has the tokenizer of `policy`."""
    found, started = Trial(len(rows)), time.monotonic()
    chunks = spread_chunks(len(rows))
    for numbers in chunks:
        found.add_rows(numbers, [texts(rows[number]).why_unrendered(chat) for number in numbers])
        spent = time.monotonic() - started
        needed = spent / found.tried * (len(rows) - found.tried)
        if spent >= limit_s:
            break
        if spent >= ALONE_S / 5 and needed > ALONE_S and num_cores() > 1:
            number = min(num_cores(), math.ceil(needed / ALONE_S))
            _try_in_processes(policy, chat.system_prompt, rows, texts, chunks, found, number, started + limit_s)
            break
    return found


def spread_chunks(num_rows: int) -> Iterator[list[int]]:
    """All indices, in an order whose every beginning is spread evenly, some at a time."""
    firsts = (int(f"{number:0{BITS}b}"[::-1], 2) for number in range(1 << BITS))  # each halves the gaps so far
    order = (number for first in firsts for number in range(first, num_rows, 1 << BITS))
    return iter(lambda: list(itertools.islice(order, CHUNK)), [])


def num_cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def _try_in_processes(
    policy: Policy,
    system_prompt: str,
    rows: Sequence[Row],
    texts: Callable[[Row], RowTexts],
    chunks: Iterator[list[int]],
    found: Trial,
    processes: int,
    until: float,
) -> None:
    """Render the remaining chunks in processes, until they are done or `until` on the monotonic clock."""
    reading = threading.Lock()

    def ask_process(_: int) -> None:
        with subprocess.Popen(PROGRAM, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
            assert child.stdin is not None and child.stdout is not None
            try:
                _send_message(child.stdin, (policy, system_prompt))
                while True:
                    with reading:
                        numbers = next(chunks, []) if time.monotonic() < until else []
                        asked = [texts(rows[number]) for number in numbers]
                    if not numbers:
                        return
                    _send_message(child.stdin, asked)
                    answer = pickle.load(child.stdout)
                    with reading:
                        found.add_rows(numbers, answer)
            except (EOFError, BrokenPipeError):
                raise ConfigError(
                    f"a process that tried rows ended with {child.wait()}; look at what it printed above"
                ) from None
            finally:
                child.kill()

    with ThreadPoolExecutor(processes) as pool:
        list(pool.map(ask_process, range(processes)))


def _send_message(pipe: Any, message: Any) -> None:
    pickle.dump(message, pipe)  # between two processes of one program, over a pipe of their own
    pipe.flush()


def try_sent_rows() -> None:
    """The program of a process: it renders what arrives on standard input, until that ends."""
    die_with_parent()
    with os.fdopen(os.dup(1), "wb") as outbox:
        os.dup2(2, 1)  # for what libraries print
        policy, system_prompt = pickle.load(sys.stdin.buffer)
        chat = Chat(known_tokenizer(policy), system_prompt)
        while True:
            try:
                asked: list[RowTexts] = pickle.load(sys.stdin.buffer)
            except EOFError:
                return
            _send_message(outbox, [one.why_unrendered(chat) for one in asked])


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

    def find_problems(self) -> list[str]:
        """What is wrong with the limit, as complete sentences."""
        found = (
            [] if self.tokens is None or self.tokens > 0 else [f"{self.option} is {self.tokens}; it needs at least 1"]
        )
        if self.too_long not in get_args(TooLong):
            found.append(f"too_long is {self.too_long!r}; choose one of {', '.join(get_args(TooLong))}")
        return found


def rows_within(
    rows: Sequence[Row], chat: Chat, most: int, limit: PromptLimit, *, task: str
) -> tuple[Sequence[Row], int]:
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
        return pick_rows(rows, fitting), num_long
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
    return len(chat.with_tools(row.tools).encode_prompt(row.turns)[1])


def shorten_prompt(token_ids: Int32, mask: Bool, most: int) -> tuple[Int32, Bool]:
    """The last `most` tokens; all tokens if the last trained turn would lose its beginning or its whole prompt."""
    excess = len(token_ids) - most
    if excess <= 0:
        return token_ids, mask
    places = np.flatnonzero(~mask[: int(np.flatnonzero(mask)[-1])])
    answer_start = int(places[-1]) + 1 if places.size else 0
    return (token_ids[excess:], mask[excess:]) if excess < answer_start else (token_ids, mask)


def open_chat(task: Task, policy: Policy, progress: Progress = ignore_progress) -> Chat:
    """The chat that renders the rows of a task for a policy."""
    return Chat(tokenizer_of(policy, progress=progress), task.system_prompt)


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

    def lengths_fit(self, lengths: Iterable[int]) -> bool:
        """Whether all samples of a row are short enough; else the caller drops the whole row. Raises ConfigError if as
        many rows as there are were too long, one after the other."""
        fits = max(lengths) <= self._most
        self._number = 0 if fits else self._number + 1
        if self._number >= self._num_rows:
            raise ConfigError(
                f"all {self._num_rows} {self._noun} of {self._task!r} are longer than {self._option} = {self._most}; "
                "raise it, or set too_long to truncate"
            )
        return fits

    def render_row(self, row: Row, render: Callable[[], T]) -> T | None:
        """What `render` makes of the row; None if the template does not render it, so that the caller drops the row.

        The first such row is named, and all are counted (`rows_unrendered`): a trial before the run names them unless
        they are to be left out, or it had no time for all. Raises ConfigError as `lengths_fit` does.
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


def refuse_long_rows(lengths: Iterable[int], most: int, *, option: str, task: str, noun: str = "conversations") -> None:
    """Raise ConfigError if one of these lengths is above `most`."""
    lengths = list(lengths)
    if long := [length for length in lengths if length > most]:
        raise ConfigError(
            f"{len(long)} of {len(lengths)} {noun} of {task!r} are longer than {option} = {most}, the longest "
            f"has {max(long)}; raise it, or set too_long to drop or truncate"
        )
