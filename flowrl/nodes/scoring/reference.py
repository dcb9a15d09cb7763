"""The reference computes logprobs of every policy token, for a KL in the reward or the loss, or for preferences.

The weights of a `Reference` are fixed, or those of every nth version of the policy, mixed with its own. Reference r,
for r = 0, n, 2n, …, is α · (the policy's weights of version r) + (1 − α) · (reference r − n); reference 0 has the
initial weights. TRL calls n `ref_model_sync_steps` and α `ref_model_mixup_alpha` (TR-DPO, arXiv 2404.09656).

A sample is compared with reference n · ⌊v / n⌋, where v is the newest version that sampled one of its tokens. So its
reference depends only on the sample, not on the order of scoring. That needs the references of all versions that
samples in progress may have: 1 + ⌈staleness / n⌉ references in host memory, one of which is loaded in the model. A
sample waits until the reference of its version has been made. This wait ends: the trainer has already published that
version, and it continues when this node holds it.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from flowrl.graph.node import Facts, Footprint, MemoryTerm, Share
from flowrl.graph.ports import In, Out
from flowrl.messages import Bool, Float32, Int32, Sample, Weights
from flowrl.messages.episode import Episode
from flowrl.models import Policy
from flowrl.nodes.scoring.scoring_model import ScoringNode, SharedPass
from flowrl.training.settings import Dtype, Layout
from flowrl.weights.receive import make_receiver

if TYPE_CHECKING:
    from torch import Tensor, nn


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
        super().__init__(
            policy, dtype=dtype, token_budget=token_budget, layout=layout, batch=batch, temperature=temperature
        )
        self.refresh_every = refresh_every
        self.mixup = mixup
        self._kept: KeptReferences | None = None
        self._newest = asyncio.Condition()
        self._pass = SharedPass(self, "reference", self._score_sequences)

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
        if self.refresh_every and self.gpus > 1:
            problems.append(
                f"refresh_every is {self.refresh_every}, and gpus {self.gpus:g}; the weights of a reference that is "
                "sharded stay as they are, so give it one GPU, or no refresh_every"
            )
        return [*problems, *super().check(facts)]

    async def setup(self) -> None:
        await super().setup()
        if self.refresh_every:
            self._receiver = make_receiver(self.context.weight_routes, self.replica_name, self.context.run_id)
            self._kept = await self.blocking(self._open_references)

    def _open_references(self) -> KeptReferences:
        from flowrl.weights.receive import ModuleWeights

        assert self.scoring is not None, "`load_model` opens it"
        num = num_kept(self.refresh_every, self.context.max_staleness)
        network = self.scoring.model.network
        kept = KeptReferences(network, every=self.refresh_every, mixup=self.mixup, kept=num)
        if self.context.resume_dir is not None:
            kept.restore_references(self._state_dir(self.context.resume_dir))
        self._published = ModuleWeights(dict(network.named_parameters()))
        return kept

    def _state_dir(self, path: str) -> Path:
        return Path(path) / f"{self.name}_state"

    async def checkpoint(self, path: str) -> None:
        if self._kept is not None and self.context.replica == 0:
            await self.blocking(self._kept.save_references, self._state_dir(path))

    async def close(self) -> None:
        await super().close()
        if hasattr(self, "_receiver"):
            self._receiver.close()

    async def run(self) -> None:
        if self._kept is None:
            await self.rollouts.each(self._score_sample, concurrency=self.batch)
            return
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow_weights(self._kept))
            await self.rollouts.each(self._score_sample, concurrency=self.batch)
            self.referenced.close()

    async def _follow_weights(self, kept: KeptReferences) -> None:
        async for manifest in self.weights:
            if manifest.version % self.refresh_every == 0 and manifest.version > kept.newest_number:
                await self.blocking(self._refresh_reference, kept, manifest)
                self.context.metric("reference_refreshed", 1)
                async with self._newest:
                    self._newest.notify_all()
            self.context.ledger.holds(self.replica_name, manifest.policy, manifest.version)
            self.weights.finish(manifest)

    def _refresh_reference(self, kept: KeptReferences, manifest: Weights) -> None:
        """Make the reference of a published version. The version is not overwritten before this node holds it."""
        fetched = self._receiver.fetch_version(manifest)
        try:
            kept.add_reference(manifest.version, self._published.read_update(fetched.update))
        finally:
            fetched.close()

    async def _score_sample(self, sample: Sample) -> None:
        wanted = 0
        if (kept := self._kept) is not None:
            wanted = kept.number_for(newest_version(sample))
            with self.context.waiting("the reference of its version"):
                async with self._newest:
                    await self._newest.wait_for(lambda: kept.newest_number >= wanted)
        asked = [_Asked(one.token_ids, one.policy_mask, wanted) for one in sample.sequences]
        ref_logprobs = np.concatenate(await asyncio.gather(*map(self._pass.ask_model, asked)))
        await self.referenced.send(dataclasses.replace(sample, ref_logprobs=ref_logprobs))

    def _score_sequences(self, asked: list[_Asked]) -> list[Float32]:
        """log p of the policy tokens of each sequence, at their positions (0 elsewhere), under its own reference."""
        from flowrl.training.model.row_layout import policy_places
        from flowrl.training.scoring_models import logprobs_of

        found = [np.zeros(len(one.token_ids), np.float32) for one in asked]
        places: dict[int, list[int]] = defaultdict(list)
        for place, one in enumerate(asked):
            places[one.reference].append(place)
        for number, mine in sorted(places.items()):
            if self._kept is not None:
                used = self._kept.load_reference(number)
                for _ in mine:
                    self.context.gauge("reference_version", used)
            sampled = [place for place in mine if policy_places(asked[place].policy_mask).size]
            items = [(asked[place].token_ids, asked[place].policy_mask) for place in sampled]
            for place, logprobs in zip(sampled, self.score_items(logprobs_of, items, self.temperature), strict=True):
                found[place] = logprobs
        return found


class EpisodeReference(Reference):
    """A Reference of episodes."""

    rollouts: In[Episode]  # type: ignore[assignment]  # an In is invariant: it takes nothing but episodes
    referenced: Out[Episode]


def newest_version(sample: Sample) -> int:
    """The newest version that sampled one of its tokens; 0 if none was sampled."""
    versions = sample.whole_versions[sample.whole_mask]
    return max(0, int(versions.max())) if versions.size else 0


FILE = "references.pt"


def num_kept(every: int, staleness: int | None) -> int:
    """The number of references that samples in progress may need."""
    return 1 + -(-(staleness or 0) // every)


class KeptReferences:
    """The newest references of one model; the model's parameters hold one reference at a time."""

    def __init__(self, network: nn.Module, *, every: int, mixup: float, kept: int) -> None:
        self._parameters = dict(network.named_parameters())
        self._every = every
        self._mixup = mixup
        self._kept = kept
        self._weights: dict[int, Mapping[str, Tensor]] = {
            0: {name: parameter.detach().to("cpu", copy=True) for name, parameter in self._parameters.items()}
        }
        self._loaded = 0

    @property
    def newest_number(self) -> int:
        """The number of the newest reference."""
        return max(self._weights)

    def number_for(self, version: int) -> int:
        """The number of the reference for samples whose newest token is of that version."""
        return version // self._every * self._every

    def add_reference(self, version: int, policy: Mapping[str, Tensor]) -> None:
        """Make reference `version` from `policy`: the policy's weights of that version, by parameter name."""
        own = self._weights[self.newest_number]
        mixed = {
            name: (self._mixup * policy[name].float().cpu() + (1 - self._mixup) * tensor.float()).to(tensor.dtype)
            for name, tensor in own.items()
        }
        self._weights[version] = mixed
        for number in sorted(self._weights)[: -self._kept]:
            del self._weights[number]

    def load_reference(self, number: int) -> int:
        """Load that reference into the model, or the oldest kept if it is older than that; return the loaded number."""
        import torch

        number = number if number in self._weights else min(self._weights)
        if number != self._loaded:
            with torch.no_grad():
                for name, tensor in self._weights[number].items():
                    self._parameters[name].copy_(tensor)
            self._loaded = number
        return number

    def save_references(self, directory: Path) -> None:
        """Write all kept references into a checkpoint's new `directory`."""
        import torch

        directory.mkdir(parents=True, exist_ok=True)
        torch.save({number: dict(weights) for number, weights in self._weights.items()}, directory / FILE)

    def restore_references(self, directory: Path) -> None:
        """Load the references that `save` wrote, and the newest of them into the model."""
        import torch

        found: dict[int, dict[str, Any]] = torch.load(directory / FILE, map_location="cpu")
        self._weights = dict(found)
        self._loaded = -1
        self.load_reference(self.newest_number)
