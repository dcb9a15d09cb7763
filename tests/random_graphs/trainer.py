"""The trainer of random graphs, which trains nothing, and flowrl's own batcher before it.

In half of the graphs trainers accumulate: their batches come in pieces, as often as one can be sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flowrl import Batch, In, Out, Trainable, Weights
from flowrl.graph.node import Facts
from flowrl.messages import Bool
from flowrl.nodes.groups.batch import Pace, TokenBatch
from flowrl.runtime.ledger.ledger_client import Use
from flowrl.training.loss.objective import loss_masks
from tests.random_graphs.dice import lot
from tests.random_graphs.nodes import Played
from tests.random_graphs.record import Meeting
from tests.random_graphs.shape import Part, Shape


class FakeTrainer(Played):
    """Takes its time for a batch and makes a version; the ranks meet at the end of each piece of it."""

    gang = True

    batches: In[Batch]
    weights: Out[Weights]
    version = -1

    def facts(self) -> Facts:
        accumulate = "auto" if lot(self.shape.seed, "accumulate") < 0.5 else "off"
        return Facts(publish_every=self.part.publish_every, accumulate=accumulate, whole_batches="")

    async def run(self) -> None:
        self.version = max(self.version, 0)
        await self.publish()
        pieces: list[Batch] = []
        parts: list[tuple[Trainable, Bool]] = []
        async for batch in self.batches:
            await self.take_time(f"{self.version}")
            pieces.append(batch)
            parts += await self.meet(batch)
            if not batch.last:
                self.batches.hold(batch)
                continue
            if self.context.replica == 0:
                self.book(parts, sum(piece.num_groups for piece in pieces))
            self.version += 1
            if self.version % self.part.publish_every == 0:
                await self.publish()
            for piece in pieces:
                self.batches.finish(piece)
            pieces, parts = [], []
            await self.context.step_done(self.version)
        if self.version % self.part.publish_every:
            await self.publish()

    async def meet(self, batch: Batch) -> list[tuple[Trainable, Bool]]:
        """Every rank brings its part; the whole."""
        meeting = self.record.meetings.setdefault((self.name, self.version, batch.piece), Meeting())
        masks = loss_masks(batch.samples, batch.mask_staleness, self.version)
        meeting.parts += zip(batch.samples, masks, strict=True)
        meeting.ranks += 1
        if meeting.ranks == self.context.num_replicas:
            meeting.complete.set()
        await meeting.complete.wait()
        return list(meeting.parts)

    def book(self, parts: Sequence[tuple[Trainable, Bool]], num_groups: int) -> None:
        uses = [Use.of(sample, mask) for sample, mask in parts]
        fresh = [use for use in uses if not use.times_trained]
        ages = [self.version - use.oldest_version for use in fresh if use.oldest_version is not None]
        counts = dict(self.counted(*part) for part in parts if not part[0].times_trained)
        again = {
            sample.sample_id: [sample.times_trained, *self.counted(sample, mask)[1]]
            for sample, mask in parts
            if sample.times_trained
        }
        self.record.train(self.name, self.version, num_groups, counts, again)
        step = {
            "step": self.version + 1,
            "num_groups": num_groups,
            "tokens_trained": sum(use.tokens for use in fresh),
            "reused_tokens": sum(use.tokens for use in uses) - sum(use.tokens for use in fresh),
            "staleness_max": max(ages, default=None),
        }
        self.context.ledger.step(step, uses, policy=self.name)

    def counted(self, sample: Trainable, mask: Bool) -> tuple[str, list[int | None]]:
        """The record's own count: sample, and its tokens trained, too old, and masked; the oldest version trained."""
        masked = 0 if sample.loss_mask is None else int((sample.policy_mask & ~sample.loss_mask).sum())
        versions = sample.versions[mask & sample.policy_mask]
        stale = sample.response_tokens - masked - len(versions)
        return sample.sample_id, [len(versions), stale, masked, int(versions.min()) if len(versions) else None]

    async def publish(self) -> None:
        if self.context.replica == 0:
            await self.weights.send(Weights(self.name, self.version, self.version - 1, "unchanged", "none", 0, 0))

    def state(self) -> Mapping[str, Any]:
        return {"version": self.version}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.version = int(state["version"])


class AtOnce(Pace):
    """A piece may be sent at any time."""

    def is_due(self, now_s: float) -> bool:
        return True


class Batcher(TokenBatch):
    """flowrl's own."""

    def __init__(self, part: Part, shape: Shape) -> None:
        super().__init__(shape.groups_per_step, token_budget=4096, replay=shape.replay)
        self._pace = AtOnce()
