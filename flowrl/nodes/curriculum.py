"""Which prompt is asked next, by what the policy could do with those asked before: a curriculum, and replay.

Of all groups a share has prompts chosen by pass rate, a share repeats prompts that no sample has passed, and the rest
has the prompts of the data in their order. So no prompt starves: that rest comes to every prompt once an epoch.

A prompt of pass rate p is chosen with weight p·(1 − p), its learnability (arXiv 2408.15099; for language models arXiv
2502.12272): most often near 1/2, and never while all its samples pass, or none.

Invariants

- A choice depends on seed, number of the choice and the outcomes known by then, and on nothing else.
- The outcome of a group counts once: its prompt's visits are numbered, and an outcome has to be newer than the last.
- A prompt whose outcome is still expected is not chosen, and not replayed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from flowrl.graph.ports import Call
from flowrl.messages import Message, Scored

Reason = Literal["order", "chosen", "replayed"]
PASSED = 1.0
ROUNDING = 1e-6
DECAY = 0.5
"""Weight of the samples of a group in a pass rate after the next group; older ones are from an older policy."""
ASKED, HEARD, RATE, AT = range(4)


@dataclass(frozen=True)
class Curriculum:
    """Which prompts are asked more often than the others. By default none are."""

    chosen: float = 0.0
    """Share of the groups whose prompt is chosen by its pass rate, most often near 1/2; 0: none."""
    replayed: float = 0.0
    """Share of the groups that ask a prompt again which no sample has passed, the longest waiting first; 0: none."""
    replay_after: int = 256
    """Groups after which such a prompt may be asked again."""
    pass_at: float | None = None
    """Raw reward from which a sample has passed; None: 1."""
    by: str = ""
    """Column of the rows, such as level or of_task: rows with one value have one pass rate. Empty: each has its own."""

    @property
    def used(self) -> bool:
        """Whether outcomes decide about any prompt."""
        return bool(self.chosen or self.replayed)

    def problems(self) -> Iterator[str]:
        """Sentences that name a field and say what is wrong with its value."""
        for name in ("chosen", "replayed"):
            if not 0 <= getattr(self, name) < 1:
                yield f"curriculum.{name} is {getattr(self, name)}; it has to be in [0, 1)"
        if self.chosen + self.replayed >= 1:
            yield (
                f"curriculum.chosen and curriculum.replayed are {self.chosen} and {self.replayed}; their sum has to be "
                "below 1, or prompts that are neither chosen nor replayed would never be asked"
            )
        if self.replay_after < 0:
            yield f"curriculum.replay_after is {self.replay_after}; it has to be 0 or more"
        if not self.used and self != Curriculum():
            yield "curriculum has settings, but neither curriculum.chosen nor curriculum.replayed is above 0"


@dataclass(frozen=True)
class GroupOutcome(Message):
    """What the policy could do with a prompt: the raw rewards of the group's samples, without those that failed."""

    prompt_id: str
    epoch: int
    """As that of the prompts: with a curriculum, how often the prompt was asked before."""
    raw_rewards: tuple[float, ...]


@dataclass(frozen=True)
class Noted(Message):
    """The answer to an outcome."""

    is_new: bool
    """False if a later outcome of the prompt, or this one, was noted before."""


async def tell_outcome(outcomes: Call[GroupOutcome, Noted], samples: Sequence[Scored]) -> None:
    """Tell the source how a group was rewarded, if the graph has an edge for that and a sample was scored."""
    if outcomes.connected and samples:
        first, rewards = samples[0], tuple(float(sample.raw_reward) for sample in samples)
        await outcomes(GroupOutcome(first.prompt_id, first.epoch, rewards))


@dataclass(frozen=True)
class ChosenRow:
    """A row, and why it is asked."""

    row: int
    reason: Reason
    pass_rate: float | None = None
    """That it was chosen by."""


class PassRates:
    """What is known about the prompts of a source, and the choices that follow from it.

    `prompt_ids` and `buckets` are those of the rows, in their order: rows of one bucket share a pass rate.
    """

    def __init__(
        self, settings: Curriculum, prompt_ids: Sequence[str], buckets: Sequence[str] | None, *, seed: int
    ) -> None:
        self._settings = settings
        self._seed = seed
        self._rows = {prompt_id: index for index, prompt_id in enumerate(prompt_ids)}
        self._names = tuple(prompt_ids)
        self._buckets = tuple(buckets or prompt_ids)
        self._members: dict[str, list[int]] = {}
        for index in random.Random(f"{seed}/buckets").sample(range(len(self._names)), len(self._names)):
            self._members.setdefault(self._buckets[index], []).append(index)
        self._number = 0
        """Of groups asked."""
        self._known: dict[str, list[float]] = {}
        """Prompt -> [times asked, visit of its newest outcome or −1, the pass rate then, number of the group then]."""
        self._sums: dict[str, list[float]] = {}
        """Bucket -> [samples that passed, samples], decayed."""

    def visits(self, row: int) -> int:
        """How often the row has been asked."""
        return int(self._known[self._names[row]][ASKED]) if self._names[row] in self._known else 0

    def choose(self) -> ChosenRow | None:
        """The choice for the next group; None: the next row in the order of the data."""
        rng = random.Random(f"{self._seed}/chosen/{self._number}")
        drawn = rng.random()
        if drawn < self._settings.chosen:
            return self._by_pass_rate(rng)
        return self._unsolved() if drawn < self._settings.chosen + self._settings.replayed else None

    def _by_pass_rate(self, rng: random.Random) -> ChosenRow | None:
        weights = {name: (passed / asked) * (1 - passed / asked) for name, (passed, asked) in self._sums.items()}
        weights = {name: weight for name, weight in weights.items() if weight > 0}
        while weights:
            (bucket,) = rng.choices(list(weights), list(weights.values()))
            if (row := self._least_asked(bucket)) is not None:
                passed, asked = self._sums[bucket]
                return ChosenRow(row, "chosen", passed / asked)
            del weights[bucket]
        return None

    def _least_asked(self, bucket: str) -> int | None:
        """The row of the bucket whose turn it is; None if all are being asked."""
        free = [row for row in self._members.get(bucket, ()) if not self._is_open(self._names[row])]
        return min(free, key=self.visits) if free else None

    def _unsolved(self) -> ChosenRow | None:
        waiting = [
            (known[AT], name)
            for name, known in self._known.items()
            if known[HEARD] >= 0 and known[RATE] == 0 and not self._is_open(name) and name in self._rows
        ]
        at, name = min(waiting, default=(0.0, ""))
        due = bool(name) and self._number - at >= self._settings.replay_after
        return ChosenRow(self._rows[name], "replayed", 0.0) if due else None

    def _is_open(self, prompt_id: str) -> bool:
        known = self._known.get(prompt_id)
        return known is not None and known[HEARD] < known[ASKED] - 1

    def asked(self, row: int) -> None:
        """Note that a group of the row was asked."""
        known = self._known.setdefault(self._names[row], [0.0, -1.0, 0.0, 0.0])
        known[ASKED] += 1
        known[AT] = self._number
        self._number += 1

    def note(self, outcome: GroupOutcome) -> bool:
        """Note an outcome; whether it is a new one."""
        known = self._known.get(outcome.prompt_id)
        if known is None or not known[HEARD] < outcome.epoch < known[ASKED]:
            return False
        least = PASSED if self._settings.pass_at is None else self._settings.pass_at
        passed = sum(reward >= least - ROUNDING for reward in outcome.raw_rewards)
        known[HEARD], known[RATE] = outcome.epoch, passed / len(outcome.raw_rewards)
        if outcome.prompt_id in self._rows:
            sums = self._sums.setdefault(self._buckets[self._rows[outcome.prompt_id]], [0.0, 0.0])
            sums[:] = [DECAY * sums[0] + passed, DECAY * sums[1] + len(outcome.raw_rewards)]
        return True

    def num_at(self, rate: float) -> int:
        """Number of prompts whose newest outcome has this pass rate: 1 for solved ones, 0 for unsolved ones."""
        return sum(known[HEARD] >= 0 and known[RATE] == rate for known in self._known.values())

    def state(self) -> Mapping[str, Any]:
        return {
            "number": self._number,
            "known": {name: list(known) for name, known in self._known.items()},
            "sums": {name: list(sums) for name, sums in self._sums.items()},
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._number = int(state["number"])
        self._known = {name: [float(value) for value in known] for name, known in state["known"].items()}
        self._sums = {name: [float(value) for value in sums] for name, sums in state["sums"].items()}
