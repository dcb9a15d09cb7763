"""What a model's tokens are: their ids, read from the model's files without transformers; the text of each, to be shown
without the tokenizer; and how much text one can stand for. With that, a text that is too long for a context is refused
without its tokens.

Two models can be compared token by token only if the same id means the same piece of text in both.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from flowrl.models.model_files import known_directory
from flowrl.models.policy import CHARACTER_MODELS, TOOL_MODEL, Policy

Vocabulary = Mapping[str, int]
ADVICE = "the second has to score the tokens of the first, so name one that has the same tokenizer"


def vocabulary_problem(student: Policy, teacher: Policy) -> str | None:
    """Why `teacher` cannot score the tokens of `student`; None if it can, and also if the files do not show it
    (`untold`)."""
    mine, other = read_vocabulary(student), read_vocabulary(teacher)
    if student.model == teacher.model or mine == other:
        return None
    if student.built_in and teacher.built_in and not student.tokenizer.chosen:
        return f"{student.model} and {teacher.model} have different tokenizers; {ADVICE}"
    if mine is None or other is None:
        return None
    return describe_difference(student.model, mine, teacher.model, other)


def untold_vocabulary(student: Policy, teacher: Policy) -> bool:
    """Whether only the loaded tokenizers can show if the two vocabularies are equal."""
    return student.model != teacher.model and None in (read_vocabulary(student), read_vocabulary(teacher))


def describe_difference(student: str, mine: Vocabulary, teacher: str, other: Vocabulary) -> str:
    """The error sentence for two vocabularies that are not equal."""
    token = min(mine.items() ^ other.items(), key=lambda entry: (entry[1], entry[0]))[0]
    return (
        f"the vocabularies of {student} ({len(mine)} tokens) and {teacher} ({len(other)}) differ, first in {token!r}: "
        f"id {mine.get(token, 'none')} and id {other.get(token, 'none')}; {ADVICE}"
    )


def read_vocabulary(policy: Policy) -> Vocabulary | None:
    """Every token with its id; None if no file that is readable without a tokenizer library contains them."""
    if policy.tokenizer.special:
        return None
    named = policy.tokenizer.name or policy.model
    if named in CHARACTER_MODELS:
        from flowrl.models.tokens.characters import TOOL_TOKENS, character_vocabulary

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


COMPOSED = 4
"""Characters of which Unicode's composition (NFC) makes one, at most."""
BYTE_TOKENS = frozenset(f"<0x{byte:02X}>" for byte in range(256))


def most_characters_per_token(tokenizer: Any) -> int | None:
    """The largest number of characters of a text of which a tokenizer can make one token.

    It is the length of the longest entry of the vocabulary, which has a character for each byte of a byte-level one,
    times what the normalizer can compose. None if there is no such number: parts of texts are dropped, or a token for
    what is unknown, or one that takes in the blanks around it, stands for any length.
    """
    core = getattr(tokenizer, "backend_tokenizer", None)
    if core is None:
        return None
    vocabulary = core.get_vocab(with_added_tokens=True)
    composed = [composed_length(part) for part in tokenizer_parts(core.normalizer, "normalizers")]
    splits = list(tokenizer_parts(core.pre_tokenizer, "pretokenizers"))
    strips = any(token.lstrip or token.rstrip for token in core.get_added_tokens_decoder().values())
    if strips or None in composed or not all(map(_keeps_all, splits)):
        return None
    if not _knows_all(core.model, splits, vocabulary):
        return None
    factor = 1
    for one in composed:
        factor *= one or 1
    return factor * max(map(len, vocabulary))


def tokenizer_parts(component: Any, inner: str) -> Iterator[Mapping[str, Any]]:
    """What a component of the package tokenizers consists of, as its file has it."""
    if component is not None:
        yield from flatten_parts(json.loads(component.__getstate__()), inner)


def flatten_parts(part: Mapping[str, Any], inner: str) -> Iterator[Mapping[str, Any]]:
    if part["type"] != "Sequence":
        yield part
        return
    for one in part[inner]:
        yield from flatten_parts(one, inner)


def composed_length(normalizer: Mapping[str, Any]) -> int | None:
    """The characters of which a normalizer makes one; None if they may be any number."""
    kind = normalizer["type"]
    if kind == "Replace":
        pattern = normalizer["pattern"].get("String")
        return 1 if pattern and len(normalizer["content"]) >= len(pattern) else None
    return {"NFC": COMPOSED, "Prepend": 1}.get(kind)


def _keeps_all(split: Mapping[str, Any]) -> bool:
    """Whether a pre-tokenizer drops nothing."""
    if split["type"] in ("Split", "Punctuation"):
        return str(split["behavior"]).lower() != "removed"
    return split["type"] in ("ByteLevel", "Digits", "Metaspace")


def _knows_all(model: Any, splits: list[Mapping[str, Any]], vocabulary: Mapping[str, int]) -> bool:
    """Whether every character has tokens of its own: byte for byte, where it is in no other."""
    from tokenizers.models import BPE, Unigram
    from tokenizers.pre_tokenizers import ByteLevel

    if not isinstance(model, BPE | Unigram):
        return False
    if getattr(model, "byte_fallback", False):
        return vocabulary.keys() >= BYTE_TOKENS
    is_bytes = any(split["type"] == "ByteLevel" for split in splits)
    return is_bytes and isinstance(model, BPE) and vocabulary.keys() >= set(ByteLevel.alphabet())


UNFINISHED = "\ufffd"
"""What a decoder writes for bytes that do not form a whole character yet."""
LONGEST_RUN = 8
"""Maximum number of tokens that share one character; a longer run is not a character."""


class TokenPieces:
    """Divides token ids into their texts. Remembers each token's text, so an object is for one tokenizer only."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}
        ids = tokenizer("a", add_special_tokens=False)["input_ids"]
        self._before = ids[-1:]
        """A token after which others are decoded: without one, some decoders strip a token's leading space."""
        self._text_before = self._decode_ids(self._before)

    def text_pieces(self, token_ids: Sequence[int]) -> list[str]:
        """One text for each id; a character that takes several tokens is in the text of the last one."""
        pieces: list[str] = []
        run: list[int] = []
        for token_id in token_ids:
            run.append(token_id)
            text = self._text_of_token(token_id) if len(run) == 1 else self._text_after(run)
            unfinished = text.endswith(UNFINISHED) and len(run) < LONGEST_RUN
            pieces.append("" if unfinished else text)
            if not unfinished:
                run = []
        if run:
            pieces[-1] = self._text_after(run)
        return pieces

    def _text_of_token(self, token_id: int) -> str:
        if token_id not in self._known:
            self._known[token_id] = self._text_after([token_id])
        return self._known[token_id]

    def _text_after(self, ids: list[int]) -> str:
        text = self._decode_ids([*self._before, *ids])
        return text[len(self._text_before) :] if text.startswith(self._text_before) else self._decode_ids(ids)

    def _decode_ids(self, ids: list[int]) -> str:
        decode = self._tokenizer.decode
        return str(decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
