"""The critic computes the value of the state before every policy token, one batch at a time, at one version.

Invariants
- The critic computes no values before the first weights message is applied, because the trainer draws
  the initial head.
- Weights change between requests, never inside one, so all values of a reply have the reply's version.
- A version counts as held when it is loaded; tickets may wait for that.

Waits: a request waits for the first weights and for the previous load or request; `run` ends
when every caller has closed and the weights edge has ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from flowrl.errors import FlowrlError
from flowrl.graph.node import Facts
from flowrl.graph.ports import In, Serve
from flowrl.messages import Float32, ValueQuestion, Values, Weights
from flowrl.models import Policy
from flowrl.nodes.scoring.scoring_model import ScoringNode
from flowrl.training.settings import Dtype, Layout
from flowrl.weights.probe import TOLERANCE, ProbeMismatch, coarser_dtype, mean_mismatch
from flowrl.weights.receive import Receiver, load_published, make_receiver
from flowrl.weights.shm import SegmentLost

if TYPE_CHECKING:
    from flowrl.training.scoring_models import Masked


class Critic(ScoringNode):
    """Computes values for a batcher's samples, with the newest weights from the trainer on its latest edge.

    `policy` is that trainer's. `token_budget` bounds the tokens of one forward pass, padding included.
    `layout` says whether prefixes that samples share are computed once, see `ZeroSettings`.
    """

    head = "scalar"

    requests: Serve[ValueQuestion, Values]
    weights: In[Weights]

    def __init__(
        self, policy: Policy, *, dtype: Dtype = "float32", token_budget: int = 8192, layout: Layout = "auto"
    ) -> None:
        super().__init__(policy, dtype=dtype, token_budget=token_budget, layout=layout)
        self.version = -1
        self._content = -1
        """The version whose tensors are loaded; older than `version` after an unchanged version."""
        self._first = asyncio.Event()
        """Set as soon as weights have been loaded once."""
        self._model_in_use = asyncio.Lock()
        self._receiver: Receiver

    def facts(self) -> Facts:
        return Facts(
            concurrency=1,
            token_budget=self.token_budget,
            weights_in_host_memory=True,
            weights_dtype=self.dtype,
        )

    async def setup(self) -> None:
        self._receiver = make_receiver(self.context.weight_routes, self.replica_name, self.context.run_id)
        await super().setup()  # the first weights message brings the values of the parameters
        self.context.progress("ready")

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow_weights())
            await self.requests.each(self._answer_question, concurrency=1)

    async def close(self) -> None:
        await super().close()
        if hasattr(self, "_receiver"):
            self._receiver.close()

    # Weights

    async def _follow_weights(self) -> None:
        async for manifest in self.weights:
            async with self._model_in_use:
                await self._take_version(manifest)
            self.weights.finish(manifest)
        if not self._first.is_set():
            raise FlowrlError(
                f"{self.replica_name}: the weights edge ended before its first message; "
                "a trainer publishes its initial weights before its first batch"
            )

    async def _take_version(self, manifest: Weights) -> None:
        """Bring the model to the manifest's version, unless newer weights replaced that version meanwhile."""
        if manifest.version <= self.version:
            return
        if manifest.base_version != self._content:
            try:
                with self.context.busy("load"):
                    await self.blocking(self._load_version, manifest)
            except SegmentLost:
                return  # there is a newer manifest
        self.version, self._content = manifest.version, manifest.base_version
        self.context.ledger.holds(self.replica_name, manifest.policy, manifest.version)
        self._first.set()

    def _load_version(self, manifest: Weights) -> None:
        """Load the tensors, and check that the values of a few fixed sequences match the trainer's; blocking."""
        assert self.scoring is not None, "`setup` opens it"
        fetched = self._receiver.fetch_version(manifest)
        try:
            self.scoring.call_everywhere(load_published, fetched.update)
        finally:
            fetched.close()
        if not manifest.probe_logprobs:
            return
        sequences = [np.array(tokens, np.int32) for tokens in manifest.probe_token_ids]
        found = self._values_of([(tokens, np.ones(len(tokens), np.bool_)) for tokens in sequences])
        difference = mean_mismatch(manifest, [values[1:].tolist() for values in found])
        self.context.gauge("value_mismatch", difference)
        dtype = coarser_dtype(manifest, self.dtype)
        if not difference <= TOLERANCE[dtype]:
            raise ProbeMismatch(
                f"{self.replica_name} loaded version {manifest.version} of {manifest.policy!r}, but its values of the "
                f"probe sequences differ from the trainer's by {difference:.4g} on average; with {dtype}, "
                f"rounding explains up to {TOLERANCE[dtype]:g}. Give the Critic and its Trainer the same model "
                "and dtype"
            )

    # Values

    async def _answer_question(self, asked: ValueQuestion) -> Values:
        with self.context.waiting("the critic's first weights"):
            await self._first.wait()
        async with self._model_in_use:
            with self.context.busy("value"):
                values = await self.blocking(self._values_of, asked.sequences)
            return Values(version=self.version, values=np.concatenate(values))

    def _values_of(self, items: Sequence[Masked]) -> list[Float32]:
        """V of the state before each policy token, at the token's position, for every sequence; 0 elsewhere."""
        from flowrl.training.scoring_models import values_of_pass

        return self.score_items(values_of_pass, items)
