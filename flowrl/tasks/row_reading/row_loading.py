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
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from flowrl.errors import ConfigError
from flowrl.hub import HubName
from flowrl.tasks.arithmetic import Arithmetic
from flowrl.tasks.input_template import asked_of_source
from flowrl.tasks.row_reading import files, preference_rows, text_rows
from flowrl.tasks.row_reading.files import Keys
from flowrl.tasks.row_reading.indexed_rows import StoredRows, by_id, joined
from flowrl.tasks.row_reading.record_formats import FORMATS, RawRow, Reading, read_records
from flowrl.tasks.row_reading.row_files import files_of, hub_dataset, is_file_task, require_there
from flowrl.tasks.row_reading.row_index import rows_of, scan_source
from flowrl.tasks.row_reading.row_stores import FileRows, HeldRows, RowStore, num_bytes_of
from flowrl.tasks.row_reading.text_rows import TextKeys
from flowrl.tasks.rows import Row, Rows
from flowrl.tasks.sticks import SticksRules
from flowrl.tasks.task import Task

Options = TypeVar("Options")
AUTO_BYTES = 256 << 20
"""Rows of files that together have more bytes than this stay on disk, unless the task says otherwise."""


@dataclass(frozen=True)
class RowKind:
    """The kind of rows that a node wants: the options that say where they are in a record, and how to make them from
    it."""

    keys: type[Keys] | type[TextKeys]
    of_record: Callable[[Any, str, RawRow], tuple[Row, ...]]
    generated: Callable[[Task], Iterable[Row]]
    """The rows of a source without files. Raises ConfigError if the source cannot generate any."""
    every: bool = False
    """Whether rows that repeat a prompt are also taken."""


def load_rows(task: Task, *, whole: bool = False) -> Rows:
    """Read or generate all rows of `task`, once per process. Raises ConfigError if the task is invalid.

    `whole`: the caller uses both parts alike, so there may be no training rows.
    """
    return _with_training_rows(task, all_rows(task), whole)


UNREPEATED: WeakValueDictionary[Task, Rows] = WeakValueDictionary()
"""Rows that `all_rows` has loaded for tasks without repeated prompts, while they are still referenced elsewhere."""


@functools.lru_cache(maxsize=8)
def all_rows(task: Task) -> Rows:
    """`load_rows` of a task that may have no training rows."""
    found = _loaded(task, _with_answers(task))
    if not found.repeated:
        UNREPEATED[task] = found
    return found


def load_demonstrations(task: Task, *, whole: bool = False) -> Rows:
    """`load_rows` for learning from the answers: rows of files that answer the same prompt differently are all
    taken."""
    if task.generated and len(task.sources) == 1:
        return load_rows(task, whole=whole)
    return _with_training_rows(task, all_demonstrations(task), whole)


@functools.lru_cache(maxsize=8)
def all_demonstrations(task: Task) -> Rows:
    """`load_demonstrations` of a task that has files, and may have no training rows.

    If no row repeats a prompt, they are the rows of `load_rows`, and are not read again.
    """
    return UNREPEATED.get(task) or _loaded(task, _with_answers(task, every=True))


def _with_answers(task: Task, *, every: bool = False) -> RowKind:
    """Rows with the answers that the reward of the whole task needs, even if the task is a mixture."""
    return RowKind(Keys, partial(files.of_record, compared=task.compares), _generated, every)


class KnownRows:
    """Every row of a task by the prompt id of its samples: both parts, with every response to a prompt that has
    several.

    The rows are those of `load_demonstrations`; the first one of each prompt is the row of `load_rows`, with the same
    id. They are loaded here, which may be slow. Raises ConfigError.
    """

    def __init__(self, task: Task) -> None:
        found = load_demonstrations(task, whole=True)
        self._rows = joined(found.train, found.held_out)
        self._by_id = by_id(self._rows)

    def get(self, prompt_id: str) -> Row | None:
        """The row of a sample; None if the task has no row with this prompt id."""
        return self._by_id.get(prompt_id)

    def of_prompts(self, most: int) -> list[Row]:
        """One row for each of the first `most` prompts, or of all if there are fewer."""
        return list(itertools.islice((row for row in self._rows if row.prompt_id == row.asked_id), most))


def load_texts(task: Task, *, whole: bool = False) -> Rows:
    """The texts of `task`, each as the prompt of a row, including repeated ones; the split is by text."""
    if len(task.sources) > 1:
        raise ConfigError(f"task {task.name!r} is a mixture, and texts are read from one; name a pattern of files")
    return _with_training_rows(task, all_texts(task), whole)


@functools.lru_cache(maxsize=4)
def all_texts(task: Task) -> Rows:
    """`load_texts` of a task that may have no texts to train on."""
    return _loaded(task, RowKind(TextKeys, text_rows.of_record, _no_texts, every=True))


@functools.lru_cache(maxsize=8)
def load_preferences(task: Task, kind: preference_rows.Kind) -> Rows:
    """The pairs of `task`, or its labelled completions (a pair makes two); the split is by prompt.

    `arithmetic` prefers right answers to answers without carrying.
    """
    made = partial(preference_rows.of_record, kind)
    found = _loaded(task, RowKind(Keys, made, partial(_generated_preferences, kind)))
    return _with_training_rows(task, found, whole=False)


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
        self._opened: dict[str, None] = {}
        """Columns whose text was read as messages, in the order in which they were found."""

    @cached_property
    def keys(self) -> Any:
        """The options that say where the rows are in a record. Raises ConfigError."""
        return options_of(self._kind.keys, self.task)

    @property
    def where(self) -> str:
        """Value of the task's option `rows`: auto, memory or disk; always memory for generated rows."""
        return "memory" if self.place is None else str(self.keys.rows)

    @cached_property
    def paths(self) -> list[Path]:
        """The files of a source that has files."""
        assert self.place is not None, "asked for only where there are files"
        return files_of(self.place, config=self.keys.config, split=self.keys.split)

    @cached_property
    def num_bytes(self) -> int:
        """Size of its files."""
        return sum(num_bytes_of(path, self.keys.split) for path in self.paths)

    def rows(self) -> Iterator[Row]:
        """Every row, read or generated. Raises ConfigError, and Malformed if `reading` stops at malformed records."""
        if self.place is None:
            yield from self._kind.generated(self.task)
            return
        for path in self.paths:
            for place, record in read_records(path, self.keys.split, self.reading):
                make = partial(self._kind.of_record, self.keys, place, record)
                for row in self.reading.attempt_at(place, make) or ():
                    self.note(row)
                    yield row

    def note(self, row: Row) -> None:
        """Remember which of the row's columns hold messages as text."""
        if row.opened:
            self._opened.update(dict.fromkeys(row.opened))

    @property
    def opened(self) -> tuple[str, ...]:
        """A sentence about each column whose text was read as messages."""
        where = self.task.source
        return tuple(
            f"{where}: the text in the column {column!r} is a list of messages, and is read as such; {where}:text=raw "
            "reads it as plain text"
            for column in self._opened
        )

    def chosen(self) -> Rows:
        """The rows in memory that are taken from one source of a mixture."""
        found = (Rows.every if self.every else Rows.split)(self.rows())
        self.repeated = found.repeated
        return found

    def stores(self, on_disk: bool) -> Sequence[RowStore]:
        """The stores that single rows are read from. Raises ConfigError."""
        if not on_disk:
            return (HeldRows([*self.rows()]),)
        of_record = partial(self._kind.of_record, self.keys)
        return [FileRows(path, self.keys.split, of_record) for path in self.paths]

    def require(self, number: int) -> None:
        """Raise ConfigError if there is no row."""
        if not number:
            skipped = self.reading.skipped
            said = f", {len(skipped)} are skipped: {skipped[0]}" if skipped else ""
            low = self.reading.low_scores
            said += f", {low} have a score below min_score={self.keys.min_score:g}" if low else ""
            raise ConfigError(f"task {self.task.name!r} has no rows at all{said}; add rows, or name other data")


def _with_training_rows(task: Task, found: Rows, whole: bool) -> Rows:
    """Returns `found`. Raises ConfigError if it has no training rows, unless `whole`."""
    if not found.train and not whole:
        raise ConfigError(f"task {task.name!r} has no training rows ({len(found.held_out)} are held out); add rows")
    return found


def _loaded(task: Task, kind: RowKind) -> Rows:
    """The rows of all sources, with the counts and errors of rows left out. Raises ConfigError if a source has none."""
    mixed = len(task.sources) > 1
    sources = [OneSource(Task(term.text) if mixed else task, kind, term.text * mixed) for term in task.sources]
    on_disk = _stay_on_disk(sources)
    found = _indexed(task, kind, sources, on_disk) if any(on_disk) else _held(task, kind, sources)
    readings = [source.reading for source in sources]
    return dataclasses.replace(
        found,
        skipped=tuple(text for reading in readings for text in reading.skipped),
        repeated=found.repeated + sum(source.repeated for source in sources),
        low_scores=sum(reading.low_scores for reading in readings),
        opened=tuple(text for source in sources for text in source.opened),
    )


def _stay_on_disk(sources: Sequence[OneSource]) -> list[bool]:
    """For each source, whether its rows stay in their files."""
    wanted = [source.where for source in sources]
    if "auto" not in wanted:
        return [where == "disk" for where in wanted]
    in_sum = sum(source.num_bytes for source, where in zip(sources, wanted, strict=True) if where != "memory")
    return [where == "disk" or (where == "auto" and in_sum > AUTO_BYTES) for where in wanted]


def _indexed(task: Task, kind: RowKind, sources: Sequence[OneSource], on_disk: Sequence[bool]) -> Rows:
    stores = [source.stores(stays) for source, stays in zip(sources, on_disk, strict=True)]
    names = [source.name for source, own in zip(sources, stores, strict=True) for _ in own]
    stored = StoredRows([store for own in stores for store in own], names, task.template, task.reasoning)
    scans, first = [], 0
    for source, own in zip(sources, stores, strict=True):
        places = range(first, first := first + len(own))
        note, every = source.note, source.every
        scan, source.repeated = scan_source(stored, places, source.reading, note, every=every, mixed=len(sources) > 1)
        scans.append(scan)
        source.require(len(scans[-1]))
    return rows_of(stored, scans, every=kind.every)


def _held(task: Task, kind: RowKind, sources: Sequence[OneSource]) -> Rows:
    return (Rows.every if kind.every else Rows.split)(_asked(task, sources))


def _asked(task: Task, sources: Sequence[OneSource]) -> Iterator[Row]:
    """The rows in memory of all sources, put into the task's template; in a mixture only those that are taken from
    each."""
    for source in sources:
        number = 0
        for row in source.rows() if len(sources) == 1 else _both_parts(source.chosen()):
            number += 1
            yield asked_of_source(row, source.name, task.template, task.reasoning)
        source.require(number)


def _both_parts(rows: Rows) -> Iterator[Row]:
    yield from rows.train
    yield from rows.held_out


def _generated(task: Task) -> Iterable[Row]:
    if task.source == "arithmetic":
        return options_of(Arithmetic, task).rows()
    if task.source == "sticks":
        return options_of(SticksRules, task).rows()
    if task.source.startswith("reasoning_gym/"):
        from flowrl.tasks import reasoning

        return reasoning.rows(task)
    close = difflib.get_close_matches(task.source, ["arithmetic", "sticks", "reasoning_gym/chain_sum"], 1, 0.5)
    hint = f" Did you mean {close[0]}?" if close else ""
    raise ConfigError(
        f"there is no task {task.source!r}: it is neither arithmetic, nor sticks, nor reasoning_gym/NAME, nor a file "
        f"({FORMATS}), pattern or dataset directory on this machine, nor OWNER/NAME, as datasets of the Hub are named."
        f"{hint}"
    )


def _generated_preferences(kind: preference_rows.Kind, task: Task) -> Iterable[Row]:
    if task.source == "arithmetic":
        return preference_rows.careless(_generated(task), kind)
    raise ConfigError(
        f"task {task.name!r} has no preferences: it is neither arithmetic, nor a file ({FORMATS}) or dataset "
        "directory on this machine, nor a dataset of the Hub; name one with the columns chosen and rejected, or "
        "completion and label"
    )


def _no_texts(task: Task) -> Iterable[Row]:
    raise ConfigError(
        f"task {task.name!r} has no texts: it is neither a file ({FORMATS}), pattern or dataset directory on this "
        "machine, nor a dataset of the Hub; name one with the column text"
    )


def place_of_rows(task: Task) -> Path | HubName | None:
    """The files or the Hub dataset that a task's rows are read from; None for a task that has neither.

    Raises ConfigError for a file that does not exist.
    """
    if task.source.startswith("reasoning_gym/"):
        return None
    require_there(task.path)
    return task.path if is_file_task(task.path) else hub_dataset(task.source)


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
