"""The critic's objective: predict the return before every policy token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from flowrl.errors import ConfigError, FlowrlError
from flowrl.messages import Trainable
from flowrl.training.loss.objective import Column, LossInputs, MeanOver, Objective
from flowrl.training.settings import Head

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class ValueObjective(Objective):
    """0.5·(V − R)², clipped around the values from which the batch's advantages were made (2017, PPO's `vf_clip`)."""

    clip: float | None = 0.2
    """How far V may move from the old value before the loss stops rewarding it; None does not clip."""

    def __post_init__(self) -> None:
        if self.clip is not None and not self.clip > 0:
            raise ConfigError(f"the value clip is {self.clip}; it has to be above 0, or None for no clip")

    @property
    def head(self) -> Head:
        return "scalar"

    mean_over: ClassVar[MeanOver] = "tokens"
    stats = ("clip_fraction", "value_mean", "value_error")

    def columns(self, sample: Trainable) -> Column:
        if sample.values is None or sample.returns is None:
            raise FlowrlError(
                f"sample {sample.sample_id!r} has no old values and returns, on which a critic is trained: use the "
                "estimator 'gae' and connect the batcher to a Critic node"
            )
        return {"old_values": sample.values, "returns": sample.returns}

    def loss(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        from flowrl.training.loss.policy_losses import value_loss

        return value_loss(
            inputs.values_BT,
            inputs.columns["old_values"],
            inputs.columns["returns"],
            inputs.mask_BT,
            clip=self.clip,
            num_tokens=inputs.totals.num_tokens,
        )
