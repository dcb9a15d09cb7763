"""The user's choice of a tokenizer for the policy: another one than the model's, and its special tokens. Plain data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from flowrl.errors import ConfigError

NONE = "none"
"""Given as the begin token: texts then have none."""


@dataclass(frozen=True)
class TokenizerOptions:
    """Another tokenizer than the policy's own, or other special tokens of it; all empty: the policy's own tokenizer,
    unchanged."""

    name: str = ""
    """Directory or OWNER/NAME[@REVISION] on the Hugging Face Hub whose tokenizer and chat template are used in place of
    the policy's own."""
    eos: tuple[str, ...] = ()
    """Tokens that end a response. The first is the tokenizer's end token, which ends texts that are trained."""
    pad: str = ""
    """The token that fills up batches."""
    bos: str = ""
    """The token before texts without a chat template, and {{ bos_token }} in templates; none: no such token."""
    special: tuple[str, ...] = ()
    """Further tokens that are never split and not shown. New ones need embedding rows that no token uses."""

    def __post_init__(self) -> None:
        for problem in self._problems():
            raise ConfigError(problem)

    def _problems(self) -> Iterator[str]:
        for option in ("eos", "special"):
            tokens: tuple[str, ...] = getattr(self, option)
            if "" in tokens:
                yield f"--tokenizer.{option} has an empty token; leave it out"
            if twice := [token for index, token in enumerate(tokens) if token in tokens[:index]]:
                yield f"--tokenizer.{option} has {twice[0]!r} twice; leave one out"

    @property
    def chosen(self) -> bool:
        """Whether anything differs from the model's own tokenizer."""
        return self != TokenizerOptions()

    @property
    def named(self) -> tuple[tuple[str, str], ...]:
        """(option, token) of every token that must exist in the tokenizer."""
        one = (("pad", self.pad), ("bos", "" if self.bos == NONE else self.bos))
        return (*(("eos", token) for token in self.eos), *((option, token) for option, token in one if token))
