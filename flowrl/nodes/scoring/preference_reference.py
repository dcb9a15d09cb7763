"""The reference for preference data: computes every logprob once before the first batch, then reads from disk.

`setup` loads the model only if the cache of this model and this data does not exist yet, and frees it again:
after training has started, trainer and reference never hold memory at the same time. Batches pass without a
model, as fast as the file can be read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from flowrl.graph.facts import Facts
from flowrl.graph.node import Node
from flowrl.graph.ports import In, Out
from flowrl.messages import Batch, Bool, Group, Int32, Trainable
from flowrl.models import Policy, check_model, known_directory, require_same_vocabulary, resolve
from flowrl.models.sizes.model_layout import note, scoring_layout
from flowrl.models.tokens.vocabulary import untold, vocabulary_problem
from flowrl.nodes.scoring.scoring_model import gpu_problems, opened
from flowrl.nodes.sources.preference_source import Preferences, Renderer
from flowrl.nodes.sources.too_long import within_limit
from flowrl.tasks import Row
from flowrl.tasks.row_reading.indexed_rows import asked_ids, lowest_asked
from flowrl.training.layouts import refused
from flowrl.training.model.trainable import check_policy
from flowrl.training.settings import Dtype, Layout

if TYPE_CHECKING:
    from flowrl.models.references import ReferenceCache
    from flowrl.training.scoring_models import ScoringModel


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
        return problems + refused(self.layout, scoring_layout(self.policy, self.layout))

    def notes(self) -> list[str]:
        return [note(scoring_layout(self.policy, self.layout))]

    def preflight(self) -> None:
        check_model(self.policy)
        if (model_dir := known_directory(self.policy)) is not None:
            check_policy(model_dir, trust_remote_code=self.policy.trust_remote_code)
        if untold(self.data.policy, self.policy):
            require_same_vocabulary(self.data.policy, self.policy)

    async def setup(self) -> None:
        self._cache = await self.blocking(self._load)

    def _load(self) -> ReferenceCache:
        progress = self.context.progress
        model_dir = resolve(self.policy, progress=progress)
        from flowrl.models.references import reference_cache

        chat, rows = self.data.chat(progress), self.data.rows()
        parts = [Renderer(self.data, chat, rows.train), Renderer(self.data, chat, self._chosen(rows.held_out))]
        self._judged_on = parts[1]
        return reference_cache(
            model_dir,
            (sequence for part in parts for samples in part if self._kept(samples) for sequence in _sequences(samples)),
            dtype=self.dtype,
            open_model=partial(self._open, model_dir),
            token_budget=self.token_budget,
            progress=progress,
        )

    def _kept(self, samples: Sequence[Trainable]) -> bool:
        """Whether the data keep the row of these samples."""
        return within_limit(samples, self.data.max_tokens)

    def _open(self, model_dir: str) -> ScoringModel:
        import torch

        from flowrl.training.model.policy_model import choose_attention
        from flowrl.training.scoring_models import ModelLoad

        torch.set_num_threads(max(1, len(self.context.cores)))
        device = "cuda" if self.context.gpus else "cpu"
        attention = choose_attention(None, torch.device(device), self.dtype)
        trusted = self.policy.trust_remote_code
        load = ModelLoad(model_dir, "lm", "policy", self.dtype, attention, trusted, self.layout)
        return opened(load, self.context.gpus, device, threads=len(self.context.cores))

    def _chosen(self, held_out: Sequence[Row]) -> Sequence[Row]:
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
        return Batch(
            samples=samples,
            micro_batches=(),
            num_sequences=len(samples),
            num_tokens=sum(sample.response_tokens for sample in samples),
            num_groups=len(rows),
            token_budget=self.token_budget,
        )

    def referenced_sample(self, sample: Trainable) -> Trainable:
        """`sample`, and its mismatched completion if it has one, with their reference logprobs."""
        other = sample.mismatched
        if other is not None:
            other = replace(other, ref_logprobs=self._cache.logprobs(other.token_ids, other.mask))
        ref_logprobs = self._cache.logprobs(sample.token_ids, sample.policy_mask)
        return replace(sample, ref_logprobs=ref_logprobs, mismatched=other)


def _sequences(samples: Sequence[Trainable]) -> Iterator[tuple[Int32, Bool]]:
    for sample in samples:
        yield sample.token_ids, sample.policy_mask
        if sample.mismatched is not None:
            yield sample.mismatched.token_ids, sample.mismatched.mask
