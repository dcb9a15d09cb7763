"""Which labels of a reward model make the reward: one by name or number, or a weighted sum of several."""

from __future__ import annotations

import math
from collections.abc import Sequence

from flowrl.errors import ConfigError
from flowrl.tasks.task_syntax import parse_weights

OPTION = "--reward-model.label"


def label_weights(text: str, labels: Sequence[str], *, model: str, option: str = OPTION) -> tuple[float, ...]:
    """The weight of each of `labels`, the labels of the model's head, as `text` says; a label not named weighs 0.

    `text` is a label or its number (from 0), or NAME=WEIGHT,NAME=WEIGHT; empty means the only label. Raises
    ConfigError, which lists the labels, for an unknown label, and if there are several labels and none is chosen.
    """
    if not text and len(labels) > 1:
        raise ConfigError(
            f"{model} scores {len(labels)} labels ({listed(labels)}); choose one with {option} {labels[0]}, or a sum "
            f"with {option} {labels[0]}=0.7,{labels[1]}=0.3"
        )
    chosen = {text or labels[0]: 1.0} if "=" not in text or text in labels else parse_weights(option, text)
    weights = dict.fromkeys(range(len(labels)), 0.0)
    for name, weight in chosen.items():
        weights[_index(name, labels, model, option)] += weight
    if not any(weights.values()):
        raise ConfigError(f"{option} {text!r} weighs every label 0; give one of {listed(labels)} another weight")
    return tuple(weights.values())


def weighted(scores: Sequence[float], weights: Sequence[float]) -> float:
    """The weighted sum of one sample's scores, one for each label; a label that weighs 0 may have any score."""
    return math.fsum(weight * score for weight, score in zip(weights, scores, strict=True) if weight)


def listed(labels: Sequence[str]) -> str:
    """`labels` in one line, each with its number."""
    return ", ".join(f"{number} {name}" for number, name in enumerate(labels))


def _index(name: str, labels: Sequence[str], model: str, option: str) -> int:
    if name in labels:
        return labels.index(name)
    if name.isdecimal() and int(name) < len(labels):
        return int(name)
    raise ConfigError(f"{option} names {name!r}, but {model} has the labels {listed(labels)}")
