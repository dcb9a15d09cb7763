"""Trains one batch on one rank: from samples to updated weights and their metrics.

Invariants
- The loss is a mean over the *global* optimizer step. Before the first backward pass of a whole batch, the denominators
  are summed over all parts of the batch and their micro-batches, so the way a batch is split does not change the
  gradient. Ranks that share a part (sequence or tensor parallelism) have the same logprobs, losses and sums; each part
  counts once.
- No token older than the staleness bound reaches a gradient; this is asserted before anything is computed.
- KTO's baseline is also a mean over the whole optimizer step, computed with the weights from before the step.
- π_p is the policy with the weights from before the batch's first optimizer step. If a batch has only one step, these
  are the weights being trained, so no extra pass is needed.
- The gap to behavior logprobs is that of π_p; without a pass for π_p, of the tokens up to the first applied step.
- A batch that arrives in pieces is one optimizer step. The gradient is accumulated as a sum. When the last piece has
  arrived, the sum is divided once by the count over all pieces of all ranks, before norm, clipping and optimizer. The
  result differs from that of a whole batch only by rounding.
- All ranks run the same number of forward and backward passes: an empty micro-batch runs on padding.

`update` is collective and blocking; it ends when the slowest rank has done its part.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import get_args

import numpy as np
import torch
from torch import Tensor

from flowrl.errors import FlowrlError
from flowrl.messages import Batch, Bool, Trainable
from flowrl.training.batch.masks import loss_masks
from flowrl.training.batch.micro_batch import MicroBatch, make_micro_batch
from flowrl.training.batch.referenced import with_reference
from flowrl.training.batch.sequence_rows import RowShare, in_rows
from flowrl.training.batch.step_passes import StepPasses, step_passes
from flowrl.training.batch.update import Accumulated, Sums, Update
from flowrl.training.engine.zero import ZeroEngine
from flowrl.training.layouts import Placing
from flowrl.training.loss.objective import LossInputs, MeanOver, Objective, Totals
from flowrl.training.model.output_layer import OutputLayer

BALANCE = "router_aux_loss"
"""Name in a metrics line: the load-balancing loss of a mixture of experts, not multiplied by its coefficient."""


class Learner:
    """Trains one model with one objective."""

    def __init__(
        self,
        engine: ZeroEngine,
        objective: Objective,
        *,
        epochs: int = 1,
        temperature: float = 1.0,
        max_staleness: int | None = None,
        teacher: OutputLayer | None = None,
        router_aux_loss_coef: float = 0.0,
    ) -> None:
        """`router_aux_loss_coef` is the weight of the load-balancing loss, which a `balanced` engine computes."""
        self.engine = engine
        self.objective = objective
        self._epochs = epochs
        self._temperature = temperature
        self._max_staleness = max_staleness
        self._teacher = teacher
        self._balance_coef = router_aux_loss_coef
        self._so_far = Accumulated()

    def update(self, part: Batch, masks: Sequence[Bool], version: int, lr: float) -> Update:
        """Train on this rank's part of a batch. `masks` say which tokens of each sample enter the loss.

        `version` is the version being updated. Raises FlowrlError if a token is older than the staleness bound.
        """
        self.engine.set_lr(lr)
        steps, totals = self._laid_out(part, masks, version)
        micro_batches = [one for step in steps for one in step]
        several = self._epochs * len(steps) > 1
        old = self._proximal(micro_batches) if several and self.objective.needs_proximal else {}
        update = self._run(steps, totals, old)
        return replace(update, tokens_computed=self._computed(micro_batches))

    def add(self, piece: Batch, masks: Sequence[Bool], version: int, lr: float) -> Update | None:
        """Accumulate the gradient of this rank's part of a piece; after the last piece, make the batch's one step.

        Returns None for all but the last piece. The arguments are those of `update`; `version` is the same for all
        pieces. Raises FlowrlError if a token is older than the staleness bound, or if this learner needs whole batches.
        """
        over = self._divisor()
        so_far = self._so_far
        (micro_batches,), (total,) = self._laid_out(piece, masks, version)
        so_far.computed += sum(self.engine.num_computed(one.rows) for one in micro_batches)
        so_far.totals += total
        stepping = piece.last and self.objective.enough(so_far.totals)
        if stepping or self.objective.enough(total):
            for position, micro_batch in enumerate(micro_batches):
                inputs, loss, stats = self._loss(micro_batch, Totals.sums(over), None, 0.0)
                if micro_batch.backward:
                    self.engine.backward(loss, last=stepping and position == len(micro_batches) - 1)
                so_far.add(over, self._reported(loss.detach(), stats), self._others(inputs, over))
                self._add_gaps(so_far.sums, micro_batch, inputs)
        if not piece.last:
            return None
        self._so_far = Accumulated()
        return self._stepped(so_far, over, lr, stepping=stepping)

    def _stepped(self, so_far: Accumulated, over: MeanOver, lr: float, *, stepping: bool) -> Update:
        """Make the step of all pieces, unless there is nothing to train. Returns the result over all ranks."""
        norms, skipped = list[float](), 0
        if stepping:
            self.engine.set_lr(lr)
            step = self.engine.step(divide_by=so_far.totals.number(over))
            norms, skipped = ([step.grad_norm], 0) if step.applied else ([], 1)
        merged = self._merged(so_far.means())
        update = Update.of(merged, self._names, norms, skipped, so_far.totals.num_tokens)
        return replace(update, tokens_computed=sum(self.engine.gang.parts(so_far.computed)))

    def _divisor(self) -> MeanOver:
        """The denominator of the pieces' gradient. Raises FlowrlError if this objective needs the whole batch."""
        over = self.objective.mean_over
        if over is None or self._epochs > 1 or self.objective.needs_mismatched or self._balance_coef:
            raise FlowrlError(
                f"a batch came in pieces, but {type(self.objective).__name__} with {self._epochs} epochs needs it "
                "whole; this is an error in the node that sends the batches"
            )
        return over

    def _others(self, inputs: LossInputs, over: MeanOver) -> dict[MeanOver, dict[str, Tensor]]:
        """Stats, or parts of them, that are means over another count than the loss: undivided sums, by that count."""
        found: dict[MeanOver, dict[str, Tensor]] = {}
        with torch.no_grad():
            for other in (other for other in get_args(MeanOver) if other != over):
                loss, stats = self.objective.loss(replace(inputs, totals=Totals.sums(other)))
                if math.isfinite(value := float(loss)) and value:
                    raise FlowrlError(
                        f"{type(self.objective).__name__} says that its loss is a mean over {over}, but a part of it "
                        f"is divided by the number of {other}; set mean_over to None, so that batches come whole"
                    )
                found[other] = dict(stats)
        return found

    def rest(self, part: Batch, masks: Sequence[Bool], version: int) -> Update:
        """Process a batch that makes no update: nothing is computed, but the staleness bound is asserted."""
        part, masks, _ = in_rows(part, masks)
        self._assert_bounds(part, masks, version)
        return Update.of(Sums(), self._names, [], 0, 0)

    def _laid_out(
        self, part: Batch, masks: Sequence[Bool], version: int
    ) -> tuple[list[list[MicroBatch]], list[Totals]]:
        """The micro-batches of each optimizer step of this rank's part, and each step's totals; collective.

        Micro-batches without a backward pass come first. All ranks have the same number of each kind.
        """
        part, masks, shares = in_rows(part, masks)
        self._assert_bounds(part, masks, version)
        part = self._referenced(part)
        starts = (0, *part.step_ends[:-1])
        planned = [
            self._passes(part, masks, part.micro_batches[start:end])
            for start, end in zip(starts, part.step_ends, strict=True)
        ]
        steps = [
            [
                replace(self._micro_batch(part, masks, shares, indices, version), backward=backward)
                for passes, backward in ((step.forward, False), (step.both, True))
                for indices in passes
            ]
            for step in planned
        ]
        return steps, self._totals(steps)

    def _referenced(self, part: Batch) -> Batch:
        """The part with the logprobs of the reference, which is the base of an adapter; collective."""
        if not (self.objective.needs_reference and self.engine.lora.rank):
            return part
        mismatched = self.objective.needs_mismatched
        return with_reference(
            self.engine, part, self._placing(part), mismatched=mismatched, temperature=self._temperature
        )

    def _passes(self, part: Batch, masks: Sequence[Bool], micro_batches: Sequence[Sequence[int]]) -> StepPasses:
        """The passes of one optimizer step, padded to the largest number of each kind on any rank; collective."""
        # Every token contributes to the load-balancing loss, so no pass is without a backward. A step has at least one
        # backward pass, even if its gradient is 0.
        found = (
            StepPasses((), tuple(map(tuple, micro_batches)))
            if self._balance_coef
            else step_passes(part, masks, micro_batches, self.objective)
        )
        numbers = self.engine.gang.parts((len(found.forward), len(found.both)))
        most_forward, most_both = (max(of_ranks) for of_ranks in zip(*numbers, strict=True))
        return found.padded(most_forward, max(most_both, int(part.last)))

    def judge(self, part: Batch) -> dict[str, float | None]:
        """Return the loss and the objective's stats on this rank's part of a held-out batch; collective."""
        part, masks, shares = in_rows(part, loss_masks(part.samples, -1, 0))
        part = self._referenced(part)
        micro_batches = [self._micro_batch(part, masks, shares, indices, 0) for indices in part.micro_batches]
        (total,), sums = self._totals([micro_batches]), Sums()
        with torch.no_grad():
            mismatched_kl = self._mismatched_kl(micro_batches) if self.objective.needs_mismatched else 0.0
            for micro_batch in micro_batches if self.objective.enough(total) else ():
                loss, stats = self.objective.loss(self._loss_inputs(micro_batch, total, None, mismatched_kl))
                sums.add(self._reported(loss, stats))
        merged = self._merged(sums)
        return {name: merged.values.get(name) for name in ("loss", *self.objective.stats)}

    def _computed(self, micro_batches: Sequence[MicroBatch]) -> int:
        """Number of tokens that one pass over the micro-batches of all ranks computes; collective."""
        return sum(self.engine.gang.parts(sum(self.engine.num_computed(one.rows) for one in micro_batches)))

    def _placing(self, part: Batch) -> Placing:
        """How the passes over `part` are laid out. A tree can have more sequences than would fit into rows."""
        if part.layout != "tree":
            return self.engine.layout
        if self.engine.layout not in ("auto", "tree"):
            raise FlowrlError(
                "the batcher packs trees of shared prefixes, but this trainer computes rows, which would need more "
                "tokens than the token budget; give the batcher layout='rows', or the trainer layout='auto'"
            )
        return "tree"

    def _merged(self, sums: Sums) -> Sums:
        merged = Sums()
        for part in self.engine.gang.parts(sums):
            merged.merge(part)
        return merged

    def _run(
        self, steps: Sequence[Sequence[MicroBatch]], totals: Sequence[Totals], old: Mapping[int, Tensor]
    ) -> Update:
        sums, norms, skipped = Sums(), list[float](), 0
        planned = max(1, self._epochs * sum(map(self.objective.enough, totals)))
        for epoch in range(self._epochs):
            for micro_batches, total in zip(steps, totals, strict=True):
                if not self.objective.enough(total):
                    continue
                before = epoch == 0 and (bool(old) or not norms)
                result = self._optimize(micro_batches, total, old, sums, share=1 / planned, measures_gap=before)
                if result is None:
                    skipped += 1
                else:
                    norms.append(result)
        merged = self._merged(sums)
        return Update.of(merged, self._names, norms, skipped, self._epochs * sum(total.num_tokens for total in totals))

    def _optimize(
        self,
        micro_batches: Sequence[MicroBatch],
        total: Totals,
        old: Mapping[int, Tensor],
        sums: Sums,
        *,
        share: float,
        measures_gap: bool,
    ) -> float | None:
        """Run one optimizer step; return its gradient norm, or None if the step was not applied."""
        mismatched_kl = self._mismatched_kl(micro_batches) if self.objective.needs_mismatched else 0.0
        for position, micro_batch in enumerate(micro_batches):
            inputs, loss, stats = self._loss(micro_batch, total, old.get(id(micro_batch)), mismatched_kl)
            sums.add(self._reported(loss.detach(), stats), share)
            if inputs.balance is not None:
                # A mean over the micro-batches of all ranks, weighted by the number of tokens that each one routes.
                balance = inputs.balance * (micro_batch.num_places / total.num_places)
                sums.add({BALANCE: balance.detach()}, share)
                loss = loss + self._balance_coef * balance
            if micro_batch.backward:
                self.engine.backward(loss, last=position == len(micro_batches) - 1)
            if measures_gap:
                self._add_gaps(sums, micro_batch, inputs)
        step = self.engine.step()
        return step.grad_norm if step.applied else None

    @property
    def _names(self) -> tuple[str, ...]:
        """Names of the statistics in `Update.stats`."""
        return ("loss", *self.objective.stats, *((BALANCE,) if self._balance_coef else ()))

    def _add_gaps(self, sums: Sums, micro_batch: MicroBatch, inputs: LossInputs) -> None:
        if self.objective.head == "lm" and not self.objective.offline:
            sums.add_gaps(micro_batch, inputs.old_logprobs_BT)

    def _reported(self, loss: Tensor, stats: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Loss and stats of a micro-batch. Raises FlowrlError for a stat that metrics lines would leave out."""
        if unnamed := sorted(stats.keys() - set(self.objective.stats)):
            raise FlowrlError(
                f"{type(self.objective).__name__}.loss returned the stats {', '.join(unnamed)}, which its `stats` do "
                "not name; add them there, so that every metrics line contains them"
            )
        return {"loss": loss, **stats}

    def _loss(
        self, micro_batch: MicroBatch, total: Totals, old_BT: Tensor | None, mismatched_kl: float
    ) -> tuple[LossInputs, Tensor, Mapping[str, Tensor]]:
        """Inputs, loss and stats of a micro-batch, with an autograd graph if it has a backward pass."""
        with torch.set_grad_enabled(micro_batch.backward):
            inputs = self._loss_inputs(micro_batch, total, old_BT, mismatched_kl)
            loss, stats = self.objective.loss(inputs)
        return inputs, loss, stats

    def _loss_inputs(
        self, micro_batch: MicroBatch, total: Totals, old_BT: Tensor | None, mismatched_kl: float
    ) -> LossInputs:
        """Run one pass of the model over a micro-batch."""
        balance: list[Tensor] = []
        logprobs_BT = entropies_BT = values_BT = micro_batch.behavior_BT.new_zeros(micro_batch.rows.shape[0], 0)
        if self.objective.head == "scalar":
            values_BT = micro_batch.rows.spread(self.engine.values(micro_batch.rows))
        else:
            logprobs_N, entropies_N, *balance = self.engine.outputs(
                micro_batch.rows, self._temperature, self.objective.needs_entropy_gradient
            )
            logprobs_BT, entropies_BT = micro_batch.rows.spread(logprobs_N), micro_batch.rows.spread(entropies_N)
        return LossInputs(
            logprobs_BT,
            entropies_BT,
            logprobs_BT.detach() if old_BT is None else old_BT,
            micro_batch.mask_BT,
            micro_batch.columns,
            total,
            values_BT,
            micro_batch.labels_B,
            micro_batch.pairs_P2,
            mismatched_kl,
            micro_batch.sample_tokens_B,
            *balance,
        )

    def _proximal(self, micro_batches: Sequence[MicroBatch]) -> dict[int, Tensor]:
        """log π_p of every micro-batch, keyed by the micro-batch's id(); computed in one pass without gradients."""
        with torch.no_grad():
            return {
                id(micro_batch): micro_batch.rows.spread(
                    self.engine.forward(micro_batch.rows, temperature=self._temperature)[0]
                )
                for micro_batch in micro_batches
            }

    def _totals(self, steps: Sequence[Sequence[MicroBatch]]) -> list[Totals]:
        mine = [np.sum([(*one.counts, one.num_places) for one in micro_batches], axis=0) for micro_batches in steps]
        by_part = np.array(self.engine.gang.parts(mine))
        return [Totals(*counts) for counts in by_part.sum(axis=0).tolist()]

    def _mismatched_kl(self, micro_batches: Sequence[MicroBatch]) -> float:
        """Mean of log π/ref over all mismatched completions of the optimizer step; collective."""
        total, number = 0.0, 0
        for mismatched in (micro_batch.mismatched for micro_batch in micro_batches):
            assert mismatched is not None
            with torch.no_grad():
                logprobs_N, _ = self.engine.forward(mismatched.rows, temperature=self._temperature)
            log_ratio_B = mismatched.rows.spread(logprobs_N).sum(dim=1) - mismatched.ref_B
            total += float(log_ratio_B[mismatched.counted_B].sum())
            number += int(mismatched.counted_B.sum())
        totals, numbers = zip(*self.engine.gang.parts((total, number)), strict=True)
        return float(sum(totals) / max(1, sum(numbers)))

    def _micro_batch(
        self,
        part: Batch,
        masks: Sequence[Bool],
        shares: Sequence[RowShare | None],
        indices: Sequence[int],
        version: int,
    ) -> MicroBatch:
        samples = [part.samples[i] for i in indices]
        micro_batch = make_micro_batch(
            samples,
            [masks[i] for i in indices],
            self.objective,
            version=version,
            layout=self._placing(part),
            device=self.engine.device,
            shares=[shares[i] for i in indices],
        )
        return (
            micro_batch
            if self._teacher is None
            else replace(micro_batch, rows=self._teacher.taught(micro_batch.rows, samples))
        )

    def _assert_bounds(self, part: Batch, masks: Sequence[Bool], version: int) -> None:
        for sample, mask in zip(part.samples, masks, strict=True):
            self._assert_bound(sample, mask, version)

    def _assert_bound(self, sample: Trainable, mask: Bool, version: int) -> None:
        if self._max_staleness is None or self.objective.offline or not mask.any():
            return
        sampled = mask & (sample.whole_versions >= 0)
        oldest = int(sample.whole_versions[sampled].min()) if sampled.any() else version
        if version - oldest > self._max_staleness:
            raise FlowrlError(
                f"sample {sample.sample_id!r} has tokens of version {oldest}, and training would make version "
                f"{version + 1} from version {version}: a staleness of {version - oldest}, but the graph "
                f"allows {self._max_staleness}. The sample was not trained on; this is an error in flowrl, please "
                "report it"
            )
