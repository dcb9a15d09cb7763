"""The form of the audit's rules: a check is a query for the rows that are wrong.

Of the numbers that a resume may change those count that were in force at a step, or when a ticket was taken.
The audit says what `:main` and the others stand for.
"""

from __future__ import annotations

from dataclasses import dataclass

AT_STEP = (
    "(SELECT i.{0} FROM steps p JOIN incarnations i ON i.number = p.incarnation"
    " WHERE p.trainer = u.trainer AND p.step = u.step)"
)
AT_TICKET = "(SELECT {0} FROM incarnations WHERE first_ticket <= t.ticket ORDER BY number DESC LIMIT 1)"
HELD = "json_each(CASE WHEN json_valid(t.held) THEN t.held ELSE '{}' END)"


@dataclass(frozen=True)
class Check:
    """`text` takes the columns of a row that `query` returns."""

    kind: str
    text: str
    query: str
