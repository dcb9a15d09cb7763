"""What the last attempts at episodes have come to, and when that ends the run."""

from __future__ import annotations

from typing import Any

import pytest

from flowrl.agents.programs import ProgramName, as_agents_failure
from flowrl.environments import EnvironmentFailed
from flowrl.errors import AttemptFailed, FlowrlError
from flowrl.nodes.attempt_outcomes import FIRST_ATTEMPTS, LOOKED_BACK, AttemptOutcomes


class Context:
    """Keeps what is told."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def progress(self, text: str) -> None:
        self.lines.append(text)


def outcomes() -> tuple[AttemptOutcomes, Context]:
    context: Any = Context()
    return AttemptOutcomes(context, "played"), context


def test_attempts_that_a_dying_zygote_has_ended_count_as_one() -> None:
    seen, context = outcomes()
    for event in ("zygote 7", "zygote 8"):
        for _ in range(LOOKED_BACK):
            seen.failed("env_died", "its process ended", event=event)
    assert len(context.lines) == 1
    for _ in range(FIRST_ATTEMPTS - 3):
        seen.failed("env_died", "its process ended")
    with pytest.raises(FlowrlError, match=rf"{FIRST_ATTEMPTS} of the last {FIRST_ATTEMPTS} attempts"):
        seen.failed("env_died", "its process ended")


def test_attempts_that_failed_each_by_itself_end_the_run() -> None:
    seen, _ = outcomes()
    seen.succeeded()
    for _ in range(LOOKED_BACK - 2):
        seen.failed("env_raised", "a bug")
    with pytest.raises(FlowrlError, match="mostly by env_raised; the last failure: a bug"):
        seen.failed("env_raised", "a bug")


def test_an_agents_failure_keeps_the_event_of_its_process() -> None:
    with pytest.raises(AttemptFailed) as failed, as_agents_failure(ProgramName("agent.py:play", "")):
        raise EnvironmentFailed("env_died", "its process ended", event="zygote 7")
    assert (failed.value.cause, failed.value.event) == ("agent_died", "zygote 7")
