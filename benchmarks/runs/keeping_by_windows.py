"""Makes a run keep samples in every other window of time: what keeping costs is then seen within one run.

For `benchmarks.runs.kept_samples`, which lets every process of the run install it. Without it two runs would be
compared, and those differ by more than keeping costs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import psutil

from flowrl.runtime.samples.kept_samples import KeptSamples
from flowrl.runtime.samples.sample_notes import SampleChoice
from flowrl.runtime.telemetry.metrics import Metrics

BEGAN = "began_s"
"""File of the run directory: the monotonic clock, which all processes of a machine share, at the run's time 0."""
SETTLE_S = 0.5
"""At the beginning of a window, work of the one before is still under way."""
LOOK_S = 0.1
"""Before the end of a window, for a look at all processes."""
FEWEST = 3
"""Steps of a window that is compared."""
SITE = """
from benchmarks.runs import keeping_by_windows
keeping_by_windows.install({window_s})
"""
"""A sitecustomize.py, which Python runs at the start of each process."""


def keeps(window: int) -> bool:
    """Whether samples are kept in this window; windows are counted from the start of the machine."""
    return window % 2 == 1


def install(window_s: float) -> None:
    """Keep and write samples only in windows that `keeps` names. A window without earns nothing for the next one."""
    may, is_due, begin = SampleChoice.may_keep, KeptSamples._is_due, Metrics.__init__

    def keeping() -> bool:
        return keeps(int(time.monotonic() / window_s))

    def may_now(choice: SampleChoice) -> bool:
        if keeping():
            return may(choice)
        choice._seen_s = None
        return False

    def is_due_now(kept: KeptSamples) -> bool:
        return keeping() and is_due(kept)

    def begin_and_tell(metrics: Metrics, run_dir: Path, *args: Any, **kwargs: Any) -> None:
        begin(metrics, run_dir, *args, **kwargs)
        (run_dir / BEGAN).write_text(repr(metrics._start_s))

    patch.object(SampleChoice, "may_keep", may_now).start()
    patch.object(KeptSamples, "_is_due", is_due_now).start()
    patch.object(Metrics, "__init__", begin_and_tell).start()


class CpuMeter:
    """CPU seconds of a command's processes in every window, without its beginning."""

    def __init__(self, process: psutil.Process, window_s: float) -> None:
        self._process, self._window_s = process, window_s
        self.spent_s: dict[int, float] = {}

    def watch(self) -> None:
        """Until the command has ended."""
        while self._process.is_running() and self._process.status() != psutil.STATUS_ZOMBIE:
            window = int(time.monotonic() / self._window_s) + 1
            began_s = self._cpu_s(at=window * self._window_s + SETTLE_S)
            self.spent_s[window] = self._cpu_s(at=(window + 1) * self._window_s - LOOK_S) - began_s

    def _cpu_s(self, *, at: float) -> float:
        time.sleep(max(0.0, at - time.monotonic()))
        total = 0.0
        with suppress(psutil.NoSuchProcess):
            for one in (self._process, *self._process.children(recursive=True)):
                with suppress(psutil.NoSuchProcess):
                    total += sum(one.cpu_times()[:4])  # those of children that have ended among them
        return total


def pairs_of(
    ends_s: Sequence[float], window_s: float, spent_s: Mapping[int, float] | None = None
) -> list[tuple[float, float]]:
    """(a step's seconds while samples are kept, those in the windows before and after) by window.

    `ends_s` are the ends of a run's steps by the monotonic clock. `spent_s`: window -> seconds in place of the clock's.
    A step that is under way at a border counts in part on both sides.
    """
    numbers = range(len(ends_s))
    step_s: dict[int, float] = {}
    for window in range(int(ends_s[0] / window_s) + 1, int(ends_s[-1] / window_s)):
        borders = (window * window_s + SETTLE_S, (window + 1) * window_s - LOOK_S)
        first, last = np.interp(borders, ends_s, numbers)
        spent = borders[1] - borders[0] if spent_s is None else spent_s.get(window, math.nan)
        if last - first >= FEWEST and spent == spent:
            step_s[window] = float(spent / (last - first))
    return [
        (step_s[window], (step_s[window - 1] + step_s[window + 1]) / 2)
        for window in sorted(step_s)
        if keeps(window) and window - 1 in step_s and window + 1 in step_s
    ]
