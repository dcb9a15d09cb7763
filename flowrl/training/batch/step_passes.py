"""The passes of one optimizer step over one rank's samples: those with a backward pass, and those without.

A group whose samples all have advantage 0, because all its rewards are equal, adds nothing to a policy gradient
(`Objective.has_gradient`). Its forward pass still runs, because loss and stats are means over the whole step. Its
backward pass, two thirds of the work, is left out. Neither gradient nor metrics change.

A group stays whole, so that its prompt is computed once. A longer prefix that groups of both kinds share is computed
once for each kind. The samples are divided by kind only if that reduces the total work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flowrl import packing
from flowrl.messages import Batch, Bool
from flowrl.training.loss.objective import Objective

BACKWARD = 2
"""The work of a backward pass as a multiple of a forward pass: two matrix products for each forward product."""


@dataclass(frozen=True)
class StepPasses:
    """Numbers of samples, micro-batch by micro-batch."""

    forward: tuple[tuple[int, ...], ...]
    """Passes without gradients; they come first."""
    both: tuple[tuple[int, ...], ...]
    """Passes with a backward pass."""

    def padded(self, num_forward: int, num_both: int) -> StepPasses:
        """With empty micro-batches added, so that every rank makes these numbers of passes."""
        return StepPasses(
            self.forward + ((),) * (num_forward - len(self.forward)), self.both + ((),) * (num_both - len(self.both))
        )


def step_passes(
    part: Batch, masks: Sequence[Bool], micro_batches: Sequence[Sequence[int]], objective: Objective
) -> StepPasses:
    """The passes over the samples in `micro_batches`, which are those of one optimizer step.

    `masks` mark the tokens of each sample of `part` that enter the loss; every sample is one sequence.
    """
    planned = tuple(tuple(one) for one in micro_batches)
    numbers = [number for one in planned for number in one]
    groups = {part.samples[n].group_id for n in numbers if objective.has_gradient(part.samples[n], masks[n])}
    without = [number for number in numbers if part.samples[number].group_id not in groups]
    if not without:
        return StepPasses((), planned)
    way = part.how_packed()
    forward, both = (_packed(part, chosen, way) for chosen in (without, sorted({*numbers} - {*without})))
    whole = _size(part, planned, way)
    if _size(part, forward, way) + (1 + BACKWARD) * _size(part, both, way) >= (1 + BACKWARD) * whole:
        return StepPasses((), planned)
    return StepPasses(forward, both)


def _packed(part: Batch, numbers: Sequence[int], way: packing.Packing) -> tuple[tuple[int, ...], ...]:
    return tuple(map(tuple, way.micro_batches(_units(part, numbers))))


def _size(part: Batch, micro_batches: Sequence[Sequence[int]], way: packing.Packing) -> int:
    return sum(way.num_places(_units(part, one)) for one in micro_batches)


def _units(part: Batch, numbers: Sequence[int]) -> list[packing.PackedUnit]:
    lengths = [part.samples[number].pass_tokens for number in numbers]
    found = packing.units_of(lengths, [part.samples[number].pair for number in numbers])
    return [
        packing.PackedUnit(tuple(numbers[i] for i in unit.indices), unit.longest, unit.num_tokens) for unit in found
    ]
