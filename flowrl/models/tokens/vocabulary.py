"""What a model's tokens are: their ids, read from the model's files without transformers; the text of each, to be shown
without the tokenizer; and how much text one can stand for. With that, a text that is too long for a context is refused
without its tokens.

Two models can be compared token by token only if the same id means the same piece of text in both.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from flowrl.models.model_files import known_directory
from flowrl.models.policy import CHARACTER_MODELS, TOOL_MODEL, Policy

Vocabulary = Mapping[str, int]
ADVICE = "the second has to score the tokens of the first, so name one that has the same tokenizer"


def vocabulary_problem(student: Policy, teacher: Policy) -> str | None:
    """Why `teacher` cannot score the tokens of `student`; None if it can, and also if the files do not show it
    (`untold_vocabulary`)."""
    mine, other = read_vocabulary(student), read_vocabulary(teacher)
    if student.model == teacher.model or mine == other:
        return None
    if student.built_in and teacher.built_in and not student.tokenizer.is_chosen:
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
    if directory is None or not (directory / "tokenizer.json").is_file():
        return None
    try:
        described: dict[str, Any] = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
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
    splits = list(tokenizer_parts(core.pre_tokenizer, "pretokenizers"))
    if any(token.lstrip or token.rstrip for token in core.get_added_tokens_decoder().values()):
        return None
    if not knows_all_characters(core.model, splits, vocabulary):
        return None
    for split in splits:
        if split["type"] in ("Split", "Punctuation"):
            if str(split["behavior"]).lower() == "removed":
                return None
        elif split["type"] not in ("ByteLevel", "Digits", "Metaspace"):
            return None
    factor = 1
    for normalizer in tokenizer_parts(core.normalizer, "normalizers"):
        if normalizer["type"] == "NFC":
            factor *= COMPOSED
        elif normalizer["type"] == "Replace":
            pattern = normalizer["pattern"].get("String")
            if not pattern or len(normalizer["content"]) < len(pattern):
                return None
        elif normalizer["type"] != "Prepend":
            return None
    return factor * max(map(len, vocabulary))


def tokenizer_parts(component: Any, inner: str) -> Iterator[Mapping[str, Any]]:
    """What a component of the package tokenizers consists of, as its file has it; `inner` has the parts of a
    sequence."""
    remaining = [] if component is None else [json.loads(component.__getstate__())]
    while remaining:
        part = remaining.pop(0)
        if part["type"] == "Sequence":
            remaining[:0] = part[inner]
        else:
            yield part


def knows_all_characters(model: Any, splits: list[Mapping[str, Any]], vocabulary: Mapping[str, int]) -> bool:
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
            text = self._known.get(token_id) if len(run) == 1 else None
            if text is None:
                text = self._text_after(run)
                if len(run) == 1:
                    self._known[token_id] = text
            unfinished = text.endswith(UNFINISHED) and len(run) < LONGEST_RUN
            pieces.append("" if unfinished else text)
            if not unfinished:
                run = []
        if run:
            pieces[-1] = self._text_after(run)
        return pieces

    def _text_after(self, ids: list[int]) -> str:
        text = self._decode_ids([*self._before, *ids])
        return text[len(self._text_before) :] if text.startswith(self._text_before) else self._decode_ids(ids)

    def _decode_ids(self, ids: list[int]) -> str:
        decode = self._tokenizer.decode
        return str(decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
