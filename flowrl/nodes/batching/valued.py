"""The batcher's use of a critic: it sends a request for a whole batch and stores the values in the samples."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from flowrl.errors import ConfigError, FlowrlError
from flowrl.messages import Group, Trainable, ValueQuestion, Values
from flowrl.nodes.groups.one_sequence import require_one_sequence
from flowrl.training.advantages import require_one_seat


def question(groups: Sequence[Group]) -> ValueQuestion:
    """The samples of `groups` as a request to a critic."""
    samples = tuple(sample for group in groups for sample in group.samples)
    require_one_seat(samples, "a critic")
    require_one_sequence(samples, "a critic")
    return ValueQuestion.of(samples)


def with_values(groups: Sequence[Group], reply: Values) -> list[Group]:
    """`groups` with the values of `reply`, which has the values of all their samples in order."""
    lengths = [sample.token_ids.size for group in groups for sample in group.samples]
    assert sum(lengths) == reply.values.size, "a critic answers with a value a token"
    left = iter(np.split(reply.values, np.cumsum(lengths)[:-1]))
    return [
        dataclasses.replace(
            group,
            samples=tuple(
                dataclasses.replace(sample, values=next(left), values_version=reply.version) for sample in group.samples
            ),
        )
        for group in groups
    ]


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
