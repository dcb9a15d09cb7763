"""What to load for scoring, as plain data that can be sent to processes that share a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from flowrl.training.settings import Attention, Dtype, Head, Layout, Start

if TYPE_CHECKING:
    from flowrl.training.model.policy_model import PolicyModel
    from flowrl.training.model.value_model import ScalarModel


@dataclass(frozen=True)
class ModelLoad:
    """One model directory and how it is loaded, see `load_policy_model` and `load_scalar_model`.

    A scalar head that was saved keeps all its labels.
    """

    path: str
    head: Head = "lm"
    start: Start = "policy"
    dtype: Dtype = "float32"
    attention: Attention = "sdpa"
    trust_remote_code: bool = False
    layout: Layout = "auto"

    def model(self, *, tries: bool = True) -> PolicyModel | ScalarModel:
        """The model in host memory; under ZeRO-3, this rank's part. `tries`: try a tree if the model takes trees."""
        from flowrl.training.model.policy_model import load_policy_model
        from flowrl.training.model.token_logprobs.products import multiply_fast
        from flowrl.training.model.value_model import load_scalar_model

        options = {
            "dtype": self.dtype,
            "attention": self.attention,
            "trust_remote_code": self.trust_remote_code,
            "layout": self.layout,
            "tries": tries,
        }
        found: PolicyModel | ScalarModel
        if self.head == "lm":
            found = load_policy_model(self.path, **options)  # type: ignore[arg-type]
        else:
            every = self.start == "reward_model"
            found = load_scalar_model(self.path, start=self.start, every_label=every, **options)  # type: ignore[arg-type]
        multiply_fast(found.network)
        return found.eval()
