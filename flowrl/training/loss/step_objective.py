"""The objective of a process reward model: whether each step of a response is right.

Axes: B samples, T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from flowrl.errors import FlowrlError
from flowrl.messages import Trainable
from flowrl.training.loss.objective import Column, LossInputs, MeanOver, Objective
from flowrl.training.settings import Head

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class StepCorrectness(Objective):
    """Binary cross-entropy of σ(score) with each step's label, the mean over steps (arXiv 2305.20050)."""

    head: ClassVar[Head] = "scalar"
    offline = True
    mean_over: ClassVar[MeanOver] = "tokens"
    stats = ("step_accuracy", "step_score", "right_steps")

    def columns(self, sample: Trainable) -> Column:
        if sample.returns is None:
            raise FlowrlError(f"sample {sample.sample_id!r} has no labels of its steps in `returns`; use StepDataset")
        return {"labels": sample.returns}

    def loss(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        from torch.nn.functional import binary_cross_entropy_with_logits

        labels_BT, mask_BT = inputs.columns["labels"], inputs.mask_BT
        scores_BT, num_steps = inputs.values_BT, inputs.totals.num_tokens
        terms_BT = binary_cross_entropy_with_logits(scores_BT, labels_BT, reduction="none")
        right_BT = (scores_BT.detach() > 0) == (labels_BT > 0.5)
        return (terms_BT * mask_BT).sum() / num_steps, {
            "step_accuracy": (right_BT & mask_BT).sum() / num_steps,
            "step_score": (scores_BT.detach().sigmoid() * mask_BT).sum() / num_steps,
            "right_steps": (labels_BT * mask_BT).sum() / num_steps,
        }
