"""What decoding costs is bounded by what was received; what costs more is refused, and by its sender already."""

from __future__ import annotations

import random
import struct
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import msgpack
import numpy as np
import pytest

from flowrl.errors import WireError
from flowrl.messages import Batch, Message, Trainable
from flowrl.wire.encoding import cost
from flowrl.wire.encoding.codec import Encoder
from flowrl.wire.encoding.cost import FLOOR_BYTES, MOST_TEXT_BYTES, MOST_VALUES, PER_BYTE, weigh
from flowrl.wire.encoding.multiparts import (
    CREDIT,
    DATA,
    HEADER,
    MAGIC,
    MAX_FRAMES,
    MAX_PARTS,
    NOTIFY,
    PREAMBLE,
    WIRE_VERSION,
    Frame,
    MessageDecoder,
    MessageEncoder,
    Refused,
)
from flowrl.wire.encoding.schema import Envelope, source_id
from tests.wire.test_channel_wire import Parcel, equal

PREAMBLE_BYTES = PREAMBLE.pack(MAGIC, WIRE_VERSION, 0, 0, 1) + b"A"
KIND = b"\x92" + msgpack.packb("statistics")
HEADERS = 900
"""msgpack takes 1,024 containers within each other."""


def multipart(body: bytes) -> bytes:
    """A note with this body."""
    return PREAMBLE_BYTES + HEADER.pack(NOTIFY, 0, 0, 0, 0, 0, len(body)) + body


def array(items: list[bytes]) -> bytes:
    return struct.pack(">BI", 0xDD, len(items)) + b"".join(items)


def many(item: bytes, size: int) -> bytes:
    return array([item] * (size // len(item)))


def in_short_arrays(item: bytes, size: int) -> bytes:
    """Arrays that are short enough to be decoded without being weighed."""
    inner = struct.pack(">BH", 0xDC, 200) + item * 200
    outer = struct.pack(">BH", 0xDC, 200) + inner * 200
    return many(outer, max(size, len(outer)))


def ext(code: int, data: bytes) -> bytes:
    return bytes(msgpack.packb(msgpack.ExtType(code, data)))


SMALLEST_ARRAY = ext(1, struct.pack("<BBxxxxxxB", 1, 0, 5))
BOMBS: dict[str, Callable[[int], bytes]] = {
    "empty dicts": lambda size: many(b"\x80", size),
    "dicts of one": lambda size: many(b"\x81\0\0", size),
    "tuples of one": lambda size: many(b"\x91\0", size),
    "negative integers": lambda size: many(b"\xe0", size),
    "negative integers in short tuples": lambda size: in_short_arrays(b"\xe0", size),
    "dicts in short tuples": lambda size: in_short_arrays(b"\x80", size),
    "texts in short tuples": lambda size: in_short_arrays(b"\xa2ab", size),
    "lists in short tuples": lambda size: in_short_arrays(ext(5, b"\x90"), size),
    "short texts": lambda size: many(b"\xa2ab", size),
    "arrays": lambda size: many(SMALLEST_ARRAY, size),
    "numpy numbers": lambda size: many(ext(7, b"\x01\x05"), size),
    "lists": lambda size: many(ext(5, b"\x90"), size),
    "read-only mappings": lambda size: many(ext(6, b"\x80"), size),
    "longer than it is": lambda size: struct.pack(">BI", 0xDD, 2**32 - 1) + bytes(size),
    "a mapping longer than it is": lambda size: struct.pack(">BI", 0xDF, 2**31) + bytes(size),
    "arrays within each other, all too long": lambda size: struct.pack(">BI", 0xDD, size) * HEADERS + bytes(size),
    "short arrays within each other": lambda size: struct.pack(">BH", 0xDC, 256) * HEADERS + bytes(size),
    "text beside integers": lambda size: array([bytes(msgpack.packb("a" * (size // 2))), many(b"\xe0", size // 2)]),
}


@pytest.mark.parametrize("name", BOMBS)
def test_what_costs_more_than_its_bytes_allow_is_refused_before_it_costs_that(name: str) -> None:
    first = multipart(KIND + BOMBS[name](600_000))
    frame, peak = decoded(first)
    assert cost.ADVICE in refusal(frame)
    assert peak < FLOOR_BYTES + PER_BYTE * len(first)


@pytest.mark.parametrize("size", [300, 20_000, 100_000])
@pytest.mark.parametrize("name", BOMBS)
def test_smaller_ones_cost_no_more_than_they_may(name: str, size: int) -> None:
    first = multipart(KIND + BOMBS[name](size))
    _, peak = decoded(first)
    assert peak < 2 * FLOOR_BYTES + PER_BYTE * len(first)


def decoded(first: bytes) -> tuple[Any, int]:
    """The one frame, and the most memory that decoding it took."""
    decoder = MessageDecoder()
    decoder.decode([multipart(KIND + b"\x01")])
    tracemalloc.start()
    try:
        (frame,) = decoder.decode([first])
        return frame, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def refusal(frame: Any) -> str:
    """Why a frame was refused, "" if it was not. A note's number counts, so a note of another kind stands for it."""
    if isinstance(frame, Refused):
        return frame.reason
    return str(frame[4][0]) if frame[0] == NOTIFY and frame[4][0] not in ("statistics", "kind") else ""


def test_text_is_bounded_by_itself() -> None:
    for text in ("a" * (MOST_TEXT_BYTES - 100), "\U0001f600" * (MOST_TEXT_BYTES // 4 - 25)):
        ((_, _, _, _, (_, found)),) = MessageDecoder().decode([multipart(KIND + msgpack.packb(text))])  # type: ignore[misc]
        assert found == text
    with pytest.raises(WireError, match=f"more than {MOST_TEXT_BYTES} bytes of text"):
        encoded((NOTIFY, 0, 0, 0, ("text", "a" * (MOST_TEXT_BYTES + 1))))


@pytest.mark.parametrize("beside", [0, 1])
def test_a_message_with_more_text_than_a_receiver_takes_is_refused_by_its_sender(beside: int) -> None:
    """The allowance for its bytes would be enough, so that nothing else makes the sender count the text."""
    long = replace(sample(0, 4), columns={"inputs": "a" * (MOST_TEXT_BYTES + 1)})
    frames = [
        (DATA, 1, 0, n, [Envelope(bytes(16), body=one)]) for n, one in enumerate([sample(1, 4)] * beside + [long])
    ]
    with pytest.raises(WireError, match=f"more than {MOST_TEXT_BYTES} bytes of text"):
        encoded(*frames)  # type: ignore[arg-type]
    (short,) = encoded((DATA, 1, 0, 0, [Envelope(bytes(16), body=replace(long, columns={"inputs": "a" * (7 << 20)}))]))
    (frame,) = MessageDecoder().decode(short)
    assert not isinstance(frame, Refused)


def encoded(*frames: Frame) -> list[list[bytes]]:
    encoder = MessageEncoder("A", 0)
    encoder.add(frames)
    return [[bytes(part) for part in parts] for parts in encoder.multiparts()]


def sample(index: int, tokens: int) -> Trainable:
    ids = np.arange(tokens, dtype=np.int32)
    return Trainable(
        f"s{index}", f"g{index}", "p", 0, 0, 8, "a prompt", "an answer", ids, ids > 3, ids.astype(np.float32), ids, 3,
        False, "generator/0", columns={"answer": "2"}, metrics={"a": 0.5}, advantages=ids.astype(np.float32),
    )  # fmt: skip


LANES = {f"generator/{n}.rollouts -> reward/{n % 7}.rollouts": dict.fromkeys("abcdefgh", n + 0.5) for n in range(3000)}
LEGAL: dict[str, Callable[[], Any]] = {
    "a page of a snapshot in bytes": lambda: [("generator/0", "edge", bytes([n]) * (1 << 20)) for n in range(64)],
    "statistics of 3,000 lanes": lambda: LANES,
    "ids of 40,000 messages": lambda: [source_id("s", str(n)) for n in range(40_000)],
    "140,000 integers": lambda: tuple(range(-70_000, 70_000)),
    "20,000 events": lambda: [("scored", f"sample {n}", 0.5, 1.7e9 + n) for n in range(20_000)],
    "one large batch": lambda: Batch(tuple(sample(n, 3000) for n in range(1500)), ((0, 1),), 1500, 1, 1),
    "a large batch of short samples": lambda: Batch(tuple(sample(n, 100) for n in range(3000)), (), 3000, 1, 1),
    "64 MB of an array": lambda: Parcel(inner=(np.zeros(1 << 23),)),
}


@pytest.mark.parametrize("name", LEGAL)
def test_what_is_large_and_made_of_larger_things_passes(name: str) -> None:
    body = LEGAL[name]()
    frame: Frame = (NOTIFY, 0, 0, 0, ("kind", body))
    if isinstance(body, Message):
        frame = (DATA, 1, 0, 0, [Envelope(bytes(16), body=body)])
    (parts,) = encoded(frame)
    (found,) = MessageDecoder().decode(parts)
    assert refusal(found) == ""
    assert equal(found[4][0].body if isinstance(body, Message) else found[4][1], body)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (Parcel(inner=tuple({} for _ in range(50_000))), "16 bytes of memory per byte"),
        (Parcel(inner=tuple(range(MOST_VALUES))), f"more than {MOST_VALUES} values; store numbers in numpy arrays"),
        (Parcel(inner=tuple(tuple(Parcel() for _ in range(20)) for _ in range(250))), "16 bytes of memory per byte"),
    ],
)
def test_the_sender_hears_of_what_its_receiver_would_refuse(body: Message, reason: str) -> None:
    good = Envelope(bytes(16), body=Parcel(text="good"))
    encoder = MessageEncoder("A", 0)
    encoder.add([(DATA, 1, 0, 0, [good])])
    with pytest.raises(WireError, match=reason):
        encoder.add([(DATA, 1, 0, 1, [Envelope(bytes(16), body=body)])])
    with pytest.raises(WireError, match=reason):
        encoder.add([(NOTIFY, 0, 0, 0, ("kind", body))])
    encoder.add([(DATA, 1, 0, 1, [good])])
    found = [frame for parts in encoder.multiparts() for frame in MessageDecoder().decode([bytes(p) for p in parts])]
    assert [(frame[3], len(frame[4])) for frame in found if not isinstance(frame, Refused)] == [(0, 1), (1, 1)]


THINGS: list[Callable[[random.Random], Any]] = [
    lambda rng: {},
    lambda rng: ({"a": 1},) * rng.randrange(60),
    lambda rng: [[rng.random()], [[]]] * rng.randrange(9),
    lambda rng: tuple(range(rng.randrange(400))),
    lambda rng: "\u00e9" * rng.randrange(3000),
    lambda rng: rng.randbytes(rng.randrange(20_000)),
    lambda rng: np.zeros(rng.randrange(9000)),
    lambda rng: (np.float64(1), np.zeros(3), Parcel(values=np.zeros(5, np.int32))) * rng.randrange(9),
    lambda rng: tuple(Parcel(text="a" * rng.randrange(3)) for _ in range(rng.randrange(90))),
    lambda rng: (Parcel(),) * rng.randrange(90),
]


@pytest.mark.parametrize("seed", range(8))
def test_whatever_a_sender_takes_its_receiver_takes_whatever_it_came_with(seed: int) -> None:
    rng = random.Random(seed)
    favourites = rng.sample(THINGS, 3)
    frames: list[Frame] = []
    for seq in range(rng.choice((10, 300, 3000))):
        thing = rng.choice(favourites)(rng)
        body = [Envelope(source_id("s", str(seq)), body=Parcel(inner=(thing,) * rng.randrange(3)))]
        frames.append((DATA, rng.randrange(1, 3), 0, seq, body))
        if rng.random() < 0.1:
            frames.append((CREDIT, 3, 0, seq, None))
            frames.append((NOTIFY, 0, 0, 0, ("kind", [thing] * rng.randrange(9))))
    found = [frame for parts in encoded(*frames) for frame in MessageDecoder().decode(parts)]
    assert {*map(refusal, found)} == {""}
    sent = [envelope for frame in frames if frame[0] == DATA for envelope in frame[4]]
    received = [envelope for frame in found if frame[0] == DATA for envelope in frame[4]]  # type: ignore[index]
    assert [(e.id, len(e.body.inner)) for e in received] == [(e.id, len(e.body.inner)) for e in sent]  # type: ignore[attr-defined]
    assert len(found) >= len(frames) / 256


@dataclass(frozen=True)
class Flat(Message):
    """Nothing in it needs counting beside the message itself."""

    number: int


@pytest.mark.parametrize("num_between", [0, 1, 700, 2300])
def test_small_messages_that_join_a_record_are_counted_too(num_between: int) -> None:
    """They are cheap one by one, and `num_between` of them stand between costly ones."""
    bodies: list[Message] = []
    for _ in range(6):
        bodies += [*[Flat(1)] * num_between, Parcel(inner=({"a": 1},) * 200)]
    bodies += [Flat(2)] * 3000
    envelopes = [Envelope(source_id("s", str(seq)), body=body) for seq, body in enumerate(bodies)]
    frames: list[Frame] = [(DATA, 1, 0, 0, envelopes), (CREDIT, 3, 0, 1, None)]
    multiparts = encoded(*frames)
    found = [frame for parts in multiparts for frame in MessageDecoder().decode(parts)]
    assert {*map(refusal, found)} == {""}
    assert [e.id for frame in found if frame[0] == DATA for e in frame[4]] == [e.id for e in envelopes]  # type: ignore[index]
    assert len(envelopes) / MAX_FRAMES < len(multiparts) < len(envelopes) / 200


def test_a_costly_message_can_share_a_multipart_with_earlier_arrays() -> None:
    costly = Parcel(inner=({"a": 1},) * 4000)
    assert len(encoded((DATA, 1, 0, 0, [Envelope(bytes(16), body=costly), Envelope(bytes(16), body=costly)]))) == 2
    bodies = [Parcel(values=np.zeros(1 << 18, np.int32)), costly]
    (parts,) = encoded((DATA, 1, 0, 0, [Envelope(source_id("s", str(n)), body=b) for n, b in enumerate(bodies)]))
    frames = MessageDecoder().decode(parts)
    assert [equal(e.body, b) for f in frames for e, b in zip(f[4], bodies, strict=True)] == [True, True]  # type: ignore[index]


def test_a_multipart_has_so_many_frames_and_parts() -> None:
    credit: Frame = (CREDIT, 1, 0, 5, None)
    assert [len(MessageDecoder().decode(parts)) for parts in encoded(*[credit] * (MAX_FRAMES + 1))] == [MAX_FRAMES, 1]
    record = HEADER.pack(CREDIT, 1, 0, 5, 0, 0, 0)
    found = MessageDecoder().decode([PREAMBLE_BYTES + record * (MAX_FRAMES + 1)])
    assert found[:-1] == [credit] * MAX_FRAMES and f"more than {MAX_FRAMES} frames" in str(found[-1][4])  # type: ignore[index]
    with pytest.raises(WireError, match=f"more than {MAX_FRAMES} frames"):
        MessageDecoder().decode([PREAMBLE_BYTES + record * 100_000])
    (refused,) = MessageDecoder().decode([multipart(KIND + b"\x01"), *[b""] * (MAX_PARTS + 1)])
    assert f"with {MAX_PARTS + 1} arrays" in refusal(refused)


def test_one_costly_body_is_refused_and_the_frames_before_it_are_not() -> None:
    credit = HEADER.pack(CREDIT, 1, 0, 5, 0, 0, 0)
    bomb = KIND + many(b"\x80", 1_000_000)
    first, refused = MessageDecoder().decode(
        [PREAMBLE_BYTES + credit + HEADER.pack(NOTIFY, 0, 0, 0, 0, 0, len(bomb)) + bomb]
    )
    assert first == (CREDIT, 1, 0, 5, None) and refusal(refused)


def test_a_weight_is_no_less_than_what_is_made() -> None:
    rng = random.Random(0)
    for _ in range(100):
        value = [rng.choice((1.5, -9, 2**63, "ab", "\u00e9" * 9, b"xyz", {1: 2}, (1,), None)) for _ in range(2000)]
        body = Encoder().pack(value)
        tracemalloc.start()
        msgpack.unpackb(body, use_list=False, strict_map_key=False)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert weigh(body).num_bytes >= peak - 2000


@pytest.mark.parametrize("end", range(1, 40))
def test_what_is_weighed_may_be_cut_off_anywhere(end: int) -> None:
    things = [Parcel(inner=(np.zeros(2),)), "a text of more than 31 characters", b"bytes", 2**40, 1.5]
    body = KIND + Encoder().pack([*range(300), *things])
    (whole,) = MessageDecoder().decode([multipart(body)])
    assert refusal(whole) == ""
    (refused,) = MessageDecoder().decode([multipart(body[:-end])])
    assert refusal(refused)


def test_one_multipart_does_not_pay_for_another() -> None:
    decoder = MessageDecoder()
    for _ in range(2):
        assert refusal(decoder.decode([multipart(KIND + many(b"\x80", 600_000))])[0])
        assert refusal(decoder.decode([multipart(KIND + many(b"\x01", 1000))])[0]) == ""
        assert refusal(decoder.decode([multipart(KIND + many(b"\x01", 100_000))])[0]) == ""
