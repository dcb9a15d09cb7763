"""Whether a row's answer is one that the check of its task can compare with; `malformed=skip` leaves other rows out.

Without that option, `flowrl.tasks.check_answers` reports unusable answers before a run.
"""

from __future__ import annotations

from flowrl.tasks.checks import maths
from flowrl.tasks.checks.answer_checks import NEEDED
from flowrl.tasks.checks.code_tests import missing_tests
from flowrl.tasks.rows import Row


def lacking(check: str, row: Row, *, compared: bool) -> str:
    """What the check needs and the row's answer does not have; "" if nothing is missing.

    A row without an answer lacks nothing: it is a prompt for a teacher, or for a reward that needs no answer. An answer
    that is a list or mapping lacks nothing either, unless the task's own verifier compares with it (`compared`).
    """
    if row.answer is None:
        return ""
    if check == "code":
        return missing_tests(row.answer, row.columns.get("entry_point"))
    if not row.text_answer:
        return "a text" if compared else ""
    answer = str(row.answer)
    if check == "math":
        return "" if maths.is_readable(answer) else "a number or formula"
    needed, find = NEEDED.get(check, ("", bool))
    return needed if needed and find(answer) is None else ""
