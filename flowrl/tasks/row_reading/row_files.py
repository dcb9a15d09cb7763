"""Which files hold a task's rows: a file, the files of a pattern, of a directory, or of a dataset on the Hub.

In a directory, and in a repository of the Hub that does not say it, the names of files and folders decide: `train`,
`validation` or `test` as a word in a name is a split, and on the Hub a folder is a configuration. The head of a
repository's README declares its files in the form that the Hub reads (`configs:` with `data_files:`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flowrl.errors import ConfigError
from flowrl.hub import HubName, fetch_snapshot, files_in, to_stderr
from flowrl.tasks.row_reading.record_formats import FORMATS, PLAIN, SAVED, format_of

PATTERN = re.compile(r"[*?\[]")
CARD = "README.md"
HEAD = re.compile(r"\A---\s*\n(.*?)\n---\s*(\n|\Z)", re.DOTALL)
SHARD = re.compile(r"-(\d{5})-of-(\d{5})(?=[.-])")
DESCRIPTIONS = ("dataset_infos.json", "dataset_info.json", *SAVED)
"""Files that only describe the data and hold none."""
SPLIT_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""Split -> the words for it in names of files and folders."""


def files_of(source: Path | HubName, *, config: str, split: str) -> list[Path]:
    """The files whose records are read, in order; a directory that save_to_disk wrote counts as one file. Those of the
    Hub are downloaded first. Raises ConfigError if there are none."""
    if isinstance(source, HubName):
        return _hub_files(source, config, split)
    if config:
        raise ConfigError(f"{source} is on this machine, and config={config} is for datasets of the Hub; leave it out")
    if source.is_file() or any((source / name).is_file() for name in SAVED):
        return [source]
    if PATTERN.search(str(source)) and not source.exists():
        first = next(index for index, part in enumerate(source.parts) if PATTERN.search(part))
        try:
            found = sorted(
                path for path in Path(*source.parts[:first]).glob(str(Path(*source.parts[first:]))) if path.is_file()
            )
        except (ValueError, OSError) as problem:
            raise ConfigError(
                f"the pattern {source} cannot be searched: {problem}; write ** as a part of its own"
            ) from None
        if not found:
            raise ConfigError(f"no file matches {source}; quote the pattern, and look at its folder")
        if other := [path for path in found if not format_of(path)]:
            raise ConfigError(f"{other[0]}, which matches {source}, is no file of rows; they end in {FORMATS}")
        return found
    return _files_of_directory(source, split)


# On this machine


def _files_of_directory(path: Path, split: str) -> list[Path]:
    """The files of a downloaded dataset: those whose names begin with the split, else those that name it as files on
    the Hub do.

    A .json or .txt file counts only if there are no other files: datasets describe themselves in such files.
    """
    known = sorted(file for file in path.rglob("*") if file.is_file() and format_of(file))
    if saved := [file.parent for file in known if file.name in SAVED]:
        raise ConfigError(
            f"{path} is no dataset directory, but {saved[0]} in it is one that save_to_disk has written; name that one"
        )
    rows = [file for file in known if format_of(file) != PLAIN] or known
    found = [file for file in rows if format_of(file) != ".json"] or rows
    if not found:
        raise ConfigError(
            f"{path} is no dataset directory: it was not written by save_to_disk and holds no file of rows "
            f"({FORMATS}); name a file, or save a dataset there"
        )
    if begun := [file for file in found if file.name.startswith(split)]:
        return begun
    splits = files_by_split(file.relative_to(path).as_posix() for file in found)
    if split not in splits:
        names = ", ".join(name for some in splits.values() for name in some[:2])
        raise ConfigError(
            f"{path} has no file of the split {split!r}, whose name begins with it, or has it as a word; it has "
            f"{names}: set the option split, or name the files with a pattern"
        )
    return [path / name for name in splits[split]]


def split_of(name: str) -> str:
    """The split that a word of the name means; the part of the path nearest to its end decides. "" if there is none."""
    for part in reversed(name.split("/")):
        words = re.split(r"[-._ ]|(?<=\D)(?=\d)", part.lower())
        for split, spelled in SPLIT_WORDS.items():
            if not set(spelled).isdisjoint(words):
                return split
    return ""


def files_by_split(names: Iterable[str]) -> dict[str, list[str]]:
    """Split -> its files, in order. If no name has a word for a split, all files belong to `train`."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(split_of(name), []).append(name)
    return {"train": found[""]} if set(found) == {""} else found


# On the Hub


def _hub_files(name: HubName, config: str, split: str) -> list[Path]:
    listed: list[str] = []

    def card_alone(names: Iterable[str]) -> list[str]:
        listed[:] = names
        return [file for file in listed if file == CARD]

    card_path = fetch_snapshot(name, card_alone, lambda directory: True, to_stderr) / CARD
    card = card_path.read_text(encoding="utf-8", errors="replace") if card_path.is_file() else ""

    def choose(names: Iterable[str]) -> list[str]:
        return choose_files(str(name), names, card, config=config, split=split)

    def is_complete(directory: Path) -> bool:
        here = files_in(directory)
        try:
            wanted = choose(listed or here)
        except ConfigError:
            return False
        return all(file in here for file in wanted) and has_all_shards(wanted)

    directory = fetch_snapshot(name, choose, is_complete, to_stderr)
    files = choose(listed or files_in(directory))
    if not files:
        raise ConfigError(
            f"{name} has no file for config={config or 'default'} and split={split}; its page on the Hub lists the "
            "files"
        )
    return [directory / file for file in files]


def choose_files(what: str, names: Iterable[str], card: str, *, config: str, split: str) -> list[str]:
    """The files of one configuration and split of a repository with these files and README, in order.

    Raises ConfigError if there are none, or several choices.
    """
    names = sorted(names)
    declared = _declared_configs(what, card)
    if declared:
        found = _declared_files(what, names, declared, config, split)
    else:
        found = _named_files(what, names, config, split)
    if other := [name for name in found if not format_of(Path(name))]:
        raise ConfigError(
            f"{what}: {other[0]} is of no format that flowrl reads ({FORMATS}); name what the Hub has converted, as in "
            f"{what}@refs/convert/parquet, or save it with datasets' save_to_disk and name that directory"
        )
    return found


def has_all_shards(files: Iterable[str]) -> bool:
    """Whether there is at least one file, and no part of numbered files (-00000-of-00002) is missing."""
    files = list(files)
    parts: dict[str, set[int]] = {}
    for name in files:
        if shard := SHARD.search(name):
            key = f"{name[: shard.start()]}\0{shard[2]}\0{name[shard.end() :]}"
            parts.setdefault(key, set()).add(int(shard[1]))
    return bool(files) and all(len(found) == int(key.split("\0")[1]) for key, found in parts.items())


def _declared_configs(what: str, card: str) -> dict[str, Mapping[str, Any]]:
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


def _declared_files(
    what: str, names: Sequence[str], declared: Mapping[str, Mapping[str, Any]], config: str, split: str
) -> list[str]:
    """Those of `names` that the README gives to one configuration and split."""
    if config and config not in declared:
        raise ConfigError(f"{what} has no configuration {config!r}; it has {', '.join(declared)}: set config")
    usual = [entry for name, entry in declared.items() if entry.get("default") or name == "default"]
    if not config and len(declared) > 1 and not usual:
        raise ConfigError(f"{what} has the configurations {', '.join(declared)}; choose one with the option config")
    entry = declared[config] if config else (*usual, *declared.values())[0]

    folder = str(entry.get("data_dir") or "").strip("/")
    splits: dict[str, list[str]] = {}
    given = entry["data_files"]
    for one in given if isinstance(given, list) else [given]:
        paths = one.get("path") if isinstance(one, Mapping) else one
        name = str(one.get("split", "train")) if isinstance(one, Mapping) else "train"
        splits.setdefault(name, []).extend([paths] if isinstance(paths, str) else list(paths or ()))
    _require_split(what, split, splits)
    wanted = [_path_pattern(f"{folder}/{path}" if folder else path) for path in splits[split]]
    return [name for name in names if any(pattern.fullmatch(name) for pattern in wanted)]


def _path_pattern(text: str) -> re.Pattern[str]:
    """A pattern of paths, in which * stays within a folder and ** does not."""
    pieces = re.split(r"(\*\*/?|\*|\?|\[[^\]]*\])", text.removeprefix("./"))
    spelled = {"*": "[^/]*", "?": "[^/]", "**": ".*", "**/": "(?:.*/)?"}
    return re.compile(
        "".join(spelled.get(p, p if p.startswith("[") and p.endswith("]") else re.escape(p)) for p in pieces)
    )


def _named_files(what: str, names: Sequence[str], config: str, split: str) -> list[str]:
    known = [name for name in names if format_of(Path(name)) and name.rpartition("/")[2] not in DESCRIPTIONS]
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
    splits = files_by_split(data)
    _require_split(what, split, splits)
    if not config:
        found = sorted({folder for folder, slash, _ in (name.partition("/") for name in splits[split]) if slash})
        configs = [folder for folder in found if not split_of(folder)]
        if len(configs) > 1:
            raise ConfigError(f"{what} has the configurations {', '.join(configs)}; choose one with the option config")
    return splits[split]


def _require_split(what: str, split: str, splits: Mapping[str, Any]) -> None:
    if split not in splits:
        raise ConfigError(
            f"{what} has no split {split!r}; it has {', '.join(filter(None, splits))}: set the option split"
        )
