"""Trains batches on one rank: from samples to updated weights and their figures.

A batch arrives in pieces, as its groups finish; a batch that comes whole is a single piece. `train_piece` adds the
gradient of each piece to the sums in the engine, and makes the optimizer step after the last one. Only a whole batch
may have several optimizer steps, or be passed over several times.

Invariants
- The loss is a mean over the *global* optimizer step. The denominators of a whole batch are summed over all parts of
  the batch and their micro-batches before the first backward pass, so the way a batch is split does not change the
  gradient. Those of a batch in pieces are known at its end only: the gradient is accumulated as a sum, and divided once
  by the count over all pieces of all ranks, before norm, clipping and optimizer. The result differs from that of a
  whole batch only by rounding.
- Ranks that share a part (sequence or tensor parallelism) have the same logprobs, losses and sums; each part counts
  once.
- No token older than the staleness bound reaches a gradient; this is asserted before anything is computed.
- KTO's baseline is also a mean over the whole optimizer step, computed with the weights from before the step. An
  objective that chooses tokens (clip_cov, kl_cov) chooses among those of the whole step, before its first pass.
- π_p is the policy with the weights from before the batch's first optimizer step. If a batch has only one step, these
  are the weights being trained, so no extra pass is needed.
- The gap to behavior logprobs is that of π_p; without a pass for π_p, of the tokens up to the first applied step.
- All ranks run the same number of forward and backward passes: an empty micro-batch runs on padding.

`train_piece` and `judge` are collective and blocking; they end when the slowest rank has done its part.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from flowrl.errors import FlowrlError
from flowrl.messages import Batch, Bool, Float32, Int32, Trainable
from flowrl.training.engine.zero import ZeroEngine
from flowrl.training.layouts import Placing
from flowrl.training.loss.objective import (
    CHOSEN,
    LossInputs,
    MeanOver,
    Objective,
    StepTokens,
    Totals,
    loss_masks,
)
from flowrl.training.micro_batches import (
    PADDING,
    MicroBatch,
    Passes,
    RowShare,
    make_micro_batch,
    plan_passes,
    split_in_rows,
)
from flowrl.training.model.policy_model import OutputLayer
from flowrl.training.model.row_layout import lay_out, policy_places

BALANCE = "router_aux_loss"
"""Name in a metrics line: the load-balancing loss of a mixture of experts, not multiplied by its coefficient."""


@dataclass
class BatchSums:
    """What has been computed of a batch so far: sums over micro-batches, optimizer steps and pieces."""

    values: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Shares of the means of loss and stats, of this rank."""
    undivided: dict[tuple[MeanOver, str], float] = field(default_factory=lambda: defaultdict(float))
    """This rank's sums of loss and stats of a batch in pieces, and by which count they are to be divided."""
    gap_by_age: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    tokens_by_age: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    tokens_computed: int = 0
    """This rank's."""
    totals: Totals = field(default_factory=lambda: Totals(0, 0))
    """Over all ranks: denominators of the optimizer step to which the pieces so far belong."""
    token_passes: int = 0
    """Over all ranks: tokens that entered the loss of the steps that are finished."""
    grad_norms: list[float] = field(default_factory=list)
    """The norms of the steps that were applied, before clipping."""
    skipped_steps: int = 0

    def add_values(self, values: Mapping[str, Tensor], share: float = 1.0, *, over: MeanOver | None = None) -> None:
        """Add what a micro-batch adds to means, or with `over` to sums that are still to be divided by that count."""
        for name, value in values.items():
            if over is None:
                self.values[name] += float(value) * share
            else:
                self.undivided[over, name] += float(value)

    def add_gaps(self, micro_batch: MicroBatch, proximal_BT: Tensor) -> None:
        """Add |log π_p − log π_b| of the trained tokens that the policy has sampled, by their age."""
        trained = micro_batch.mask_BT
        gaps = (proximal_BT - micro_batch.behavior_BT).abs()[trained].double().cpu().numpy()
        ages = micro_batch.ages_BT[trained].cpu().numpy()
        gaps, ages = gaps[ages >= 0], ages[ages >= 0]
        for age in np.unique(ages):
            self.gap_by_age[int(age)] += float(gaps[ages == age].sum())
            self.tokens_by_age[int(age)] += int((ages == age).sum())

    def finish_step(self) -> None:
        """Divide what has to be divided by the counts of the optimizer step, which are complete now."""
        for (over, name), value in self.undivided.items():
            self.values[name] += value / max(1, self.totals.number_of(over))
        self.undivided.clear()
        self.token_passes += self.totals.num_tokens
        self.totals = Totals(0, 0)

    def make_update(self, parts: Sequence[BatchSums], names: Sequence[str]) -> Update:
        """The figures called `names`, and the others, from the sums of all parts of the finished batch."""
        values: dict[str, float] = defaultdict(float)
        gaps: dict[int, float] = defaultdict(float)
        tokens: dict[int, int] = defaultdict(int)
        for part in parts:
            for name, value in part.values.items():
                values[name] += value
            for age, gap in part.gap_by_age.items():
                gaps[age] += gap
                tokens[age] += part.tokens_by_age[age]
        norms, num_tokens = self.grad_norms, sum(tokens.values())
        return Update(
            changed=bool(norms),
            optimizer_steps=len(norms),
            skipped_steps=self.skipped_steps,
            token_passes=self.token_passes,
            tokens_computed=sum(part.tokens_computed for part in parts),
            grad_norm=sum(norms) / len(norms) if norms else None,
            stats={name: values.get(name) for name in names},
            behavior_gap=sum(gaps.values()) / num_tokens if num_tokens else None,
            behavior_gap_by_staleness={age: gaps[age] / number for age, number in sorted(tokens.items())},
        )


@dataclass(frozen=True)
class Update:
    """The result of training on one batch, over all ranks."""

    changed: bool
    """False: no optimizer step was applied, so the weights are the same as before."""
    optimizer_steps: int
    """Number of steps that were applied."""
    skipped_steps: int
    """Number of steps whose gradient was not finite."""
    token_passes: int
    """Tokens that entered a loss, counted once in each epoch."""
    tokens_computed: int
    """Tokens that one pass over the batch computes, prompts and padding included, shared prefixes once."""
    grad_norm: float | None
    """Mean over the applied steps, before clipping."""
    stats: Mapping[str, float | None]
    """loss and the objective's stats, means over the batch's optimizer steps; None without a value."""
    behavior_gap: float | None
    """Mean |log π_p − log π_b| over the trained tokens whose log π_p is computed: all tokens, or those up to the first
    applied step if the objective needs no pass for π_p."""
    behavior_gap_by_staleness: Mapping[int, float]

    @property
    def without_a_step(self) -> bool:
        """Whether no step was tried: the batch has fewer samples or tokens than the objective needs."""
        return not self.optimizer_steps and not self.skipped_steps

    @property
    def metrics(self) -> dict[str, Any]:
        """The values under their names in a metrics line."""
        return {
            **self.stats,
            "optimizer_steps": self.optimizer_steps,
            "skipped_steps": self.skipped_steps,
            "unchanged": not self.changed,
            "token_passes": self.token_passes,
            "tokens_computed": self.tokens_computed,
            "grad_norm": self.grad_norm,
            "behavior_gap": self.behavior_gap,
            "behavior_gap_by_staleness": {str(age): gap for age, gap in self.behavior_gap_by_staleness.items()},
        }


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
        max_reused_age: int | None = None,
        teacher: OutputLayer | None = None,
        router_aux_loss_coef: float = 0.0,
    ) -> None:
        """`router_aux_loss_coef` is the weight of the load-balancing loss, which a `balanced` engine computes."""
        self.engine = engine
        self.objective = objective
        self._epochs = epochs
        self._temperature = temperature
        self._max_staleness = max_staleness
        self._max_reused_age = max_reused_age
        self._teacher = teacher
        self._balance_coef = router_aux_loss_coef
        self._sums = BatchSums()
        self._stat_names = ("loss", *objective.stats, *((BALANCE,) if router_aux_loss_coef else ()))

    def train_piece(self, piece: Batch, masks: Sequence[Bool], version: int, lr: float) -> Update | None:
        """Train on this rank's part of a piece of a batch; the result comes with the batch's last piece.

        `masks` say which tokens of each sample enter the loss. `version` is the version being updated, the same for all
        pieces. Raises FlowrlError if a token is older than the staleness bound, or if the batch does not come whole and
        this learner needs it whole.
        """
        over = None if piece.whole else self.objective.mean_over
        if not piece.whole and (
            over is None or self._epochs > 1 or self.objective.needs_mismatched or self._balance_coef
        ):
            raise FlowrlError(
                f"a batch came in pieces, but {type(self.objective).__name__} with {self._epochs} epochs needs it "
                "whole; this is an error in the node that sends the batches"
            )
        steps = self._lay_out_steps(piece, masks, version)
        sums, enough = self._sums, self.objective.enough
        sums.tokens_computed += sum(self.engine.num_computed(one.rows) for step, _ in steps for one in step)
        several = self._epochs * len(steps) > 1
        old = self._compute_proximal(steps) if several and self.objective.needs_proximal else {}
        share = 1 / max(1, self._epochs * sum(enough(counts) for _, counts in steps))
        for epoch in range(self._epochs):
            for micro_batches, counts in steps:
                sums.totals += counts
                stepping = piece.last and enough(sums.totals)
                if stepping or enough(counts):
                    self._add_gradient(
                        micro_batches,
                        counts if over is None else Totals.undivided_over(over),
                        over=over,
                        old=old,
                        share=share,
                        measures_gap=epoch == 0 and (bool(old) or not sums.grad_norms),
                        stepping=stepping,
                    )
                if stepping:
                    self.engine.set_lr(lr)
                    made = self.engine.step_optimizer(divide_by=1.0 if over is None else sums.totals.number_of(over))
                    sums.grad_norms += [made.grad_norm] if made.applied else []
                    sums.skipped_steps += not made.applied
                if piece.last:
                    sums.finish_step()
        if not piece.last:
            return None
        self._sums = BatchSums()
        return sums.make_update(self.engine.gang.gather_parts(sums), self._stat_names)

    def skip_piece(self, piece: Batch, masks: Sequence[Bool], version: int) -> Update:
        """Process a piece of a batch that makes no update: nothing is computed, but the staleness bound is asserted."""
        part, masks, _ = split_in_rows(piece, masks)
        self._assert_bound(part, masks, version)
        return BatchSums().make_update((), self._stat_names)

    def judge_batch(self, part: Batch) -> dict[str, float | None]:
        """Return the loss and the objective's stats on this rank's part of a held-out batch; collective."""
        part, masks, shares = split_in_rows(part, loss_masks(part.samples, -1, 0))
        part = self._add_reference(part)
        micro_batches = [self._make_micro_batch(part, masks, shares, indices, 0) for indices in part.micro_batches]
        ((_, total),), sums = self._count_steps([micro_batches]), BatchSums()
        with torch.no_grad():
            mismatched_kl = self._compute_mismatched_kl(micro_batches) if self.objective.needs_mismatched else 0.0
            for micro_batch in micro_batches if self.objective.enough(total) else ():
                loss, stats = self.objective.loss(self._compute_inputs(micro_batch, total, None, mismatched_kl))
                sums.add_values(self._check_stats(loss, stats))
        return dict(sums.make_update(self.engine.gang.gather_parts(sums), ("loss", *self.objective.stats)).stats)

    # From samples to micro-batches

    def _lay_out_steps(self, part: Batch, masks: Sequence[Bool], version: int) -> list[tuple[list[MicroBatch], Totals]]:
        """The micro-batches of each optimizer step of this rank's part, and each step's counts; collective.

        Micro-batches without a backward pass come first. All ranks have the same number of each kind.
        """
        part, masks, shares = split_in_rows(part, masks)
        self._assert_bound(part, masks, version)
        part = self._add_reference(part)
        part = self._choose_tokens(part, masks)
        starts = (0, *part.step_ends[:-1])
        planned = [
            self._agree_on_passes(part, masks, part.micro_batches[start:end])
            for start, end in zip(starts, part.step_ends, strict=True)
        ]
        steps = [
            [
                replace(self._make_micro_batch(part, masks, shares, indices, version), backward=backward)
                for passes, backward in ((forward, False), (both, True))
                for indices in passes
            ]
            for forward, both in planned
        ]
        return self._count_steps(steps)

    def _choose_tokens(self, part: Batch, masks: Sequence[Bool]) -> Batch:
        """`part` with the tokens marked that the objective chooses among all of each optimizer step; collective.

        Every sample of `part` is one sequence.
        """
        if not self.objective.chooses_tokens:
            return part
        gang, samples = self.engine.gang, list(part.samples)
        for start, end in zip((0, *part.step_ends[:-1]), part.step_ends, strict=True):
            numbers = [number for one in part.micro_batches[start:end] for number in one]
            of_step = [masks[number] for number in numbers]
            parts = gang.gather_parts(StepTokens.collect_tokens([samples[n] for n in numbers], of_step))
            chosen_N = self.objective.choose_tokens(StepTokens.join_parts(parts))
            ends = np.cumsum([one.keys_N.size for one in parts])
            mine = np.split(chosen_N, ends[:-1])[gang.rank // gang.ranks_per_part]
            for number, mask in zip(numbers, of_step, strict=True):
                marks = np.zeros(mask.size, np.bool_)
                marks[mask], mine = np.split(mine, [int(mask.sum())])
                samples[number] = samples[number].with_column(CHOSEN, marks)
        return replace(part, samples=tuple(samples))

    def _assert_bound(self, part: Batch, masks: Sequence[Bool], version: int) -> None:
        if self._max_staleness is None or self.objective.offline:
            return
        for sample, mask in zip(part.samples, masks, strict=True):
            sampled = mask & (sample.whole_versions >= 0)
            oldest = int(sample.whole_versions[sampled].min()) if sampled.any() else version
            bound = self._max_reused_age if sample.times_trained else self._max_staleness
            if bound is None or version - oldest > bound:
                raise FlowrlError(
                    f"sample {sample.sample_id!r} has tokens of version {oldest}, and training would make version "
                    f"{version + 1} from version {version}: a staleness of {version - oldest}, but the graph "
                    f"allows {bound} after {sample.times_trained} earlier uses. The sample was not trained on; this is "
                    "an error in flowrl, please report it"
                )

    def _agree_on_passes(
        self, part: Batch, masks: Sequence[Bool], micro_batches: Sequence[Sequence[int]]
    ) -> tuple[Passes, Passes]:
        """The passes of one optimizer step, without and with a backward: as many of each kind on every rank, the
        missing ones empty; collective."""
        # Every token contributes to the load-balancing loss, so no pass is without a backward. A step has at least one
        # backward pass, even if its gradient is 0.
        forward, both = (
            ((), tuple(map(tuple, micro_batches)))
            if self._balance_coef
            else plan_passes(part, masks, micro_batches, self.objective)
        )
        numbers = self.engine.gang.gather_parts((len(forward), len(both)))
        most_forward, most_both = (max(of_ranks) for of_ranks in zip(*numbers, strict=True))
        most_both = max(most_both, int(part.last))
        return forward + ((),) * (most_forward - len(forward)), both + ((),) * (most_both - len(both))

    def _make_micro_batch(
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
            layout=self._choose_layout(part),
            device=self.engine.device,
            shares=[shares[i] for i in indices],
        )
        if self._teacher is None:
            return micro_batch
        return replace(micro_batch, rows=self._teacher.add_teacher(micro_batch.rows, samples))

    def _choose_layout(self, part: Batch) -> Placing:
        """How the passes over `part` are laid out. A tree can have more sequences than would fit into rows."""
        if part.layout != "tree":
            return self.engine.layout
        if self.engine.layout not in ("auto", "tree"):
            raise FlowrlError(
                "the batcher packs trees of shared prefixes, but this trainer computes rows, which would need more "
                "tokens than the token budget; give the batcher layout='rows', or the trainer layout='auto'"
            )
        return "tree"

    def _count_steps(self, steps: Sequence[list[MicroBatch]]) -> list[tuple[list[MicroBatch], Totals]]:
        """The steps with their counts over all ranks; collective."""
        mine = [
            np.sum([(*one.added_counts, one.num_places) for one in micro_batches], axis=0) for micro_batches in steps
        ]
        by_part = np.array(self.engine.gang.gather_parts(mine))
        return [(step, Totals(*counts)) for step, counts in zip(steps, by_part.sum(axis=0).tolist(), strict=True)]

    # From micro-batches to the gradient

    def _add_gradient(
        self,
        micro_batches: Sequence[MicroBatch],
        totals: Totals,
        *,
        over: MeanOver | None,
        old: Mapping[int, Tensor],
        share: float,
        measures_gap: bool,
        stepping: bool,
    ) -> None:
        """Add the gradient of micro-batches to the engine's sums, and their figures to `_sums`.

        `stepping`: an optimizer step follows, so the last backward completes its gradient.
        """
        sums = self._sums
        mismatched_kl = self._compute_mismatched_kl(micro_batches) if self.objective.needs_mismatched else 0.0
        for position, micro_batch in enumerate(micro_batches):
            with torch.set_grad_enabled(micro_batch.backward):
                inputs = self._compute_inputs(micro_batch, totals, old.get(id(micro_batch)), mismatched_kl)
                loss, stats = self.objective.loss(inputs)
            sums.add_values(self._check_stats(loss.detach(), stats), share, over=over)
            # Stats, or parts of them, that are means over another count than the loss: undivided, by that count.
            for other in (other for other in get_args(MeanOver) if over is not None and other != over):
                with torch.no_grad():
                    loss_by_other, stats = self.objective.loss(replace(inputs, totals=Totals.undivided_over(other)))
                if math.isfinite(value := float(loss_by_other)) and value:
                    raise FlowrlError(
                        f"{type(self.objective).__name__} says that its loss is a mean over {over}, but a part of it "
                        f"is divided by the number of {other}; set mean_over to None, so that batches come whole"
                    )
                sums.add_values(stats, over=other)
            if inputs.balance is not None:
                # A mean over the micro-batches of all ranks, weighted by the number of tokens that each one routes.
                balance = inputs.balance * (micro_batch.num_places / totals.num_places)
                sums.add_values({BALANCE: balance.detach()}, share)
                loss = loss + self._balance_coef * balance
            if micro_batch.backward:
                self.engine.add_gradient(loss, last=stepping and position == len(micro_batches) - 1)
            if measures_gap and self.objective.head == "lm" and not self.objective.offline:
                sums.add_gaps(micro_batch, inputs.old_logprobs_BT)

    def _compute_inputs(
        self, micro_batch: MicroBatch, totals: Totals, old_BT: Tensor | None, mismatched_kl: float
    ) -> LossInputs:
        """Run one pass of the model over a micro-batch."""
        balance: list[Tensor] = []
        logprobs_BT = entropies_BT = values_BT = micro_batch.behavior_BT.new_zeros(micro_batch.rows.shape[0], 0)
        if self.objective.head == "scalar":
            values_BT = micro_batch.rows.spread_values(self.engine.compute_values(micro_batch.rows))
        else:
            logprobs_N, entropies_N, *balance = self.engine.compute_outputs(
                micro_batch.rows, self._temperature, self.objective.needs_entropy_gradient
            )
            logprobs_BT, entropies_BT = (
                micro_batch.rows.spread_values(logprobs_N),
                micro_batch.rows.spread_values(entropies_N),
            )
        return LossInputs(
            logprobs_BT,
            entropies_BT,
            logprobs_BT.detach() if old_BT is None else old_BT,
            micro_batch.mask_BT,
            micro_batch.columns,
            totals,
            values_BT,
            micro_batch.labels_B,
            micro_batch.pairs_P2,
            mismatched_kl,
            micro_batch.sample_tokens_B,
            *balance,
        )

    def _check_stats(self, loss: Tensor, stats: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Loss and stats of a micro-batch. Raises FlowrlError for a stat that metrics lines would leave out."""
        if unnamed := sorted(stats.keys() - set(self.objective.stats)):
            raise FlowrlError(
                f"{type(self.objective).__name__}.loss returned the stats {', '.join(unnamed)}, which its `stats` do "
                "not name; add them there, so that every metrics line contains them"
            )
        return {"loss": loss, **stats}

    # Passes without a gradient

    def _compute_proximal(self, steps: Sequence[tuple[list[MicroBatch], Totals]]) -> dict[int, Tensor]:
        """log π_p of every micro-batch, keyed by the micro-batch's id()."""
        with torch.no_grad():
            return {
                id(one): one.rows.spread_values(self.engine.forward(one.rows, temperature=self._temperature)[0])
                for step, _ in steps
                for one in step
            }

    def _compute_mismatched_kl(self, micro_batches: Sequence[MicroBatch]) -> float:
        """Mean of log π/ref over all mismatched completions of the optimizer step; collective."""
        total, number = 0.0, 0
        for mismatched in (micro_batch.mismatched for micro_batch in micro_batches):
            assert mismatched is not None
            with torch.no_grad():
                logprobs_N, _ = self.engine.forward(mismatched.rows, temperature=self._temperature)
            log_ratio_B = mismatched.rows.spread_values(logprobs_N).sum(dim=1) - mismatched.ref_B
            total += float(log_ratio_B[mismatched.counted_B].sum())
            number += int(mismatched.counted_B.sum())
        totals, numbers = zip(*self.engine.gang.gather_parts((total, number)), strict=True)
        return float(sum(totals) / max(1, sum(numbers)))

    def _add_reference(self, part: Batch) -> Batch:
        """`part` with the logprobs of the reference, which is the base of an adapter, in every sample, and in its
        mismatched completion if the objective reads those; collective.

        Returned unchanged if the objective needs no reference, or no rank has a sample that lacks it. Every rank
        processes its micro-batches, empty ones on padding.
        """
        if not (self.objective.needs_reference and self.engine.lora.rank):
            return part
        lacking = any(sample.ref_logprobs is None for sample in part.samples)
        if not any(self.engine.gang.gather_objects(lacking)):
            return part
        layout, samples = self._choose_layout(part), list(part.samples)
        for indices in part.micro_batches:
            chosen: list[Trainable] = [part.samples[i] for i in indices] or [PADDING]
            own = self._compute_reference([s.token_ids for s in chosen], [s.policy_mask for s in chosen], layout)
            chosen = [replace(s, ref_logprobs=ref) for s, ref in zip(chosen, own, strict=True)]
            if self.objective.needs_mismatched:  # a sample without a mismatched completion passes its own tokens
                others = [sample.mismatched for sample in chosen]
                tokens = [s.token_ids if m is None else m.token_ids for s, m in zip(chosen, others, strict=True)]
                masks = [s.policy_mask if m is None else m.mask for s, m in zip(chosen, others, strict=True)]
                found = self._compute_reference(tokens, masks, layout)
                chosen = [
                    s if m is None else replace(s, mismatched=replace(m, ref_logprobs=ref))
                    for s, m, ref in zip(chosen, others, found, strict=True)
                ]
            for index, sample in zip(indices, chosen, strict=False):
                samples[index] = sample
        return replace(part, samples=tuple(samples))

    def _compute_reference(self, token_ids: Sequence[Int32], masks: Sequence[Bool], layout: Placing) -> list[Float32]:
        """log p of the marked tokens of each sequence without the adapter, at their positions; 0 elsewhere."""
        rows = lay_out(token_ids, masks, layout=layout, device=self.engine.device)
        with torch.no_grad(), self.engine.adapter_off():
            logprobs_N, _ = self.engine.forward(rows, temperature=self._temperature)
        places = [policy_places(mask) for mask in masks]
        parts = np.split(logprobs_N.float().cpu().numpy(), np.cumsum([len(where) for where in places])[:-1])
        found = [np.zeros(len(tokens), np.float32) for tokens in token_ids]
        for ref_logprobs, where, part in zip(found, places, parts, strict=True):
            ref_logprobs[where] = part
        return found
