"""The log of one attempt at an episode: what a checkpoint keeps of it, and how a resumed run continues from there.

Invariants

- The log has every reply that has arrived and every step that the environment has finished. What is running at a
  checkpoint is done again: the environment repeats the step, and a generator continues the request after the tokens
  that were sampled.
- A resumed run plays the attempt from its beginning with the replies of the log. If the environment saved its state,
  the state is restored, and the steps come from the log as well. Otherwise a fresh environment replays the actions, and
  everything that it shows is compared with the log. If something differs, or the environment cannot replay, the attempt
  is void.

Waits: for the environment; each call has a limit in seconds.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from flowrl.environments import Action, EnvironmentFailed, EnvironmentRow, Episodes, Observation, OpenEpisode, Step
from flowrl.environments.protocol import as_plain, read_observation, read_step, without_middle
from flowrl.messages import Record
from flowrl.messages.episode import EpisodeRecord, Reply, Turn
from flowrl.nodes.episodes.attempt import AskedTurn

SHOWN_CHARACTERS = 200
"""Most characters that the failure's text shows of what differs in a replay, now and before."""
NEW = EpisodeRecord()


class EpisodeLog:
    """Starts from a checkpoint's `record`. It keeps at most `observation_bytes` of each text of the environment."""

    def __init__(self, record: Record | None = None, *, observation_bytes: int) -> None:
        before = record if isinstance(record, EpisodeRecord) else NEW
        self.attempt, self.failed = before.attempt, before.failed
        self.first, self.state = before.first, before.state
        self._before = before
        self._replies, self._steps = list(before.replies), list(before.steps)
        self._asked, self._context_ids = before.asked, before.context_ids
        self._observation_bytes = observation_bytes
        self._num_answered = self._num_stepped = 0
        self._began_s = time.monotonic()

    def make_record(self) -> EpisodeRecord:
        """What a resumed run needs. The tokens that a checkpoint found for a request stay until the request ends."""
        return replace(
            self._before if self._asked and self._asked == self._before.asked else NEW,
            request_ids=tuple(reply.request_id for reply in self._replies),
            asked=self._asked,
            attempt=self.attempt,
            failed=self.failed,
            seconds=self.seconds_played,
            replies=tuple(self._replies),
            context_ids=self._context_ids,
            first=self.first,
            steps=tuple(self._steps),
            state=self.state,
        )

    def next_attempt(self, *, counts: bool) -> EpisodeLog:
        """The log of the attempt after this one, which is void; `counts` says whether this one counts as failed."""
        record = EpisodeRecord(attempt=self.attempt + 1, failed=self.failed + counts)
        return type(self)(record, observation_bytes=self._observation_bytes)

    # Time

    @property
    def seconds_played(self) -> float:
        """Seconds since the attempt started, without the time between a checkpoint and the end of a replay."""
        return self._before.seconds + (0.0 if self._replaying else time.monotonic() - self._began_s)

    def elapsed_s(self) -> float:
        """The seconds for the attempt's limit; 0 during a replay, because the replayed turns were in time."""
        return 0.0 if self._replaying else self.seconds_played

    @property
    def _replaying(self) -> bool:
        return self._num_answered < len(self._before.replies)

    # Turns

    def known_reply(self, question: AskedTurn) -> Reply | None:
        """The logged reply to a turn; None if it has to be asked for. Raises EnvironmentFailed for another context."""
        number, newest = self._num_answered, len(self._before.replies) - (not self._before.asked)
        if number == newest and not np.array_equal(question.token_ids, self._before.context_ids):
            raise EnvironmentFailed("replay_differs", f"the context of turn {number} has other tokens than before")
        if number >= len(self._replies):
            return None
        self._note_known_reply()
        return self._replies[number]

    def _note_known_reply(self) -> None:
        """A known reply has been used."""
        self._num_answered += 1
        if not self._replaying:
            self._began_s = time.monotonic()

    def note_request(self, turn: Turn) -> Turn:
        """Note a request, and return it with the tokens that a checkpoint found for it."""
        known = self._before if turn.request_id == self._before.asked else NEW
        self._asked, self._context_ids = turn.request_id, turn.token_ids
        return replace(
            turn,
            prefix_token_ids=known.prefix_token_ids,
            prefix_logprobs=known.prefix_logprobs,
            prefix_versions=known.prefix_versions,
        )

    def note_reply(self, reply: Reply) -> None:
        """Note the reply to the request; its arrays are copied."""
        arrays = {name: getattr(reply, name).copy() for name in ("token_ids", "behavior_logprobs", "versions")}
        self._replies.append(replace(reply, **arrays))
        self._num_answered += 1
        self._asked = ""

    # The environment

    def known_step(self) -> Mapping[str, Any] | None:
        """The next step in the log; None if the environment has to make it."""
        return self._steps[self._num_stepped] if self._num_stepped < len(self._steps) else None

    def note_first(self, observations: Sequence[Observation], state: bytes | None) -> None:
        """Note what a fresh environment shows to each seat, or compare it with the log."""
        shown = tuple(map(self._plain_shown, observations))
        if self.first is None:
            self.first, self.state = shown, state
        _require_equal("the first observation", shown, self.first)

    def note_step(self, step: Step, state: bytes | None) -> None:
        """Note a step of the environment, or compare it with the step in the log."""
        seen = tuple({**self._plain_shown(observation), "tools": ()} for observation in step.observations)
        shown = {**as_plain(step), "observation": seen}
        known = self.known_step()
        if known is None:
            self._steps.append(shown)
            self.state = state
        else:
            _require_equal(f"step {self._num_stepped}", shown, known)
        self._num_stepped += 1

    def pass_step(self) -> None:
        """Move on to the next step in the log."""
        self._num_stepped += 1

    def _plain_shown(self, observation: Observation) -> dict[str, Any]:
        """The observation as plain data, with the middle of long texts left out."""
        most, found = self._observation_bytes, as_plain(observation)
        found["text"] = without_middle(found["text"], most)
        for message in found["messages"]:
            message["content"] = without_middle(message["content"], most)
        return found


class LoggedEpisode:
    """An environment's episode whose steps are logged; if `restored`, the steps in the log need no environment."""

    def __init__(self, episode: OpenEpisode, log: EpisodeLog, *, restored: bool, saves: bool) -> None:
        self._episode = episode
        self._log = log
        self._restored = restored
        self._saves = saves

    async def log_first(self) -> None:
        """Log what the environment shows first; call this once. Raises EnvironmentFailed if it differs from the log."""
        if not self._restored:
            self._log.note_first(self._episode.observations, await self._saved_state())

    @property
    def observations(self) -> tuple[Observation, ...]:
        """What each seat sees first."""
        assert self._log.first is not None, "`begin` has logged it"
        return tuple(read_observation(shown) for shown in self._log.first)

    async def step(self, action: Action, seat: int = 0) -> Step:
        """Play one action of a seat. Raises EnvironmentFailed, also if a replayed step differs from the log."""
        known = self._log.known_step()
        if known is not None and self._restored:
            self._log.pass_step()
            return read_step(dict(known))
        step = await self._episode.step(action, seat)
        self._log.note_step(step, None if step.over else await self._saved_state())
        return step

    async def close_quietly(self) -> None:
        await self._episode.close_quietly()

    async def _saved_state(self) -> bytes | None:
        return await self._episode.save_state() if self._saves else None


async def open_episode(pool: Episodes, row: EnvironmentRow, log: EpisodeLog) -> LoggedEpisode:
    """The episode that continues `log`, or a new one; call `begin` next, and `close_quietly` in the end.

    Raises EnvironmentFailed, also if the environment can neither replay nor restore the episode.
    """
    if log.first is not None and log.state is None and not pool.replays:
        raise EnvironmentFailed("resumed", f"{row.name} neither replays nor saves its state")
    state = log.state
    opened = await (pool.reset(row) if state is None else pool.restore(row, state))
    return LoggedEpisode(opened, log, restored=state is not None, saves=pool.saves)


def _require_equal(what: str, shown: Any, before: Any) -> None:
    now, then = _without_metrics(shown), _without_metrics(before)
    if now != then:
        text = f"{what} of the replay is {str(now)[:SHOWN_CHARACTERS]}, and was {str(then)[:SHOWN_CHARACTERS]}"
        raise EnvironmentFailed("replay_differs", text)


def _without_metrics(shown: Any) -> Any:
    """What an environment shows, without its metrics, which may be durations."""
    if not isinstance(shown, Mapping):
        return [_without_metrics(one) for one in shown]
    return {
        name: _without_metrics(value) if name == "observation" else value
        for name, value in shown.items()
        if name != "metrics"
    }
