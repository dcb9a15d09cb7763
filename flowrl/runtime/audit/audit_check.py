"""The form of the audit's rules: a check is a query that returns the wrong rows.

For numbers that a resume may change, the values in force at the step, or when the ticket was taken, apply. The audit
(`audit._parameters`) defines `:main` and the other parameters.
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
    """One rule; `text` is formatted with the columns of each row that `query` returns."""

    kind: str
    text: str
    query: str
