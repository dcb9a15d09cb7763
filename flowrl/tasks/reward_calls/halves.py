"""Finds the samples at which a request for several fails: it is asked again in halves until they are alone.

Invariants

- Only a failure that one sample may cause is asked again: an answer without a verdict for each (also 422 and 413), 500
  after its tries, and any 4xx that is not about the server, the client's rights or its rate (`OF_SERVERS`).
- A request for n samples is followed by at most 2n - 2 others, one after the other in its place. For them such a
  failure is final at the first try. After 4xx and 500, nothing is divided further when `UNANSWERED` requests have been
  made and none was answered: then it is the server.
"""

from __future__ import annotations

from collections.abc import Sequence

from flowrl.tasks.reward_calls.question import Question

OF_SAMPLES = frozenset(
    {"reward_malformed", "reward_not_finite", "reward_wrong_length", "reward_raised", "reward_http_413"}
    | {"reward_unrendered"}
)
OF_SERVERS = frozenset({401, 402, 403, 404, 405, 406, 407, 408, 410, 415, 421, 425, 426, 429, 431, 451})
UNANSWERED = 10
"""As many requests as find one sample of 32: five times two halves."""


def may_be_one(reason: str) -> bool:
    """Whether one sample may cause the failure of a whole request."""
    return reason in OF_SAMPLES or _is_status(reason)


def _is_status(reason: str) -> bool:
    status = reason.removeprefix("reward_http_")
    if status == reason:
        return False
    return int(status) == 500 or (400 <= int(status) < 500 and int(status) not in OF_SERVERS)


class Halves:
    """The parts of one request that have not been asked yet."""

    def __init__(self, questions: Sequence[Question]) -> None:
        self._parts = [questions]
        self.num_asked = 0
        self.num_answered = 0

    def take(self) -> list[Question]:
        """The next part, without questions that nobody waits for; empty if there is none."""
        while self._parts:
            if part := [question for question in self._parts.pop() if not question.verdict.done()]:
                self.num_asked += 1
                return part
        return []

    def split(self, part: Sequence[Question], reason: str) -> bool:
        """Have the halves of a part that failed asked, the first one next. False: its failure is final."""
        if len(part) == 1 or not may_be_one(reason):
            return False
        if reason not in OF_SAMPLES and not self.num_answered and self.num_asked > UNANSWERED:
            return False
        middle = len(part) // 2
        self._parts += [part[middle:], part[:middle]]
        return True
