"""Tries before a run whether the model's chat template renders each row of a task, every row by itself.

A template is a program of the model's author and may refuse a row, or show it in a form in which its answer cannot be
found. Such a row is named before the run, or left out with `malformed=skip`; it would be lost in the run's middle.

Only texts are rendered: that is what a template can refuse, and takes less time than tokenizing. Rows are tried in an
order in which any beginning is spread over all of them, so that a share, where time is short, says something of all.
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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from flowrl.errors import ConfigError
from flowrl.models import Policy, known_tokenizer
from flowrl.models.tokens.chat import Chat, Messages, ReplyMessage, Unrendered
from flowrl.models.tokens.steps import require_steps
from flowrl.orphans import die_with_parent
from flowrl.tasks import Row, Task
from flowrl.tasks.rows import OF_TASK

TRIAL_S = 60.0
"""Longest time that a trial takes."""
ALONE_S = 5.0
"""What takes longer is tried in several processes, each of which takes a second or two to start."""
CHUNK = 128
"""Rows that are tried between two looks at the clock."""
BITS = 10
"""Rows are tried in 2 ** BITS sweeps over all, each between the rows of those before."""

PROGRAM = (sys.executable, "-c", f"from {__name__} import main; main()")
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

    def problem(self, chat: Chat) -> str:
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

    def add(self, numbers: Sequence[int], found: Sequence[str]) -> None:
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
    skipped = {number: why for number, why in found.problems.items() if _is_skipped(task, rows[number])}
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


def _is_skipped(task: Task, row: Row) -> bool:
    source = Task(str(row.columns[OF_TASK])) if len(task.sources) > 1 else task
    return source.options.get("malformed") == "skip"


def try_rows(
    policy: Policy, chat: Chat, rows: Sequence[Row], texts: Callable[[Row], RowTexts], *, limit_s: float = TRIAL_S
) -> Trial:
    """Render the rows until all are done, or the time is over. `chat` has the tokenizer of `policy`."""
    found, started = Trial(len(rows)), time.monotonic()
    chunks = _chunks(len(rows))
    for numbers in chunks:
        found.add(numbers, [texts(rows[number]).problem(chat) for number in numbers])
        spent = time.monotonic() - started
        needed = spent / found.tried * (len(rows) - found.tried)
        if spent >= limit_s:
            break
        if spent >= ALONE_S / 5 and needed > ALONE_S and _num_cores() > 1:
            number = min(_num_cores(), math.ceil(needed / ALONE_S))
            _try_apart(policy, chat.system_prompt, rows, texts, chunks, found, number, started + limit_s)
            break
    return found


def _chunks(num_rows: int) -> Iterator[list[int]]:
    """All indices, in an order whose every beginning is spread evenly, some at a time."""
    firsts = (int(f"{number:0{BITS}b}"[::-1], 2) for number in range(1 << BITS))  # each halves the gaps so far
    order = (number for first in firsts for number in range(first, num_rows, 1 << BITS))
    return iter(lambda: list(itertools.islice(order, CHUNK)), [])


def _num_cores() -> int:
    return len(os.sched_getaffinity(0))


def _try_apart(
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

    def ask(_: int) -> None:
        with subprocess.Popen(PROGRAM, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
            assert child.stdin is not None and child.stdout is not None
            try:
                _send(child.stdin, (policy, system_prompt))
                while True:
                    with reading:
                        numbers = next(chunks, []) if time.monotonic() < until else []
                        asked = [texts(rows[number]) for number in numbers]
                    if not numbers:
                        return
                    _send(child.stdin, asked)
                    answer = pickle.load(child.stdout)
                    with reading:
                        found.add(numbers, answer)
            except (EOFError, BrokenPipeError):
                raise ConfigError(
                    f"a process that tried rows ended with {child.wait()}; look at what it printed above"
                ) from None
            finally:
                child.kill()

    with ThreadPoolExecutor(processes) as pool:
        list(pool.map(ask, range(processes)))


def _send(pipe: Any, message: Any) -> None:
    pickle.dump(message, pipe)  # between two processes of one program, over a pipe of their own
    pipe.flush()


def main() -> None:
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
            _send(outbox, [one.problem(chat) for one in asked])
