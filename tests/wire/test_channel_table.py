"""Tables: a tuple of many messages arrives as it was sent, in few values, and costs its receiver what it was told."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgpack
import numpy as np
import pytest

from flowrl.errors import WireError
from flowrl.messages import Batch, Branch, Message, Trainable
from flowrl.wire.encoding.codec import (
    ARRAYS,
    DICTS,
    LEAST_ROWS,
    MESSAGES,
    NUMBERS,
    RECORDS,
    ROWS,
    SAME,
    TABLE_CODE,
    TEXTS,
    TUPLES,
    Decoder,
    Encoder,
    dump_value,
    load_message,
)
from flowrl.wire.encoding.cost import FLOOR_BYTES, PER_BYTE, weigh
from flowrl.wire.encoding.multiparts import DATA, NOTIFY, MessageDecoder, MessageEncoder, Refused
from flowrl.wire.encoding.schema import Envelope, schema_of
from tests.wire.test_channel_cost import multipart, sample
from tests.wire.test_channel_wire import equal


@dataclass(frozen=True)
class Leaf(Message):
    number: int
    weight: float = 0.5


@dataclass(frozen=True)
class Row(Message):
    any_value: Any = None
    text: str = ""
    array: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    leaves: tuple[Leaf, ...] = ()
    names: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Many(Message):
    rows: tuple[Any, ...]


SCALARS: list[Callable[[random.Random], Any]] = [
    lambda rng: None,
    lambda rng: rng.random() < 0.5,
    lambda rng: rng.randrange(-(2**63), 2**64),
    lambda rng: rng.choice((0.0, -0.0, float("nan"), float("inf"), rng.random())),
    lambda rng: rng.choice(("", "a", "计算", "\U0001f600" * 3)),
    lambda rng: rng.randbytes(3),
    lambda rng: np.float32(rng.random()),
    lambda rng: (1, 2.5, "c") * rng.randrange(3),
    lambda rng: [rng.randrange(9)] * rng.randrange(3),
    lambda rng: MappingProxyType({"a": rng.randrange(9)}),
    lambda rng: Leaf(rng.randrange(9)),
    lambda rng: np.arange(rng.randrange(5), dtype=np.float64),
]
ARRAY_KINDS: list[Callable[[random.Random], Any]] = [
    lambda rng: np.arange(rng.randrange(9), dtype=np.int32),
    lambda rng: np.zeros((2, rng.randrange(3))),
    lambda rng: np.ones(rng.randrange(3000), np.bool_)[::2],
    lambda rng: np.float64([rng.random()]),
    lambda rng: np.array(rng.random()),
]


def made(rng: random.Random, number: int) -> tuple[Row, ...]:
    """Rows whose fields are of one kind, or of many."""
    kinds = [rng.sample(SCALARS, rng.choice((1, 1, 3))) for _ in range(2)]
    arrays = rng.sample(ARRAY_KINDS, rng.choice((1, 1, 2)))
    keys = [("a", "b"), ("b", "a"), ()][: rng.choice((1, 3))]
    return tuple(
        Row(
            rng.choice(kinds[0])(rng),
            rng.choice(("", "x", "é" * rng.randrange(5))),
            rng.choice(arrays)(rng),
            tuple(Leaf(rng.randrange(3)) for _ in range(rng.randrange(3))),
            {key: rng.choice(kinds[1])(rng) for key in rng.choice(keys)},
        )
        for _ in range(number)
    )


class Shared:
    """Stands for the shared memory of a sender: all arrays of 4 KB and more are put there."""

    def __init__(self) -> None:
        self.blocks: dict[bytes, bytes] = {}

    def __call__(self, array: np.ndarray[Any, Any]) -> bytes | None:
        if array.nbytes < 4096:
            return None
        address = len(self.blocks).to_bytes(8, "big")
        self.blocks[address] = array.tobytes()
        return address

    def take_back(self, address: bytes) -> None:
        del self.blocks[address]

    def attach(self, address: bytes, num_bytes: int) -> np.ndarray[Any, Any]:
        return np.frombuffer(self.blocks[address], np.uint8)[:num_bytes]


def through(message: Message, place: Shared | None = None) -> Message:
    """The message as it comes out of the wire, its large arrays in shared memory if there is a `place` for them."""
    encoder = MessageEncoder("A", 0, place)
    encoder.add([(DATA, 1, 0, 0, [Envelope(bytes(16), body=message)])])
    decoder = MessageDecoder(place.attach if place else None)
    (frame,) = [one for parts in encoder.multiparts() for one in decoder.decode([bytes(part) for part in parts])]
    assert not isinstance(frame, Refused), frame.reason
    found: Message = frame[4][0].body
    return found


def same(first: Any, second: Any) -> bool:
    """Equal with all types, signs of zero, and dtypes; NaN equals NaN."""
    if type(first) is not type(second):
        return False
    if isinstance(first, Message):
        values = schema_of(type(first)).values
        return same(values(first), values(second))
    if isinstance(first, tuple | list):
        return len(first) == len(second) and all(map(same, first, second))
    if isinstance(first, dict | MappingProxyType):
        return same(list(first.items()), list(second.items()))
    if isinstance(first, np.ndarray):
        return first.dtype == second.dtype and first.shape == second.shape and first.tobytes() == second.tobytes()
    return repr(first) == repr(second)


@pytest.mark.parametrize("seed", range(60))
def test_what_arrives_is_what_was_sent(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    message = Many(made(rng, rng.choice((1, LEAST_ROWS - 1, LEAST_ROWS, 300))))
    assert same(through(message), message)
    assert same(load_message(dump_value(message)), message), "what is stored has names and no tables"


def test_messages_of_two_classes_are_no_table() -> None:
    rows = (*(Leaf(n) for n in range(LEAST_ROWS)), Row())
    assert same(through(Many(rows)), Many(rows))
    assert TABLE_CODE not in codes(Many(rows)) and TABLE_CODE in codes(Many(rows[:-1]))


def codes(message: Message) -> set[int]:
    """Extensions in the body of a message, at its first level."""
    encoder = Encoder()
    found: set[int] = set()
    body = encoder.pack(schema_of(type(message)).take_apart(None, message, encoder.carry_value))
    msgpack.unpackb(body, ext_hook=lambda code, data: found.add(code), strict_map_key=False)
    return found


def test_arrays_are_read_only_at_both_ends_and_keep_their_dtype() -> None:
    message = Many(tuple(Row(array=np.arange(n % 4, dtype=np.int16)) for n in range(100)))
    found = through(message)
    assert isinstance(found, Many)
    for sent, arrived in zip(message.rows, found.rows, strict=True):
        assert not sent.array.flags.writeable and not arrived.array.flags.writeable and arrived.array.flags.aligned
        assert arrived.array.dtype == np.int16 and arrived.array.tolist() == sent.array.tolist()
    assert found.rows[0].names is not found.rows[1].names, "dicts are not shared"


def test_a_text_that_cannot_be_sent_is_named() -> None:
    with pytest.raises(WireError, match=r"Many\.rows: .*surrogate"):
        through(Many(tuple(Row(text="\ud800") for _ in range(LEAST_ROWS))))
    with pytest.raises(WireError, match="cannot be sent; make it a sorted tuple"):
        through(Many(tuple(Row({1}) for _ in range(LEAST_ROWS))))


@pytest.mark.parametrize(("number", "tokens", "branches"), [(16_000, 24, 0), (4_000, 2_048, 0), (3_000, 300, 3)])
def test_a_large_batch_is_one_message(number: int, tokens: int, branches: int) -> None:
    """One by one the samples of all three were refused, for their values or for the bytes of their body."""

    def one(index: int) -> Trainable:
        whole = sample(index, tokens)
        ids = whole.token_ids
        branch = Branch(ids, whole.policy_mask, whole.behavior_logprobs, whole.versions)
        object.__setattr__(whole, "branches", (branch,) * branches)
        return whole

    batch = Batch(tuple(map(one, range(number))), ((0, 1),), number, 1, 1)
    found = through(batch)
    assert isinstance(found, Batch) and len(found.samples) == number
    for at in (0, 1, number // 2, number - 1):
        assert equal(found.samples[at], batch.samples[at])
    body = Encoder().pack(schema_of(Batch).take_apart("", batch, Encoder().carry_value)) if tokens == 24 else b""
    assert not body or weigh(body, deep=True).num_values < 300


def batch_of(number: int, tokens: int, **fields: Any) -> Batch:
    samples = tuple(sample(n, tokens) for n in range(number))
    for one in samples:
        for name, value in fields.items():
            object.__setattr__(one, name, value(one) if callable(value) else value)
    return Batch(samples, ((0, 1),), number, 1, 1)


LARGE: dict[str, Callable[[], Message]] = {
    "samples of one token": lambda: batch_of(4_000, 1),
    "long texts": lambda: batch_of(4_000, 8, response_text=lambda one: one.sample_id + "word " * 1_600),
    "long texts in another alphabet": lambda: batch_of(
        1_000, 8, response_text=lambda one: one.sample_id + "数" * 9_000
    ),
    "rewards by turn": lambda: batch_of(4_000, 8, turn_rewards=tuple((turn, 0.5) for turn in range(20))),
    "nothing but equal values": lambda: Many(tuple(Leaf(7) for _ in range(40_000))),
    "a table beside a larger array": lambda: Many((tuple(Leaf(7) for _ in range(4_000)), np.zeros(1 << 20))),
    "two tables": lambda: Many((tuple(Leaf(7) for _ in range(4_000)), tuple(Row(np.zeros(4_000)) for _ in range(32)))),
}


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("name", LARGE)
def test_what_a_table_saves_in_bytes_does_not_make_it_too_costly(name: str, shared: bool) -> None:
    """A receiver allows so much memory for each byte: a table brings as many bytes as what is made of it needs."""
    message = LARGE[name]()
    assert same(through(message, Shared() if shared else None), message)


@pytest.mark.parametrize("number", [40, 300, 3_000])
def test_notes_with_tables_share_a_multipart_if_they_fit(number: int) -> None:
    encoder = MessageEncoder("A", 0)
    encoder.add([(NOTIFY, 0, 0, n, ("kind", Many(tuple(Leaf(7) for _ in range(number))))) for n in range(30)])
    frames = [one for parts in encoder.multiparts() for one in MessageDecoder().decode([bytes(part) for part in parts])]
    assert len(frames) == 30 and all(not isinstance(one, Refused) and one[4][0] == "kind" for one in frames)


@pytest.mark.parametrize("keys", [(1, True), (1, 1.0), (1, np.int64(1)), ("a", 1)])
def test_keys_keep_their_types(keys: tuple[Any, ...]) -> None:
    message = Many(tuple(Row({keys[n % 2]: n}) for n in range(100)))
    assert same(through(message), message)


def test_values_one_by_one_are_counted_too() -> None:
    """Columns of two types go in rows, whose values the receiver reads one by one."""

    def rows(number: int) -> Many:
        values = ({str(k): (None, 0.5)[(n + k) % 2] for k in range(40)} for n in range(number))
        return Many(tuple(Row(names=one) for one in values))

    assert same(through(rows(3_000)), rows(3_000))
    with pytest.raises(WireError, match="more than 150000 values"):
        through(rows(4_000))


def test_nested_values_are_bounded_in_a_table_as_outside() -> None:
    value: Any = 1
    for _ in range(64):
        value = (value, "a")
    for number in (3, 40):
        with pytest.raises(WireError, match="nested in more than 64"):
            through(Many(tuple(Row((value, n)) for n in range(number))))


def test_only_arrays_of_a_table_pay_for_it() -> None:
    """The receiver meets an array behind the table only when the table is made."""
    message = Many((tuple({} for _ in range(3_000)), tuple(Leaf(7) for _ in range(4_000)), np.zeros(1 << 20)))
    assert same(through(message, Shared()), message)


@pytest.mark.parametrize("number", [140_000, 160_000])
def test_more_values_than_a_receiver_reads_are_refused_by_the_sender(number: int) -> None:
    message = Many(tuple(float(n) for n in range(number)))
    if number < 150_000:
        assert same(through(message), message)
    else:
        with pytest.raises(WireError, match="more than 150000 values"):
            through(message)


@pytest.mark.parametrize("number", [LEAST_ROWS, 700, 16_000])
def test_what_lies_in_shared_memory_counts_as_received(number: int) -> None:
    """Else the receiver refused what the sender had sent: the arrays are not in the multipart."""
    shared = Shared()
    batch = batch_of(number, 24)
    assert same(through(batch, shared), batch) and bool(shared.blocks) == (number > LEAST_ROWS)


# What a peer may send


def column(values: Any) -> tuple[Any, ...]:
    return Encoder().make_column(values)


LEAF = schema_of(Leaf).hash
FOUR = np.arange(4, dtype=np.int64)
LENGTHS = np.ones(4, np.int64)
WRONG: dict[str, tuple[Any, Any]] = {
    "no messages": (4, (SAME, 0)),
    "an unknown form": (4, (9, 0)),
    "a form that is no number": (4, ("a", 0)),
    "no column": (4, 7),
    "an empty column": (4, ()),
    "an unknown schema": (4, (MESSAGES, 1, (SAME, 0), (SAME, 0))),
    "a field too few": (4, (MESSAGES, LEAF, (SAME, 0))),
    "a field too many": (4, (MESSAGES, LEAF, (SAME, 0), (SAME, 0), (SAME, 0))),
    "numbers of another length": (5, (MESSAGES, LEAF, (NUMBERS, 1, FOUR), (SAME, 0))),
    "numbers of another type": (4, (MESSAGES, LEAF, (NUMBERS, 2, FOUR), (SAME, 0))),
    "numbers of no type": (4, (MESSAGES, LEAF, (NUMBERS, 7, FOUR), (SAME, 0))),
    "numbers that are none": (4, (MESSAGES, LEAF, (NUMBERS, 1, "1234"), (SAME, 0))),
    "rows too few": (4, (MESSAGES, LEAF, (ROWS, (1, 2)), (SAME, 0))),
    "negative lengths": (4, (MESSAGES, LEAF, (ARRAYS, FOUR, np.array([9, -5, 0, 0])), (SAME, 0))),
    "lengths of more than there is": (4, (MESSAGES, LEAF, (ARRAYS, FOUR, LENGTHS * 9), (SAME, 0))),
    "lengths that are too many": (4, (MESSAGES, LEAF, (ARRAYS, FOUR, np.ones(9, np.int64)), (SAME, 0))),
    "an array of two axes": (4, (MESSAGES, LEAF, (ARRAYS, np.ones((2, 2)), LENGTHS), (SAME, 0))),
    "text that is none": (4, (MESSAGES, LEAF, (TEXTS, np.full(4, 255, np.uint8), LENGTHS), (SAME, 0))),
    "tuples of negative length": (4, (MESSAGES, LEAF, (TUPLES, -LENGTHS, (SAME, 0)), (SAME, 0))),
    "keys without columns": (4, (MESSAGES, LEAF, (DICTS, ("a",)), (SAME, 0))),
    "a value that all would share": (4, (MESSAGES, LEAF, (SAME, {}), (SAME, 0))),
    "a negative number": (-1, (MESSAGES, LEAF, (SAME, 0), (SAME, 0))),
    "no number": ("4", (MESSAGES, LEAF, (SAME, 0), (SAME, 0))),
    "a number of numpy": (np.uint32(1 << 28), (MESSAGES, LEAF, (SAME, 0), (SAME, None))),
    "columns by the thousand": (2_000, (MESSAGES, LEAF, *[(SAME, None)] * 5_000)),
    "an array for a column": (4, np.arange(4)),
    "an array for a field": (4, (MESSAGES, LEAF, np.arange(4), (SAME, 0))),
    "records of another length": (4, (MESSAGES, LEAF, (RECORDS, 2, (SAME, 0)), (SAME, 0))),
    "records of no length": (4, (MESSAGES, LEAF, (RECORDS, 0), (SAME, 0))),
    "half a message": (0.5, (MESSAGES, LEAF, (SAME, 0), (SAME, 0))),
}


def note(number: Any, table: Any) -> bytes:
    """A note of a table, as nobody's encoder makes it."""
    encoder = Encoder(beside=False)
    body = msgpack.packb(("kind", msgpack.ExtType(TABLE_CODE, encoder.pack((number, table)))))
    return multipart(body)


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_table_is_refused(name: str) -> None:
    good = note(4, (MESSAGES, LEAF, (NUMBERS, 1, FOUR), (SAME, 0.5)))
    (frame,) = MessageDecoder().decode([good])
    assert not isinstance(frame, Refused) and same(frame[4][1], tuple(Leaf(n) for n in range(4)))
    (frame,) = MessageDecoder().decode([note(*WRONG[name])])
    assert isinstance(frame, Refused) or isinstance(frame[4][0], str), frame
    assert "kind" not in str(frame[4][0] if not isinstance(frame, Refused) else ""), frame


HUGE = 1 << 33
BOMBS: dict[str, Any] = {
    "messages of nothing": (HUGE, (MESSAGES, LEAF, (SAME, 0), (SAME, 0))),
    "many messages of nothing": (100_000, (MESSAGES, LEAF, (SAME, 0), (SAME, 0))),
    "tuples of nothing": (1, (MESSAGES, LEAF, (TUPLES, np.array([HUGE]), (SAME, 0)), (SAME, 0))),
    "dicts of nothing": (1, (MESSAGES, LEAF, (TUPLES, np.array([HUGE]), (DICTS, ())), (SAME, 0))),
    "empty arrays": (
        1,
        (MESSAGES, LEAF, (TUPLES, np.array([90_000]), (ARRAYS, np.zeros(0), np.zeros(90_000, np.int64))), (SAME, 0)),
    ),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_table_is_paid_for_before_it_is_made(name: str) -> None:
    first = note(*BOMBS[name])
    decoder = MessageDecoder()
    decoder.decode([note(4, (MESSAGES, LEAF, (NUMBERS, 1, FOUR), (SAME, 0.5)))])
    tracemalloc.start()
    try:
        (frame,) = decoder.decode([first])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2 * FLOOR_BYTES + PER_BYTE * len(first)
    if name != "empty arrays":
        assert isinstance(frame, Refused) or frame[4][0] != "kind"


def test_what_is_paid_is_at_least_what_it_takes() -> None:
    packer = Encoder()
    batch = tuple(sample(n, 24) for n in range(2_000))
    packer.make_column(batch)
    encoder = MessageEncoder("A", 0)
    encoder.add([(NOTIFY, 0, 0, 0, ("kind", Many(batch)))])
    multiparts = [[bytes(part) for part in parts] for parts in encoder.multiparts()]
    tracemalloc.start()
    try:
        frames = [frame for parts in multiparts for frame in MessageDecoder().decode(parts)]
        taken = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    paid = packer.tables_cost + packer.tables_bulk
    assert len(frames) == 1 and 0.5 * paid < taken < paid


def test_columns_are_of_values_of_one_type() -> None:
    assert column([1, 2])[0] == NUMBERS and column([1, 2.0])[0] == ROWS and column([2**64 - 1, 0])[0] == ROWS
    assert column(["a", "a"])[0] == SAME and column([0.0, 0.0])[0] == NUMBERS and column([True, 1])[0] == ROWS


def test_what_is_not_from_a_peer_is_not_paid_for() -> None:
    encoder = Encoder(beside=False)
    found = Decoder().unpack(encoder.pack(Many(tuple(sample(n, 3) for n in range(40)))))
    assert isinstance(found, Many) and len(found.rows) == 40 and encoder.tables_cost > 40 * 1000
