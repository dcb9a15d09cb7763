"""Ctrl-C, SIGTERM and SIGHUP before and after a run has begun; on a driver that only notes what it is told."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from flowrl.runtime.driver.driver import RunSignals


@dataclass
class NotingDriver:
    """Stands for the driver and its view."""

    begun: bool
    interrupted: bool = False
    told: list[str] = field(default_factory=list)

    def interrupt(self) -> None:
        self.interrupted = True
        self.told.append("interrupt")

    def terminate(self) -> None:
        self.interrupted = True
        self.told.append("terminate")

    def progress(self, replica_id: str, text: str) -> None:
        self.told.append(text)

    def warning(self, text: str) -> None:
        self.told.append(text)


async def signalled(driver: Any, *numbers: signal.Signals, at_once: bool = False) -> bool:
    """Whether the run ends at once by these signals, one after the other."""
    try:
        with RunSignals(driver, driver, at_once=at_once):
            for number in numbers:
                os.kill(os.getpid(), number)
                await asyncio.sleep(0.01)  # the loop reads the signal from its own pipe
    except asyncio.CancelledError:
        return True
    return False


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_has_not_begun_ends_by_the_first_signal(number: signal.Signals) -> None:
    driver = NotingDriver(begun=False)
    assert asyncio.run(signalled(driver, number))
    assert driver.told == ["stopping at once"], "there is nothing in flight to be finished"


def test_a_run_that_has_begun_ends_in_order_and_by_the_second_signal_at_once() -> None:
    driver = NotingDriver(begun=True)
    assert not asyncio.run(signalled(driver, signal.SIGTERM))
    assert driver.told == ["terminate"]
    driver = NotingDriver(begun=True)
    assert asyncio.run(signalled(driver, signal.SIGINT, signal.SIGINT))
    assert driver.told == ["interrupt", "stopping at once"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_to_a_run_that_is_ending_early_is_not_the_second(number: signal.Signals) -> None:
    driver = NotingDriver(begun=True, interrupted=True)
    assert not asyncio.run(signalled(driver, number))
    assert len(driver.told) == 1 and driver.told[0] in ("interrupt", "terminate")
    assert asyncio.run(signalled(NotingDriver(begun=True, interrupted=True), number, number))


def test_a_run_that_only_evaluates_ends_at_once() -> None:
    driver = NotingDriver(begun=True)
    assert asyncio.run(signalled(driver, signal.SIGTERM, at_once=True))
    assert driver.told == ["stopping at once; the same command continues with the existing answers"]


@pytest.fixture
def hangup() -> Iterator[list[int]]:
    """The signals of a terminal's end that ended nothing so far; without a handler, one would end the tests."""
    came: list[int] = []
    before = signal.signal(signal.SIGHUP, lambda number, frame: came.append(number))
    yield came
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("begun", [False, True])
def test_a_run_goes_on_without_its_terminal(begun: bool, hangup: list[int]) -> None:
    driver = NotingDriver(begun=begun)
    assert not asyncio.run(signalled(driver, signal.SIGHUP))
    assert driver.told == ["the terminal is gone (SIGHUP); the run goes on, and SIGTERM ends it in order"]
    assert not hangup


def test_a_run_under_nohup_stays_so(hangup: list[int]) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    driver = NotingDriver(begun=True)
    assert not asyncio.run(signalled(driver, signal.SIGHUP))
    assert not driver.told
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
