"""What a message may hold: one rule for messages that stay in their process, are sent or are stored.

A value keeps its type or is refused. So types are compared exactly: the other end would turn an instance of a subclass
(a named tuple, an enum, an OrderedDict, a masked array) into the plain type.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from flowrl.channel.encoding.compiled import DTYPE_CODES, DTYPES
from flowrl.errors import WireError
from flowrl.messages import Message
from flowrl.messages.base import scalar_problem

MAX_DEPTH = 32
"""The most messages, lists and read-only mappings that may be nested around a value: each takes about 40 KiB of
the receiver's stack."""
MAX_NESTED = 64
"""Deepest nesting of tuples and dicts within one of these."""
MAX_AXES = 8

FREE, TEXT, WHOLE, NUMBER, ARRAY, TUPLE, DICT, LIST, PROXY, MESSAGE = range(10)
_numbers = [dtype.type for dtype in DTYPES if dtype.kind != "c"]
_kinds: dict[type, int] = {
    **dict.fromkeys((type(None), bool, float, bytes), FREE),
    **dict.fromkeys(_numbers, NUMBER),
    str: TEXT,
    int: WHOLE,
    np.ndarray: ARRAY,
    tuple: TUPLE,
    dict: DICT,
    list: LIST,
    MappingProxyType: PROXY,
}
SCALARS = frozenset((type(None), bool, float, bytes, str, int))
"""Scalar types that msgpack supports."""
_PLAIN: tuple[tuple[Any, str], ...] = (
    (enum.Enum, "its `.value`"),
    (Mapping, "a dict of it"),
    (tuple, "a tuple of it"),
    (list, "a list of it"),
    (set | frozenset, "a sorted tuple of it"),
    (np.ndarray, "an array by numpy.asarray, a mask as one of its own"),
    (str, "a str of it"),
    (bytes | bytearray | memoryview, "bytes of it"),
    (int, "an int of it"),
    (float, "a float of it"),
)
"""(type of a refused value, what the message can hold instead)."""


def kind_of(value: Any) -> int:
    """Which of the above kinds `value` is. Raises WireError for a value that a message cannot hold."""
    kind = _kinds.get(type(value))
    if kind is not None:
        return kind
    if isinstance(value, Message):
        return MESSAGE
    raise refusal(value)


def refusal(value: Any) -> WireError:
    """The error for a `value` whose type cannot be sent; it names an alternative if there is one."""
    cls = type(value)
    if cls is int or cls is str:
        return WireError(scalar_problem(value))
    plain = next((f"; make it {what}" for kind, what in _PLAIN if isinstance(value, kind)), "")
    return WireError(
        f"a value of type {cls.__module__}.{cls.__qualname__} cannot be sent{plain}. Messages hold scalars, str, "
        "bytes, tuples, lists, dicts, messages, numpy arrays and numpy numbers"
    )


def check_scalar(value: Any) -> None:
    """Raises WireError for a text or an integer that cannot be sent."""
    if problem := scalar_problem(value):
        raise WireError(problem)


def check_keys(keys: Iterable[Any]) -> None:
    """Raises WireError unless all keys are scalars, or tuples of them."""
    for key in keys:
        kind = kind_of(key)
        if kind == TUPLE:
            check_keys(key)
        elif kind in (TEXT, WHOLE):
            check_scalar(key)
        elif kind not in (FREE, NUMBER):
            raise WireError(f"a {type(key).__name__} as a key cannot be sent; keys are scalars, or tuples of them")


def check_depth(depth: int) -> None:
    """Raises WireError if `depth`, the number of messages, lists and read-only mappings around a value, is too high."""
    if depth > MAX_DEPTH:
        raise WireError(
            f"a value inside more than {MAX_DEPTH} messages cannot be sent (a list counts as a message), nor can "
            "values that contain themselves; store a chain of messages as a tuple"
        )


def check_nested(nested: int) -> None:
    """Raises WireError if `nested`, the number of tuples and dicts around a value, is too high."""
    if nested > MAX_NESTED:
        raise WireError(f"values are nested in more than {MAX_NESTED} tuples and dicts, or contain themselves")


def dtype_code(array: np.ndarray[Any, Any]) -> int:
    """The code of the array's dtype. Raises WireError for an array that cannot be sent."""
    code = DTYPE_CODES.get(array.dtype)
    if code is None or array.ndim > MAX_AXES:
        raise WireError(f"an array of dtype {array.dtype} and {array.ndim} axes cannot be sent; convert it first")
    return code
