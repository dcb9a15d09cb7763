"""Why a trainer needs whole batches: the reason that `flowrl check` gives where gradients are not accumulated."""

from __future__ import annotations

from flowrl.training.loss.objective import Objective
from flowrl.training.settings import ZeroSettings


def why_whole(objective: object, zero: ZeroSettings, *, epochs: int, balance: float = 0.0) -> str:
    """What keeps a trainer from starting before the whole batch has arrived, "" if nothing does.

    `balance` is the weight of the load-balancing loss of a mixture of experts.
    """
    if not isinstance(objective, Objective):
        return "it has no objective"
    name = type(objective).__name__
    if epochs > 1:
        return f"it makes {epochs} passes over each batch"
    if objective.needs_mismatched:
        return f"the baseline of {name} is a mean over the whole batch"
    if objective.offline:
        return "its batches come from data and are ready before it asks for them"
    if objective.mean_over is None:
        return f"{name} does not say what its loss is a mean over (mean_over)"
    if balance:
        return "the load-balancing loss of its experts is a mean over the whole batch"
    if zero.optimizer == "muon":
        return "muon averages gradients of several steps before they can be divided"
    return ""
