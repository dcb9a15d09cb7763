"""The child of a `RewardWorker`: it loads one function and answers its calls. See `worker` for the protocol."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import IO, Any

import msgpack

from flowrl.errors import ConfigError
from flowrl.tasks.judge import BadReward, load_judge
from flowrl.tasks.worker import LENGTH

PR_SET_PDEATHSIG = 1


def serve(place: str) -> None:
    """The main loop of the child process."""
    _die_with_parent()
    inbox, outbox = os.fdopen(0, "rb", closefd=False), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    try:
        judge = load_judge(place)
    except ConfigError as problem:
        _write(outbox, {"error": str(problem)})
        return
    _write(outbox, {})
    while (request := _read(inbox)) is not None:
        try:
            verdicts = judge(request["prompts"], request["responses"], request["columns"])
        except BadReward as bad:
            _write(outbox, {"error": str(bad), "reason": bad.reason})
        else:
            _write(outbox, {"rewards": verdicts.rewards, "scores": verdicts.scores, "logs": dict(verdicts.logs)})


def _read(inbox: IO[bytes]) -> Any:
    head = inbox.read(LENGTH.size)
    return msgpack.unpackb(inbox.read(LENGTH.unpack(head)[0])) if len(head) == LENGTH.size else None


def _write(outbox: IO[bytes], message: dict[str, Any]) -> None:
    body = msgpack.packb(message)
    outbox.write(LENGTH.pack(len(body)) + body)
    outbox.flush()


def _die_with_parent() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    serve(sys.argv[1])
