"""Counts the items that a node makes, and reports their number, the total and the rate per second every few seconds."""

from __future__ import annotations

import time
from collections.abc import Callable

REPORT_EVERY_S = 5.0


class ProgressCount:
    """For use on one event loop. `say` gets the text; `add` reports nothing before REPORT_EVERY_S have passed."""

    def __init__(
        self,
        what: str,
        say: Callable[[str], None],
        *,
        total: int | None = None,
        there: int = 0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`what` names the items; `there` of the `total` exist already, which is reported immediately."""
        self._what, self._say, self._total, self._now = what, say, total, now
        self._number = self._reported_number = there
        self._reported_s: float | None = None
        """Time of the last report, or of the first `add`: a node may wait long for its first item."""
        self._has_reported = False
        if there:
            self._report(f"{self._counted} are there already")

    def add(self, number: int = 1, note: str = "") -> None:
        """Count `number` more items; `note` follows the numbers in a report."""
        self._number += number
        if self._reported_s is None:
            self._reported_s, self._reported_number = self._now(), self._number
        elapsed_s = self._now() - self._reported_s
        if elapsed_s >= REPORT_EVERY_S:
            rate = (self._number - self._reported_number) / elapsed_s
            self._report(
                f"{self._counted} ({rate:,.0f}/s){note}" if rate >= 10 else f"{self._counted} ({rate:.2g}/s){note}"
            )

    def end(self, note: str = "", *, always: bool = False) -> None:
        """All items are counted. Reports if `always`, or if there was a report and items have been added since."""
        if always or (self._has_reported and self._number > self._reported_number):
            self._report(f"{self._counted}{note}")

    @property
    def _counted(self) -> str:
        return f"{self._number:,}{'' if self._total is None else f' of {self._total:,}'} {self._what}"

    def _report(self, text: str) -> None:
        self._say(text)
        self._has_reported, self._reported_number = True, self._number
        self._reported_s = None if self._reported_s is None else self._now()
