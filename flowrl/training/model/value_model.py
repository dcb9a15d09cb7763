"""A language model with a scalar head: its outputs are a critic's values or a reward model's scores.

It is saved and loaded as transformers' own `…ForSequenceClassification` with one label and a `score` layer without
bias, so that class gives the same scores. The class finds a row's last token by the pad token, which therefore has to
differ from the end token; if both are the same, a pad token is added (`distinct_pad`).

A reward model may have several labels; such a model can score, but cannot be trained.

Axes: B rows, L input tokens, N places that are read, H hidden, C labels.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flowrl.errors import ConfigError
from flowrl.training.layouts import decide_layout
from flowrl.training.model.adapter import add_adapter, quantization_config
from flowrl.training.model.policy_model import (
    DTYPES,
    choose_implementation,
    read_config,
    silence_transformers,
    trial_facts,
)
from flowrl.training.model.row_layout import RowLayout, require_trees
from flowrl.training.model.scalar_head import head_labels, renamed_head, require_one_label, require_scalar_head
from flowrl.training.settings import Attention, Dtype, Layout, LoRA, Start

PAD_TOKEN = "<|flowrl_pad|>"


class ScalarHead(nn.Module):
    """A linear layer to one number, or to one for each label, in float32 whatever the model's dtype."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = linear.weight

    def forward(self, hidden_NH: Tensor) -> Tensor:
        return F.linear(hidden_NH.float(), self.weight.float()).squeeze(-1)


class ScalarModel(nn.Module):
    """`forward` returns the head's value at every place of a micro-batch, [N] in float32; with several labels [N, C].

    With the rows of `lay_out` this is V of the state before each policy token; with those of
    `lay_out_ends` it is the score at each sequence's last token.
    """

    def __init__(self, classifier: Any, tokenizer: Any = None) -> None:
        """`tokenizer` is given only if its pad token had to be added; it is then saved with the model."""
        super().__init__()
        head = getattr(classifier, "score", None)
        if not isinstance(head, nn.Linear) or head.bias is not None:
            raise ConfigError(
                f"{type(classifier).__name__} has no linear layer `score` without bias; flowrl's reward "
                "models and critics need a model type whose ForSequenceClassification has one (Llama, Qwen, Mistral, …)"
            )
        classifier.score = ScalarHead(head)
        self.classifier: Any = classifier
        self.tokenizer: Any = tokenizer
        self.layout: Layout = "rows"
        """How a node that scores with the model packs its passes."""

    @property
    def network(self) -> Any:
        """The transformers model, which defines the names of the parameters."""
        return self.classifier

    def forward(self, rows: RowLayout) -> Tensor:
        hidden_RLH: Tensor = self.classifier.base_model(**rows.model_input)[0]
        values_N: Tensor = self.classifier.score(hidden_RLH.flatten(0, 1).index_select(0, rows.places_N))
        return values_N


def load_scalar_model(
    path: str | Path,
    *,
    start: Start,
    dtype: Dtype = "float32",
    attention: Attention = "sdpa",
    gradient_checkpointing: bool = False,
    lora: LoRA | None = None,
    seed: int = 0,
    trust_remote_code: bool = False,
    layout: Layout = "auto",
    tries: bool = True,
    every_label: bool = False,
) -> ScalarModel:
    """The model in `path` with its saved head ("reward_model"), or with a head drawn from N(0, 1/(h+1)) ("policy").

    Dropout is off. `layout` and `tries` are those of `load_policy_model`. With `every_label` the saved head keeps all
    its labels; otherwise it has to have exactly one. Raises ConfigError if a saved head is requested and there is none.
    """
    from transformers import AutoModelForSequenceClassification

    if start == "reward_model":
        require_scalar_head(path)
    if not every_label:
        require_one_label(path)
    config = read_config(path, trust_remote_code=trust_remote_code)
    config.num_labels = len(head_labels(path)) if every_label else 1
    pad, tokenizer = distinct_pad(path, config, trust_remote_code=trust_remote_code)
    lora = lora or LoRA()
    decision = decide_layout(layout, config.to_dict(), attention=attention)
    with silence_transformers():
        classifier = AutoModelForSequenceClassification.from_pretrained(
            path,
            config=config,
            key_mapping=renamed_head(path),
            trust_remote_code=trust_remote_code,
            dtype=DTYPES[dtype],
            attn_implementation=choose_implementation(attention, decision, config),
            quantization_config=quantization_config(lora, dtype),
        )
    embeddings = classifier.get_input_embeddings().weight
    if pad >= getattr(embeddings, "ds_shape", embeddings.shape)[0]:
        classifier.resize_token_embeddings(pad + 1, mean_resizing=False)
    classifier.config.pad_token_id = pad
    # The original pad token may be the end token, where scores are read, so its embedding has to be trained.
    classifier.get_input_embeddings().padding_idx = None
    if lora.rank:
        add_adapter(classifier, lora)
    if gradient_checkpointing:
        classifier.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        classifier.train()
    model = ScalarModel(classifier, tokenizer)
    if start == "policy":
        draw_head(classifier.score.weight, seed)
    if decision.has_trees and tries:
        require_trees(model, name=str(path), dtype=dtype, **trial_facts(classifier))
    model.layout = decision.layout
    return model


def draw_head(weight_1H: nn.Parameter, seed: int) -> None:
    """Set the head's weights to a draw from N(0, 1/(h+1)); collective if ZeRO-3 has sharded them."""
    sharded = hasattr(weight_1H, "ds_shape")
    shape = tuple(getattr(weight_1H, "ds_shape", weight_1H.shape))
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) / (shape[-1] + 1) ** 0.5
    with torch.no_grad():
        if not sharded:
            weight_1H.copy_(drawn)
            return
        import deepspeed

        # Leaving the context distributes rank 0's values to all ranks.
        with deepspeed.zero.GatheredParameters([weight_1H], modifier_rank=0):
            weight_1H.copy_(drawn)


def distinct_pad(path: str | Path, config: Any, *, trust_remote_code: bool = False) -> tuple[int, Any]:
    """(a pad token that ends no sequence, the tokenizer if the pad token had to be added to it, else None)."""
    ends = _as_set(config.eos_token_id)
    if config.pad_token_id is not None and config.pad_token_id not in ends:
        return int(config.pad_token_id), None
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=trust_remote_code)
    ends |= _as_set(tokenizer.eos_token_id)
    added = tokenizer.pad_token_id is None or tokenizer.pad_token_id in ends
    if added:
        tokenizer.add_special_tokens({"pad_token": PAD_TOKEN})
    return int(tokenizer.pad_token_id), tokenizer if added else None


def _as_set(token_ids: int | list[int] | None) -> set[int]:
    if token_ids is None:
        return set()
    return {token_ids} if isinstance(token_ids, int) else set(token_ids)
