"""Reads the ids of a model's tokens from its files, without transformers.

Two models can be compared token by token only if the same id means the same piece of text in both.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flowrl.models.find_model import known_directory
from flowrl.models.policy import CHARACTER_MODELS, TOOL_MODEL, Policy

Vocabulary = Mapping[str, int]
ADVICE = "the second has to score the tokens of the first, so name one that has the same tokenizer"


def vocabulary_problem(student: Policy, teacher: Policy) -> str | None:
    """Why `teacher` cannot score the tokens of `student`; None if it can, and also if the files do not show it
    (`untold`)."""
    mine, other = vocabulary(student), vocabulary(teacher)
    if student.model == teacher.model or mine == other:
        return None
    if student.built_in and teacher.built_in and not student.tokenizer.chosen:
        return f"{student.model} and {teacher.model} have different tokenizers; {ADVICE}"
    if mine is None or other is None:
        return None
    return difference(student.model, mine, teacher.model, other)


def untold(student: Policy, teacher: Policy) -> bool:
    """Whether only the loaded tokenizers can show if the two vocabularies are equal."""
    return student.model != teacher.model and None in (vocabulary(student), vocabulary(teacher))


def difference(student: str, mine: Vocabulary, teacher: str, other: Vocabulary) -> str:
    """The error sentence for two vocabularies that are not equal."""
    token = min(mine.items() ^ other.items(), key=lambda entry: (entry[1], entry[0]))[0]
    return (
        f"the vocabularies of {student} ({len(mine)} tokens) and {teacher} ({len(other)}) differ, first in {token!r}: "
        f"id {mine.get(token, 'none')} and id {other.get(token, 'none')}; {ADVICE}"
    )


def vocabulary(policy: Policy) -> Vocabulary | None:
    """Every token with its id; None if no file that is readable without a tokenizer library contains them."""
    if policy.tokenizer.special:
        return None
    named = policy.tokenizer.name or policy.model
    if named in CHARACTER_MODELS:
        from flowrl.models.tokens.characters import character_vocabulary
        from flowrl.models.tokens.tool_characters import TOOL_TOKENS

        return character_vocabulary(TOOL_TOKENS if named == TOOL_MODEL else ())
    directory = known_directory(Policy(named))
    return None if directory is None else _of_directory(directory)


def _of_directory(path: Path) -> Vocabulary | None:
    file = path / "tokenizer.json"
    if not file.is_file():
        return None
    try:
        described: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        pieces = described["model"]["vocab"]
        added = {token["content"]: int(token["id"]) for token in described.get("added_tokens", ())}
    except (ValueError, KeyError, TypeError, RecursionError):
        return None  # not such a file; loading the tokenizer decides
    if isinstance(pieces, list):  # unigram models list (piece, score) in the order of ids
        pieces = {piece: index for index, (piece, _) in enumerate(pieces)}
    return {**pieces, **added}
