"""A Hugging Face causal language model for the trainer: logprobs of given tokens, no logits."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from flowrl.cache import RECIPE
from flowrl.errors import ConfigError
from flowrl.training.layouts import Decision, decide
from flowrl.training.model.adapter import add_adapter, quantization
from flowrl.training.model.attention import varlen
from flowrl.training.model.attention.tree_attention import register
from flowrl.training.model.balance import Balance
from flowrl.training.model.row_layout import RowLayout
from flowrl.training.model.token_logprobs.logit_scaling import found_scaling
from flowrl.training.model.token_logprobs.logprobs import LogprobHead
from flowrl.training.model.tree_trial import require_trees
from flowrl.training.settings import Attention, Dtype, Layout, LoRA, attention_problems

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json")
RUN_FILES = ("ledger.sqlite", "manifest.json", RECIPE)
"""Files next to the model that belong to a run or the cache. `state.msgpack` is not listed: flax weights have its
suffix."""
LARGEST_COMPANION_BYTES = 128 << 20
"""No tokenizer is larger; a larger file holds weights in some other format."""


class PolicyModel(nn.Module):
    """`forward` returns logprobs and entropies at the policy tokens of a micro-batch, [N] each."""

    def __init__(self, causal_lm: Any) -> None:
        super().__init__()
        scaling = found_scaling(causal_lm)
        causal_lm.set_output_embeddings(LogprobHead(causal_lm.get_output_embeddings(), scaling))
        self.causal_lm = causal_lm
        self.layout: Layout = "rows"
        """How a node that scores with the model packs its passes."""
        self.balance: Balance | None = None
        """If given, a forward with gradients returns the load-balancing loss of its tokens as well."""

    @property
    def network(self) -> Any:
        """The transformers model, which defines the names of the parameters."""
        return self.causal_lm

    def forward(
        self,
        rows: RowLayout,
        temperature: float = 1.0,
        entropy_gradient: bool = False,
        *,
        with_hidden: bool = False,
    ) -> tuple[Tensor, ...]:
        """Logprobs and entropies; `with_hidden` also the last hidden states at these places, [N, H]."""
        hidden_NH, balance = self._hidden(rows, balance=self.balance if torch.is_grad_enabled() else None)
        result: tuple[Tensor, Tensor] = self.causal_lm.get_output_embeddings()(
            hidden_NH, rows.targets_N, temperature, entropy_gradient, rows.taught
        )
        if balance is not None:
            return (*result, balance)
        return (*result, hidden_NH) if with_hidden else result

    def hidden(self, rows: RowLayout) -> Tensor:
        """[N, H]: the last hidden states at the positions of the policy tokens."""
        return self._hidden(rows, balance=None)[0]

    def _hidden(self, rows: RowLayout, *, balance: Balance | None) -> tuple[Tensor, Tensor | None]:
        """The hidden states, and the load-balancing loss; all else that the model returns is freed."""
        asked = {} if balance is None else {"output_router_logits": True}
        outputs = self.causal_lm.base_model(**rows.model_input, **asked)
        hidden_NH: Tensor = outputs[0].flatten(0, 1).index_select(0, rows.places_N)
        return hidden_NH, None if balance is None else balance(outputs.router_logits, rows.real_RL)


def choose_attention(attention: Attention | None, device: torch.device, dtype: Dtype) -> Attention:
    """`attention` if given, else flash attention on a GPU with the package installed, else torch's own kernels.

    Flash attention computes in 16 bits only. Raises ConfigError if it is given for float32.
    """
    if attention is not None:
        for problem in attention_problems(attention, dtype):
            raise ConfigError(problem)
        if attention == "varlen":
            varlen.require_varlen(device)
        return attention
    from transformers.utils import is_flash_attn_2_available

    flash = device.type == "cuda" and dtype != "float32" and is_flash_attn_2_available()
    return "flash_attention_2" if flash else "sdpa"


def implementation(attention: Attention, decision: Decision, config: Any) -> str:
    """The attention implementation to load a model with. It takes rows, and also trees if `decision` has trees."""
    if attention == "varlen":
        varlen.require_plain_scores(config)
        return varlen.register()
    return register() if decision.trees else suited_attention(attention, config)


def suited_attention(attention: str, config: Any) -> str:
    """`attention`, but "eager" for sdpa if the attention scores have a soft cap, which torch's kernels would ignore."""
    capped = getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None
    return "eager" if capped and attention == "sdpa" else attention


def splits_packed_rows(attention: str) -> bool:
    """Whether packing sequences into one row costs no more than their own attention."""
    return "flash" in attention or attention == "varlen"


def load_policy_model(
    path: str | Path,
    *,
    dtype: Dtype = "float32",
    attention: Attention = "sdpa",
    gradient_checkpointing: bool = False,
    lora: LoRA | None = None,
    trust_remote_code: bool = False,
    layout: Layout = "auto",
    tries: bool = True,
) -> PolicyModel:
    """The model in the Hugging Face directory `path` without dropout: π_θ and π_p have to be the same function.

    `layout` says whether the model takes trees. If it does, a tree is tried, unless `tries` is False: a trial needs
    whole weights.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    lora = lora or LoRA()
    config = read_config(path, trust_remote_code=trust_remote_code)
    decision = decide(layout, config.to_dict(), attention=attention)
    causal_lm = AutoModelForCausalLM.from_pretrained(
        path,
        config=config,
        trust_remote_code=trust_remote_code,
        dtype=DTYPES[dtype],
        attn_implementation=implementation(attention, decision, config),
        quantization_config=quantization(lora, dtype),
    )
    # A pad token that is also the end token occurs in conversations; with padding_idx torch would not train it there.
    causal_lm.get_input_embeddings().padding_idx = None
    if lora.rank:
        add_adapter(causal_lm, lora)
    if gradient_checkpointing:
        causal_lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        causal_lm.train()
    model = PolicyModel(causal_lm)
    if decision.trees and tries:
        require_trees(lambda rows: model(rows)[0], name=str(path), dtype=dtype, **sizes(causal_lm))
    model.layout = decision.layout
    return model


def sizes(network: Any) -> dict[str, Any]:
    """What a trial needs to know about a transformers model."""
    weight = network.get_input_embeddings().weight
    return {"vocab_size": network.config.vocab_size, "device": weight.device}


def read_config(path: str | Path, *, trust_remote_code: bool = False) -> Any:
    """The transformers configuration of the model directory `path`, with every dropout set to 0."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is not a Hugging Face model directory: {error}") from error
    _clear_dropout(config)
    return config


def _clear_dropout(config: Any) -> None:
    """Set every dropout of a configuration, and of those within it, to 0."""
    for name, value in list(vars(config).items()):
        if ("dropout" in name or name.endswith("pdrop")) and isinstance(value, float):
            setattr(config, name, 0.0)
        elif hasattr(value, "to_dict"):
            _clear_dropout(value)


@contextmanager
def quietly() -> Iterator[None]:
    """Within this context transformers does not report missing or additional layers, which are intended here."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)


class Wrapped(Protocol):
    """A flowrl model that wraps a transformers model."""

    @property
    def network(self) -> Any: ...


def companions(path: str | Path) -> dict[str, bytes]:
    """The tokenizer and related files of a model directory, by file name.

    They are read when the model is loaded: later checkpoints of the run need them, and by then the checkpoint from
    which the run resumed may have been removed.
    """
    return {
        file.name: file.read_bytes()
        for file in sorted(Path(path).iterdir())
        if file.is_file()
        and not file.name.endswith(WEIGHT_FILES)
        and file.name not in RUN_FILES
        and file.stat().st_size <= LARGEST_COMPANION_BYTES
    }


def bare(network: Any) -> Any:
    """The same model without tensors, adapters and quantization, to write weights with the adapter merged in."""
    config = copy.deepcopy(network.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        return type(network)(config)
