"""Rows from disk: JSON lines, and Hugging Face datasets saved by `save_to_disk`."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowrl.errors import ConfigError
from flowrl.tasks.rows import Row


@dataclass(frozen=True)
class Keys:
    """Options of a task on disk: which column holds what."""

    prompt: str = "prompt"
    """Text, or a conversation as a list of {role, content}."""
    answer: str = "answer"
    split: str = "train"
    """Hugging Face datasets with several splits: the one to read."""


def json_rows(path: Path, keys: Keys) -> Iterator[Row]:
    """One row a line. Raises ConfigError with the line's number on the first that is malformed."""
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield _row(f"{path}:{number}", _parse(f"{path}:{number}", line), keys)


def dataset_rows(path: Path, keys: Keys) -> Iterator[Row]:
    """The rows of a dataset directory."""
    try:
        from datasets import Dataset, DatasetDict, load_from_disk
    except ImportError:
        raise ConfigError(
            f"{path} is a directory; to read it the package datasets is needed: pip install datasets"
        ) from None
    try:
        found: Dataset | DatasetDict = load_from_disk(str(path))
    except (FileNotFoundError, ValueError) as refusal:
        raise ConfigError(
            f"{path} is no dataset directory written by save_to_disk ({str(refusal).rstrip('.')}); save one there, or "
            "name a .jsonl file"
        ) from None
    if isinstance(found, DatasetDict):
        if keys.split not in found:
            raise ConfigError(f"{path} has no split {keys.split!r}; it has {', '.join(found)}: set the option split")
        found = found[keys.split]
    for number, row in enumerate(found):
        yield _row(f"{path}, row {number}", row, keys)


def _parse(place: str, line: str) -> Mapping[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as problem:
        raise ConfigError(f"{place}: no JSON ({problem.msg}); write one object a line") from None
    if not isinstance(row, dict):
        raise ConfigError(f"{place}: a {type(row).__name__} where an object was needed; write one object a line")
    return row


def _row(place: str, row: Mapping[str, Any], keys: Keys) -> Row:
    if keys.prompt not in row:
        close = difflib.get_close_matches(keys.prompt, row, 1)
        hint = f"did you mean prompt={close[0]}?" if close else f"set prompt= to one of {', '.join(row) or 'none'}"
        raise ConfigError(f"{place}: no column {keys.prompt!r}; {hint} (behind the task's name: FILE:prompt=COLUMN)")
    columns = {key: _plain(value) for key, value in row.items() if key not in (keys.prompt, keys.answer)}
    if row.get(keys.answer) is not None:
        columns["answer"] = str(row[keys.answer])
    return Row(_turns(place, row[keys.prompt]), columns)


def _turns(place: str, prompt: object) -> tuple[Mapping[str, str], ...]:
    if isinstance(prompt, str) and prompt.strip():
        return ({"role": "user", "content": prompt},)
    if isinstance(prompt, list) and prompt and all(_is_turn(turn) for turn in prompt):
        return tuple({"role": turn["role"], "content": turn["content"]} for turn in prompt)
    raise ConfigError(
        f"{place}: the prompt is {str(prompt)[:60]!r}; it needs text, or a list of {{'role': ..., 'content': text}}"
    )


def _is_turn(turn: object) -> bool:
    return isinstance(turn, Mapping) and all(isinstance(turn.get(key), str) for key in ("role", "content"))


def _plain(value: Any) -> Any:
    """Values that a message can carry: lists become tuples, dates and the like their text."""
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, Iterable):
        return tuple(_plain(inner) for inner in value)
    return str(value)
