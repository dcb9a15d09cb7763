"""Scores conversations with a trained reward model, outside of training.

The score is read at the last real token, the tokenizer's end token, which follows the template's own end if that is
another one. Training renders with the same function (`Chat.encode_scored`), so that a model is scored where it was
trained.

If the model has several labels, the score is that of one label, or a weighted sum: one by name or number, or several by
their weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flowrl.errors import ConfigError
from flowrl.messages import Bool, Int32
from flowrl.models.tokens.chat import Chat, Messages, load_tokenizer
from flowrl.tasks.task_syntax import parse_weights
from flowrl.training.settings import Attention, Dtype, Layout

if TYPE_CHECKING:
    from flowrl.training.scoring_models import ModelLoad, ScoringModel


OPTION = "--reward-model.label"


def label_weights(text: str, labels: Sequence[str], *, model: str, option: str = OPTION) -> tuple[float, ...]:
    """The weight of each of `labels`, the labels of the model's head, as `text` says; a label not named weighs 0.

    `text` is a label or its number (from 0), or NAME=WEIGHT,NAME=WEIGHT; empty means the only label. Raises
    ConfigError, which lists the labels, for an unknown label, and if there are several labels and none is chosen.
    """
    if not text and len(labels) > 1:
        raise ConfigError(
            f"{model} scores {len(labels)} labels ({list_labels(labels)}); choose one with {option} {labels[0]}, or a "
            f"sum with {option} {labels[0]}=0.7,{labels[1]}=0.3"
        )
    chosen = {text or labels[0]: 1.0} if "=" not in text or text in labels else parse_weights(option, text)
    weights = dict.fromkeys(range(len(labels)), 0.0)
    for name, weight in chosen.items():
        if name not in labels and not (name.isdecimal() and int(name) < len(labels)):
            raise ConfigError(f"{option} names {name!r}, but {model} has the labels {list_labels(labels)}")
        index = labels.index(name) if name in labels else int(name)
        weights[index] += weight
    if not any(weights.values()):
        raise ConfigError(f"{option} {text!r} weighs every label 0; give one of {list_labels(labels)} another weight")
    return tuple(weights.values())


def weighted_sum(scores: Sequence[float], weights: Sequence[float]) -> float:
    """The weighted sum of one sample's scores, one for each label; a label that weighs 0 may have any score."""
    return math.fsum(weight * score for weight, score in zip(weights, scores, strict=True) if weight)


def list_labels(labels: Sequence[str]) -> str:
    """`labels` in one line, each with its number."""
    return ", ".join(f"{number} {name}" for number, name in enumerate(labels))


ScoredMessages = Messages | tuple[Messages, str]
"""All turns, the last one being the assistant's; or the turns of a prompt, and the response to it."""
TOKENS_A_PASS = 16384
ONE_LABEL: Mapping[str, float] = {"LABEL_0": 1.0}


class Scorer:
    """Scores with one reward model, in the calling thread; see `load_scorer`."""

    def __init__(
        self,
        model: ScoringModel,
        tokenizer: Any,
        *,
        labels: Mapping[str, float] = ONE_LABEL,
        system_prompt: str = "",
        token_budget: int = TOKENS_A_PASS,
    ) -> None:
        self.model = model
        self.labels = labels
        """Label -> its weight in the score, in the order of the model's head."""
        self.token_budget = token_budget
        """The most tokens of one pass, padding included; a longer sequence gets a pass of its own."""
        self.chat = Chat(tokenizer, system_prompt)
        self.mean, self.std = 0.0, 1.0
        # As flowrl and OpenRLHF write them into a model's config.
        for mean, std in (("mean", "std"), ("reward_mean", "reward_std")):
            if mean in model.facts and std in model.facts:
                self.mean, self.std = float(model.facts[mean]), float(model.facts[std])
        """Mean of the model's scores in its training; with `std` it makes the scores of several models comparable."""

    def score(self, conversations: Sequence[ScoredMessages]) -> list[float]:
        """The score of each conversation, not normalised."""
        return [self.sum_labels(scores) for scores in self.score_labels(conversations)]

    def score_labels(self, conversations: Sequence[ScoredMessages]) -> list[tuple[float, ...]]:
        """The score of each label, in the order of `labels`, for each conversation."""
        return self.label_scores([self.render_ids(*split_parts(conversation)) for conversation in conversations])

    def render_ids(self, turns: Messages, response: str, *, tools: Messages = ()) -> Int32:
        """The token ids to score, rendered with this model's own template up to the end token. Raises Unrendered."""
        return self.chat.with_tools(tools).encode_scored(turns, response, sampled=True)[0]

    def label_scores(self, token_ids: Sequence[Int32]) -> list[tuple[float, ...]]:
        """The score of each label, in the order of `labels`, for each sequence."""
        from flowrl.training.scoring_models import score_items, scores_of_pass

        return score_items(self.model, scores_of_pass, token_ids, token_budget=self.token_budget)

    def step_scores(self, asked: Sequence[tuple[Int32, Bool]]) -> list[list[float]]:
        """The score of each step (σ of the model's output) of sequences in the form that `step_tokens` returns."""
        from flowrl.training.scoring_models import score_items, values_of_pass

        weights = tuple(self.labels.values())
        values = score_items(self.model, values_of_pass, asked, weights, token_budget=self.token_budget)
        return [(1 / (1 + np.exp(-found[mask]))).tolist() for found, (_, mask) in zip(values, asked, strict=True)]

    def sum_labels(self, scores: Sequence[float]) -> float:
        """The score of a sequence whose labels have these scores."""
        return weighted_sum(scores, tuple(self.labels.values()))

    def by_name(self, scores: Sequence[float]) -> dict[str, float]:
        """Label -> score, for a sequence whose labels have these scores; {} if the model has one label."""
        return dict(zip(self.labels, scores, strict=True)) if len(self.labels) > 1 else {}

    def normalise_scores(self, scores: Sequence[float]) -> list[float]:
        """`scores` minus the model's mean, divided by its standard deviation."""
        return [(score - self.mean) / max(self.std, 1e-8) for score in scores]


def load_scorer(
    path: str | Path,
    device: str = "cpu",
    dtype: Dtype = "float32",
    *,
    system_prompt: str = "",
    attention: Attention = "sdpa",
    trust_remote_code: bool = False,
    token_budget: int = TOKENS_A_PASS,
    layout: Layout = "auto",
    label: str = "",
) -> Scorer:
    """The reward model in the directory `path`; `label` says which of its labels make the score, see `label_weights`.

    Raises ConfigError if there is none.
    """
    from flowrl.training.scoring_models import LocalModel

    load = scorer_load(path, dtype, attention=attention, trust_remote_code=trust_remote_code, layout=layout)
    tokenizer = load_tokenizer(path, trust_remote_code=trust_remote_code)
    model = LocalModel(load.load_model().to(device))
    labels = labels_of(path, label)
    return Scorer(model, tokenizer, labels=labels, system_prompt=system_prompt, token_budget=token_budget)


def scorer_load(
    path: str | Path,
    dtype: Dtype,
    *,
    attention: Attention = "sdpa",
    trust_remote_code: bool = False,
    layout: Layout = "auto",
) -> ModelLoad:
    """How the reward model in `path` is loaded. Raises ConfigError if there is none."""
    from flowrl.training.model.scalar_head import require_scalar_head
    from flowrl.training.scoring_models import ModelLoad

    require_scalar_head(path)
    return ModelLoad(str(path), "scalar", "reward_model", dtype, attention, trust_remote_code, layout)


def check_reward_model(
    path: str | Path, *, trust_remote_code: bool = False, label: str = "", option: str = OPTION
) -> None:
    """Raise ConfigError unless the directory `path` holds a reward model that can be loaded. Loads no weights.

    `label` chooses from its labels, and `option` is what the user calls it.
    """
    from flowrl.training.model.scalar_head import require_scalar_head
    from flowrl.training.model.trainable import check_scores

    require_scalar_head(path)
    check_scores(path, trust_remote_code=trust_remote_code)
    labels_of(path, label, option=option)


def labels_of(path: str | Path, label: str, *, option: str = OPTION) -> Mapping[str, float]:
    """Label of the reward model in `path` -> its weight in the score. Raises ConfigError, see `label_weights`."""
    from flowrl.training.model.scalar_head import head_labels

    labels = head_labels(path)
    return dict(zip(labels, label_weights(label, labels, model=str(path), option=option), strict=True))


def split_parts(conversation: ScoredMessages) -> tuple[Messages, str]:
    if isinstance(conversation, tuple) and len(conversation) == 2 and isinstance(conversation[1], str):
        return conversation[0], conversation[1]
    turns: Sequence[Mapping[str, str]] = conversation
    if not turns or turns[-1].get("role") != "assistant":
        found = turns[-1].get("role") if turns else "nothing"
        raise ConfigError(f"a conversation to be scored ends with {found!r}; its last turn has to be the assistant's")
    return turns[:-1], turns[-1]["content"]
