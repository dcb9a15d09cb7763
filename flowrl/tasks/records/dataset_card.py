"""Which files of a dataset's repository are those of a configuration and split.

The head of the repository's README declares this, in the form that the Hub reads (`configs:` with `data_files:`).
Without such a head, the names of files and folders decide: a folder is a configuration, and `train`, `validation` or
`test` in a name is a split.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flowrl.errors import ConfigError
from flowrl.tasks.records.formats import FORMATS, PLAIN, format_of
from flowrl.tasks.records.split_names import by_split, split_of

CARD = "README.md"
HEAD = re.compile(r"\A---\s*\n(.*?)\n---\s*(\n|\Z)", re.DOTALL)
SHARD = re.compile(r"-(\d{5})-of-(\d{5})(?=[.-])")


def chosen_files(what: str, names: Iterable[str], card: str, *, config: str, split: str) -> list[str]:
    """The files of one configuration and split, in order. Raises ConfigError if there are none, or several choices."""
    names = sorted(names)
    declared = _declared(what, card)
    if declared:
        found = _of_card(what, names, _config(what, declared, config), split)
    else:
        found = _of_names(what, names, config, split)
    if other := [name for name in found if not format_of(Path(name))]:
        raise ConfigError(
            f"{what}: {other[0]} is of no format that flowrl reads ({FORMATS}); name what the Hub has converted, as in "
            f"{what}@refs/convert/parquet, or save it with datasets' save_to_disk and name that directory"
        )
    return found


def whole(files: Iterable[str]) -> bool:
    """Whether there is at least one file, and no part of numbered files (-00000-of-00002) is missing."""
    files = list(files)
    parts: dict[str, set[int]] = {}
    for name in files:
        if shard := SHARD.search(name):
            key = f"{name[: shard.start()]}\0{shard[2]}\0{name[shard.end() :]}"
            parts.setdefault(key, set()).add(int(shard[1]))
    return bool(files) and all(len(found) == int(key.split("\0")[1]) for key, found in parts.items())


def _declared(what: str, card: str) -> dict[str, Mapping[str, Any]]:
    """Configuration -> its entry in the head of the README."""
    import yaml

    head = HEAD.match(card)
    if head is None:
        return {}
    try:
        content = yaml.safe_load(head[1])
    except (yaml.YAMLError, ValueError, RecursionError) as problem:
        raise ConfigError(f"{what}: the head of its {CARD} is no YAML ({problem}); name its files instead") from None
    entries = content.get("configs") if isinstance(content, Mapping) else None
    known = [entry for entry in entries or () if isinstance(entry, Mapping) and entry.get("data_files")]
    return {str(entry.get("config_name", "default")): entry for entry in known}


def _config(what: str, declared: Mapping[str, Mapping[str, Any]], config: str) -> Mapping[str, Any]:
    if config:
        if config not in declared:
            raise ConfigError(f"{what} has no configuration {config!r}; it has {', '.join(declared)}: set config")
        return declared[config]
    usual = [entry for name, entry in declared.items() if entry.get("default") or name == "default"]
    if len(declared) > 1 and not usual:
        raise ConfigError(f"{what} has the configurations {', '.join(declared)}; choose one with the option config")
    return usual[0] if usual else next(iter(declared.values()))


def _of_card(what: str, names: Sequence[str], entry: Mapping[str, Any], split: str) -> list[str]:
    folder = str(entry.get("data_dir") or "").strip("/")
    splits: dict[str, list[str]] = {}
    given = entry["data_files"]
    for one in given if isinstance(given, list) else [given]:
        paths = one.get("path") if isinstance(one, Mapping) else one
        name = str(one.get("split", "train")) if isinstance(one, Mapping) else "train"
        splits.setdefault(name, []).extend([paths] if isinstance(paths, str) else list(paths or ()))
    _require_split(what, split, splits)
    wanted = [_pattern(f"{folder}/{path}" if folder else path) for path in splits[split]]
    return [name for name in names if any(pattern.fullmatch(name) for pattern in wanted)]


def _of_names(what: str, names: Sequence[str], config: str, split: str) -> list[str]:
    known = [name for name in names if format_of(Path(name)) and not _describes(name)]
    data = [name for name in known if format_of(Path(name)) != PLAIN] or known
    if not data:
        raise ConfigError(
            f"{what} has no file of rows ({FORMATS}); name what the Hub has converted, as in "
            f"{what}@refs/convert/parquet, or save it with datasets' save_to_disk and name that directory"
        )
    if config:
        folders = sorted({name.partition("/")[0] for name in data if "/" in name})
        data = [name for name in data if name.startswith(f"{config}/")]
        if not data:
            raise ConfigError(f"{what} has no configuration {config!r}; its folders are {', '.join(folders) or 'none'}")
    splits = by_split(data)
    _require_split(what, split, splits)
    if not config:
        _require_one_folder(what, splits[split])
    return splits[split]


def _require_one_folder(what: str, names: Sequence[str]) -> None:
    """Raise ConfigError if files are in several folders that name no split, so that each is a configuration."""
    folders = sorted({folder for folder, slash, _ in (name.partition("/") for name in names) if slash})
    configs = [folder for folder in folders if not split_of(folder)]
    if len(configs) > 1:
        raise ConfigError(f"{what} has the configurations {', '.join(configs)}; choose one with the option config")


def _require_split(what: str, split: str, splits: Mapping[str, Any]) -> None:
    if split not in splits:
        raise ConfigError(
            f"{what} has no split {split!r}; it has {', '.join(filter(None, splits))}: set the option split"
        )


def _describes(name: str) -> bool:
    """Whether a file only describes the data and holds none."""
    return name.rpartition("/")[2] in ("dataset_infos.json", "dataset_info.json", "state.json", "dataset_dict.json")


def _pattern(text: str) -> re.Pattern[str]:
    """A pattern of paths, in which * stays within a folder and ** does not."""
    pieces = re.split(r"(\*\*/?|\*|\?|\[[^\]]*\])", text.removeprefix("./"))
    spelled = {"*": "[^/]*", "?": "[^/]", "**": ".*", "**/": "(?:.*/)?"}
    return re.compile(
        "".join(spelled.get(p, p if p.startswith("[") and p.endswith("]") else re.escape(p)) for p in pieces)
    )
