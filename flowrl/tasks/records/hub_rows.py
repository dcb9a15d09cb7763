"""Records of a dataset on the Hugging Face Hub: OWNER/NAME or OWNER/NAME@REVISION. Its files are read like local
ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from flowrl.errors import ConfigError
from flowrl.hub import HubName, fetch_snapshot, files_in, to_stderr
from flowrl.tasks.records.dataset_card import CARD, chosen_files, whole
from flowrl.tasks.records.formats import RawRow, file_records, format_of
from flowrl.tasks.records.malformed import Reading


def hub_dataset(source: str) -> HubName | None:
    """The Hub dataset that a task names; None for a file, and for a text that cannot be a name on the Hub."""
    return None if format_of(Path(source)) else HubName.parse(source, "dataset")


def hub_records(name: HubName, reading: Reading, *, config: str, split: str) -> Iterator[tuple[str, RawRow]]:
    """(place, record) of one configuration and split, which are downloaded first. Raises ConfigError."""
    for file in hub_files(name, config=config, split=split):
        yield from file_records(file, reading)


def hub_files(name: HubName, *, config: str, split: str) -> list[Path]:
    """The files of one configuration and split, which are downloaded first. Raises ConfigError."""
    directory, files = _found(name, config, split)
    return [directory / file for file in files]


def _found(name: HubName, config: str, split: str) -> tuple[Path, list[str]]:
    listed: list[str] = []

    def card_alone(names: Iterable[str]) -> list[str]:
        listed[:] = names
        return [file for file in listed if file == CARD]

    card_dir = fetch_snapshot(name, card_alone, lambda directory: True, to_stderr)
    card = (card_dir / CARD).read_text(encoding="utf-8", errors="replace") if (card_dir / CARD).is_file() else ""

    def choose(names: Iterable[str]) -> list[str]:
        return chosen_files(str(name), names, card, config=config, split=split)

    def complete(directory: Path) -> bool:
        here = files_in(directory)
        try:
            wanted = choose(listed or here)
        except ConfigError:
            return False
        return all(file in here for file in wanted) and whole(wanted)

    directory = fetch_snapshot(name, choose, complete, to_stderr)
    files = choose(listed or files_in(directory))
    if not files:
        raise ConfigError(
            f"{name} has no file for config={config or 'default'} and split={split}; its page on the Hub lists the "
            "files"
        )
    return directory, files
