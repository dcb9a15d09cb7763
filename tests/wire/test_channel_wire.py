"""Bodies, frames and stored messages: what travels, what is refused, and what a file survives."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from flowrl.errors import SchemaError, WireError
from flowrl.messages import Group, Int32, Message, Prompt, Tombstone, Trainable
from flowrl.messages import base as message_base
from flowrl.wire.encoding import codec, multiparts, schema
from flowrl.wire.encoding.codec import FORMAT, dump_value, load_message, load_value
from flowrl.wire.encoding.multiparts import (
    ABORT,
    ACK,
    BYE,
    CANCEL,
    CLOSE,
    CREDIT,
    DATA,
    ERROR,
    HELLO,
    NOTIFY,
    RECORD_BYTES,
    REFUSE,
    RELEASE,
    REQUEST,
    RESEND,
    SYNC,
    Frame,
    MessageDecoder,
    MessageEncoder,
    Refused,
)
from flowrl.wire.encoding.schema import (
    DTYPES,
    INLINE_LIMIT_BYTES,
    MAX_DEPTH,
    Envelope,
    freeze,
    message_id,
    payload_bytes,
    source_id,
)


@dataclass(frozen=True)
class Parcel(Message):
    number: int = 0
    text: str = ""
    inner: tuple[Any, ...] = ()
    columns: Mapping[str, Any] = field(default_factory=dict)
    values: Int32 = field(default_factory=lambda: np.zeros(0, np.int32))


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return bool(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes())
    if isinstance(a, Message):
        return type(a) is type(b) and equal(shallow(a), shallow(b))
    if isinstance(a, tuple | list):
        return isinstance(b, tuple | list) and len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, Mapping):
        return isinstance(b, Mapping) and list(a) == list(b) and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, float):
        return a == b or (a != a and b != b)
    return type(a) is type(b) and a == b


def shallow(message: Message) -> tuple[Any, ...]:
    return schema.schema_of(type(message)).values(message)


def there_and_back(*bodies: Message) -> list[Envelope]:
    encoder, decoder = MessageEncoder("host", 3), MessageDecoder()
    sent = [Envelope(source_id("s", str(i)), i, "group", i, body) for i, body in enumerate(bodies)]
    encoder.add([(DATA, 7, 1, i, [envelope]) for i, envelope in enumerate(sent)])
    parts = [bytes(part) for part in encoder.take()]
    assert decoder.sender(parts[0]) == ("host", 3)
    frames = list(decoder.decode(parts))
    received: list[Envelope] = []
    for kind, lane, session, seq, envelopes in frames:  # type: ignore[misc]
        assert (kind, lane, session, seq) == (DATA, 7, 1, len(received))
        received += envelopes
    for before, after in zip(sent, received, strict=True):
        assert (after.id, after.ticket, after.group_id, after.member) == (
            before.id,
            before.ticket,
            before.group_id,
            before.member,
        )
    return received


arrays = st.sampled_from(DTYPES).flatmap(
    lambda dtype: npst.arrays(dtype, npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5))
)
scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary()
parcels = st.deferred(
    lambda: st.builds(
        Parcel,
        number=st.integers(-(2**63), 2**63),
        text=st.text(),
        inner=st.lists(values, max_size=3).map(tuple),
        columns=st.dictionaries(st.text(max_size=5), values, max_size=3),
        values=npst.arrays(np.int32, st.integers(0, 50)),
    )
)
values: st.SearchStrategy[Any] = st.deferred(lambda: scalars | arrays | parcels)


@given(st.lists(parcels, min_size=1, max_size=3))
@settings(max_examples=200, deadline=None)
def test_messages_arrive_as_they_left(bodies: list[Parcel]) -> None:
    for before, after in zip(bodies, there_and_back(*bodies), strict=True):
        assert equal(before, after.body)


@given(parcels)
@example(Parcel(columns={"\0type": None, "a": {"\0type": "Prompt"}}))  # a mapping that looks like a message
@settings(max_examples=100, deadline=None)
def test_stored_messages_come_back(body: Parcel) -> None:
    assert equal(body, load_message(dump_value(body)))


def test_large_arrays_travel_beside_the_body_and_small_ones_inside() -> None:
    small, large = np.arange(10), np.arange(INLINE_LIMIT_BYTES)
    encoder = MessageEncoder("h", 0)
    encoder.add([(DATA, 1, 0, 0, [Envelope(bytes(16), body=Parcel(inner=(small, large, large + 1)))])])
    parts = encoder.take()
    assert len(parts) == 3
    assert np.shares_memory(np.asarray(parts[1]), large)
    (frame,) = MessageDecoder().decode([bytes(part) for part in parts])
    _, first, second = frame[4][0].body.inner  # type: ignore[index]
    assert np.array_equal(first, large) and np.array_equal(second, large + 1)


def test_messages_of_a_lane_share_a_record_until_something_comes_between() -> None:
    def message(lane: int, session: int, seq: int, body: Message) -> Frame:
        return DATA, lane, session, seq, [Envelope(source_id("s", str(seq)), body=body)]

    body, other, long = Parcel(text="x"), Tombstone("g", 0, "failed", "", "n", ()), Parcel(text="x" * RECORD_BYTES)
    encoder = MessageEncoder("h", 0)
    encoder.add([message(1, 0, 0, body), message(1, 0, 1, body)])
    encoder.add([message(1, 0, 2, body), message(1, 0, 4, body)])  # what is between was acked before a replay
    encoder.add([message(1, 1, 5, body), message(2, 1, 6, body), message(2, 1, 7, other), message(2, 1, 8, long)])
    encoder.add([message(2, 1, 9, body), message(2, 1, 10, body), (CREDIT, 3, 0, 7, None), message(2, 1, 11, body)])
    assert encoder.pending == 12
    frames = MessageDecoder().decode([bytes(part) for part in encoder.take()])
    assert [(*frame[:4], len(frame[4]) if frame[4] else 0) for frame in frames] == [  # type: ignore[index]
        (DATA, 1, 0, 0, 3),
        (DATA, 1, 0, 4, 1),
        (DATA, 1, 1, 5, 1),
        (DATA, 2, 1, 6, 1),
        (DATA, 2, 1, 7, 1),
        (DATA, 2, 1, 8, 1),
        (DATA, 2, 1, 9, 2),
        (CREDIT, 3, 0, 7, 0),
        (DATA, 2, 1, 11, 1),
    ]
    assert encoder.pending == 0


def test_a_message_that_cannot_travel_leaves_those_before_it() -> None:
    good, bad = (Envelope(bytes(16), body=Parcel(inner=(thing,))) for thing in (1, Torch()))
    encoder = MessageEncoder("h", 0)
    with pytest.raises(WireError, match="Torch"):
        encoder.add([(DATA, 1, 0, 0, [good, bad])])
    encoder.add([(DATA, 1, 0, 1, [good])])
    ((*_, envelopes),) = MessageDecoder().decode([bytes(part) for part in encoder.take()])  # type: ignore[misc]
    assert len(envelopes) == 2


def test_frame_indices_count_over_the_whole_multipart() -> None:
    arrays = [np.full(INLINE_LIMIT_BYTES, i) for i in range(5)]
    received = there_and_back(*(Parcel(inner=(array,)) for array in arrays))
    assert [envelope.body.inner[0][0] for envelope in received] == list(range(5))  # type: ignore[attr-defined]


def test_arrays_are_read_only_at_both_ends() -> None:
    array = np.arange(3)
    (envelope,) = there_and_back(Parcel(inner=(array,)))
    for frozen in (array, envelope.body.inner[0]):  # type: ignore[attr-defined]
        with pytest.raises(ValueError, match="read-only"):
            frozen[0] = 9


def test_freeze_reaches_every_array() -> None:
    arrays = [np.arange(3) for _ in range(4)]
    freeze(Parcel(inner=(arrays[0], Parcel(values=arrays[1])), columns={"a": (arrays[2],), "b": {"c": arrays[3]}}))
    assert not any(array.flags.writeable for array in arrays)


def test_views_are_copied_where_their_layout_needs_it() -> None:
    array = np.arange(2 * INLINE_LIMIT_BYTES).reshape(2, -1)
    (envelope,) = there_and_back(Parcel(inner=(array.T, array[:, ::2])))
    transposed, strided = envelope.body.inner  # type: ignore[attr-defined]
    assert np.array_equal(transposed, array.T) and np.array_equal(strided, array[:, ::2])


def test_a_tombstone_needs_no_lane_type() -> None:
    (envelope,) = there_and_back(Tombstone("g", 1, "failed", "timeout", "reward/0", ("s",)))
    assert envelope.lost and envelope.body.reason == "timeout"  # type: ignore[attr-defined]


def test_nested_messages_of_the_field() -> None:
    ids = np.arange(4, dtype=np.int32)
    sample = Trainable(
        "s", "g", "p", 0, 0, 2, "p", "r", ids, ids > 1, ids.astype(np.float32), ids, 2, False, "generator/0"
    )
    (envelope,) = there_and_back(Group("g", (sample, sample), 2))
    assert equal(envelope.body, Group("g", (sample, sample), 2))
    assert payload_bytes(sample) > 4 * (4 + 1 + 4 + 4)


class Torch:
    """Stands for a foreign type."""


def test_foreign_types_are_refused_by_name_and_leave_nothing_behind() -> None:
    encoder = MessageEncoder("h", 0)
    with pytest.raises(WireError, match=r"Torch cannot be sent"):
        body = Parcel(inner=(np.zeros(INLINE_LIMIT_BYTES), Torch()))
        encoder.add([(DATA, 1, 0, 0, [Envelope(bytes(16), body=body)])])
    assert not encoder.pending
    encoder.add([(CREDIT, 1, 0, 5, None)])
    assert len(encoder.take()) == 1


def within_itself() -> list[Any]:
    items: list[Any] = []
    items.append(items)
    return items


@pytest.mark.parametrize(
    ("thing", "reason"),
    [
        (np.array(["text"]), "dtype <U4"),
        (np.array([object()]), "dtype object"),
        (np.zeros(2, ">i4"), "dtype >i4"),
        (np.zeros((1,) * 9), "9 axes"),
        ({Torch(): 1}, "Torch cannot be sent"),
        (Torch(), "Torch cannot be sent"),
        (within_itself(), "contain themselves"),
    ],
)
def test_the_same_is_refused_between_processes_in_one_and_in_storage(thing: Any, reason: str) -> None:
    body = Parcel(inner=(thing,))
    for send in (freeze, dump_value, parts_with):
        with pytest.raises(WireError, match=f"cannot (send|be stored): .*{reason}"):
            send(body)


def chain(num_around: int) -> Parcel:
    body = Parcel()
    for _ in range(num_around):
        body = Parcel(inner=(body,))
    return body


def test_messages_are_nested_only_so_deep() -> None:
    deepest, deeper = chain(MAX_DEPTH), chain(MAX_DEPTH + 1)
    freeze(deepest)
    assert equal(deepest, there_and_back(deepest)[0].body) and equal(deepest, load_message(dump_value(deepest)))
    for send in (freeze, dump_value, parts_with):
        with pytest.raises(WireError, match=r"inside more than 32 messages .* as a tuple"):
            send(deeper)


def test_bytes_that_nest_deeper_are_refused_before_the_stack_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema, "MAX_DEPTH", 60)
    parts, stored = parts_with(chain(60)), dump_value(chain(60))
    monkeypatch.undo()
    (frame,) = MessageDecoder().decode(parts)
    assert isinstance(frame, Refused) and "inside more than 32 messages" in frame.reason
    with pytest.raises(SchemaError, match="inside more than 32 messages"):
        load_message(stored)
    (frame,) = MessageDecoder().decode(parts_with(chain(MAX_DEPTH)))
    assert not isinstance(frame, Refused)


@dataclass(frozen=True)
class Derived(Message):
    """Its `__post_init__` may run once only."""

    number: int
    total: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "number", self.number + 1)
        object.__setattr__(self, "total", 2 * self.number)


@dataclass(frozen=True, slots=True)
class Slotted(Message):
    number: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "number", self.number + 1)


@dataclass(frozen=True)
class Heir(Slotted):
    text: str = "x"


@dataclass(frozen=True, slots=True, kw_only=True)
class Keyed(Message):
    number: int
    text: str = "x"


@pytest.mark.parametrize("body", [Derived(3), Slotted(3), Heir(3, "y"), Keyed(number=3)])
def test_every_field_arrives_and_nothing_is_initialised_again(body: Message) -> None:
    there, nested = there_and_back(body, Parcel(inner=(body,)))
    assert there.body == nested.body.inner[0] == load_message(dump_value(body)) == body  # type: ignore[attr-defined]
    assert not hasattr(there.body, "__dict__") or set(vars(there.body)) == set(vars(body))


def test_a_field_without_a_value_is_named() -> None:
    body = object.__new__(Derived)
    for send in (freeze, dump_value, parts_with):
        with pytest.raises(WireError, match="'number'"):
            send(body)


def test_bytes_of_somebody_else() -> None:
    with pytest.raises(WireError, match="not a flowrl process"):
        MessageDecoder().sender(b"GET / HTTP/1.1\r\n\r\n")
    with pytest.raises(WireError, match="shorter than its preamble"):
        MessageDecoder().sender(b"")
    with pytest.raises(WireError, match="wire version 9"):
        MessageDecoder().sender(b"flow\x09" + bytes(20))


def parts_of(*frames: Frame) -> list[bytes]:
    encoder = MessageEncoder("h", 0)
    encoder.add(frames)
    return [bytes(part) for part in encoder.take()]


def parts_with(body: Message) -> list[bytes]:
    return parts_of((DATA, 2, 0, 0, [Envelope(bytes(16), body=body)]))


def test_a_senders_name_that_is_none() -> None:
    (first,) = parts_of((CREDIT, 1, 0, 5, None))
    start = first.index(b"h")
    with pytest.raises(WireError, match="not valid UTF-8"):
        MessageDecoder().sender(first[:start] + b"\xff" + first[start + 1 :])
    with pytest.raises(WireError, match=rf"expected 65535 bytes, got {len(first) - start}"):
        MessageDecoder().sender(first[: start - 2] + b"\xff\xff" + first[start:])


@pytest.mark.parametrize(
    ("kind", "payload"),
    [
        (HELLO, None),
        (HELLO, ((("Thing", "1"),), ())),
        (HELLO, ((), ("0",))),
        (CLOSE, 1),
        (CANCEL, ("id",)),
        (ERROR, None),
        (RELEASE, ((1, 2, 3),)),
        (BYE, ()),
    ],
)
def test_what_no_frame_of_its_kind_holds_is_refused(kind: int, payload: Any) -> None:
    refused, after = MessageDecoder().decode(parts_of((kind, 5, 6, 7, payload), (CREDIT, 1, 0, 5, None)))
    assert isinstance(refused, Refused) and f"kind {kind} " in refused.reason
    assert (refused.lane, refused.session) == (5, 6)
    assert after == (CREDIT, 1, 0, 5, None)


@pytest.mark.parametrize(
    ("kind", "payload", "stands"),
    [(REQUEST, "kind", REQUEST), (NOTIFY, (["kind"], None), NOTIFY), (ABORT, 1, NOTIFY)],
)
def test_of_the_control_link_something_with_the_same_number_stands_for_it(kind: int, payload: Any, stands: int) -> None:
    (frame,) = MessageDecoder().decode(parts_of((kind, 5, 6, 7, payload)))
    assert not isinstance(frame, Refused)
    assert frame[:4] == (stands, 5, 6, 7) and f"kind {kind} " in frame[4][0] and frame[4][1] is None


@pytest.mark.parametrize(
    ("kind", "payload"), [(ACK, 7), (ACK, ({},)), (CREDIT, 1), (RESEND, "x"), (SYNC, ()), (REFUSE, None)]
)
def test_for_the_sender_of_a_lane_it_is_a_refusal(kind: int, payload: Any) -> None:
    (frame,) = MessageDecoder().decode(parts_of((kind, 5, 6, 7, payload)))
    assert not isinstance(frame, Refused)
    assert frame[:4] == (REFUSE, 5, 6, 0) and f"kind {kind} " in frame[4]


def test_a_bad_body_is_refused_and_the_frames_around_it_are_not() -> None:
    body = [Envelope(bytes(16), body=Parcel(text="x" * 100))]
    parts = parts_of((CREDIT, 1, 0, 5, None), (DATA, 2, 4, 0, body), (ACK, 3, 0, 0, [1, 2]))
    at = parts[0].index(b"x" * 100)
    broken = parts[0][: at - 2] + b"\xc1\xc1" + parts[0][at:]
    first, second, third = MessageDecoder().decode([broken])
    assert first == (CREDIT, 1, 0, 5, None)
    assert isinstance(second, Refused) and (second.lane, second.session) == (2, 4)
    assert third == (ACK, 3, 0, 0, (1, 2))


def no_schemas(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has seen no message yet; both tables, as what is found now is forgotten with them."""
    monkeypatch.setattr(schema, "_by_hash", {})
    for module in (schema, multiparts):
        monkeypatch.setattr(module, "KNOWN", {})


def test_a_schema_is_found_whose_class_another_thread_is_making_known(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = parts_of((DATA, 2, 0, 0, [Envelope(bytes(16), body=Parcel())]))
    monkeypatch.setattr(schema, "_by_hash", {})
    (frame,) = MessageDecoder().decode(parts)
    assert not isinstance(frame, Refused)


def test_an_unknown_schema_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = parts_of((DATA, 2, 0, 0, [Envelope(bytes(16), body=Parcel())]))
    no_schemas(monkeypatch)
    monkeypatch.setattr(schema, "known_types", lambda: (Prompt,))
    (frame,) = MessageDecoder().decode(parts)
    assert isinstance(frame, Refused) and "same message classes" in frame.reason


def unresolved(monkeypatch: pytest.MonkeyPatch) -> type[Message]:
    """A message class with a type that is imported under `if TYPE_CHECKING`."""
    cls: type[Message] = dataclasses.make_dataclass("Unresolved", [("a", "NotHere")], bases=(Message,), frozen=True)
    del message_base._registry["types.Unresolved"]
    monkeypatch.setattr(schema, "known_types", lambda: (cls, Parcel))
    return cls


def test_classes_with_unknown_types_do_not_stand_in_the_way_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    unresolved(monkeypatch)
    parts = parts_with(Parcel())
    no_schemas(monkeypatch)
    (frame,) = MessageDecoder().decode(parts)
    assert not isinstance(frame, Refused)
    (frame,) = MessageDecoder().decode(parts_with(Slotted(1))[:1])
    assert not isinstance(frame, Refused)


def test_their_own_messages_say_what_to_change(monkeypatch: pytest.MonkeyPatch) -> None:
    body = unresolved(monkeypatch)(1)  # type: ignore[call-arg]
    for send in (freeze, parts_with):
        with pytest.raises(WireError, match=r"field of Unresolved .*'NotHere'.*TYPE_CHECKING"):
            send(body)


def test_a_body_beyond_the_limit_is_refused() -> None:
    (frame,) = MessageDecoder(max_body_bytes=50).decode(parts_with(Parcel(text="x" * 100)))
    assert isinstance(frame, Refused) and "at most 50" in frame.reason


def test_the_limit_is_one_messages_and_not_that_of_a_record() -> None:
    body = [Envelope(source_id("s", str(i)), body=Parcel(text="x" * 60)) for i in range(2)]
    (frame,) = MessageDecoder(max_body_bytes=100).decode(parts_of((DATA, 2, 0, 0, body)))
    assert not isinstance(frame, Refused) and len(frame[4]) == 2


def test_a_record_is_full_before_its_bodies_pass_the_limit() -> None:
    half = len(msgpack.packb(dataclasses.astuple(Parcel()), default=repr)) + RECORD_BYTES // 2
    bodies = [Envelope(source_id("s", str(i)), body=Parcel(text="x" * half)) for i in range(2)]
    frames = MessageDecoder().decode(parts_of((DATA, 2, 0, 0, bodies)))
    assert [(frame[3], len(frame[4])) for frame in frames] == [(0, 1), (1, 1)]  # type: ignore[index]


def test_a_wrong_number_of_messages_is_told_as_that() -> None:
    (first,) = parts_of((DATA, 2, 0, 0, [Envelope(b"i" * 16, body=Parcel())]))
    count, body = first.index(b"iiii") - 8, first.index(b"\xdd")
    (frame,) = MessageDecoder().decode([first[:count] + b"\x32" + first[count + 1 :]])
    assert (
        isinstance(frame, Refused) and frame.reason == "a truncated record: it ends within the ids of its 50 messages"
    )
    longer = first[: count + 4] + bytes([first[count + 4] + 1]) + first[count + 5 : body]
    (frame,) = MessageDecoder().decode([longer + b"\xdd\0\0\0\2" + first[body + 5 :] + b"\xc0"])
    assert isinstance(frame, Refused) and frame.reason == "got 2 bodies for 1 message headers"
    (frame,) = MessageDecoder().decode([first[:-1]])
    assert isinstance(frame, Refused) and frame.reason == "a truncated body: expected 16 bytes, got 15"


def test_the_sender_hears_of_a_body_beyond_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiparts, "MAX_BODY_BYTES", RECORD_BYTES)
    encoder, text = MessageEncoder("h", 0), "x" * RECORD_BYTES
    for frame in ((DATA, 2, 0, 0, [Envelope(bytes(16), body=Parcel(text=text))]), (REQUEST, 0, 0, 1, ("kind", text))):
        with pytest.raises(WireError, match=f"at most {RECORD_BYTES} can be"):
            encoder.add([frame])
    assert encoder.pending == 0


@given(st.integers(0, 10_000), st.binary(min_size=1, max_size=3))
@example(118, b"\x00\x02")  # an array that claims more axes than it has bytes for
@settings(max_examples=300, deadline=None)
def test_damaged_bytes_never_raise_anything_but_wire_errors(at: int, damage: bytes) -> None:
    array = np.arange(INLINE_LIMIT_BYTES, dtype=np.int16)
    body = Parcel(1, "t", (1, array), {"a": np.arange(9)})
    parts = parts_of((DATA, 2, 0, 0, [Envelope(bytes(16), body=body), Envelope(bytes(16), body=Parcel())]))
    start = at % len(parts[0])
    parts[0] = parts[0][:start] + damage + parts[0][start + len(damage) :]
    decoder = MessageDecoder()
    with contextlib.suppress(WireError):
        decoder.sender(parts[0])
        decoder.decode(parts)


def test_ids_depend_on_lineage_alone() -> None:
    a, b = source_id("prompts", "1"), source_id("prompts", "2")
    assert len({a, b, source_id("prompt", "s1")}) == 3
    assert message_id([a, b], "out", 0) == message_id((a, b), "out", 0)
    assert len({message_id(p, o, n) for p in ([a], [b], [a, b], [b, a]) for o in ("x", "y") for n in (0, 1)}) == 16
    assert len(a) == len(message_id([a], "out", 0)) == 16


# Storage across changes of a class


def redefine(fields: list[Any]) -> type[Message]:
    return dataclasses.make_dataclass("Kept", fields, bases=(Message,), frozen=True)


def test_added_fields_take_their_defaults() -> None:
    stored = dump_value(redefine([("a", int)])(1))  # type: ignore[call-arg]
    redefine([("b", int, field(default=7)), ("a", int, field(default=0))])
    loaded: Any = load_message(stored)
    assert (loaded.a, loaded.b) == (1, 7)


def test_added_fields_take_what_their_factory_makes() -> None:
    stored = dump_value(redefine([("a", int)])(1))  # type: ignore[call-arg]
    redefine([("a", int), ("b", Mapping[str, int], field(default_factory=dict))])
    first: Any = load_message(stored)
    second: Any = load_message(stored)
    assert first.b == second.b == {} and first.b is not second.b


def test_removed_and_missing_fields_are_refused_by_name() -> None:
    stored = dump_value(redefine([("a", int)])(1))  # type: ignore[call-arg]
    redefine([("c", int)])
    with pytest.raises(SchemaError, match=r"Kept .*'a' is unknown.*'c' is missing"):
        load_message(stored)


def test_an_unknown_type_and_foreign_bytes_are_refused() -> None:
    stored = codec.Encoder(beside=False).pack((FORMAT, {"\0type": "Nobody"}))
    with pytest.raises(SchemaError, match="'Nobody'"):
        load_value(stored)
    with pytest.raises(SchemaError):
        load_message(b"\x93\x01")
    with pytest.raises(SchemaError, match="no message"):
        load_message(dump_value({"a": 1}))


def test_values_hold_messages_too() -> None:
    state = {"cursor": 3, "prompts": (Parcel(text="x"),), "rng": np.arange(3)}
    loaded = load_value(dump_value(state))
    assert equal(loaded, state)
