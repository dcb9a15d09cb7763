"""The reference computes logprobs of every policy token, for a KL in the reward or the loss, or for preferences.

The weights of a `Reference` are fixed, or those of every nth version of the policy, mixed with its own. Reference r,
for r = 0, n, 2n, …, is α · (the policy's weights of version r) + (1 − α) · (reference r − n); reference 0 has the
initial weights. TRL calls n `ref_model_sync_steps` and α `ref_model_mixup_alpha` (TR-DPO, arXiv 2404.09656).

A sample is compared with reference n · ⌊v / n⌋, where v is the newest version that sampled one of its tokens. So its
reference depends only on the sample, not on the order of scoring. That needs the references of all versions that
samples in progress may have: 1 + ⌈staleness / n⌉ references in host memory, one of which is loaded in the model. A
sample waits until the reference of its version has been made. This wait ends: the trainer has already published that
version, and it continues when this node holds it.

A `PreferenceReference` computes every logprob once before the first batch, then reads from disk. `setup` loads the
model only if the cache of this model and this data does not exist yet, and frees it again: after training has started,
trainer and reference never hold memory at the same time. Batches pass without a model, as fast as the file can be read.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from flowrl.graph.node import Facts, Footprint, MemoryTerm, Node, Share
from flowrl.graph.ports import In, Out
from flowrl.messages import Batch, Bool, Float32, Group, Int32, Sample, Trainable, Weights
from flowrl.messages.episode import Episode
from flowrl.models import Policy, check_model, known_directory, require_same_vocabulary, resolve
from flowrl.models.model_layout import layout_note, scoring_layout
from flowrl.models.tokens.vocabulary import untold_vocabulary, vocabulary_problem
from flowrl.nodes.scoring.scoring_model import ScoringNode, SharedPass, gpu_problems, open_scoring_model
from flowrl.nodes.sources.demonstrations import batch_of_samples
from flowrl.nodes.sources.preferences import Preferences, Renderer
from flowrl.nodes.sources.row_checks import within_limit
from flowrl.tasks import Row
from flowrl.tasks.row_reading.rows_on_disk import asked_ids, lowest_asked
from flowrl.training.layouts import explain_refused_tree
from flowrl.training.model.trainable import check_policy
from flowrl.training.settings import Dtype, Layout
from flowrl.weights.receive import make_receiver

if TYPE_CHECKING:
    from torch import Tensor, nn

    from flowrl.models.references import ReferenceCache
    from flowrl.training.scoring_models import ScoringModel


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
        self._pass = SharedPass(self._score_sequences)

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
        return problems + explain_refused_tree(self.layout, scoring_layout(self.policy, self.layout))

    def notes(self) -> list[str]:
        return [layout_note(scoring_layout(self.policy, self.layout))]

    def preflight(self) -> None:
        check_model(self.policy)
        if (model_dir := known_directory(self.policy)) is not None:
            check_policy(model_dir, trust_remote_code=self.policy.trust_remote_code)

    async def setup(self) -> None:
        await self.blocking(self._load_model)
        if self.refresh_every:
            self._receiver = make_receiver(self.context.weight_routes, self._replica_name, self.context.run_id)
            self._kept = await self.blocking(self._open_references)

    def _load_model(self) -> None:
        from flowrl.training.scoring_models import ModelLoad

        source = resolve(self.policy, progress=self.context.progress)
        trusted = self.policy.trust_remote_code
        self.open_model(ModelLoad(source, dtype=self.dtype, trust_remote_code=trusted, layout=self.layout))

    def _open_references(self) -> KeptReferences:
        from flowrl.weights.receive import ModuleWeights

        assert self.scoring is not None, "`_load_model` opens it"
        num = num_kept(self.refresh_every, self.context.max_staleness)
        network = self.scoring.model.network
        kept = KeptReferences(network, every=self.refresh_every, mixup=self.mixup, kept=num)
        if self.context.resume_dir is not None:
            kept.restore_references(self._state_dir(self.context.resume_dir))
        self._published = ModuleWeights(dict(network.named_parameters()))
        return kept

    @property
    def _replica_name(self) -> str:
        return f"{self.name}/{self.context.replica}"

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
            self.context.ledger.holds(self._replica_name, manifest.policy, manifest.version)
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

    async def _score_sequences(self, asked: list[_Asked]) -> Sequence[Float32]:
        with self.context.busy("reference"):
            return await self.blocking(self._logprobs_by_reference, asked)

    def _logprobs_by_reference(self, asked: list[_Asked]) -> Sequence[Float32]:
        """The logprobs of each sequence, under the reference of its sample's version."""
        if self._kept is None:
            return self._policy_logprobs(asked)
        places: dict[int, list[int]] = defaultdict(list)
        for place, one in enumerate(asked):
            places[one.reference].append(place)
        found: dict[int, Float32] = {}
        for number, mine in sorted(places.items()):
            used = self._kept.load_reference(number)
            logprobs = self._policy_logprobs([asked[place] for place in mine])
            found |= zip(mine, logprobs, strict=True)
            for _ in mine:
                self.context.gauge("reference_version", used)
        return [found[place] for place in range(len(asked))]

    def _policy_logprobs(self, sequences: Sequence[_Asked]) -> list[Float32]:
        """log p of the policy tokens of each sequence, at their positions; 0 elsewhere."""
        from flowrl.training.model.row_layout import policy_places
        from flowrl.training.scoring_models import logprobs_of

        asked = [number for number, one in enumerate(sequences) if policy_places(one.policy_mask).size]
        results = [np.zeros(len(one.token_ids), np.float32) for one in sequences]
        items = [(sequences[number].token_ids, sequences[number].policy_mask) for number in asked]
        for number, logprobs in zip(asked, self.score_items(logprobs_of, items, self.temperature), strict=True):
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


class PreferenceReference(Node):
    """Adds `ref_logprobs` under `policy` (None: the data's) to preferences, mismatched completions included.

    A different policy needs the same vocabulary as the data's, because it scores the same token ids.

    Sends up to `num_held_out` held-out rows as one batch before everything else, to evaluate the trainer.
    `token_budget` bounds the tokens of one pass, padding included. `layout` says whether prefixes that sequences share
    are computed once, see `ZeroSettings`.
    """

    cpus = 1

    groups: In[Group]
    referenced: Out[Group]
    held_out: Out[Batch]

    def __init__(
        self,
        data: Preferences,
        *,
        policy: Policy | None = None,
        dtype: Dtype = "float32",
        token_budget: int = 8192,
        num_held_out: int = 256,
        layout: Layout = "auto",
    ) -> None:
        self.data = data
        self.policy = policy or data.policy
        self.dtype: Dtype = dtype
        self.token_budget = token_budget
        self.num_held_out = num_held_out
        self.layout: Layout = layout

    def facts(self) -> Facts:
        return Facts(optional=("held_out",))

    def check(self, facts: object) -> list[str]:
        problem = vocabulary_problem(self.data.policy, self.policy)
        problems = [problem] if problem else []
        needed = self.data.group_size * self.data.max_tokens
        if self.token_budget < needed:
            problems.append(
                f"token_budget is {self.token_budget}, but {self.data.group_size} conversation(s) of max_tokens = "
                f"{self.data.max_tokens} that stay together can be {needed} tokens; raise it, or lower max_tokens"
            )
        if self.num_held_out < 0:
            problems.append(f"num_held_out is {self.num_held_out}; it has to be 0 (none) or more")
        problems += gpu_problems(self.gpus)
        return problems + explain_refused_tree(self.layout, scoring_layout(self.policy, self.layout))

    def notes(self) -> list[str]:
        return [layout_note(scoring_layout(self.policy, self.layout))]

    def preflight(self) -> None:
        check_model(self.policy)
        if (model_dir := known_directory(self.policy)) is not None:
            check_policy(model_dir, trust_remote_code=self.policy.trust_remote_code)
        if untold_vocabulary(self.data.policy, self.policy):
            require_same_vocabulary(self.data.policy, self.policy)

    async def setup(self) -> None:
        self._cache = await self.blocking(self._fill_cache)

    def _fill_cache(self) -> ReferenceCache:
        progress = self.context.progress
        model_dir = resolve(self.policy, progress=progress)
        from flowrl.models.references import reference_cache

        chat, rows = self.data.open_chat(progress), self.data.read_rows()
        parts = [
            Renderer(self.data, chat, rows.train),
            Renderer(self.data, chat, self._rows_to_judge_on(rows.held_out)),
        ]
        self._judged_on = parts[1]
        return reference_cache(
            model_dir,
            (
                sequence
                for part in parts
                for samples in part
                if self.keeps_row(samples)
                for sample in samples
                for sequence in scored_sequences(sample)
            ),
            dtype=self.dtype,
            open_model=partial(self._open_model, model_dir),
            token_budget=self.token_budget,
            progress=progress,
        )

    def keeps_row(self, samples: Sequence[Trainable]) -> bool:
        """Whether the data keep the row of these samples."""
        return within_limit(samples, self.data.max_tokens)

    def _open_model(self, model_dir: str) -> ScoringModel:
        import torch

        from flowrl.training.model.policy_model import choose_attention
        from flowrl.training.scoring_models import ModelLoad

        torch.set_num_threads(max(1, len(self.context.cores)))
        device = "cuda" if self.context.gpus else "cpu"
        attention = choose_attention(None, torch.device(device), self.dtype)
        trusted = self.policy.trust_remote_code
        load = ModelLoad(model_dir, "lm", "policy", self.dtype, attention, trusted, self.layout)
        return open_scoring_model(load, self.context.gpus, device, threads=len(self.context.cores))

    def _rows_to_judge_on(self, held_out: Sequence[Row]) -> Sequence[Row]:
        """The rows to evaluate on, independent of the order of the data; rows of one prompt are next to each other."""
        rows = lowest_asked(held_out, self.num_held_out)
        alike = self.data.kind == "labelled" and len({*asked_ids(rows)}) < 2
        return () if alike else rows

    async def run(self) -> None:
        judged_on = await self.blocking(self._held_out_batch)
        if judged_on.samples and self.held_out.live is not None:
            await self.held_out.send(judged_on)
        if self.held_out.live is not None:
            self.held_out.close()
        async for group in self.groups:
            samples = tuple(self.referenced_sample(sample) for sample in group.samples)
            await self.referenced.send(replace(group, samples=samples))

    def _held_out_batch(self) -> Batch:
        rows = [
            samples
            for samples in self._judged_on
            if max(sample.pass_tokens for sample in samples) <= self.data.max_tokens
        ]
        samples = tuple(self.referenced_sample(sample) for row in rows for sample in row)
        return batch_of_samples(samples, len(rows), self.token_budget)

    def referenced_sample(self, sample: Trainable) -> Trainable:
        """`sample`, and its mismatched completion if it has one, with their reference logprobs."""
        other = sample.mismatched
        if other is not None:
            other = replace(other, ref_logprobs=self._cache.read_logprobs(other.token_ids, other.mask))
        ref_logprobs = self._cache.read_logprobs(sample.token_ids, sample.policy_mask)
        return replace(sample, ref_logprobs=ref_logprobs, mismatched=other)


def scored_sequences(sample: Trainable) -> Iterator[tuple[Int32, Bool]]:
    """The sequences of which a sample of preference data needs reference logprobs."""
    yield sample.token_ids, sample.policy_mask
    if sample.mismatched is not None:
        yield sample.mismatched.token_ids, sample.mismatched.mask
