"""The reference of preferences: every logprob is computed once before the first batch, and then read from disk.

`setup` loads the model only if the cache of this model and this data does not exist yet, and frees it again: after
training has started, trainer and reference never hold memory at the same time. Batches pass without a model, as fast as
the file can be read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from flowrl.graph.node import Facts, Footprint, Share
from flowrl.graph.ports import In, Out
from flowrl.messages import Batch, Bool, Group, Int32, Trainable
from flowrl.models import Policy, require_same_vocabulary, resolve
from flowrl.models.tokens.vocabulary import untold_vocabulary, vocabulary_problem
from flowrl.nodes.scoring.scoring_model import ScoringNode, open_scoring_model
from flowrl.nodes.sources.given_rows import batch_of_samples
from flowrl.nodes.sources.preferences import Preferences, Renderer
from flowrl.nodes.sources.row_checks import open_chat
from flowrl.tasks.row_reading.rows_on_disk import asked_ids, lowest_asked
from flowrl.training.settings import Dtype, Layout

if TYPE_CHECKING:
    from flowrl.models.references import ReferenceCache
    from flowrl.training.scoring_models import ScoringModel


class PreferenceReference(ScoringNode):
    """Adds `ref_logprobs` under `policy` (None: the data's) to preferences, mismatched completions included.

    A different policy needs the same vocabulary as the data's, because it scores the same token ids.

    Sends up to `num_held_out` held-out rows as one batch before everything else, to evaluate the trainer.
    `token_budget` bounds the tokens of one pass, padding included. `layout` says whether prefixes that sequences share
    are computed once, see `ZeroSettings`.
    """

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
        super().__init__(policy or data.policy, dtype=dtype, token_budget=token_budget, layout=layout)
        self.data = data
        self.num_held_out = num_held_out

    def facts(self) -> Facts:
        return Facts(optional=("held_out",))

    def footprint(self, share: Share) -> Footprint | None:
        """Nothing: the model is gone when the others take their memory."""
        return None

    def check(self, facts: Any) -> list[str]:
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
        return [*problems, *super().check(facts)]

    def preflight(self) -> str | None:
        said = super().preflight()
        if untold_vocabulary(self.data.policy, self.policy):
            require_same_vocabulary(self.data.policy, self.policy)
        return said

    async def setup(self) -> None:
        self._cache = await self.blocking(self._fill_cache)

    def _fill_cache(self) -> ReferenceCache:
        progress = self.context.progress
        chat, rows = open_chat(self.data.task, self.data.policy, progress), self.data.read_rows()
        judged = lowest_asked(rows.held_out, self.num_held_out)  # rows of one prompt are next to each other
        if self.data.kind == "labelled" and len({*asked_ids(judged)}) < 2:
            judged = ()  # all completions answer one prompt, so there is none to mismatch
        self._judged_on = Renderer(self.data, chat, judged)
        parts = (Renderer(self.data, chat, rows.train), self._judged_on)

        def scored_sequences() -> Iterator[tuple[Int32, Bool]]:
            kept = (samples for part in parts for samples in part if self.data.keeps_row(samples))
            for sample in (sample for samples in kept for sample in samples):
                yield sample.token_ids, sample.policy_mask
                if sample.mismatched is not None:
                    yield sample.mismatched.token_ids, sample.mismatched.mask

        return self._open_cache(scored_sequences())

    def _open_cache(self, sequences: Iterable[tuple[Int32, Bool]]) -> ReferenceCache:
        """The logprobs of `sequences`, computed first if they are not on the disk yet."""
        progress = self.context.progress
        model_dir = resolve(self.policy, progress=progress)
        from flowrl.models.references import reference_cache

        return reference_cache(
            model_dir,
            sequences,
            dtype=self.dtype,
            open_model=lambda: self._open_reference(model_dir),
            token_budget=self.token_budget,
            progress=progress,
        )

    def _open_reference(self, model_dir: str) -> ScoringModel:
        import torch

        from flowrl.training.model.policy_model import choose_attention
        from flowrl.training.scoring_models import ModelLoad

        torch.set_num_threads(max(1, len(self.context.cores)))
        device = "cuda" if self.context.gpus else "cpu"
        attention = choose_attention(None, torch.device(device), self.dtype)
        trusted = self.policy.trust_remote_code
        load = ModelLoad(model_dir, "lm", "policy", self.dtype, attention, trusted, self.layout)
        return open_scoring_model(load, self.context.gpus, device, threads=len(self.context.cores))

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
