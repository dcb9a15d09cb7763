"""Records that cannot be used: they stop the reading before anything has started, or are skipped and counted."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from flowrl.errors import ConfigError

T = TypeVar("T")


class Malformed(ConfigError):
    """A record cannot be used. The error text starts with the record's place."""


def missing_column(place: str, record: Mapping[str, Any], column: str, option: str) -> Malformed:
    """The error of a record without the column that an option of the task names."""
    close = difflib.get_close_matches(column, record, 1)
    hint = f"did you mean {option}={close[0]}?" if close else f"set {option}= to one of {', '.join(record) or 'none'}"
    return Malformed(f"{place}: no column {column!r}, which {option}= names; {hint}")


class NothingInIt(Malformed):
    """A record holds nothing to use; it is left out and counted, even if malformed records stop the reading."""


class LowScore(ConfigError):
    """A record's score is below `min_score`; the record is left out and counted."""


@dataclass
class Reading:
    """How to handle malformed records: stop at the first, or skip them and keep their errors."""

    malformed: str = "stop"
    skipped: list[str] = field(default_factory=list)
    low_scores: int = 0
    """Number of records that were left out for their score."""

    def attempt(self, make: Callable[[], T]) -> T | None:
        """Return the result of `make`, None if it raised for a record that is left out."""
        try:
            return make()
        except LowScore:
            self.low_scores += 1
            return None
        except Malformed as problem:
            if self.malformed == "stop" and not isinstance(problem, NothingInIt):
                raise
            self.skipped.append(str(problem))
            return None

    def at(self, place: str, make: Callable[[], T]) -> T | None:
        """`attempt` with a `make` for the record at `place`. A record with values that no message can carry is
        malformed."""

        def named() -> T:
            try:
                return make()
            except (Malformed, LowScore):
                raise
            except ConfigError as problem:
                raise Malformed(f"{place}: {problem}") from None
            except RecursionError:
                raise Malformed(f"{place}: values nested too deep; flatten them, or write them as text") from None

        return self.attempt(named)
