"""Which split a file of a dataset belongs to, by the words in the names of the file and its folders."""

from __future__ import annotations

import re
from collections.abc import Iterable

WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""Split -> the words for it in names of files and folders."""


def split_of(name: str) -> str:
    """The split that a word of the name means; the part of the path nearest to its end decides. "" if there is none."""
    for part in reversed(name.split("/")):
        words = re.split(r"[-._ ]|(?<=\D)(?=\d)", part.lower())
        for split, spelled in WORDS.items():
            if not set(spelled).isdisjoint(words):
                return split
    return ""


def by_split(names: Iterable[str]) -> dict[str, list[str]]:
    """Split -> its files, in order. If no name has a word for a split, all files belong to `train`."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(split_of(name), []).append(name)
    return {"train": found[""]} if set(found) == {""} else found
