"""What an agent's program returns: a reward and metrics, or nothing."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from flowrl.message_base import number_in

NEEDED = "it needs a finite number, or a dict of such with the key 'reward'"


@dataclass(frozen=True)
class AgentResult:
    reward: float | None = None
    """None if the program returned none; it may have posted one to its session."""
    metrics: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, returned: object) -> AgentResult:
        """The result for a number, a mapping or None. Raises TypeError for all else, and for what is not finite."""
        if not isinstance(returned, Mapping):
            return cls(None if returned is None else _finite("", returned))
        numbers = {str(name): _finite(f"{name}=", value) for name, value in returned.items() if value is not None}
        return cls(numbers.pop("reward", None), numbers)

    @classmethod
    def of_line(cls, line: str) -> AgentResult:
        """The result on the last line that a program printed; none if that is no JSON of a result. A bare `true` is
        none: programs print it for other reasons, too."""
        try:
            found = json.loads(line)
            return cls() if isinstance(found, bool) else cls.of(found)
        except (ValueError, TypeError, RecursionError):
            return cls()

    @classmethod
    def unpacked(cls, text: str) -> AgentResult:
        """The result from the text that `packed` returned."""
        return cls(**json.loads(text))

    def packed(self) -> str:
        """The result as text, for `unpacked`."""
        return json.dumps({"reward": self.reward, "metrics": dict(self.metrics)})


def _finite(what: str, value: object) -> float:
    number = number_in(value)
    if number is None or not math.isfinite(number):
        raise TypeError(f"the agent returned {what}{str(value)[:80]!r}; {NEEDED}")
    return number
