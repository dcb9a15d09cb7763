"""The reference computes logprobs of every policy token, for a KL in the reward or the loss.

Its weights are fixed, or those of every nth version of the policy (`flowrl.nodes.scoring.refreshed`). In the second
case a sample waits until the reference of its version has been made. This wait ends: the trainer has already published
that version, and it continues when this node holds it.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from flowrl.episode import Episode
from flowrl.graph.facts import Facts
from flowrl.graph.footprint import Footprint, MemoryTerm, Share
from flowrl.graph.ports import In, Out
from flowrl.messages import Bool, Float32, Int32, Sample, Weights
from flowrl.models import Policy, check_model, known_directory, resolve
from flowrl.models.sizes.model_layout import note, scoring_layout
from flowrl.nodes.scoring.refreshed import KeptReferences, num_kept
from flowrl.nodes.scoring.scoring_model import ScoringNode, gpu_problems
from flowrl.nodes.scoring.shared_pass import SharedPass
from flowrl.training.layouts import refused
from flowrl.training.model.trainable import check_policy
from flowrl.training.settings import Dtype, Layout
from flowrl.weights.receive import make_receiver


class _Asked(NamedTuple):
    """A sequence whose logprobs are asked for."""

    token_ids: Int32
    policy_mask: Bool
    reference: int
    """The number of the reference, if it follows the policy; else 0."""


class Reference(ScoringNode):
    """Adds `ref_logprobs` to samples, for all sequences of each sample.

    `temperature` has to equal the generator's: logits are divided by it. `dtype` applies to weights and computation, as
    in the trainer. At most `batch` samples wait for a pass at the same time. One pass takes at most `token_budget`
    tokens, padding included, or a single longer sequence. `layout` says whether prefixes that sequences share are
    computed once, see `ZeroSettings`.

    With `refresh_every=n` it takes the weights of every nth version from the trainer on its latest edge. Its new
    weights are `mixup` times these plus (1 − `mixup`) times its previous weights. The graph's admission has to wait for
    this edge as well: `until=(generator.weights, reference.weights)`.
    """

    cpus = 1

    rollouts: In[Sample]
    referenced: Out[Sample]
    weights: In[Weights]

    def __init__(
        self,
        policy: Policy,
        *,
        temperature: float = 1.0,
        dtype: Dtype = "float32",
        token_budget: int = 8192,
        batch: int = 64,
        layout: Layout = "auto",
        refresh_every: int = 0,
        mixup: float = 1.0,
    ) -> None:
        self.policy = policy
        self.refresh_every = refresh_every
        self.mixup = mixup
        self._kept: KeptReferences | None = None
        self._newest = asyncio.Condition()
        self.temperature = temperature
        self.dtype = dtype
        self.token_budget = token_budget
        self.batch = batch
        self.layout: Layout = layout
        self._pass = SharedPass(self._refer_all)

    def facts(self) -> Facts:
        if not self.refresh_every:
            return Facts(concurrency=self.batch, optional=("weights",))
        return Facts(
            concurrency=self.batch,
            adapter_rank=0,
            takes_every=self.refresh_every,
            without_devices=("weights",),
            weights_in_host_memory=True,
            weights_dtype=self.dtype,
        )

    def footprint(self, share: Share) -> Footprint | None:
        found = super().footprint(share)
        if found is None or not self.refresh_every:
            return found
        weights = next(term.num_bytes for term in found.terms if term.name == "weights")
        kept = MemoryTerm("references", 3 * weights, "host")  # two references, and one more while it is made
        return dataclasses.replace(found, terms=(*found.terms, kept))

    def check(self, facts: object) -> list[str]:
        problems = []
        if self.refresh_every < 0:
            problems.append(f"refresh_every is {self.refresh_every}; it has to be 0 (never) or more")
        if not 0 < self.mixup <= 1:
            problems.append(f"mixup is {self.mixup}; it has to be above 0, and at most 1")
        if self.weights.connected and not self.refresh_every:
            problems.append("it is sent weights that it never takes; give it refresh_every=, or remove that edge")
        if self.temperature <= 0:
            problems.append(f"temperature is {self.temperature}; it has to be above 0, and the generator's")
        for name in ("token_budget", "batch"):
            if getattr(self, name) < 1:
                problems.append(f"{name} is {getattr(self, name)}; it needs at least 1")
        problems += gpu_problems(self.gpus)
        if self.refresh_every and self.gpus > 1:
            problems.append(
                f"refresh_every is {self.refresh_every}, and gpus {self.gpus:g}; the weights of a reference that is "
                "sharded stay as they are, so give it one GPU, or no refresh_every"
            )
        return problems + refused(self.layout, scoring_layout(self.policy, self.layout))

    def notes(self) -> list[str]:
        return [note(scoring_layout(self.policy, self.layout))]

    def preflight(self) -> None:
        check_model(self.policy)
        if (model_dir := known_directory(self.policy)) is not None:
            check_policy(model_dir, trust_remote_code=self.policy.trust_remote_code)

    async def setup(self) -> None:
        await self.blocking(self._load)
        if self.refresh_every:
            self._receiver = make_receiver(self.context.weight_routes, self._replica, self.context.run_id)
            self._kept = await self.blocking(self._keep)

    def _load(self) -> None:
        from flowrl.training.scoring_models import ModelLoad

        source = resolve(self.policy, progress=self.context.progress)
        trusted = self.policy.trust_remote_code
        self.open_model(ModelLoad(source, dtype=self.dtype, trust_remote_code=trusted, layout=self.layout))

    def _keep(self) -> KeptReferences:
        from flowrl.weights.receive import ModuleWeights

        assert self.scoring is not None, "`_load` opens it"
        num = num_kept(self.refresh_every, self.context.max_staleness)
        network = self.scoring.model.network
        kept = KeptReferences(network, every=self.refresh_every, mixup=self.mixup, kept=num)
        if self.context.resume_dir is not None:
            kept.restore(self._state_dir(self.context.resume_dir))
        self._published = ModuleWeights(dict(network.named_parameters()))
        return kept

    @property
    def _replica(self) -> str:
        return f"{self.name}/{self.context.replica}"

    def _state_dir(self, path: str) -> Path:
        return Path(path) / f"{self.name}_state"

    async def checkpoint(self, path: str) -> None:
        if self._kept is not None and self.context.replica == 0:
            await self.blocking(self._kept.save, self._state_dir(path))

    async def close(self) -> None:
        await super().close()
        if hasattr(self, "_receiver"):
            self._receiver.close()

    async def run(self) -> None:
        if self._kept is None:
            await self.rollouts.each(self._refer, concurrency=self.batch)
            return
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow_weights(self._kept))
            await self.rollouts.each(self._refer, concurrency=self.batch)
            self.referenced.close()

    async def _follow_weights(self, kept: KeptReferences) -> None:
        async for manifest in self.weights:
            if manifest.version % self.refresh_every == 0 and manifest.version > kept.newest:
                await self.blocking(self._take, kept, manifest)
                self.context.metric("reference_refreshed", 1)
                async with self._newest:
                    self._newest.notify_all()
            self.context.ledger.holds(self._replica, manifest.policy, manifest.version)
            self.weights.finish(manifest)

    def _take(self, kept: KeptReferences, manifest: Weights) -> None:
        """Make the reference of a published version. The version is not overwritten before this node holds it."""
        fetched = self._receiver.fetch(manifest)
        try:
            kept.take(manifest.version, self._published.read(fetched.update))
        finally:
            fetched.close()

    async def _refer(self, sample: Sample) -> None:
        wanted = 0
        if (kept := self._kept) is not None:
            wanted = kept.of(newest_version(sample))
            with self.context.waiting("the reference of its version"):
                async with self._newest:
                    await self._newest.wait_for(lambda: kept.newest >= wanted)
        asked = [_Asked(one.token_ids, one.policy_mask, wanted) for one in sample.sequences]
        ref_logprobs = np.concatenate(await asyncio.gather(*map(self._pass.ask, asked)))
        await self.referenced.send(dataclasses.replace(sample, ref_logprobs=ref_logprobs))

    async def _refer_all(self, asked: list[_Asked]) -> Sequence[Float32]:
        with self.context.busy("reference"):
            return await self.blocking(self._passes, asked)

    def _passes(self, asked: list[_Asked]) -> Sequence[Float32]:
        """The logprobs of each sequence, under the reference of its sample's version."""
        if self._kept is None:
            return self._logprobs(asked)
        places: dict[int, list[int]] = defaultdict(list)
        for place, one in enumerate(asked):
            places[one.reference].append(place)
        found: dict[int, Float32] = {}
        for number, mine in sorted(places.items()):
            used = self._kept.load(number)
            logprobs = self._logprobs([asked[place] for place in mine])
            found |= zip(mine, logprobs, strict=True)
            for _ in mine:
                self.context.gauge("reference_version", used)
        return [found[place] for place in range(len(asked))]

    def _logprobs(self, sequences: Sequence[_Asked]) -> list[Float32]:
        """log p of the policy tokens of each sequence, at their positions; 0 elsewhere."""
        from flowrl.training.model.row_layout import policy_places
        from flowrl.training.scoring_models import logprobs_of

        asked = [number for number, one in enumerate(sequences) if policy_places(one.policy_mask).size]
        results = [np.zeros(len(one.token_ids), np.float32) for one in sequences]
        items = [(sequences[number].token_ids, sequences[number].policy_mask) for number in asked]
        for number, logprobs in zip(asked, self.scores(logprobs_of, items, self.temperature), strict=True):
            results[number] = logprobs
        return results


class EpisodeReference(Reference):
    """A Reference of episodes."""

    rollouts: In[Episode]  # type: ignore[assignment]  # an In is invariant: it takes nothing but episodes
    referenced: Out[Episode]


def newest_version(sample: Sample) -> int:
    """The newest version that sampled one of its tokens; 0 if none was sampled."""
    versions = sample.whole_versions[sample.whole_mask]
    return max(0, int(versions.max())) if versions.size else 0
