"""Fates: what becomes of samples at several trainers. Pure."""

from __future__ import annotations

import pytest

from flowrl.errors import FlowrlError
from flowrl.runtime.ledger.ledger import Fate
from flowrl.runtime.ledger.sample_fates import Fates, GroupFates

LOST = Fate(state="filtered", reason="unsure")
STALE = Fate(4, 0, 3, state="dropped", reason="stale")


def opened(trainers: tuple[str, ...] = ("actor", "critic"), members: int = 2) -> tuple[Fates, GroupFates]:
    fates = Fates(trainers)
    return fates, fates.open_group("g", 7, dict.fromkeys(trainers, 0), {m: f"g/{m}" for m in range(members)})


def test_a_state_is_known_with_the_last_fate() -> None:
    fates, group = opened()
    fates.settle_fate("g/0", "critic", LOST)
    assert fates.final_state(group, "g/0") is None
    fates.settle_fate("g/0", "actor", Fate(3, 5))
    assert fates.final_state(group, "g/0") == Fate(3, 5)
    assert fates.group_of("g/0") is None and fates.group_of("g/1") is group


def test_a_sample_that_any_trainer_used_is_trained_by_the_first_that_did() -> None:
    fates, group = opened(members=1)
    fates.settle_fate("g/0", "actor", LOST)
    fates.settle_fate("g/0", "critic", Fate(9, 2))
    assert fates.final_state(group, "g/0") == Fate(9, 2)
    assert fates.step_of(group) == 9 and fates.groups == {}


def test_a_sample_that_nobody_used_is_what_the_main_trainer_says() -> None:
    fates, group = opened(members=1)
    fates.settle_fate("g/0", "critic", LOST)
    fates.settle_fate("g/0", "actor", STALE)
    assert fates.final_state(group, "g/0") == STALE
    assert fates.step_of(group) is None
    assert group.newest_step("actor") == 4, "its batch was made all the same"
    assert group.newest_step("critic") is None


def test_a_trainer_is_done_with_a_group_when_it_has_a_fate_for_each_sample() -> None:
    fates, group = opened()
    fates.settle_fate("g/0", "actor", Fate(3, 5))
    assert not group.is_done("actor")
    fates.settle_fate("g/1", "actor", LOST)
    assert group.is_done("actor") and not group.is_done("critic")
    assert list(fates.still_open()) == [("g/0", "critic"), ("g/1", "critic")]


def test_the_first_word_stands() -> None:
    fates, group = opened()
    assert fates.settle_fate("g/0", "actor", LOST) is group
    assert fates.settle_fate("g/0", "actor", Fate(state="failed", reason="late")) is None
    assert group.fates["g/0"]["actor"] == LOST
    assert fates.settle_fate("unknown", "actor", LOST) is None


def test_a_use_against_another_word_is_an_error() -> None:
    fates, _ = opened()
    fates.settle_fate("g/0", "actor", Fate(3, 5))
    with pytest.raises(FlowrlError, match="'actor' used sample 'g/0' at step 4, but had used it at step 3 already"):
        fates.settle_fate("g/0", "actor", Fate(4, 5))
    fates.settle_fate("g/1", "actor", LOST)
    with pytest.raises(FlowrlError, match=r"the sample is filtered \(unsure\)"):
        fates.settle_fate("g/1", "actor", Fate(4, 5))


def test_a_loss_is_of_the_member_of_those_that_are_named_or_of_all() -> None:
    fates, _ = opened(members=3)
    assert fates.find_samples("g", 1, ("other",)) == ["g/1"]
    assert fates.find_samples("g", -1, ("g/0", "g/2", "other")) == ["g/0", "g/2"]
    assert fates.find_samples("g", -1, ()) == ["g/0", "g/1", "g/2"]
    assert fates.find_samples("", -1, ("g/2", "other")) == ["g/2"]
    assert fates.find_samples("h", -1, ()) == []
    for trainer in ("actor", "critic"):
        fates.settle_fate("g/0", trainer, LOST)
    assert fates.find_samples("g", -1, ("g/0",)) == []
