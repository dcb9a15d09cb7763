"""Passes each frame of a lane to the method of the lane's end that handles it. Pure, as are the machines of `lane` and
`latest`.

Invariant: a frame of another session changes nothing; it belongs to an earlier incarnation of one of the two processes.
"""

from __future__ import annotations

from collections.abc import Sequence

from flowrl.channel.encoding.multiparts import (
    ACK,
    CANCEL,
    CLOSE,
    CREDIT,
    DATA,
    ERROR,
    HELLO,
    REFUSE,
    RESEND,
    SYNC,
    Frame,
)
from flowrl.channel.lanes.lane import ReceiverLane, SenderLane
from flowrl.channel.lanes.latest import LatestReceiver, LatestSender

Ids = Sequence[bytes]


def to_receiver(machine: ReceiverLane | LatestReceiver, frame: Frame) -> Ids:
    """Pass a frame to the consumer's end. Returns the ids of messages that it cancels and that are being worked on."""
    kind, _, session, seq, payload = frame
    if session != machine.session:
        return ()
    if kind == DATA:
        machine.on_data(seq, payload)
    elif kind == CLOSE:
        machine.on_close(seq)
    elif kind == HELLO:
        machine.on_hello(seq, *payload)
    elif kind == CANCEL:
        return machine.on_cancel(payload)
    elif kind == ERROR:
        machine.on_error(payload)
    return ()


def to_sender(machine: SenderLane | LatestSender, frame: Frame) -> tuple[Ids, Ids]:
    """Pass a frame to the producer's end. Returns the ids of messages now taken, and of those now acked."""
    kind, _, session, seq, payload = frame
    if session != machine.session:
        return (), ()
    if kind == CREDIT:
        return machine.on_credit(seq), ()
    if kind == ACK:
        return (), machine.on_ack(payload)
    if kind == RESEND:
        machine.on_resend(seq)
    elif kind == SYNC:
        machine.say_hello()
    elif kind == REFUSE:
        machine.on_error(payload)
    return (), ()
