"""Reads the rows of a task into memory, or indexes them on disk. This module decides which, for all kinds of rows.

`auto`: rows stay in their files if the files of all sources of the task together are large. Generated rows are always
kept in memory, even if the rows of other sources stay on disk.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, TypeVar
from weakref import WeakValueDictionary

from flowrl.errors import ConfigError
from flowrl.hub import HubName
from flowrl.tasks.row_reading.columns import Keys, TextKeys, make_row, make_text_row
from flowrl.tasks.row_reading.preference_rows import Kind, careless_preferences, make_preferences
from flowrl.tasks.row_reading.record_formats import FORMATS, RawRow, Reading, format_of, read_records
from flowrl.tasks.row_reading.row_files import PATTERN, files_of
from flowrl.tasks.row_reading.rows_on_disk import (
    FileRows,
    HeldRows,
    RowStore,
    join_rows,
    num_bytes_of,
    part_rows,
    rows_by_id,
    scan_source,
)
from flowrl.tasks.rows import OF_TASK, WEIGHT, Row, Rows, word_row
from flowrl.tasks.task import Task
from flowrl.tasks.toy_tasks import Arithmetic, SticksRules

Options = TypeVar("Options")
AUTO_BYTES = 256 << 20
"""Rows of files that together have more bytes than this stay on disk, unless the task says otherwise."""


# What nodes load


def load_rows(task: Task, *, whole: bool = False) -> Rows:
    """Read or generate all rows of `task`, once per process. Raises ConfigError if the task is invalid.

    `whole`: the caller uses both parts alike, so there may be no training rows.
    """
    return _with_training_rows(task, all_rows(task), whole)


def load_demonstrations(task: Task, *, whole: bool = False) -> Rows:
    """`load_rows` for learning from the answers: rows of files that answer the same prompt differently are all
    taken."""
    if task.generated and len(task.sources) == 1:
        return load_rows(task, whole=whole)
    return _with_training_rows(task, all_demonstrations(task), whole)


def load_texts(task: Task, *, whole: bool = False) -> Rows:
    """The texts of `task`, each as the prompt of a row, including repeated ones; the split is by text."""
    if len(task.sources) > 1:
        raise ConfigError(f"task {task.name!r} is a mixture, and texts are read from one; name a pattern of files")
    return _with_training_rows(task, all_texts(task), whole)


@functools.lru_cache(maxsize=8)
def load_preferences(task: Task, kind: Kind) -> Rows:
    """The pairs of `task`, or its labelled completions (a pair makes two); the split is by prompt.

    `arithmetic` prefers right answers to answers without carrying.
    """

    def generate(source: Task) -> Iterable[Row]:
        if source.source == "arithmetic":
            return careless_preferences(_generate_rows(source), kind)
        raise ConfigError(
            f"task {source.name!r} has no preferences: it is neither arithmetic, nor a file ({FORMATS}) or dataset "
            "directory on this machine, nor a dataset of the Hub; name one with the columns chosen and rejected, or "
            "completion and label"
        )

    found = _load_sources(task, RowKind(Keys, partial(make_preferences, kind), generate))
    return _with_training_rows(task, found, whole=False)


UNREPEATED: WeakValueDictionary[Task, Rows] = WeakValueDictionary()
"""Rows that `all_rows` has loaded for tasks without repeated prompts, while they are still referenced elsewhere."""


@functools.lru_cache(maxsize=8)
def all_rows(task: Task) -> Rows:
    """`load_rows` of a task that may have no training rows."""
    found = _load_sources(task, RowKind(Keys, partial(make_row, compared=task.compares), _generate_rows))
    if not found.repeated:
        UNREPEATED[task] = found
    return found


@functools.lru_cache(maxsize=8)
def all_demonstrations(task: Task) -> Rows:
    """`load_demonstrations` of a task that has files, and may have no training rows.

    If no row repeats a prompt, they are the rows of `load_rows`, and are not read again.
    """
    if (found := UNREPEATED.get(task)) is not None:
        return found
    return _load_sources(task, RowKind(Keys, partial(make_row, compared=task.compares), _generate_rows, every=True))


@functools.lru_cache(maxsize=4)
def all_texts(task: Task) -> Rows:
    """`load_texts` of a task that may have no texts to train on."""

    def generate(source: Task) -> Iterable[Row]:
        raise ConfigError(
            f"task {source.name!r} has no texts: it is neither a file ({FORMATS}), pattern or dataset directory on "
            "this machine, nor a dataset of the Hub; name one with the column text"
        )

    return _load_sources(task, RowKind(TextKeys, make_text_row, generate, every=True))


class KnownRows:
    """Every row of a task by the prompt id of its samples: both parts, with every response to a prompt that has
    several.

    The rows are those of `load_demonstrations`; the first one of each prompt is the row of `load_rows`, with the same
    id. They are loaded here, which may be slow. Raises ConfigError.
    """

    def __init__(self, task: Task) -> None:
        found = load_demonstrations(task, whole=True)
        self._rows = join_rows(found.train, found.held_out)
        self._by_id = rows_by_id(self._rows)

    def get(self, prompt_id: str) -> Row | None:
        """The row of a sample; None if the task has no row with this prompt id."""
        return self._by_id.get(prompt_id)

    def of_prompts(self, most: int) -> list[Row]:
        """One row for each of the first `most` prompts, or of all if there are fewer."""
        return list(itertools.islice((row for row in self._rows if row.prompt_id == row.asked_id), most))


def _with_training_rows(task: Task, found: Rows, whole: bool) -> Rows:
    """Returns `found`. Raises ConfigError if it has no training rows, unless `whole`."""
    if not found.train and not whole:
        raise ConfigError(f"task {task.name!r} has no training rows ({len(found.held_out)} are held out); add rows")
    return found


# How they are read


@dataclass(frozen=True)
class RowKind:
    """The kind of rows that a node wants: the options that say where they are in a record, and how to make them from
    it."""

    keys: type[Keys] | type[TextKeys]
    make: Callable[[Any, str, RawRow], tuple[Row, ...]]
    generate: Callable[[Task], Iterable[Row]]
    """The rows of a source without files. Raises ConfigError if the source cannot generate any."""
    every: bool = False
    """Whether rows that repeat a prompt are also taken."""


class OneSource:
    """The source of a task, or one of a mixture."""

    def __init__(self, task: Task, kind: RowKind, name: str) -> None:
        self.task, self.name, self._kind = task, name, kind
        self.reading = Reading(str(task.options.get("malformed", "stop")))
        self.place = place_of_rows(task)
        self.every = kind.every and not task.generated
        """Whether rows that repeat a prompt are also taken; not if `Task.generated`, since a source may generate a row
        twice."""
        self.repeated = 0
        """Rows of a source of a mixture that were left out because they repeat another row's prompt."""
        self.opened: dict[str, None] = {}
        """Columns whose text was read as messages, in the order in which they were found."""

    @cached_property
    def keys(self) -> Any:
        """The options that say where the rows are in a record. Raises ConfigError."""
        return options_of(self._kind.keys, self.task)

    @cached_property
    def paths(self) -> list[Path]:
        """The files of a source that has files."""
        assert self.place is not None, "asked for only where there are files"
        return files_of(self.place, config=self.keys.config, split=self.keys.split)

    def read_rows(self) -> Iterator[Row]:
        """Every row, read or generated. Raises ConfigError, and Malformed if `reading` stops at malformed records."""
        if self.place is None:
            yield from self._kind.generate(self.task)
            return
        for path in self.paths:
            for place, record in read_records(path, self.keys.split, self.reading):
                make = partial(self._kind.make, self.keys, place, record)
                for row in self.reading.attempt_record(place, make) or ():
                    if row.opened:
                        self.opened.update(dict.fromkeys(row.opened))
                    yield row

    def require_rows(self, number: int) -> None:
        """Raise ConfigError if there is no row."""
        if not number:
            skipped = self.reading.skipped
            said = f", {len(skipped)} are skipped: {skipped[0]}" if skipped else ""
            low = self.reading.low_scores
            said += f", {low} have a score below min_score={self.keys.min_score:g}" if low else ""
            raise ConfigError(f"task {self.task.name!r} has no rows at all{said}; add rows, or name other data")


def _load_sources(task: Task, kind: RowKind) -> Rows:
    """The rows of all sources, with the counts and errors of rows left out. Raises ConfigError if a source has none."""
    mixed = len(task.sources) > 1
    sources = [OneSource(Task(term.text) if mixed else task, kind, term.text * mixed) for term in task.sources]
    wanted = ["memory" if source.place is None else str(source.keys.rows) for source in sources]
    in_sum = 0
    if "auto" in wanted:
        in_sum = sum(
            num_bytes_of(path, source.keys.split)
            for source, where in zip(sources, wanted, strict=True)
            if where != "memory"
            for path in source.paths
        )
    on_disk = [where == "disk" or (where == "auto" and in_sum > AUTO_BYTES) for where in wanted]
    if any(on_disk):
        found = _index_rows(task, kind, sources, on_disk)
    else:
        found = (Rows.every if kind.every else Rows.split)(_held_rows(task, sources))
    readings = [source.reading for source in sources]
    return dataclasses.replace(
        found,
        skipped=tuple(text for reading in readings for text in reading.skipped),
        repeated=found.repeated + sum(source.repeated for source in sources),
        low_scores=sum(reading.low_scores for reading in readings),
        opened=tuple(
            f"{where}: the text in the column {column!r} is a list of messages, and is read as such; {where}:text=raw "
            "reads it as plain text"
            for where, column in ((source.task.source, column) for source in sources for column in source.opened)
        ),
    )


def _held_rows(task: Task, sources: Sequence[OneSource]) -> Iterator[Row]:
    """The rows in memory of all sources, put into the task's template; in a mixture only those that are taken from
    each, those for training first."""
    for source in sources:
        rows: Iterable[Row] = source.read_rows()
        if len(sources) > 1:
            taken = (Rows.every if source.every else Rows.split)(rows)
            source.repeated = taken.repeated
            rows = (*taken.train, *taken.held_out)
        number = 0
        for row in rows:
            number += 1
            yield word_row(row, source.name, task.template, task.reasoning)
        source.require_rows(number)


def _index_rows(task: Task, kind: RowKind, sources: Sequence[OneSource], on_disk: Sequence[bool]) -> Rows:
    """The rows of all sources, of which some stay on disk."""
    stores: list[RowStore] = []
    own: list[range] = []
    for source, stays in zip(sources, on_disk, strict=True):
        word = partial(word_row, source=source.name, template=task.template, reasoning=task.reasoning)
        first = len(stores)
        if stays:
            make = partial(kind.make, source.keys)
            stores += [FileRows(path, source.keys.split, make, source.name, word) for path in source.paths]
        else:
            stores.append(HeldRows([*source.read_rows()], source.name, word))
        own.append(range(first, len(stores)))
    scans = []
    for source, numbers in zip(sources, own, strict=True):
        scan, source.repeated = scan_source(
            stores, numbers, source.reading, source.opened, every=source.every, mixed=len(sources) > 1
        )
        source.require_rows(len(scan))
        scans.append(scan)
    return part_rows(stores, scans, every=kind.every)


def _generate_rows(task: Task) -> Iterable[Row]:
    if task.source == "arithmetic":
        return options_of(Arithmetic, task).rows()
    if task.source == "sticks":
        return options_of(SticksRules, task).rows()
    if task.source.startswith("reasoning_gym/"):
        from flowrl.tasks import reasoning

        return reasoning.generate_rows(task)
    close = difflib.get_close_matches(task.source, ["arithmetic", "sticks", "reasoning_gym/chain_sum"], 1, 0.5)
    hint = f" Did you mean {close[0]}?" if close else ""
    raise ConfigError(
        f"there is no task {task.source!r}: it is neither arithmetic, nor sticks, nor reasoning_gym/NAME, nor a file "
        f"({FORMATS}), pattern or dataset directory on this machine, nor OWNER/NAME, as datasets of the Hub are named."
        f"{hint}"
    )


def place_of_rows(task: Task) -> Path | HubName | None:
    """The files or the Hub dataset that a task's rows are read from; None for a task that has neither.

    Raises ConfigError for a file that does not exist.
    """
    path = task.path
    if task.source.startswith("reasoning_gym/"):
        return None
    if path.is_dir() or (path.is_file() and format_of(path)):
        return path
    if not path.exists() and PATTERN.search(str(path)):
        return path
    if not path.exists() and format_of(path):
        near = difflib.get_close_matches(path.name, [file.name for file in path.parent.glob("*.*")], 1)
        hint = (
            f"did you mean {path.parent / near[0]}?"
            if near
            else "correct the path, which is relative to this directory"
        )
        raise ConfigError(f"there is no task {str(path)!r}, for {path.resolve()} does not exist; {hint}")
    return None if format_of(Path(task.source)) else HubName.parse(task.source, "dataset")


def options_of(kind: type[Options], task: Task) -> Options:
    """`task.options` as the dataclass `kind`; names and types are checked."""
    fields: Mapping[str, Any] = {f.name: f for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    for key, value in task.options.items():
        if key not in fields:
            raise ConfigError(f"task {task.name!r} has no option {key!r}; it has {', '.join(fields)}")
        wanted = type(fields[key].default)
        if not isinstance(value, (int, float) if wanted is float else wanted):
            raise ConfigError(f"task {task.name!r}: option {key} is {value!r} and needs {wanted.__name__}")
    return kind(**task.options)


# Columns that other trainers read


RowUse = Literal["prompts", "responses", "preferences"]
"""What is done with rows: prompts are asked (the columns go to rewards), responses are learned from, preferences are
compared."""
LEARNED: tuple[RowUse, ...] = ("responses", "preferences")
EVERYWHERE: tuple[RowUse, ...] = ("prompts", *LEARNED)
MEDIA = ("image", "images", "video", "videos", "audio", "audios")
REFUSED: Mapping[str, tuple[tuple[RowUse, ...], str]] = {
    **dict.fromkeys(MEDIA, (EVERYWHERE, "policies read text alone; take the column, or such rows, out of the data")),
    "chat_template_kwargs": (
        EVERYWHERE,
        "variables of the chat template are the same for all rows; take the column out of the data, and set them with "
        "--chat-template-kwargs",
    ),
    "functions": (
        EVERYWHERE,
        "definitions of tools are read from the column 'tools'; write FILE:tools=functions, or tools=none if it has "
        "another meaning",
    ),
    WEIGHT: (
        LEARNED,
        "a row has no weight in the loss, only its messages have one; repeat rows or leave rows out, and take the "
        "column out of the data",
    ),
    "label": (
        ("responses",),
        "its completion is undesirable, and would be imitated; leave such rows out, train with kto, or write "
        "FILE:answer=completion to learn from all completions",
    ),
    **dict.fromkeys(
        ("completion_mask", "assistant_masks"),
        (LEARNED, "what is trained is told by the messages' roles and weights; take the column out of the data"),
    ),
}
"""Column that would be lost in silence here -> (where rows with a value in it are refused, what to do). docs/data.md
has a table of what becomes of other trainers' columns."""


def require_served(task: Task, rows: Iterable[Row], use: RowUse) -> None:
    """Raise ConfigError for the first row with a column that another trainer would read, and this one would not."""
    wanted = {name: advice for name, (uses, advice) in REFUSED.items() if use in uses}
    mixed = len(task.sources) > 1
    options: dict[str, Mapping[str, Any]] = {}
    for row in rows:
        if wanted.keys().isdisjoint(row.columns):
            continue
        source = str(row.columns[OF_TASK]) if mixed else task.name
        if source not in options:
            options[source] = Task(source).options
        for name, advice in wanted.items():
            if name in row.columns and _is_lost(name, row.columns, options[source]):
                raise ConfigError(
                    f"{row.place or source}: the row has {name} = {str(row.columns[name])[:40]!r}, which is not read "
                    f"here: {advice}"
                )


def _is_lost(name: str, columns: Mapping[str, Any], options: Mapping[str, Any]) -> bool:
    """Whether the column's value says something that other trainers heed."""
    value = columns[name]
    if name == "functions":
        return "tools" not in options and bool(value)
    if name == WEIGHT:
        return isinstance(value, int | float) and value != 1
    if name == "label":
        return value is False and "completion" in columns and "answer" not in options
    return value is not None and value != "" and (not isinstance(value, tuple | Mapping) or len(value) > 0)
