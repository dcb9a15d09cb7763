"""What all messages have: a base class, a name that every process knows, a hash of their fields, and columns.

A column is what travels with each token of a sample under a name, declared once. A declaration says what a value is
(`dtype`, `shape`), whether there is one for each token or one for the sample, and whether the ledger's digests cover
it. Everything that handles the arrays of a sample walks the declarations: the digest, the size in `flowrl check`, the
division of a sample into rows, cuts, padding, and the columns of a loss.

The fields of a message class are declared in its `token_columns`. A node declares further columns in `Facts.columns`
and adds their values by `Sample.with_column`; these travel in `Sample.added_columns`, each with what its declaration
says, so that a process needs only the sample to divide and to digest it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import sys
from contextvars import ContextVar
from dataclasses import dataclass
from decimal import Decimal
from numbers import Real
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, get_type_hints

import numpy as np
import numpy.typing as npt

from flowrl.errors import ConfigError, SchemaError

_registry: dict[str, type[Message]] = {}
"""Every message class of this process, by `type_name`; if several classes share a name, the newest."""
_modules: dict[str, str] = {}
"""Module names that differ between processes -> the stable name that type names use instead."""


class ReportsToLedger(Protocol):
    """A node's context, as far as messages need it."""

    ledger: Any


node_context: ContextVar[ReportsToLedger | None] = ContextVar("flowrl_node_context", default=None)
"""The context of the node whose code runs now; None outside of nodes, and in threads."""
COLUMN_DTYPES = (
    "bool",
    *(f"{kind}{bits}" for bits in (8, 16, 32, 64) for kind in ("int", "uint")),
    "float16",
    "float32",
)
"""The types of a column's values; a loss computes with float32."""
INT64 = range(-(1 << 63), 1 << 64)
"""The integers that can be sent: 64 bits, signed or unsigned."""


class Message:
    """Base of every message. Subclasses are `@dataclass(frozen=True)` and register by `type_name`."""

    schema_hash: ClassVar[int] = 0

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        name = type_name(cls)
        _registry.pop(name, None)
        _registry[name] = cls


def type_name(cls: type) -> str:
    """The name of a message class in lanes and in storage: the same in every process and on every machine.

    flowrl's own classes use the bare name. A user's class uses module and name, so it may share a name with flowrl's.
    """
    module = cls.__module__
    if module.partition(".")[0] == "flowrl":
        return cls.__name__
    if module in ("__main__", "__mp_main__") and module not in _modules:
        _modules[module] = _name_of_program(module)
    return f"{_modules.get(module, module)}.{cls.__qualname__}"


def _name_of_program(module: str) -> str:
    """The module name that this process's program has in a process that imports it."""
    program = sys.modules[module]
    spec, file = getattr(program, "__spec__", None), getattr(program, "__file__", None)
    return str(spec.name) if spec is not None else Path(file).stem if file else "__main__"


def name_module(name: str, stable: str) -> None:
    """Use `stable` in type names in place of the module name `name`, which only this process gives the module."""
    _modules[name] = stable


def message_type(name: str) -> type[Message]:
    """The message class called `name`. Raises SchemaError if there is none or more than one.

    A bare name, or the name of a class that has moved to another module since it was stored, matches the only
    user class with the same last part.
    """
    if name in _registry:
        return _registry[name]
    bare = name.rpartition(".")[2]
    found = [known for known in _registry if known.rpartition(".")[2] == bare and known != bare]
    if len(found) == 1:
        return _registry[found[0]]
    if found:
        raise SchemaError(f"message type {name!r} may be {' or '.join(found)}; give the classes different names")
    raise SchemaError(f"no message type {name!r} is known here; import the module that defines it")


def known_types() -> tuple[type[Message], ...]:
    """Every message class defined so far in this process."""
    return tuple(_registry.values())


def schema_hash(cls: type[Message]) -> int:
    """A 32-bit hash of the class's name and its fields' names and types, in order; cached on the class."""
    if "schema_hash" not in cls.__dict__:
        hints = get_type_hints(cls)
        text = type_name(cls) + "".join(f";{f.name}:{_spelt(hints[f.name])}" for f in dataclasses.fields(cls))  # type: ignore[arg-type]
        cls.schema_hash = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big")
    return cls.schema_hash


def _spelt(hint: Any) -> str:
    """A type as text that is the same in every process."""
    text = str(hint)
    for name, stable in _modules.items():
        text = text.replace(f"{name}.", f"{stable}.")
    return text


def number_in(value: object) -> float | None:
    """The number that user code gave: a real one of Python or numpy, a bool, a Decimal, or an array or tensor with one
    element. None for all else; infinity for what no float can hold."""
    if not isinstance(value, Real | Decimal) and callable(item := getattr(value, "item", None)):
        try:
            value = item()
        except (ValueError, RuntimeError, TypeError):  # it has several elements
            return None
    if not isinstance(value, Real | Decimal):
        return None
    try:
        return float(value)
    except (OverflowError, ValueError):  # a signaling NaN is a Decimal, too
        return math.inf


def scalar_problem(value: str | int) -> str:
    """Why a text or an integer cannot be sent or stored; "" if it can."""
    if isinstance(value, int):
        return "" if value in INT64 else f"the integer {_digits(value)}, beyond 64 bits; write it as a string"
    if value.isascii():
        return ""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        found = value[error.start]
        return f"text with {found!r} at {error.start}, half of a surrogate pair and no character; remove it"
    return ""


def _digits(value: int) -> str:
    """An integer as text for an error message; Python refuses to print thousands of digits."""
    return str(value) if value.bit_length() < 128 else f"of {value.bit_length()} bits"


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
        if self.dtype not in COLUMN_DTYPES:
            raise ConfigError(
                f"the column {self.name} has dtype {self.dtype!r}; choose one of {', '.join(COLUMN_DTYPES)}"
            )
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
