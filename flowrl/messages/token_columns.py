"""Columns: what travels with each token of a sample under a name, declared once.

A declaration says what a value is (`dtype`, `shape`), whether there is one for each token or one for the sample, and
whether the ledger's digests cover it. Everything that handles the arrays of a sample walks the declarations: the
digest, the size in `flowrl check`, the division of a sample into rows, cuts, padding, and the columns of a loss.

The fields of a message class are declared in its `token_columns`. A node declares further columns in `Facts.columns`
and adds their values by `Sample.with_column`; these travel in `Sample.added_columns`, each with what its declaration
says, so that a process needs only the sample to divide and to digest it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from flowrl.errors import ConfigError

DTYPES = ("bool", *(f"{kind}{bits}" for bits in (8, 16, 32, 64) for kind in ("int", "uint")), "float16", "float32")
"""The types of a column's values; a loss computes with float32."""


@dataclass(frozen=True)
class Column:
    """The declaration of a column."""

    name: str
    dtype: str = "float32"
    shape: tuple[int, ...] = ()
    """Axes of one value: (4,) for four numbers a token, so that the whole column is [tokens, 4]."""
    per: Literal["token", "sample"] = "token"
    in_digest: bool = False
    """Whether the ledger's digests of policy spans cover it: `flowrl audit` finds a value that changes between the node
    that books the sample and the trainer. Only for columns that the sample has when it is booked."""
    in_branches: bool = False
    """Fields of messages: whether each sequence has an array of its own; otherwise one array covers all sequences."""

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise ConfigError(f"a column is named {self.name!r}; its name has to be an identifier, such as entropy")
        if self.dtype not in DTYPES:
            raise ConfigError(f"the column {self.name} has dtype {self.dtype!r}; choose one of {', '.join(DTYPES)}")
        if not all(isinstance(size, int) and size > 0 for size in self.shape):
            raise ConfigError(f"the column {self.name} has the shape {self.shape}; it takes numbers of at least 1")

    @property
    def value_bytes(self) -> int:
        """Bytes of one value."""
        return np.dtype(self.dtype).itemsize * math.prod(self.shape)

    def __str__(self) -> str:
        sizes = f"[{', '.join(map(str, self.shape))}]" if self.shape else ""
        return f"{self.name} ({self.dtype}{sizes} for each {self.per})"

    def make_zeros(self, number: int) -> npt.NDArray[Any]:
        """The column of `number` values that are all 0."""
        return np.zeros((number, *self.shape), self.dtype)
