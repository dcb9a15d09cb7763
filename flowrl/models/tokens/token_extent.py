"""How much text a token can stand for: with it, a text that is too long for a context is refused without its tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

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
    composed = [_composed(part) for part in _parts(core.normalizer, "normalizers")]
    splits = list(_parts(core.pre_tokenizer, "pretokenizers"))
    strips = any(token.lstrip or token.rstrip for token in core.get_added_tokens_decoder().values())
    if strips or None in composed or not all(map(_keeps_all, splits)):
        return None
    if not _knows_all(core.model, splits, vocabulary):
        return None
    factor = 1
    for one in composed:
        factor *= one or 1
    return factor * max(map(len, vocabulary))


def _parts(component: Any, inner: str) -> Iterator[Mapping[str, Any]]:
    """What a component of the package tokenizers consists of, as its file has it."""
    if component is not None:
        yield from _flattened(json.loads(component.__getstate__()), inner)


def _flattened(part: Mapping[str, Any], inner: str) -> Iterator[Mapping[str, Any]]:
    if part["type"] != "Sequence":
        yield part
        return
    for one in part[inner]:
        yield from _flattened(one, inner)


def _composed(normalizer: Mapping[str, Any]) -> int | None:
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
