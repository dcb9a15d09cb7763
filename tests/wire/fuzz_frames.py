"""Mutated frames against an open endpoint: `python -m tests.wire.fuzz_frames [COUNT] [SEED]`.

An endpoint with a lane in, a lane out, a handler and a waiting request takes in multiparts of every kind of frame,
in which bytes are changed, cut out, doubled or spliced from others. Whatever they hold ends as a refusal, a failed
lane or a failed request: nothing may be raised out of the endpoint but what it was made to report.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np

from flowrl.errors import FlowrlError, NodeFailed
from flowrl.messages import Tombstone
from flowrl.wire.control import _as_data
from flowrl.wire.edges import Inbox
from flowrl.wire.encoding.multiparts import (
    ABORT,
    ACK,
    CANCEL,
    CLOSE,
    CONFIRM,
    CREDIT,
    DATA,
    ERROR,
    HELLO,
    NOTIFY,
    REFUSE,
    RELEASE,
    REPLY,
    REQUEST,
    RESEND,
    SYNC,
    Frame,
    MessageEncoder,
)
from flowrl.wire.encoding.schema import Envelope
from flowrl.wire.endpoint import Endpoint
from tests.rigs.ticks import ticks
from tests.wire.channel_rig import Thing, closing, lane, opened

LONG = np.arange(5000, dtype=np.int32)


def originals(number_in: int, number_out: int) -> list[Frame]:
    """One frame or more of every kind, as they should be. The endpoint asks with the numbers 1 and 2."""
    bodies = [Thing(1, LONG[:9]), Thing(2, LONG), Thing(3, LONG[:4].reshape(2, 2)), Thing(4)]
    messages = [Envelope(bytes([at]) * 16, at, "group", at, body) for at, body in enumerate(bodies)]
    failed = NodeFailed("node", 1, "why", remote_traceback="a traceback", ticket=4)
    return [
        (HELLO, number_in, 0, 0, ((("Thing", 1),), (0, 1))),
        (DATA, number_in, 0, 0, messages),
        (DATA, number_in, 0, 4, [Envelope(bytes(16), -1, "g", -1, Tombstone("g", 1, "failed", "", "n", ("a",)))]),
        (CANCEL, number_in, 0, 0, (bytes(16),)),
        (ERROR, number_in, 0, 0, "an error"),
        (CLOSE, number_in, 0, 5, None),
        (CREDIT, number_out, 0, 3, None),
        (ACK, number_out, 0, 0, (0, 1)),
        (RESEND, number_out, 0, 0, None),
        (SYNC, number_out, 0, 0, None),
        (REFUSE, number_out, 0, 0, "a reason"),
        (REQUEST, 0, 0, 7, ("echo", {"thing": Thing(5, LONG), "more": [1, 2.5, None, "text", b"bytes", {"a": (1,)}]})),
        (REPLY, 0, 0, 1, (True, {"a": 1})),
        (REPLY, 0, 0, 1, (False, _as_data(failed))),
        (REPLY, 0, 0, 2, (False, _as_data(ZeroDivisionError("oops")))),
        (REPLY, 0, 0, 2, (False, _as_data(FlowrlError("plain")))),
        (ABORT, 0, 0, 7, None),
        (NOTIFY, 0, 0, 0, ("note", [1, {"b": 2}])),
        (RELEASE, 0, 0, 0, ((0, 64),)),
        (CONFIRM, 0, 0, 1, None),
    ]


def mutated(rng: random.Random, data: bytes, start: int, other: bytes) -> bytes:
    """`data` with up to three changes behind `start`, where the sender's name ends."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(start, max(start + 1, len(changed)))
        match rng.randrange(6):
            case 0:
                changed[at : at + 1] = bytes((rng.randrange(256),))
            case 1:
                changed[at : at + 1] = bytes((rng.choice(b"\x80\x90\xa0\xc0\xc1\xc4\xc7\xd4\xd9\xdc\xdd\xde\xdf\xe0"),))
            case 2:
                del changed[at : at + rng.randint(1, 9)]
            case 3:
                changed[at:at] = rng.randbytes(rng.randint(1, 9))
            case 4:
                taken = rng.randrange(len(other))
                changed[at : at + 8] = other[taken : taken + rng.randint(1, 30)]
            case 5:
                changed[at : at + 4] = rng.choice((b"\xff\xff\xff\xff", b"\0\0\0\0", b"\x7f\xff\xff\xff"))
    return bytes(changed)


async def fuzz(count: int, seed: int) -> Counter[str]:
    """What became of `count` mutated multiparts. Raises whatever is no refusal."""
    rng, outcomes, errors = random.Random(seed), Counter[str](), list[BaseException]()
    target, peer = await opened("B", "ipc", errors=errors), await opened("A", "ipc")
    target.connect("A", peer.address)
    there, back = lane(), replace(lane(to="c"), producer_host="B", consumer_host="A")
    frames = originals(there.number, back.number)
    waiting: list[asyncio.Task[Any]] = []
    for at in range(count):
        if at % 50 == 0:  # lanes that have failed are of no use
            await target.close()
            await asyncio.gather(*waiting, return_exceptions=True)
            target = await opened("B", "ipc", errors=errors)
            target.connect("A", peer.address)
            waiting = await begin(target, there, back)
        encoder = MessageEncoder("A", 0)
        encoder.add(rng.sample(frames, rng.randint(1, 3)))
        first, *parts = [bytes(part) for part in encoder.take()]
        target._receive_parts([mutated(rng, first, 15, first), *parts])
        if at % 10 == 9:
            await ticks()
        outcomes.update(type(error).__name__ for error in errors)
        if wrong := [error for error in errors if not isinstance(error, FlowrlError)]:
            raise AssertionError(f"multipart {at} of seed {seed}") from wrong[0]
        errors.clear()
        for request in [request for request in waiting if request.done()]:
            waiting.remove(request)
            error = request.exception()
            outcomes["answered" if error is None else f"request: {type(error).__name__}"] += 1
            if error is not None and not isinstance(error, FlowrlError):
                raise AssertionError(f"request before multipart {at} of seed {seed}") from error
    await target.close()
    await asyncio.gather(*waiting, return_exceptions=True)
    await peer.close()
    closing.clear()
    return outcomes


async def begin(target: Endpoint, there: Any, back: Any) -> list[asyncio.Task[Any]]:
    """Open the lanes, answer "echo" and "note", and ask twice."""
    inbox = Inbox("in")
    inbox.add_lane(target.receiver(there))
    target.sender(back)
    target.on("echo", lambda host, body: body)
    target.on("note", lambda host, body: None)
    asked = [asyncio.ensure_future(target.request("A", "nothing", None)) for _ in range(2)]
    await ticks()
    return asked


if __name__ == "__main__":
    COUNT, SEED = (int(text) for text in (*sys.argv[1:], "100000", "0")[:2])
    print(dict(asyncio.run(fuzz(COUNT, SEED))))
