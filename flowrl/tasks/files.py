"""Rows from disk: JSON lines, Parquet, directories of either, and datasets saved by `save_to_disk`.

Every record has a place, such as `train.jsonl:17`, which errors name. A malformed record stops the
reading before anything has started, or is skipped and counted: `Reading` decides.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from flowrl.errors import ConfigError
from flowrl.tasks.rows import Row

T = TypeVar("T")
Record = Mapping[str, Any]
SUFFIXES = (".jsonl", ".json", ".parquet")
ROLES = ("system", "user", "assistant", "tool")


class Malformed(ConfigError):
    """A record cannot be used. The error text starts with the record's place."""


@dataclass
class Reading:
    """How to handle malformed records: stop at the first, or skip them and keep their errors."""

    malformed: str = "stop"
    skipped: list[str] = field(default_factory=list)

    def attempt(self, make: Callable[[], T]) -> T | None:
        """Return the result of `make`, None if it raised for a malformed record that is skipped."""
        try:
            return make()
        except Malformed as problem:
            if self.malformed == "stop":
                raise
            self.skipped.append(str(problem))
            return None

    def at(self, place: str, make: Callable[[], T]) -> T | None:
        """`attempt` of a `make` for the record at `place`. Values that no message can carry make it malformed."""

        def named() -> T:
            try:
                return make()
            except Malformed:
                raise
            except ConfigError as problem:
                raise Malformed(f"{place}: {problem}") from None
            except RecursionError:
                raise Malformed(f"{place}: values nested too deep; flatten them, or write them as text") from None

        return self.attempt(named)


@dataclass(frozen=True)
class Keys:
    """Options of a task on disk: which column holds what."""

    prompt: str = "prompt"
    """Text, or a conversation as a list of {role, content}."""
    messages: str = "messages"
    """Where there is no prompt: a conversation, of which a last turn of the assistant's is the answer."""
    answer: str = "answer"
    """Text, a number, or a list of one turn of the assistant's; `completion` where there is no such column."""
    score: str = "score"
    """Of several answers to one prompt the one with the highest score is taken."""
    min_score: float = -math.inf
    """Rows of a lower score are left out."""
    chosen: str = "chosen"
    """Of pairs: the better completion, as text or as the messages that follow the prompt's or hold them, too."""
    rejected: str = "rejected"
    completion: str = "completion"
    """Of labelled completions, with `label` true (desirable) or false."""
    label: str = "label"
    split: str = "train"
    """Datasets with several splits: the one to read."""
    check: str = "exact"
    """How responses are compared with answers: exact, or math (the last number or formula, by math-verify)."""
    malformed: str = "stop"
    """Rows that cannot be used: stop before training, or skip and count them."""

    def __post_init__(self) -> None:
        for name, known in (("check", ("exact", "math")), ("malformed", ("stop", "skip"))):
            if getattr(self, name) not in known:
                raise ConfigError(f"option {name} of a task is {getattr(self, name)!r}; it needs {' or '.join(known)}")


def is_file_task(path: Path) -> bool:
    """Whether `path` is a file or directory that `records` may be able to read."""
    return path.is_dir() or (path.suffix in SUFFIXES and path.is_file())


def rows(path: Path, keys: Keys, reading: Reading) -> Iterator[Row]:
    """The rows at `path`. Raises ConfigError if it cannot be read, Malformed depending on `reading`."""
    for place, record in records(path, reading, split=keys.split):
        row = reading.at(place, lambda place=place, record=record: _row(place, record, keys))  # type: ignore[misc]
        if row is not None and row.score >= keys.min_score:
            yield row


def records(path: Path, reading: Reading, *, split: str = "train") -> Iterator[tuple[str, Record]]:
    """(place, record) of everything at `path`, a file or a directory."""
    if path.is_file():
        yield from _file(path, reading)
    elif (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        yield from _saved(path, split)
    else:
        for file in _files(path, split):
            yield from _file(file, reading)


def _file(path: Path, reading: Reading) -> Iterator[tuple[str, Record]]:
    return _parquet(path) if path.suffix == ".parquet" else _lines(path, reading)


def _lines(path: Path, reading: Reading) -> Iterator[tuple[str, Record]]:
    with path.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, start=1):
            place = f"{path}:{number}"
            record = reading.attempt(lambda place=place, line=line: _parse(place, line)) if line.strip() else None  # type: ignore[misc]
            if record is not None:
                yield place, record


def _parquet(path: Path) -> Iterator[tuple[str, Record]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ConfigError(f"{path}: reading Parquet needs the package pyarrow; pip install pyarrow") from None
    try:
        file = pyarrow.parquet.ParquetFile(path)
    except (pyarrow.ArrowInvalid, OSError) as problem:
        raise ConfigError(f"{path} is no Parquet file ({problem}); write it again, or name a .jsonl file") from None
    number = 0
    for batch in file.iter_batches():
        for record in batch.to_pylist():
            number += 1
            yield f"{path}, row {number}", record


def _saved(path: Path, split: str) -> Iterator[tuple[str, Record]]:
    """A dataset, or one split of several, saved by `datasets`."""
    try:
        from datasets import Dataset, DatasetDict, load_from_disk
    except ImportError:
        raise ConfigError(f"{path}: reading it needs the package datasets; pip install datasets") from None
    try:
        found: Dataset | DatasetDict = load_from_disk(str(path))
    except (FileNotFoundError, ValueError) as refusal:
        raise ConfigError(
            f"{path} is no dataset directory written by save_to_disk ({str(refusal).rstrip('.')}); save one there"
        ) from None
    if isinstance(found, DatasetDict):
        if split not in found:
            raise ConfigError(f"{path} has no split {split!r}; it has {', '.join(found)}: set the option split")
        found = found[split]
    for number, record in enumerate(found, start=1):
        yield f"{path}, row {number}", record


def _files(path: Path, split: str) -> list[Path]:
    """The files of a downloaded dataset: those named after the split, or all if none is."""
    found = sorted(file for file in path.rglob("*") if file.suffix in (".jsonl", ".parquet"))
    if not found:
        raise ConfigError(
            f"{path} is no dataset directory: it was not written by save_to_disk and holds no .jsonl or .parquet "
            "file; name a file, or save a dataset there"
        )
    of_split = [file for file in found if file.name.startswith(split)]
    if not of_split and split != "train":
        names = ", ".join(file.name for file in found[:5])
        raise ConfigError(f"{path} has no file of the split {split!r}, whose name begins with it; it has {names}")
    return of_split or found


def _parse(place: str, line: str) -> Record:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as problem:
        raise Malformed(f"{place}: invalid JSON ({problem.msg}); write one object per line") from None
    except ValueError as problem:  # an integer of more digits than Python converts
        raise Malformed(f"{place}: {str(problem).partition(';')[0]}; write it as text") from None
    except RecursionError:
        raise Malformed(f"{place}: values nested too deep; flatten them, or write them as text") from None
    if not isinstance(record, dict):
        raise Malformed(f"{place}: a {type(record).__name__} where an object was needed; write one object per line")
    return record


def _row(place: str, record: Record, keys: Keys) -> Row:
    turns, answer = _asked(place, record, keys)
    used = (keys.prompt, keys.messages, keys.answer)
    columns = {key: plain(value) for key, value in record.items() if key not in used}
    if answer is not None:
        columns["answer"] = answer
    return Row(turns, columns, _score(place, record, keys))


def _asked(place: str, record: Record, keys: Keys) -> tuple[tuple[Mapping[str, str], ...], str | None]:
    """The messages before the response, and the reference response if there is one."""
    if keys.prompt in record:
        return conversation(place, record[keys.prompt], "prompt"), _answer(place, record, keys)
    if keys.messages in record:
        turns = conversation(place, record[keys.messages], "messages", may_end=True)
        if turns[-1]["role"] != "assistant":
            return turns, _answer(place, record, keys)
        if len(turns) < 2:
            raise Malformed(f"{place}: messages holds only an answer; it needs the prompt before the answer")
        return turns[:-1], _text(place, turns[-1]["content"], "last message")
    close = difflib.get_close_matches(keys.prompt, record, 1)
    hint = f"did you mean prompt={close[0]}?" if close else f"set prompt= to one of {', '.join(record) or 'none'}"
    raise Malformed(f"{place}: no column {keys.prompt!r}; {hint} (after the task's name: FILE:prompt=COLUMN)")


def conversation(place: str, value: object, what: str, *, may_end: bool = False) -> tuple[Mapping[str, str], ...]:
    """The turns of a text or a list of turns. Raises Malformed; with `may_end` the last turn may be the assistant's."""
    if isinstance(value, str) and value.strip():
        return ({"role": "user", "content": value},)
    if isinstance(value, list) and value and all(_is_turn(turn) for turn in value):
        if may_end or value[-1]["role"] != "assistant":
            return tuple({"role": turn["role"], "content": turn["content"]} for turn in value)
        raise Malformed(f"{place}: the {what} ends with the assistant's turn; end it with the user's")
    raise Malformed(
        f"{place}: the {what} is {str(value)[:60]!r}; it needs text, or a list of {{'role': ..., 'content': text}} "
        f"with the roles {', '.join(ROLES)}"
    )


def _answer(place: str, record: Record, keys: Keys) -> str | None:
    value = record.get(keys.answer, record.get("completion"))
    if isinstance(value, list) and len(value) == 1 and _is_turn(value[0]):
        value = value[0]["content"]
    return None if value is None else _text(place, str(value), "answer")


def _text(place: str, text: str, what: str) -> str:
    if not text.strip():
        raise Malformed(f"{place}: the {what} is empty, so there is nothing to learn from or to compare with")
    return text


def _score(place: str, record: Record, keys: Keys) -> float:
    value = record.get(keys.score, 0.0)
    if isinstance(value, bool | int | float) and math.isfinite(value):
        return float(value)
    if keys.score == "score" and keys.min_score == -math.inf:  # a column that happens to have this name
        return 0.0
    raise Malformed(f"{place}: the score is {value!r}; it needs a finite number")


def _is_turn(turn: object) -> bool:
    return isinstance(turn, Mapping) and turn.get("role") in ROLES and isinstance(turn.get("content"), str)


def plain(value: Any) -> Any:
    """Convert to values that a message can carry: lists become tuples; dates and similar values become text."""
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, Iterable):
        return tuple(plain(inner) for inner in value)
    return str(value)
