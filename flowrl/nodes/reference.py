"""The reference: logprobs of every policy token under fixed weights, for a KL in the reward or in the loss."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from flowrl.graph.facts import Facts
from flowrl.graph.node import Node
from flowrl.graph.ports import In, Out
from flowrl.messages import Float32, Sample
from flowrl.models import Policy, check_model, resolve
from flowrl.training.settings import Dtype

if TYPE_CHECKING:
    from flowrl.training.model import PolicyModel


class Reference(Node):
    """Adds `ref_logprobs` to samples. `temperature` has to be the generator's: logits are divided by it."""

    cpus = 1

    rollouts: In[Sample]
    referenced: Out[Sample]

    def __init__(self, policy: Policy, *, temperature: float = 1.0, dtype: Dtype = "float32") -> None:
        self.policy = policy
        self.temperature = temperature
        self.dtype = dtype

    def facts(self) -> Facts:
        return Facts()

    def check(self, facts: object) -> list[str]:
        if self.temperature <= 0:
            return [f"temperature is {self.temperature}; it has to be above 0, and the generator's"]
        return []

    def preflight(self) -> None:
        check_model(self.policy)

    async def setup(self) -> None:
        self._model = await self.blocking(self._load)

    def _load(self) -> PolicyModel:
        source = resolve(self.policy, progress=self.context.progress)
        import torch

        from flowrl.training.model import load_policy_model

        torch.set_num_threads(max(1, len(self.context.cores)))
        device = "cuda" if self.context.gpus else "cpu"
        return load_policy_model(source, dtype=self.dtype).eval().to(device)

    async def run(self) -> None:
        async for sample in self.rollouts:
            with self.context.busy("reference"):
                ref_logprobs = await self.blocking(reference_logprobs, self._model, sample, self.temperature)
            await self.referenced.send(dataclasses.replace(sample, ref_logprobs=ref_logprobs))


def reference_logprobs(model: PolicyModel, sample: Sample, temperature: float) -> Float32:
    """log p of the policy tokens of `sample` under `model`, at their places; 0 elsewhere."""
    import torch

    from flowrl.training.rows import lay_out, policy_places

    places = policy_places(sample.policy_mask)
    result = np.zeros(len(sample.token_ids), np.float32)
    if places.size:
        device = next(model.parameters()).device
        rows = lay_out([sample.token_ids], [sample.policy_mask], packed=False, device=device)
        with torch.no_grad():
            logprobs_N, _ = model(rows, temperature)
        result[places] = logprobs_N.float().cpu().numpy()
    return result
