"""What the last attempts at episodes have come to, and when that ends the run."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from random import Random
from typing import Any

import pytest

from flowrl.agents.programs import ProgramName, as_agents_failure
from flowrl.environments import EnvironmentFailed
from flowrl.errors import AttemptFailed, FlowrlError, SampleFailed
from flowrl.messages import Prompt
from flowrl.models import Policy
from flowrl.nodes import Environment, Limits
from flowrl.nodes.episodes import attempt_outcomes
from flowrl.nodes.episodes.attempt_outcomes import (
    FIRST_ATTEMPTS,
    LOOKED_BACK,
    NOT_BY_WAITING,
    PATIENCE_S,
    AttemptOutcomes,
    BegunAttempt,
)
from flowrl.nodes.episodes.episode_log import EpisodeLog
from flowrl.testing.rollouts import prompt
from tests.rigs.ticks import ticks


class Context:
    """Keeps what is told, and how many wait."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.waiting = 0

    def progress(self, text: str) -> None:
        self.lines.append(text)

    @contextmanager
    def outside(self, what: str) -> Iterator[None]:
        self.waiting += 1
        try:
            yield
        finally:
            self.waiting -= 1


class Played:
    """Attempts of which many are open, and a clock."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.context: Any = Context()
        self.outcomes = AttemptOutcomes(self.context, "played", now_s=lambda: self.now_s)
        self._open: list[tuple[ExitStack, BegunAttempt]] = []

    def begin(self, num: int) -> None:
        for _ in range(num):
            stack = ExitStack()
            self._open.append((stack, stack.enter_context(self.outcomes.begin_attempt())))

    def succeed(self, num: int) -> None:
        for _ in range(num):
            stack, attempt = self._open.pop(0)
            self.outcomes.note_success(attempt)
            stack.close()

    def fail(self, num: int, cause: str = "env_unreachable", *, event: str = "") -> list[bool]:
        """Whether each used up a retry."""
        used = []
        for _ in range(num):
            stack, attempt = self._open.pop(0)
            with stack:
                used.append(self.outcomes.note_failure(attempt, cause, f"{cause}!", event=event))
        return used

    def begin_and_fail(self, num: int, cause: str = "env_unreachable", *, event: str = "") -> None:
        for _ in range(num):
            self.begin(1)
            self.fail(1, cause, event=event)


def test_a_thousand_episodes_outlast_a_server_that_needs_twenty_seconds() -> None:
    """All fail at once, all begin again after a pause, and none has used up a retry."""
    played = Played()
    played.begin(1024)
    used = played.fail(1024)
    assert used.count(True) == FIRST_ATTEMPTS - 1, "before the failures are seen to be common"
    assert [line.partition(";")[0] for line in played.context.lines] == [
        "an attempt at an episode failed: env_unreachable!",
        "the last 16 attempts at episodes of 'played' failed",
    ]
    for now_s in (5.0, 11.0, 17.0):
        played.now_s = now_s
        played.begin(1024)
        assert not any(played.fail(1024))
    played.now_s = 24.0
    played.begin(1024)
    played.succeed(1024)
    played.begin(1024)
    assert all(played.fail(1)), "a failure among successes is one again"


def test_a_server_that_stays_away_ends_the_run_after_the_wait() -> None:
    played = Played()
    played.begin(1024)
    played.fail(1024)
    played.now_s = PATIENCE_S + 1
    played.begin(1024)
    with pytest.raises(FlowrlError, match=r"641 of the last 641 attempts .*mostly by env_unreachable; the last of"):
        played.fail(1024)


def test_attempts_that_fail_one_after_another_and_start_again_at_once_end_the_run() -> None:
    """Of 1,280 attempts that are remembered, 1,024 are always open: the 256 before them have all failed."""
    played = Played()
    played.begin(1024)
    with pytest.raises(FlowrlError, match=r"256 of the last 256 attempts .*mostly by env_unreachable"):
        for _ in range(3 * 1024):
            played.now_s += 0.05
            played.fail(1)
            played.begin(1)


def test_further_attempts_wait_until_one_succeeds() -> None:
    async def scenario() -> None:
        played = Played()
        await played.outcomes.wait_ready()  # nothing has failed
        played.begin(FIRST_ATTEMPTS + 1)
        played.fail(FIRST_ATTEMPTS)
        waiting = [asyncio.create_task(played.outcomes.wait_ready()) for _ in range(100)]
        await ticks()
        assert played.context.waiting == 100 and not any(task.done() for task in waiting)
        played.succeed(1)
        await asyncio.gather(*waiting)
        assert played.context.waiting == 0
        await played.outcomes.wait_ready()

    asyncio.run(scenario())


def test_a_pause_ends_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempt_outcomes, "PAUSES_S", (0.01, 0.01))
    played = Played()
    played.begin_and_fail(FIRST_ATTEMPTS)
    asyncio.run(played.outcomes.wait_ready())


def test_what_fails_soon_is_no_sign_of_what_is_still_played() -> None:
    """45% of the attempts fail at once, the others succeed after minutes: that is less than half, in every order."""
    played, rng = Played(), Random(0)
    for _ in range(4):
        for begun in (1024, 461, 207, 93):
            played.begin(begun)
            recent = played._open[-begun:]
            rng.shuffle(recent)
            played._open[-begun:] = recent
            failing = played._open[-int(0.45 * begun) :]
            played._open = [*failing, *played._open[: -len(failing)]]
            played.fail(len(failing))
            played.now_s += PATIENCE_S + 1
        played.succeed(len(played._open))


def test_more_than_half_of_those_that_began_before_the_open_ones_end_the_run() -> None:
    played = Played()
    played.begin(100)
    played.succeed(100)
    with pytest.raises(FlowrlError, match=r"129 of the last 256 attempts .* mostly by env_raised; the last of these"):
        for _ in range(300):
            played.begin(5)
            played.fail(3, "env_raised")
            played.succeed(2)


def test_attempts_that_a_dying_zygote_has_ended_count_as_one() -> None:
    played = Played()
    for event in ("zygote 7", "zygote 8"):
        played.begin_and_fail(LOOKED_BACK, "env_died", event=event)
    assert len(played.context.lines) == 1
    played.begin_and_fail(FIRST_ATTEMPTS - 2, "env_died")
    played.now_s = PATIENCE_S
    with pytest.raises(FlowrlError, match=r"17 of the last 17 attempts"):
        played.begin_and_fail(1, "env_died")


@pytest.mark.parametrize("cause", sorted(NOT_BY_WAITING))
def test_what_no_wait_mends_ends_the_run_at_once(cause: str) -> None:
    played = Played()
    played.begin_and_fail(FIRST_ATTEMPTS - 1, cause)
    with pytest.raises(FlowrlError, match=rf"16 of the last 16 attempts .* mostly by {cause}; the last of these"):
        played.begin_and_fail(1, cause)


def test_what_ends_the_run_is_told_with_a_failure_of_the_cause_that_it_names() -> None:
    """The attempt that ends it may have failed by something else."""
    played = Played()
    played.begin_and_fail(FIRST_ATTEMPTS - 1, "env_malformed")
    with pytest.raises(FlowrlError, match=r"mostly by env_malformed; the last of these: env_malformed!$"):
        played.begin_and_fail(1, "no_reward")


class Away(Environment):
    """Its environment cannot be reached for the first attempts."""

    def __init__(self, away: int) -> None:
        super().__init__("played", Policy("tiny"), limits=Limits(retries=2))
        self.away = away

    async def play_attempt(self, prompt: Prompt, log: EpisodeLog, ticket: int) -> Any:
        if log.attempt < self.away:
            raise AttemptFailed("env_unreachable", "away")
        return "played"

    def make_episode(self, prompt: Prompt, played: Any, attempt: int) -> Any:
        return attempt


def test_held_out_episodes_outlast_a_server_that_starts_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """What they fail by counts with the attempts of training, and uses up no retry while everything fails."""
    monkeypatch.setattr(attempt_outcomes, "PAUSES_S", (0.0, 0.0))

    async def scenario() -> None:
        played, node = Played(), Away(2 * FIRST_ATTEMPTS)
        node._outcomes = played.outcomes
        with pytest.raises(SampleFailed, match="env_unreachable"):
            await node._play_held_out(prompt(0))
        played.begin_and_fail(FIRST_ATTEMPTS - 3)
        assert await node._play_held_out(prompt(1)) == 2 * FIRST_ATTEMPTS

    asyncio.run(scenario())


def test_an_agents_failure_keeps_the_event_of_its_process() -> None:
    with pytest.raises(AttemptFailed) as failed, as_agents_failure(ProgramName("agent.py:play", "")):
        raise EnvironmentFailed("env_died", "its process ended", event="zygote 7")
    assert (failed.value.cause, failed.value.event) == ("agent_died", "zygote 7")
