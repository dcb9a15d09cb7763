"""Makes a run keep samples in every other window of time: what keeping costs is then seen within one run.

For `benchmarks.kept_samples`, which lets every process of the run install it. Without it two runs would be compared,
and those differ by more than keeping costs.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

from flowrl.runtime.samples.kept_samples import KeptSamples
from flowrl.runtime.samples.sample_share import SampleChoice
from flowrl.runtime.telemetry.metrics import Metrics

BEGAN = "began_s"
"""File of the run directory: the monotonic clock, which all processes of a machine share, at the run's time 0."""
SETTLE_S = 0.5
"""At the beginning of a window, work of the one before is still under way."""
FEWEST = 3
"""Steps of a window that is compared."""
SITE = """
from benchmarks import keeping_by_windows
keeping_by_windows.install({window_s})
"""
"""A sitecustomize.py, which Python runs at the start of each process."""


def keeps(window: int) -> bool:
    """Whether samples are kept in this window; windows are counted from the start of the machine."""
    return window % 2 == 1


def install(window_s: float) -> None:
    """Keep and write samples only in windows that `keeps` names. A window without earns nothing for the next one."""
    may, is_due, begin = SampleChoice.may, KeptSamples._is_due, Metrics.__init__

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

    patch.object(SampleChoice, "may", may_now).start()
    patch.object(KeptSamples, "_is_due", is_due_now).start()
    patch.object(Metrics, "__init__", begin_and_tell).start()


def pairs_of(ends_s: Sequence[float], window_s: float) -> list[tuple[float, float]]:
    """(a step's mean seconds while samples are kept, that of the windows before and after) by window.

    `ends_s` are the ends of a run's steps by the monotonic clock.
    """
    steps: defaultdict[int, list[float]] = defaultdict(list)
    for begin, end in itertools.pairwise(ends_s):
        window = int(begin / window_s)
        if begin - window * window_s >= SETTLE_S and end <= (window + 1) * window_s:
            steps[window].append(end - begin)
    mean = {window: statistics.fmean(found) for window, found in steps.items() if len(found) >= FEWEST}
    return [
        (mean[window], (mean[window - 1] + mean[window + 1]) / 2)
        for window in sorted(mean)
        if keeps(window) and window - 1 in mean and window + 1 in mean
    ]
