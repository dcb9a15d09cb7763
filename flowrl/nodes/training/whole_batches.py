"""Why a trainer needs its batches whole: what `flowrl check` says where gradients are not accumulated."""

from __future__ import annotations

from flowrl.training.loss.objective import Objective
from flowrl.training.settings import ZeroSettings


def why_whole(objective: object, zero: ZeroSettings, *, epochs: int, balance: float = 0.0) -> str:
    """What keeps a trainer from beginning before the whole batch is there, "" if nothing does.

    `balance` is the weight of the load-balancing loss of a mixture of experts.
    """
    if not isinstance(objective, Objective):
        return "its objective is none"
    name = type(objective).__name__
    if epochs > 1:
        return f"it makes {epochs} passes over each batch"
    if objective.needs_mismatched:
        return f"the baseline of {name} is a mean over the whole batch"
    if objective.offline:
        return "its batches are made of data, which are there before it asks for them"
    if objective.mean_over is None:
        return f"{name} does not say what its loss is a mean over (mean_over)"
    if balance:
        return "the load-balancing loss of its experts is a mean over the whole batch"
    if zero.optimizer == "muon":
        return "muon averages gradients of several steps before they can be divided"
    return ""
