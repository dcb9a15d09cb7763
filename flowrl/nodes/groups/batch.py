"""The batcher forms batches of whole groups, in admission order or within the window.

It waits for the next finished group and ends with the stream; the remaining groups then form smaller batches.

If its trainers accumulate gradients (`context.in_pieces`) and wait for work, it sends the groups that are certain to be
in the next batch as pieces, before the batch is complete: the first piece when the trainers have finished the previous
batch, each further piece when they have taken the previous piece. If the trainers never wait, or batches form quickly
(`PACE_S`), batches are sent whole.

Statistics that run over batches, for reward normalisation and the adaptive KL, advance by one step per batch here, so
they depend neither on ranks nor on timing. The batcher recomputes a batch's advantages with the statistics of that
batch.
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np

from flowrl.errors import ConfigError, FlowrlError
from flowrl.graph.node import Facts, Node
from flowrl.graph.ports import Call, In, Out
from flowrl.messages import Batch, Bool, Group, Trainable, ValueQuestion, Values, no_logprobs, packed
from flowrl.messages.forest import num_shared
from flowrl.nodes.groups.group_filter import judged_metrics, source_metrics
from flowrl.nodes.groups.replay import Replay, ReplayBuffer, spread_out
from flowrl.nodes.scoring.scoring_model import require_one_sequence
from flowrl.tasks.rows import OF_TASK
from flowrl.training.advantages import (
    SCALED_ESTIMATORS,
    Estimate,
    Scale,
    all_equal,
    require_one_seat,
    whiten_advantages,
    whole_reward,
)
from flowrl.training.loss.objective import loss_masks, trained_mask
from flowrl.training.settings import Layout
from flowrl.wire.tickets import Window


class TokenBatch(Node):
    """Puts `num_groups` groups into a batch; one batch makes one version of the weights.

    `token_budget` bounds the tokens of a micro-batch, padding included. With the `layout` "auto" or "tree", if the
    trainer computes trees, the tokens of a prefix that sequences share count once. `optimizer_steps` is the number of
    mini-batches the batch is split into. `whiten` normalises advantages over all trained tokens of the batch, as
    the estimators `reinforce` and `reinforce_baseline` require: "off", "full", or "mean" (mean only).

    If the trainers that receive the batches accumulate gradients, a batch is sent in pieces as its groups finish; see
    `Batch.piece`.

    `normalise_rewards` subtracts from each reward the mean of all rewards so far and divides by their standard
    deviation; `adaptive_kl` controls the weight of the KL in the reward. Both are updated once per batch, so both
    need the advantage node's `estimate`, with which the batcher recomputes the advantages.

    With `mask_truncated`, samples that were cut off are kept out of the loss. `sources` are the names of a mixture's
    sources (`Task.source_names`), each of which has its own metrics.

    With `replay`, a batch takes older groups along, which are trained again (flowrl.nodes.groups.replay).

    The estimator `gae` needs `estimate` as well: the batcher sends the whole batch to a critic (`values`) in one
    request, so all values have one version, and computes the advantages from them.
    """

    groups: In[Group]
    batches: Out[Batch]
    values: Call[ValueQuestion, Values]

    def __init__(
        self,
        num_groups: int,
        *,
        token_budget: int = 8192,
        layout: Layout = "rows",
        optimizer_steps: int = 1,
        whiten: Literal["off", "full", "mean"] = "off",
        estimate: Estimate | None = None,
        normalise_rewards: bool = False,
        adaptive_kl: AdaptiveKL | None = None,
        mask_truncated: bool = False,
        sources: Mapping[str, str] | None = None,
        replay: Replay | None = None,
    ) -> None:
        self.num_groups = num_groups
        self.token_budget = token_budget
        self.layout = layout
        self.optimizer_steps = optimizer_steps
        self.whiten = whiten
        self.estimate = estimate
        self.normalise_rewards = normalise_rewards
        self.adaptive_kl = adaptive_kl
        self.mask_truncated = mask_truncated
        self.sources = dict(sources or {})
        self.replay = replay if replay is not None and replay.groups else None
        self._buffer: ReplayBuffer | None = None
        self._running: RunningEstimate | None = None
        if estimate is not None and (normalise_rewards or adaptive_kl is not None or self._wants_values):
            self._running = RunningEstimate(estimate, normalise_rewards=normalise_rewards, adaptive_kl=adaptive_kl)
        self._window: Window[Group] | None = None
        self._saved: Mapping[str, Any] | None = None
        self._mask_staleness = -1
        self._num_sent = 0
        self._begun = BegunBatch()
        self._pace = Pace()
        self._before_send: Mapping[str, Any] | None = None
        """The state before a batch's send. A checkpoint during the send keeps it: the batch's groups come again."""

    @property
    def _wants_values(self) -> bool:
        return self.estimate is not None and self.estimate.estimator == "gae"

    def facts(self) -> Facts:
        # What needs all groups of a batch before the first can be trained.
        needs_all = {
            "the critic is asked for the values of a whole batch": self._wants_values,
            "advantages are whitened over the whole batch": self.whiten != "off",
            "rewards are normalised with those of the whole batch": self.normalise_rewards,
            "the weight of the KL in the reward changes with each whole batch": self.adaptive_kl is not None,
            f"a batch is split into {self.optimizer_steps} optimizer steps": self.optimizer_steps > 1,
            "a batch is one group": self.num_groups == 1,
            "a batch takes older groups along": self.replay is not None,
        }
        return Facts(
            groups_per_batch=self.num_groups,
            token_budget=self.token_budget,
            layout=self.layout,
            whole_batches=next((reason for reason, holds in needs_all.items() if holds), ""),
            keeps_lineage=False,
            optional=() if self._wants_values else ("values",),
            max_uses=None if self.replay is None else self.replay.max_uses,
            max_reuse_age=0 if self.replay is None else self.replay.max_age,
        )

    def check(self, facts: Any) -> list[str]:
        ranges = (
            ("num_groups", self.num_groups),
            ("token_budget", self.token_budget),
            ("optimizer_steps", self.optimizer_steps),
        )
        problems = [f"{name} is {value}; it needs at least 1" for name, value in ranges if value < 1]
        if self.layout not in get_args(Layout):
            problems.append(f"layout is {self.layout!r}; choose one of {', '.join(get_args(Layout))}")
        if self.whiten not in ("off", "full", "mean"):
            problems.append(f"whiten is {self.whiten!r}; it has to be off, full or mean")
        if (self.normalise_rewards or self.adaptive_kl is not None) and self.estimate is None:
            problems.append("normalise_rewards and adaptive_kl need estimate=, the same as in the advantage node")
        if self.normalise_rewards and self.estimate is not None and self.estimate.credit == "turn":
            problems.append("normalise_rewards is for whole rewards; with credit='turn' set it to False")
        if self.normalise_rewards and self.estimate is not None and self.estimate.estimator in SCALED_ESTIMATORS:
            problems.append(
                f"normalise_rewards moves rewards, and estimator {self.estimate.estimator!r} reads more than their "
                "differences; set it to False"
            )
        if self.adaptive_kl is not None:
            problems += self.adaptive_kl.find_problems()
            if self.estimate is not None and not self.estimate.kl_coef:
                problems.append("adaptive_kl steers the KL in the reward; the estimate needs a kl_coef above 0")
        if self.replay is not None:
            problems += self.replay.find_problems()
            if self._running is not None:
                problems.append(
                    "a replayed group keeps the advantages of its first use, but gae, normalise_rewards and "
                    "adaptive_kl compute them anew for each batch; leave these out, or replay=, or use another "
                    "estimator"
                )
        return problems

    async def setup(self) -> None:
        if self.values.live is not None and not self._wants_values:
            raise ConfigError(
                f"{self.name}: its port values is joined to a critic, but estimate is not 'gae', so the critic "
                "would never be asked; set estimate=Estimate('gae'), as in the advantage node, or remove the g.call"
            )

    async def run(self) -> None:
        # 0 and None, for a graph without a window in its admission, mean order of arrival.
        window: Window[Group] = Window(self.num_groups, self.context.window or 0)
        if self.replay is not None:
            self._buffer = ReplayBuffer(self.replay, self.context.seed)
        if self._saved is not None:
            window.load_state(self._saved)
            self._num_sent = int(self._saved["version"]) - self.context.start_version
            if self._buffer is not None and "replay" in self._saved:
                self._buffer.load_state(self._saved["replay"])
            if (batch := self._saved.get("batch")) is not None:
                self._begun = BegunBatch(tuple(batch["groups"]), int(batch["num_pieces"]))
        if self.context.window == 0 and self.context.max_staleness is not None:
            self._mask_staleness = self.context.max_staleness
        self._window = window
        full_since_s: float | None = None
        async for ticket, group in self.groups.ordered():
            if full_since_s is not None:
                self.context.metric("oldest_wait_s", time.monotonic() - full_since_s)
            window.offer(ticket, group)
            self._pace.begin_batch(asyncio.get_running_loop().time())
            self._before_send = self._current_state()
            while not self._is_last_sent and (groups := window.take(self._num_enough())) is not None:
                await self._send_groups(groups, last=not window.begun)
            self._before_send = None
            full_since_s = time.monotonic() if len(window) >= window.missing else None  # an older group is missing
        self._before_send = self._current_state()
        for groups in window.flush():
            if self._is_last_sent:  # groups that others had asked for, beyond those that the steps need
                for group in groups:
                    self.groups.drop(group, "run_end")
                self._before_send = self._current_state()
            else:
                await self._send_groups(groups, last=not window.begun)

    @property
    def _is_last_sent(self) -> bool:
        """Whether the batch of the run's last step is sent."""
        steps = self.context.steps if self.context.has_leftovers else None
        return steps is not None and self.context.start_version + self._num_sent >= steps

    def _num_enough(self) -> int | None:
        """How many groups are enough to send now: those of a piece if the trainers wait; None: the whole batch."""
        if not self.context.in_pieces or not self._pace.is_due(asyncio.get_running_loop().time()):
            return None
        ahead = self.batches.num_untaken if self._begun.num_pieces else self.batches.num_unfinished
        return None if ahead else -(-self.num_groups // PIECES)

    async def _send_groups(self, groups: Sequence[Group], *, last: bool) -> None:
        """Send the batch of `groups`, or a piece of a batch."""
        valued = groups
        if self.values.live is not None:
            reply = await self.values(value_question(groups))
            lengths = [sample.token_ids.size for group in groups for sample in group.samples]
            assert sum(lengths) == reply.values.size, "a critic answers with a value a token"
            left = iter(np.split(reply.values, np.cumsum(lengths)[:-1]))
            valued = [
                replace(
                    group,
                    samples=tuple(
                        replace(sample, values=next(left), values_version=reply.version) for sample in group.samples
                    ),
                )
                for group in groups
            ]
        version = self.context.start_version + self._num_sent
        again = [] if self._buffer is None else self._buffer.choose_groups(version)
        batch = self.make_batch(valued, last=last, again=again)
        begun = BegunBatch() if last else self._begun.with_piece(groups)
        await self.batches.send(batch, made_from=groups or None)
        if self._buffer is not None:
            self._buffer.add_groups(valued, version)
        self._begun = begun
        self._pace.note_sent(asyncio.get_running_loop().time(), last=last)
        self._num_sent += last
        self._before_send = self._current_state()

    def make_batch(self, groups: Sequence[Group], *, last: bool = True, again: Sequence[Group] = ()) -> Batch:
        """The batch of `groups`, in their order, or a piece of a batch; the last piece has the metrics of the whole.

        `again` are the groups that are trained again with them. They enter the loss, and no metric.
        """
        metrics: dict[str, float] = {}
        if last:
            judged = (*self._begun.groups, *groups)
            metrics = judged_metrics(judged) | source_metrics(judged, self.sources)
        if self._running is not None:  # then batches come whole, as with `whiten`
            groups = self._running.estimate_batch(groups)
            metrics |= self._running.metrics
        if again:
            metrics["reused_groups"] = float(len(again))
        samples = tuple(sample for group in spread_out(groups, again) for sample in group.samples)
        require_advantages(samples)
        if self.mask_truncated:  # samples that were cut off have no tokens in the loss
            samples = tuple(
                replace(sample, loss_mask=np.zeros_like(sample.whole_mask)) if sample.truncated else sample
                for sample in samples
            )
        if self.whiten != "off":
            # A batch makes one version, so the version that will train this batch is known here.
            masks = loss_masks(samples, self._mask_staleness, self.context.start_version + self._num_sent)
            samples = whiten_samples(samples, masks, mean_only=self.whiten == "mean")
        if last:
            whole = (*self._begun.groups, *groups)
            every = tuple(sample for group in whole for sample in group.samples)
            overlong = {"overlong_share": float(np.mean([s.truncated for s in every]))} if self.mask_truncated else {}
            metrics = batch_metrics(whole) | overlong | branch_metrics(every) | value_metrics(every) | metrics
        return Batch(
            samples=samples,
            micro_batches=(),
            num_sequences=len(samples),
            num_tokens=sum(int(trained_mask(sample).sum()) for sample in samples),
            num_groups=len(groups),
            mask_staleness=self._mask_staleness,
            token_budget=self.token_budget,
            layout=self.layout,
            optimizer_steps=min(self.optimizer_steps, max(1, len(packed(samples)))),
            metrics=metrics,
            piece=self._begun.num_pieces,
            last=last,
        )

    def state(self) -> Mapping[str, Any]:
        if self._window is None:
            return self._saved or {}
        return self._before_send or self._current_state()

    def _current_state(self) -> Mapping[str, Any]:
        assert self._window is not None
        running = {} if self._running is None else {"running": self._running.state()}
        begun = {"batch": dict(vars(self._begun))} if self._begun.num_pieces else {}
        replay = {} if self._buffer is None else {"replay": self._buffer.state()}
        version = self.context.start_version + self._num_sent
        return {**self._window.state(), "version": version, **running, **begun, **replay}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._saved = state or None
        if self._running is not None and "running" in state:
            self._running.load_state(state["running"])


def whiten_samples(samples: Sequence[Trainable], masks: Sequence[Bool], *, mean_only: bool) -> tuple[Trainable, ...]:
    """`samples` with advantages normalised over all tokens of `masks` together, 0 elsewhere."""
    values = whiten_advantages(
        np.concatenate([sample.advantages for sample in samples]).astype(np.float64),
        np.concatenate(masks),
        mean_only=mean_only,
    )
    parts = np.split(values.astype(np.float32), np.cumsum([len(mask) for mask in masks])[:-1])
    return tuple(replace(sample, advantages=part) for sample, part in zip(samples, parts, strict=True))


def branch_metrics(samples: Sequence[Trainable]) -> dict[str, float]:
    """The mean number of sequences per sample, and the share of tokens that are fed to the model more than once.

    A token is repeated if it is in the longest prefix that its sequence shares with an earlier sequence of its sample.
    Empty if no sample has branches.
    """
    if not any(sample.branches for sample in samples):
        return {}
    num_tokens = sum(sample.num_tokens for sample in samples)
    return {
        "sequences_per_sample": float(np.mean([len(sample.sequences) for sample in samples])),
        "repeated_tokens_share": sum(map(repeated_tokens, samples)) / num_tokens,
    }


def repeated_tokens(sample: Trainable) -> int:
    """Number of tokens of the sample's branches that are in a prefix shared with an earlier sequence."""
    ids = [sequence.token_ids for sequence in sample.sequences]
    return sum(max(num_shared(ids[n], earlier) for earlier in ids[:n]) for n in range(1, len(ids)))


def batch_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """The metrics that need the whole batch, by their names in metrics.jsonl."""
    samples = [sample for group in groups for sample in group.samples]
    raw = [[sample.raw_reward for sample in group.samples] for group in groups]
    metrics = {
        "reward_mean": float(np.mean([sample.reward for sample in samples])),
        "raw_reward_mean": float(np.mean([sample.raw_reward for sample in samples])),
        "response_tokens_mean": float(np.mean([sample.response_tokens for sample in samples])),
        "truncated_share": float(np.mean([sample.truncated for sample in samples])),
        "all_equal_groups_share": float(np.mean([all_equal(rewards) for rewards in raw])),
    }
    for name in sorted({name for sample in samples for name in sample.reward_parts}):
        parts = [sample.reward_parts[name] for sample in samples if name in sample.reward_parts]
        metrics[f"reward/{name}"] = float(np.mean(parts))
    return metrics


PIECES = 8
"""A batch comes in at most this many pieces, or one more. Each piece costs the trainer a micro-batch that may be small,
and with ZeRO-3 a pass of all parameters over the network."""
PACE_S = 0.5
"""At most one piece is sent in this many seconds. A piece costs the trainer some hundredths of a second, whatever its
size; a batch that forms in less than PACE_S comes whole."""


@dataclass(frozen=True)
class BegunBatch:
    """The groups of the pieces so far, without the arrays that only the trainer needs."""

    groups: tuple[Group, ...] = ()
    num_pieces: int = 0

    def with_piece(self, groups: Sequence[Group]) -> BegunBatch:
        """This batch with one more piece. It keeps copies, which stay valid after the groups are finished."""
        emptied = [one for one in Trainable.token_columns if one.name not in ("token_ids", "policy_mask")]
        of_sequence: dict[str, Any] = {one.name: one.make_zeros(0) for one in emptied if one.in_branches}
        of_sample: dict[str, Any] = {one.name: None for one in emptied if not one.in_branches}
        of_sample |= {"advantages": no_logprobs(), "teacher_hidden": None, "mismatched": None, "added_columns": None}
        kept = []
        for group in groups:
            samples = []
            for sample in group.samples:
                task = {OF_TASK: sample.columns[OF_TASK]} if OF_TASK in sample.columns else {}
                branches = tuple(replace(branch, **of_sequence) for branch in sample.branches)
                samples.append(replace(sample, columns=task, branches=branches, **of_sequence, **of_sample))
            kept.append(copy.deepcopy(replace(group, samples=tuple(samples))))
        return BegunBatch((*self.groups, *kept), self.num_pieces + 1)


class Pace:
    """How often a batcher sends pieces; times are in seconds of one clock."""

    def __init__(self) -> None:
        self._since_s: float | None = None
        """When the last piece of this batch was sent, else when its first group arrived; None before that."""

    def begin_batch(self, now_s: float) -> None:
        """A group has arrived. The first one of a batch begins it."""
        if self._since_s is None:
            self._since_s = now_s

    def note_sent(self, now_s: float, *, last: bool) -> None:
        """A piece was sent."""
        self._since_s = None if last else now_s

    def is_due(self, now_s: float) -> bool:
        """Whether the next piece may be sent."""
        return self._since_s is not None and now_s - self._since_s >= PACE_S


SMALLEST_VARIANCE = 1e-8


@dataclass(frozen=True)
class AdaptiveKL:
    """The controller of arXiv 1909.08593: β ← β·(1 + gain·clip(KL/target − 1, −limit, limit)) after every batch.

    KL is the mean over responses of the sum over their tokens, in nats.
    """

    target: float
    gain: float = 0.1
    limit: float = 0.2

    def find_problems(self) -> list[str]:
        """Problems of these settings, as complete sentences."""
        values = (("target", self.target), ("gain", self.gain), ("limit", self.limit))
        return [f"adaptive_kl.{name} is {value}; it has to be above 0" for name, value in values if not value > 0]

    def next_coef(self, coef: float, kl: float) -> float:
        """The coefficient of the next batch, after a batch with `coef` whose KL was `kl`."""
        error = min(max(kl / self.target - 1.0, -self.limit), self.limit)
        return coef * (1.0 + self.gain * error)


@dataclass
class Moments:
    """Mean and population variance of all values seen; merged batch by batch (Chan et al.)."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    """Sum of squared distances from the mean."""

    def add_values(self, values: Sequence[float]) -> None:
        new = np.asarray(values, np.float64)
        if not new.size:
            return
        difference, total = float(new.mean()) - self.mean, self.count + new.size
        self.squares += float(((new - new.mean()) ** 2).sum()) + difference**2 * self.count * new.size / total
        self.mean += difference * new.size / total
        self.count = total

    @property
    def scale(self) -> Scale:
        variance = self.squares / self.count if self.count else 1.0
        return Scale(self.mean, float(np.sqrt(max(variance, SMALLEST_VARIANCE))))


class RunningEstimate:
    """Computes the advantages of successive batches with running statistics of the batches so far."""

    def __init__(self, estimate: Estimate, *, normalise_rewards: bool, adaptive_kl: AdaptiveKL | None) -> None:
        self._estimate = estimate
        self._adaptive_kl = adaptive_kl
        self._moments = Moments() if normalise_rewards else None
        self._kl_coef = estimate.kl_coef
        self.metrics: dict[str, float] = {}
        """The metrics of the last batch, by their names in metrics.jsonl."""

    def estimate_batch(self, groups: Sequence[Group]) -> list[Group]:
        """`groups` with the advantages of this batch; advances statistics and coefficient by one batch."""
        scale = None
        if self._moments is not None:
            for group in groups:
                require_one_seat(group.samples, "a running mean of rewards")
            self._moments.add_values([whole_reward(sample) for group in groups for sample in group.samples])
            scale = self._moments.scale
            self.metrics |= {"reward_running_mean": scale.mean, "reward_running_std": scale.std}
        made = [self._estimate.make_trainables(group.samples, kl_coef=self._kl_coef, scale=scale) for group in groups]
        if self._adaptive_kl is not None:
            sums = [
                float(kl_T[: sample.num_tokens][sample.whole_mask].sum())
                for group in groups
                for sample, kl_T in zip(group.samples, self._estimate.compute_kl(group.samples), strict=True)
            ]
            kl = float(np.mean(sums))
            self.metrics |= {"kl_coef": self._kl_coef, "reward_kl": kl}
            self._kl_coef = self._adaptive_kl.next_coef(self._kl_coef, kl)
        return [replace(group, samples=samples) for group, samples in zip(groups, made, strict=True)]

    def state(self) -> Mapping[str, Any]:
        moments = {} if self._moments is None else dataclasses.asdict(self._moments)
        return {"kl_coef": self._kl_coef, "moments": moments}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._kl_coef = float(state["kl_coef"])
        if self._moments is not None and state["moments"]:
            self._moments = Moments(**state["moments"])


def value_question(groups: Sequence[Group]) -> ValueQuestion:
    """The samples of `groups` as a request to a critic."""
    samples = tuple(sample for group in groups for sample in group.samples)
    require_one_seat(samples, "a critic")
    require_one_sequence(samples, "a critic")
    return ValueQuestion.of(samples)


def require_advantages(samples: Sequence[Trainable]) -> None:
    """Raise ConfigError if advantages were left unset for a critic that was never called."""
    for sample in samples:
        if sample.advantages.size != sample.num_tokens:
            raise ConfigError(
                f"sample {sample.sample_id!r} reached the batcher without advantages, because the estimator "
                "'gae' needs a critic's values; give the batcher the same estimate as the advantage node, and join its "
                "port values to a Critic with g.call"
            )


def value_metrics(samples: Sequence[Trainable]) -> dict[str, float]:
    """How well the critic predicts the returns, over all policy tokens; empty if there are no values.

    Raises FlowrlError if the values have different versions.
    """
    versions = {sample.values_version for sample in samples if sample.values is not None}
    if not versions:
        return {}
    if len(versions) > 1:
        raise FlowrlError(
            f"a batch holds values of the critic's versions {min(versions)} to {max(versions)}, but PPO needs one: "
            "let the batcher ask the Critic (g.call(batcher.values, critic.requests)) instead of a node before it"
        )
    kept = [s for s in samples if s.values is not None and s.returns is not None]
    values = np.concatenate([s.values[s.policy_mask] for s in kept]) if kept else np.zeros(0)  # type: ignore[index]
    returns = np.concatenate([s.returns[s.policy_mask] for s in kept]) if kept else np.zeros(0)  # type: ignore[index]
    metrics = {"values_version": float(versions.pop())}
    if returns.size:
        metrics |= {"values_mean": float(values.mean()), "returns_mean": float(returns.mean())}
        if (variance := float(returns.var())) > 0:
            metrics["explained_variance"] = 1.0 - float((returns - values).var()) / variance
    return metrics
