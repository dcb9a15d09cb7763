"""A teacher's output layer, for a trainer that compares whole next-token distributions with the teacher's.

Axes: N places, K the teacher's hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from flowrl.errors import ConfigError
from flowrl.messages import Trainable
from flowrl.training.model.policy_model import DTYPES, read_config
from flowrl.training.model.row_layout import RowLayout
from flowrl.training.model.token_logprobs.logit_scaling import UNSCALED, LogitScaling, found_scaling
from flowrl.training.model.token_logprobs.logprobs import Taught
from flowrl.training.settings import Dtype


@dataclass(frozen=True)
class OutputLayer:
    """The layer that maps the teacher's last hidden states to logits."""

    weight_VK: Tensor
    bias_V: Tensor | None
    scaling: LogitScaling = UNSCALED
    beta: float = 1.0
    """Parameter of the divergence; see `Taught`."""

    def taught(self, rows: RowLayout, samples: Sequence[Trainable]) -> RowLayout:
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
    found = [_read(Path(path), names[id(parameter)]).to(device, DTYPES[dtype]) for parameter in parameters]
    return OutputLayer(found[0], found[1] if len(found) > 1 else None, found_scaling(causal_lm), beta)


def _read(model_dir: Path, name: str) -> Tensor:
    from safetensors import safe_open

    for file in sorted(model_dir.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            if name in tensors.keys():  # noqa: SIM118 - no mapping
                tensor: Tensor = tensors.get_tensor(name)
                return tensor
    raise ConfigError(
        f"{model_dir} has no tensor {name!r} in its *.safetensors; write the directory with save_pretrained"
    )
