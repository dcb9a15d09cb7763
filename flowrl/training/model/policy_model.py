"""A Hugging Face causal language model for the trainer: logprobs of given tokens, no logits.

A mixture of experts adds its load-balancing loss, as transformers defines it for the model's family:
E · Σ_e f_e P_e over all layers and tokens of a pass, padding excluded (arXiv 2101.03961, equations 4 to 6): f_e is the
share of the tokens that are routed to expert e, through which no gradient flows, P_e the mean probability of e.

Attention 'varlen' is that within the sequences of a packed row, by torch's own variable-length kernel
(`torch.nn.attention.varlen`).

It is torch's built-in flash attention, so no further package is needed. It runs on GPUs of compute capability 8.0 or
newer, in 16 bits.

An `OutputLayer` is a teacher's, for a trainer that compares whole next-token distributions with the teacher's.

Axes: R rows, L positions, N places, H hidden size, K a teacher's, V vocabulary, D channels of a head.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from flowrl.errors import ConfigError
from flowrl.machine.cache import RECIPE
from flowrl.messages import Trainable
from flowrl.training.layouts import Decision, decide_layout
from flowrl.training.model.adapter import add_adapter, quantization_config
from flowrl.training.model.logprobs import UNSCALED, LogitScaling, LogprobHead, Taught, find_scaling
from flowrl.training.model.row_layout import RowLayout, require_trees
from flowrl.training.model.tree_attention import register_trees
from flowrl.training.settings import Attention, Dtype, Layout, LoRA, attention_problems

Balance = Callable[[tuple[Tensor, ...], Tensor], Tensor]
"""The load-balancing loss of one model, from each layer's router logits and the places that are real, [R, L]."""


def find_balance(causal_lm: Any) -> Balance:
    """The loss of this model. Raises ConfigError if its family has none."""
    family = getattr(sys.modules[type(causal_lm).__module__], "load_balancing_loss_func", None)
    num_experts, num_chosen = (getattr(causal_lm, name, None) for name in ("num_experts", "num_experts_per_tok"))
    if family is None or not num_experts or not num_chosen:
        raise ConfigError(
            f"router_aux_loss_coef needs a load-balancing loss, and transformers has none for "
            f"{type(causal_lm).__name__}; set it to 0"
        )
    return lambda router_logits, real_RL: family(router_logits, num_experts, num_chosen, real_RL)


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
        scaling = find_scaling(causal_lm)
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
        balance = self.balance if torch.is_grad_enabled() else None
        asked = {} if balance is None else {"output_router_logits": True}
        outputs = self.causal_lm.base_model(**rows.model_input, **asked)
        hidden_NH: Tensor = outputs[0].flatten(0, 1).index_select(0, rows.places_N)
        balance_loss = None if balance is None else balance(outputs.router_logits, rows.real_RL)
        del outputs  # what else the model returns is freed before the logits are computed
        result: tuple[Tensor, Tensor] = self.causal_lm.get_output_embeddings()(
            hidden_NH, rows.targets_N, temperature, entropy_gradient, rows.taught
        )
        if balance_loss is not None:
            return (*result, balance_loss)
        return (*result, hidden_NH) if with_hidden else result


def choose_attention(attention: Attention | None, device: torch.device, dtype: Dtype) -> Attention:
    """`attention` if given, else flash attention on a GPU with the package installed, else torch's own kernels.

    Flash attention computes in 16 bits only. Raises ConfigError if it is given for float32.
    """
    if attention is not None:
        for problem in attention_problems(attention, dtype):
            raise ConfigError(problem)
        if attention == "varlen":
            require_varlen(device)
        return attention
    from transformers.utils import is_flash_attn_2_available

    flash = device.type == "cuda" and dtype != "float32" and is_flash_attn_2_available()
    return "flash_attention_2" if flash else "sdpa"


def choose_implementation(attention: Attention, decision: Decision, config: Any) -> str:
    """The attention implementation to load a model with. It takes rows, and also trees if `decision` has trees."""
    if attention == "varlen":
        text = config.get_text_config()
        obstacles = {
            "attn_logit_softcapping": "a soft cap on its attention scores",
            "attention_chunk_size": "attention in chunks",
        }
        found = [what for name, what in obstacles.items() if getattr(text, name, None)]
        if text.model_type == "gpt_oss":
            found.append("attention sinks")
        if found:
            raise ConfigError(
                f"attention 'varlen' does not know {found[0]}, which {text.model_type} has; leave --zero.attention out"
            )
        return register_varlen()
    if decision.has_trees:
        return register_trees()
    # torch's kernels would ignore a soft cap of the attention scores.
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
    decision = decide_layout(layout, config.to_dict(), attention=attention)
    causal_lm = AutoModelForCausalLM.from_pretrained(
        path,
        config=config,
        trust_remote_code=trust_remote_code,
        dtype=DTYPES[dtype],
        attn_implementation=choose_implementation(attention, decision, config),
        quantization_config=quantization_config(lora, dtype),
    )
    # A pad token that is also the end token occurs in conversations; with padding_idx torch would not train it there.
    causal_lm.get_input_embeddings().padding_idx = None
    if lora.rank:
        add_adapter(causal_lm, lora)
    if gradient_checkpointing:
        causal_lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        causal_lm.train()
    model = PolicyModel(causal_lm)
    if decision.has_trees and tries:
        require_trees(lambda rows: model(rows)[0], name=str(path), dtype=dtype, **trial_facts(causal_lm))
    model.layout = decision.layout
    return model


def trial_facts(network: Any) -> dict[str, Any]:
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
def silence_transformers() -> Iterator[None]:
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


def read_companions(path: str | Path) -> dict[str, bytes]:
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


def make_bare_model(network: Any) -> Any:
    """The same model without tensors, adapters and quantization, to write weights with the adapter merged in."""
    config = copy.deepcopy(network.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        return type(network)(config)


VARLEN = "flowrl_varlen"
"""Name of the implementation in transformers' interface."""
CAPABILITY = (8, 0)


def require_varlen(device: torch.device) -> None:
    """Raise ConfigError unless the kernel runs on `device`."""
    if device.type != "cuda":
        raise ConfigError(f"attention 'varlen' runs on GPUs only, and this process computes on {device}; choose sdpa")
    found = torch.cuda.get_device_capability(device)
    if found < CAPABILITY:
        raise ConfigError(
            f"attention 'varlen' needs a GPU of compute capability {CAPABILITY[0]}.{CAPABILITY[1]}, and this one has "
            f"{found[0]}.{found[1]}; choose sdpa"
        )


def varlen_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The implementation `VARLEN`, with the signature of transformers' interface.

    From [1, heads, L, D] to [1, L, heads, D]; keys and values may have fewer heads.
    """
    from torch.nn.attention.varlen import varlen_attn

    assert cu_seq_lens_q is not None and max_length_q is not None, "rows are packed wherever this attention is chosen"
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    found: Any = varlen_attn(
        q,
        k,
        v,
        cu_seq_lens_q,
        cu_seq_lens_q,
        max_length_q,
        max_length_q,
        scale=scaling,
        window_size=(-1 if sliding_window is None else sliding_window - 1, 0),
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return found[None], None


def register_varlen() -> str:
    """Register the implementation with transformers and return its name. Only once, because it may be wrapped later."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import flash_attention_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if VARLEN not in ALL_ATTENTION_FUNCTIONS:
        AttentionInterface.register(VARLEN, varlen_attention_forward)
    AttentionMaskInterface.register(VARLEN, flash_attention_mask)  # makes no mask: rows are full
    return VARLEN


@dataclass(frozen=True)
class OutputLayer:
    """The layer that maps the teacher's last hidden states to logits."""

    weight_VK: Tensor
    bias_V: Tensor | None
    scaling: LogitScaling = UNSCALED
    beta: float = 1.0
    """Parameter of the divergence; see `Taught`."""

    def add_teacher(self, rows: RowLayout, samples: Sequence[Trainable]) -> RowLayout:
        """`rows` with the teacher's distribution; unchanged if there are no samples, only padding."""
        hidden = [sample.teacher_hidden for sample in samples if sample.teacher_hidden is not None]
        if not hidden:
            return rows
        hidden_NK = torch.from_numpy(np.concatenate(hidden)).to(self.weight_VK)
        return replace(rows, taught=Taught(hidden_NK, self.weight_VK, self.bias_V, self.scaling, self.beta))


def load_output_layer(
    path: str | Path,
    *,
    vocab_size: int,
    dtype: Dtype,
    device: torch.device,
    trust_remote_code: bool = False,
    beta: float = 1.0,
) -> OutputLayer:
    """Read only the output layer of the model in `path`. Raises ConfigError unless it has `vocab_size` tokens."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):  # builds the layer without memory for its weights
        config = read_config(path, trust_remote_code=trust_remote_code)
        causal_lm = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    layer = causal_lm.get_output_embeddings()
    if layer.weight.shape[0] != vocab_size:
        raise ConfigError(
            f"the output layer of the teacher {path} has {layer.weight.shape[0]} tokens, the student's has "
            f"{vocab_size}; comparing whole distributions needs the same number; compare sampled tokens instead "
            "(exact=False)"
        )
    names = {id(parameter): name for name, parameter in causal_lm.named_parameters()}
    parameters = [layer.weight] if layer.bias is None else [layer.weight, layer.bias]
    found = [read_tensor(Path(path), names[id(parameter)]).to(device, DTYPES[dtype]) for parameter in parameters]
    return OutputLayer(found[0], found[1] if len(found) > 1 else None, find_scaling(causal_lm), beta)


def read_tensor(model_dir: Path, name: str) -> Tensor:
    from safetensors import safe_open

    for file in sorted(model_dir.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            if name in tensors.keys():  # noqa: SIM118 - no mapping
                tensor: Tensor = tensors.get_tensor(name)
                return tensor
    raise ConfigError(
        f"{model_dir} has no tensor {name!r} in its *.safetensors; write the directory with save_pretrained"
    )
