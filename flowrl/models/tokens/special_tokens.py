"""Gives a loaded tokenizer the special tokens that a user chooses, so that it keeps them when saved and loaded
again."""

from __future__ import annotations

from typing import Any

from flowrl.errors import ConfigError
from flowrl.models.tokenizer_options import NONE, TokenizerOptions

FEW_PIECES = 6


def with_special_tokens(tokenizer: Any, options: TokenizerOptions, *, rows: int | None, model: str) -> Any:
    """`tokenizer` with the tokens of `options`. Raises ConfigError.

    `rows` is how many tokens the embeddings of `model` have room for; None if that is not known.
    """
    more = [*options.special, *(token for token in options.eos[1:] if token not in options.special)]
    _require_tokens(tokenizer, options, options.name or model)
    if more:
        tokenizer.add_special_tokens({"extra_special_tokens": more}, replace_extra_special_tokens=False)
    if roles := _roles(options):
        tokenizer.add_special_tokens(roles)
    if options.bos:
        _begin_with(tokenizer, None if options.bos == NONE else options.bos, options.name or model)
    _require_room(tokenizer, options, rows, model)
    return tokenizer


def end_token_ids(tokenizer: Any, options: TokenizerOptions) -> list[int]:
    """The ids of the tokens that `options` name as ends of a response, in their order."""
    return [int(tokenizer.convert_tokens_to_ids(token)) for token in options.eos]


def _roles(options: TokenizerOptions) -> dict[str, str]:
    roles = {"eos_token": options.eos[0] if options.eos else "", "pad_token": options.pad}
    return {role: token for role, token in roles.items() if token}


def _require_tokens(tokenizer: Any, options: TokenizerOptions, of: str) -> None:
    known = tokenizer.get_vocab()
    for option, token in options.named:
        if token in known or token in options.special:
            continue
        pieces = tokenizer.convert_ids_to_tokens(tokenizer(token, add_special_tokens=False)["input_ids"])
        shown = " ".join(map(repr, pieces[:FEW_PIECES])) + (" ..." if len(pieces) > FEW_PIECES else "")
        raise ConfigError(
            f"--tokenizer.{option} is {token!r}, which is no token of the tokenizer of {of}: it "
            f"is read as {len(pieces)} ({shown}); name a token as tokenizer.json has it, or make it one with "
            "--tokenizer.special"
        )


def _require_room(tokenizer: Any, options: TokenizerOptions, rows: int | None, model: str) -> None:
    token, last = max(tokenizer.get_vocab().items(), key=lambda entry: entry[1])
    if rows is None or last < rows:
        return
    remedy = "leave out --tokenizer.special" if options.special else "name the tokenizer that belongs to the model"
    raise ConfigError(
        f"the tokenizer has ids up to {last} ({token!r}), but the embeddings of {model} have room for {rows} tokens, "
        f"ids 0 to {rows - 1}; {remedy}, or enlarge the model's embeddings first"
    )


def _begin_with(tokenizer: Any, token: str | None, of: str) -> None:
    """Put `token`, or nothing, before every text that is tokenized with special tokens; tokens after the text are
    kept."""
    from tokenizers.processors import TemplateProcessing

    if not tokenizer.is_fast:
        raise ConfigError(
            f"--tokenizer.bos needs a tokenizer with a tokenizer.json, and {of} has none; leave it "
            "out, or save the tokenizer as a fast one"
        )
    ending = _behind(tokenizer)
    if token is None:
        tokenizer.bos_token = None
    else:
        tokenizer.add_special_tokens({"bos_token": token})
    ids = ([] if token is None else [tokenizer.bos_token_id], ending)
    marks = [
        {"id": name, "ids": some, "tokens": tokenizer.convert_ids_to_tokens(some)}
        for name, some in zip(("begin", "end"), ids, strict=True)
        if some
    ]
    names = [mark["id"] for mark in marks]
    single = [*(["begin:0"] if "begin" in names else []), "$A:0", *(["end:0"] if "end" in names else [])]
    pair = [*single, *(piece.replace(":0", ":1").replace("$A", "$B") for piece in single)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=single, pair=pair, special_tokens=marks)


def _behind(tokenizer: Any) -> list[int]:
    """The ids that the tokenizer adds after a text."""
    plain, whole = tokenizer("a", add_special_tokens=False)["input_ids"], tokenizer("a")["input_ids"]
    for start in range(len(whole) - len(plain), -1, -1):
        if whole[start : start + len(plain)] == plain:
            return list(whole[start + len(plain) :])
    return []
