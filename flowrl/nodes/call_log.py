"""The log of an attempt that an agent's program plays: the calls it has made, for a program that makes them again.

A resumed run starts the program anew. Its calls are numbered as they are made, as before the checkpoint, and those with
a known reply get that one; nothing is sampled for them. A call whose context has other tokens than before, or that its
client gave up, makes the attempt void: nobody knows how the program would have gone on.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace

from flowrl.environments import EnvironmentFailed
from flowrl.episode import EpisodeRecord, Reply, Turn
from flowrl.messages import Int32, Record
from flowrl.nodes.episode_log import EpisodeLog


class CallLog(EpisodeLog):
    """Several calls may be open; a checkpoint keeps the sampled tokens of the one that was begun last."""

    def __init__(self, record: Record | None = None, *, observation_bytes: int) -> None:
        super().__init__(record, observation_bytes=observation_bytes)
        replies, contexts = self._before.replies, self._before.contexts
        self._contexts = list(contexts)
        self._known = {reply.request_id: (reply, context) for reply, context in zip(replies, contexts, strict=True)}

    def record(self) -> EpisodeRecord:
        return replace(super().record(), contexts=tuple(self._contexts))

    def known_call(self, turn: Turn) -> Reply | None:
        """The reply to a call, None if it has to be asked for.

        Raises EnvironmentFailed if the program does not make the call that it made before.
        """
        if turn.request_id == self._before.asked and _digest(turn.token_ids) != _digest(self._before.context_ids):
            raise _differs(turn)
        if turn.request_id not in self._known:
            return None
        reply, context = self._known[turn.request_id]
        if _digest(turn.token_ids) != context:
            raise _differs(turn)
        if not reply.finish_reason:
            raise EnvironmentFailed("resumed", f"call {turn.turn} of the program was given up, and has no reply")
        self._answered()
        return reply

    def called(self, turn: Turn, reply: Reply) -> None:
        """Note the reply to a call that was not known; one without a finish reason if the call was given up."""
        asked = self._asked
        self._contexts.append(_digest(turn.token_ids))
        self.replied(reply)
        if asked != turn.request_id:
            self._asked = asked


def _digest(context_ids: Int32) -> bytes:
    return hashlib.sha256(context_ids.tobytes()).digest()


def _differs(turn: Turn) -> EnvironmentFailed:
    return EnvironmentFailed("replay_differs", f"the context of call {turn.turn} has other tokens than before")
