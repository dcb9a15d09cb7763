"""What a message holds keeps its type, or is refused: in one process, between two and in storage alike."""

from __future__ import annotations

import collections
import datetime
import enum
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest

from flowrl.errors import WireError
from flowrl.messages import Int32, Message, Tombstone
from flowrl.wire.encoding.codec import dump_value, load_message, load_value
from flowrl.wire.encoding.schema import freeze, freeze_inside
from tests.wire.test_channel_wire import Parcel, equal, parts_with, there_and_back

KEEPS = [
    None,
    *(True, -(2**63), 2**64 - 1, math.inf, -0.0, "\u00e9\U0001f600", b"\0\xff"),
    *((), ((1, (2,)),), [], [1, [2, (3, [4])]], {}, {1: "a", (1, "b"): {"c": None}}, {np.int8(1): 2}),
    *(MappingProxyType({"a": (1, [2])}), {"\0type": None, "a": {"\0type": 1, "items": (1,)}}),
    *(np.float16(0.5), np.float32(0.5), np.float64(0.5), np.int64(-5), np.uint8(5), np.bool_(True)),
    *({"a": np.float64(0.5)}, (1, np.float64(0.5)), [np.float32(1), Tombstone("g", 1, "failed", "", "n", ())]),
    *(np.array(3.0), np.zeros((0, 5)), np.arange(24).reshape(4, 6)[::2, ::3], [np.arange(3)], {"a": np.arange(3)}),
]


@pytest.mark.parametrize("thing", KEEPS, ids=repr)
def test_a_value_keeps_its_type_between_processes_in_one_and_in_storage(thing: Any) -> None:
    body = Parcel(inner=(thing,), columns={"a": thing})
    freeze(body)
    for after in (
        there_and_back(body)[0].body,
        there_and_back(Parcel(inner=(body,)))[0].body.inner[0],
        load_message(dump_value(body)),
    ):  # type: ignore[attr-defined]
        assert same(body.inner, after.inner) and same(body.columns, after.columns)


def test_an_array_in_a_request_is_read_only_within_a_process_too() -> None:
    bare, held = np.arange(3), np.zeros(2)
    freeze_inside({"bare": bare, "more": [(held,)], "other": {"text": "a"}})
    assert not bare.flags.writeable and not held.flags.writeable


def same(a: Any, b: Any) -> bool:
    """Equal, and of the same types all the way down."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Mapping):
        return same(tuple(a.items()), tuple(b.items()))
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(map(same, a, b))
    return equal(a, b) if not isinstance(a, float) else math.copysign(a, b) == a == b


class Colour(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    LOW = 1


class Named(NamedTuple):
    a: int


class Text(str):
    pass


class Odd(np.ndarray[Any, Any]):
    pass


MASKED: Any = np.ma.masked_array([1, 2, 3], mask=[0, 1, 0])  # type: ignore[no-untyped-call]
REFUSED: list[tuple[Any, str]] = [
    (2**64, "the integer 18446744073709551616, beyond 64 bits; write it as a string"),
    (-(2**63) - 1, "beyond 64 bits"),
    (10**5000, "the integer of 16610 bits, beyond 64 bits"),
    ("a\ud83d", "text with '.ud83d' at 1, half of a surrogate pair"),
    (Colour.RED, "Colour cannot be sent; make it its `.value`"),
    (Level.LOW, "Level cannot be sent; make it its `.value`"),
    (Named(1), "Named cannot be sent; make it a tuple of it"),
    (Text("a"), "Text cannot be sent; make it a str of it"),
    (collections.OrderedDict(a=1), "OrderedDict cannot be sent; make it a dict of it"),
    (collections.Counter("a"), "Counter cannot be sent; make it a dict of it"),
    (bytearray(b"x"), "bytearray cannot be sent; make it bytes of it"),
    (memoryview(b"x"), "memoryview cannot be sent; make it bytes of it"),
    ({1}, "set cannot be sent; make it a sorted tuple of it"),
    (1j, "complex cannot be sent"),
    (np.complex64(1), "complex64 cannot be sent"),
    (np.str_("x"), "str_ cannot be sent; make it a str of it"),
    (np.longdouble(1), "longdouble cannot be sent"),
    (datetime.date(2020, 1, 1), "date cannot be sent"),
    (MASKED, "MaskedArray cannot be sent; make it an array by numpy.asarray, a mask as one of its own"),
    (np.zeros(2).view(Odd), "Odd cannot be sent; make it an array"),
    ({Tombstone("g", 1, "failed", "", "n", ()): 1}, "a Tombstone as a key cannot be sent"),
]


@pytest.mark.parametrize("within", [lambda x: (x,), lambda x: [x], lambda x: {"a": x}, lambda x: Parcel(inner=(x,))])
@pytest.mark.parametrize(("thing", "reason"), REFUSED, ids=lambda thing: type(thing).__name__)
def test_what_cannot_keep_its_type_is_refused_everywhere(thing: Any, reason: str, within: Callable[[Any], Any]) -> None:
    for body in (Parcel(inner=within(thing)), Bare(thing), Parcel(text=thing), Parcel(number=thing)):
        for send in (freeze, dump_value, parts_with):
            with pytest.raises(WireError, match=rf"cannot (send|be stored): (Parcel|Bare)\.\w+: .*{reason}"):
                send(body)


@dataclass(frozen=True)
class Bare(Message):
    thing: Int32 | None


def test_states_keep_their_types_too() -> None:
    state = {"queue": [1, (2, [Tombstone("g", 1, "failed", "", "n", ())])], "seen": MappingProxyType({"a": np.int8(1)})}
    assert same(load_value(dump_value(state)), state)
    with pytest.raises(WireError, match=r"cannot be stored: a value of type collections.Counter .* a dict of it"):
        dump_value({"counts": collections.Counter("a")})


def test_tuples_and_dicts_nest_only_so_deep() -> None:
    deep: Any = ()
    for _ in range(63):
        deep = (deep,)
    for send in (freeze, dump_value, parts_with):
        send(Parcel(inner=deep))
        with pytest.raises(WireError, match="more than 64 tuples and dicts"):
            send(Parcel(inner=(deep,)))
