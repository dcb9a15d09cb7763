"""The reference computes logprobs of every policy token under fixed weights, for a KL in the reward or the loss."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from flowrl.graph.facts import Facts
from flowrl.graph.ports import In, Out
from flowrl.messages import Float32, Sample
from flowrl.models import Policy, check_model, known_directory, resolve
from flowrl.models.model_layout import note, scoring_layout
from flowrl.nodes.one_sequence import require_one_sequence
from flowrl.nodes.scoring_model import ScoringNode
from flowrl.nodes.shared_pass import SharedPass
from flowrl.training.layouts import refused
from flowrl.training.model.trainable import check_policy
from flowrl.training.settings import Dtype, Layout
from flowrl.tree_packing import passes_over

if TYPE_CHECKING:
    from flowrl.training.model.policy_model import PolicyModel


class Reference(ScoringNode):
    """Adds `ref_logprobs` to samples. `temperature` has to equal the generator's: logits are divided by it.

    `dtype` applies to weights and computation, as in the trainer. At most `batch` samples wait for a pass at the
    same time. One pass takes at most `token_budget` tokens, padding included, or a single longer sample. `layout`:
    whether prefixes that samples share are computed once, see `ZeroSettings`.
    """

    cpus = 1

    rollouts: In[Sample]
    referenced: Out[Sample]

    def __init__(
        self,
        policy: Policy,
        *,
        temperature: float = 1.0,
        dtype: Dtype = "float32",
        token_budget: int = 8192,
        batch: int = 64,
        layout: Layout = "auto",
    ) -> None:
        self.policy = policy
        self.temperature = temperature
        self.dtype = dtype
        self.token_budget = token_budget
        self.batch = batch
        self.layout: Layout = layout
        self._pass = SharedPass(self._refer_all)

    def facts(self) -> Facts:
        return Facts(concurrency=self.batch)

    def check(self, facts: object) -> list[str]:
        problems = []
        if self.temperature <= 0:
            problems.append(f"temperature is {self.temperature}; it has to be above 0, and the generator's")
        for name in ("token_budget", "batch"):
            if getattr(self, name) < 1:
                problems.append(f"{name} is {getattr(self, name)}; it needs at least 1")
        return problems + refused(self.layout, scoring_layout(self.policy, self.layout))

    def notes(self) -> list[str]:
        return [note(scoring_layout(self.policy, self.layout))]

    def preflight(self) -> None:
        check_model(self.policy)
        if (model_dir := known_directory(self.policy)) is not None:
            check_policy(model_dir, trust_remote_code=self.policy.trust_remote_code)

    async def setup(self) -> None:
        self._model = await self.blocking(self._load)

    def _load(self) -> PolicyModel:
        source = resolve(self.policy, progress=self.context.progress)
        import torch

        from flowrl.training.model.policy_model import load_policy_model

        torch.set_num_threads(max(1, len(self.context.cores)))
        return (
            load_policy_model(
                source, dtype=self.dtype, trust_remote_code=self.policy.trust_remote_code, layout=self.layout
            )
            .eval()
            .to(self.load_device)
        )

    def scoring_model(self) -> PolicyModel:
        return self._model

    async def run(self) -> None:
        await self.rollouts.each(self._refer, concurrency=self.batch)

    async def _refer(self, sample: Sample) -> None:
        require_one_sequence([sample], "a Reference")
        ref_logprobs = await self._pass.ask(sample)
        await self.referenced.send(dataclasses.replace(sample, ref_logprobs=ref_logprobs))

    async def _refer_all(self, samples: list[Sample]) -> Sequence[Float32]:
        with self.context.busy("reference"):
            return await self.blocking(
                reference_logprobs, self._model, samples, self.temperature, token_budget=self.token_budget
            )


def reference_logprobs(
    model: PolicyModel, samples: Sequence[Sample], temperature: float, *, token_budget: int
) -> list[Float32]:
    """log p of the policy tokens of each sample under `model`, at their positions; 0 elsewhere."""
    import torch

    from flowrl.training.model.row_layout import lay_out, policy_places

    device = next(model.parameters()).device
    results = [np.zeros(len(sample.token_ids), np.float32) for sample in samples]
    places = [policy_places(sample.policy_mask) for sample in samples]
    wanted = [index for index, found in enumerate(places) if found.size]
    passes, trees = passes_over([samples[index].token_ids for index in wanted], token_budget, model.layout)
    for passed in passes:
        chosen = [wanted[number] for number in passed]
        token_ids, masks = [samples[i].token_ids for i in chosen], [samples[i].policy_mask for i in chosen]
        rows = lay_out(token_ids, masks, layout="tree" if trees else "padded", device=device)
        with torch.no_grad():
            logprobs_N, _ = model(rows, temperature)
        for index, part in zip(chosen, logprobs_N.float().cpu().split([places[i].size for i in chosen]), strict=True):
            results[index][places[index]] = part.numpy()
    return results
