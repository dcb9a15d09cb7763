"""Which token has which id: told from a model's files, without transformers.

Two models can be compared token by token only where the same id means the same piece of text in both.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flowrl.models.policy import CHARACTER_MODELS, Policy

Vocabulary = Mapping[str, int]
ADVICE = "a teacher scores the student's own tokens, so name one that has the student's tokenizer"


def vocabulary_problem(student: Policy, teacher: Policy) -> str | None:
    """What keeps `teacher` from scoring the tokens of `student`; None too where `untold`."""
    mine, other = vocabulary(student), vocabulary(teacher)
    if student.model == teacher.model or mine == other:
        return None
    if student.built_in and teacher.built_in:
        return f"{student.model} and {teacher.model} have different tokenizers; {ADVICE}"
    if mine is None or other is None:
        return None
    return difference(student.model, mine, teacher.model, other)


def untold(student: Policy, teacher: Policy) -> bool:
    """Only the loaded tokenizers can say whether the two vocabularies are equal."""
    return student.model != teacher.model and None in (vocabulary(student), vocabulary(teacher))


def difference(student: str, mine: Vocabulary, teacher: str, other: Vocabulary) -> str:
    """The sentence about two vocabularies that are not equal."""
    token = min(mine.items() ^ other.items(), key=lambda entry: (entry[1], entry[0]))[0]
    return (
        f"the vocabularies of {student} ({len(mine)} tokens) and {teacher} ({len(other)}) differ, first in {token!r}: "
        f"id {mine.get(token, 'none')} and id {other.get(token, 'none')}; {ADVICE}"
    )


def vocabulary(policy: Policy) -> Vocabulary | None:
    """Every token with its id, None where it stands in no file that can be read without a tokenizer library."""
    if policy.model in CHARACTER_MODELS:
        from flowrl.models.characters import character_vocabulary

        return character_vocabulary()
    return None if policy.built_in else _of_directory(Path(policy.model).expanduser())


def _of_directory(path: Path) -> Vocabulary | None:
    file = path / "tokenizer.json"
    if not file.is_file():
        return None
    try:
        described: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        pieces = described["model"]["vocab"]
        added = {token["content"]: int(token["id"]) for token in described.get("added_tokens", ())}
    except (ValueError, KeyError, TypeError):
        return None  # no file of this kind; the tokenizer itself decides when it is loaded
    if isinstance(pieces, list):  # unigram models list (piece, score) in the order of ids
        pieces = {piece: index for index, (piece, _) in enumerate(pieces)}
    return {**pieces, **added}
