"""Checks whether flowrl can train a model before anything starts, on its classes, which are built without weights.

The result is cached in the process, because several nodes have the same model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flowrl.errors import ConfigError
from flowrl.training.settings import Head


@functools.lru_cache(maxsize=16)
def check_trainable(
    path: str | Path, head: Head, *, trust_remote_code: bool = False, balanced: bool = False, tensor_size: int = 1
) -> None:
    """Raise ConfigError with family and reason if the model in `path` cannot be trained with that head.

    `balanced`: its experts need a load-balancing loss. `tensor_size`: ranks among which its matrices are divided.
    """
    (check_scalar if head == "scalar" else check_policy)(path, trust_remote_code=trust_remote_code)
    if balanced or tensor_size > 1:
        from transformers import AutoModelForCausalLM

        from flowrl.training.model.policy_model import find_balance
        from flowrl.training.model.tensors import partition_config

        network = build_without_weights(path, AutoModelForCausalLM.from_config, trust_remote_code)
        if balanced:
            find_balance(network)
        if tensor_size > 1:
            partition_config(network, tensor_size)


@functools.lru_cache(maxsize=16)
def check_policy(path: str | Path, *, trust_remote_code: bool = False) -> None:
    """Raise ConfigError unless flowrl can compute the logprobs of the model in `path`."""
    from transformers import AutoModelForCausalLM

    from flowrl.training.model.logprobs import find_scaling

    find_scaling(build_without_weights(path, AutoModelForCausalLM.from_config, trust_remote_code))


@functools.lru_cache(maxsize=16)
def check_scalar(path: str | Path, *, trust_remote_code: bool = False) -> None:
    """Raise ConfigError unless the model in `path` can have a scalar head: as a critic, or as a reward model."""
    from flowrl.training.model.scalar_head import require_one_label

    check_scores(path, trust_remote_code=trust_remote_code)
    require_one_label(path)


@functools.lru_cache(maxsize=16)
def check_scores(path: str | Path, *, trust_remote_code: bool = False) -> None:
    """Raise ConfigError unless the model in `path` can be loaded with a head; how many labels it has is not checked."""
    from transformers import AutoModelForSequenceClassification

    from flowrl.training.model.value_model import ScalarModel

    ScalarModel(build_without_weights(path, AutoModelForSequenceClassification.from_config, trust_remote_code))


def build_without_weights(path: str | Path, build: Callable[..., Any], trust_remote_code: bool) -> Any:
    import torch

    from flowrl.training.model.policy_model import read_config, silence_transformers

    config = read_config(path, trust_remote_code=trust_remote_code)
    config.num_labels = 1
    try:
        with torch.device("meta"), silence_transformers():
            return build(config, trust_remote_code=trust_remote_code)
    except (ValueError, ImportError, KeyError, TypeError, AttributeError) as error:
        first_line = (str(error).strip().splitlines() or [""])[0]
        raise ConfigError(
            f"{path} is a {config.model_type} model, which transformers cannot build for training ({first_line}); "
            "choose a model of another family, or install what it needs"
        ) from None
