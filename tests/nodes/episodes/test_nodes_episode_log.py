"""The log of an attempt: what a replayed environment shows is compared with what it showed before."""

from __future__ import annotations

import pytest

from flowrl.environments import EnvironmentFailed, Observation, Step
from flowrl.nodes.episodes.episode_log import EpisodeLog

BEFORE = Step(Observation("b"), reward=1.0, metrics={"took_s": 0.5})


def resumed() -> EpisodeLog:
    """A log that a checkpoint kept after one step."""
    log = EpisodeLog(observation_bytes=64)
    log.note_first([Observation("a")], None)
    log.note_step(BEFORE, None)
    return EpisodeLog(log.make_record(), observation_bytes=64)


@pytest.mark.parametrize(
    "shown", [Step(Observation("c"), reward=1.0), Step(Observation("b"), reward=0.5), Step(Observation("b"), 1.0, True)]
)
def test_a_step_that_differs_in_text_reward_or_end_is_told(shown: Step) -> None:
    log = resumed()
    log.note_first([Observation("a")], None)
    with pytest.raises(EnvironmentFailed, match=r"step 0 of the replay is .*, and was ") as failed:
        log.note_step(shown, None)
    assert failed.value.cause == "replay_differs"


def test_a_first_observation_that_differs_is_told() -> None:
    with pytest.raises(EnvironmentFailed, match="the first observation of the replay is"):
        resumed().note_first([Observation("A")], None)


def test_metrics_may_differ() -> None:
    log = resumed()
    log.note_first([Observation("a")], None)
    log.note_step(Step(Observation("b"), reward=1.0, metrics={"took_s": 0.7}), None)
    assert log.known_step() is None
