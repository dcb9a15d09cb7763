"""The log of an attempt that an agent's program plays: its calls, which the program makes again in a resumed run.

A resumed run starts the program again from its beginning. Calls are numbered in their order, as before the checkpoint,
and a call with a known reply gets that reply; nothing is sampled for it. If the program does not do what it did before
(a call with another context, limit or stop text, an end before all known calls are made again, a call that its client
gave up), the attempt is void: how it would have continued is not known.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace

from flowrl.environments import EnvironmentFailed, Step
from flowrl.episode import EpisodeRecord, Reply, Turn
from flowrl.messages import Record
from flowrl.nodes.episodes.episode_log import EpisodeLog


class CallLog(EpisodeLog):
    """Several calls may be open; a checkpoint keeps the sampled tokens of the call that was started last."""

    def __init__(self, record: Record | None = None, *, observation_bytes: int) -> None:
        super().__init__(record, observation_bytes=observation_bytes)
        replies, calls = self._before.replies, self._before.calls
        self._calls = list(calls[: len(replies)])
        self._asked_call = b"".join(calls[len(replies) :])
        self._asked_before = self._asked_call
        self._left = {reply.request_id: (reply, call) for reply, call in zip(replies, self._calls, strict=True)}

    def record(self) -> EpisodeRecord:
        open_call = [self._asked_call] if self._asked else []
        return replace(super().record(), calls=(*self._calls, *open_call))

    @property
    def calls_left(self) -> int:
        """Number of calls with a known reply that the program has not made again."""
        return len(self._left)

    def known_call(self, turn: Turn) -> Reply | None:
        """The known reply to a call; None if it has to be asked for.

        Raises EnvironmentFailed if the program does not make the call that it made before.
        """
        if turn.request_id == self._before.asked and _digest(turn) != self._asked_before:
            raise _differs(turn)
        if turn.request_id not in self._left:
            return None
        reply, call = self._left[turn.request_id]
        if _digest(turn) != call:
            raise _differs(turn)
        if not reply.finish_reason:
            raise EnvironmentFailed("resumed", f"call {turn.turn} of the program was given up, and has no reply")
        del self._left[turn.request_id]
        self._answered()
        return reply

    def asking(self, turn: Turn) -> Turn:
        self._asked_call = _digest(turn)
        return super().asking(turn)

    def called(self, turn: Turn, reply: Reply) -> None:
        """Note the reply to a call that had no known reply; it has no finish reason if the call was given up."""
        asked = self._asked
        self._calls.append(_digest(turn))
        self.replied(reply)
        if asked != turn.request_id:
            self._asked = asked

    def stepped(self, step: Step, state: bytes | None) -> None:
        """Note the program's result. If the program has played again, its new result counts, not the known one."""
        if self.known_step() is None:
            super().stepped(step, state)
        else:
            self.pass_step()

    @property
    def _replaying(self) -> bool:
        return bool(self._left)


def _digest(turn: Turn) -> bytes:
    """What makes two calls the same."""
    asked = repr((turn.max_tokens, turn.stop)).encode()
    return hashlib.sha256(turn.token_ids.tobytes() + asked).digest()


def _differs(turn: Turn) -> EnvironmentFailed:
    return EnvironmentFailed("replay_differs", f"call {turn.turn} of the program is not the one that it was before")
