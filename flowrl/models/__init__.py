"""Models: from a `Policy` to a Hugging Face directory that transformers and vLLM load."""

from __future__ import annotations

from pathlib import Path

from flowrl.errors import ConfigError
from flowrl.models.cache import Progress, cache_dir
from flowrl.models.chat import Chat, load_tokenizer
from flowrl.models.spec import Policy

__all__ = ["Chat", "Policy", "cache_dir", "check_model", "load_tokenizer", "resolve"]


def silent(text: str) -> None:
    """The progress of somebody who does not want to know."""


def resolve(policy: Policy, *, progress: Progress = silent) -> str:
    """The local model directory of `policy`, made first if it is a built-in one not in the cache.

    Safe to call from several processes: one makes the model, the others wait. `progress` is told each
    stage in a line. Raises ConfigError if there is no such model.
    """
    if policy.model == "tiny":
        from flowrl.models.tiny import tiny_model

        return str(tiny_model(policy.task, progress))
    if policy.model == "smollm2":
        from flowrl.models.smollm2 import smollm2_model

        return str(smollm2_model(progress))
    check_model(policy)
    return str(Path(policy.model).expanduser().resolve())


def check_model(policy: Policy) -> None:
    """Raise ConfigError unless `policy` names a built-in model or a directory that looks like a model."""
    path = Path(policy.model).expanduser()
    if policy.model == "smollm2":
        from flowrl.models.smollm2 import find_gguf

        find_gguf()
    elif not policy.built_in and not path.is_dir():
        raise ConfigError(
            f"there is no model {policy.model!r}: it is neither tiny nor smollm2 nor a directory on this machine; "
            "download the model and name its directory"
        )
    elif not policy.built_in and not (path / "config.json").is_file():
        raise ConfigError(f"{path} is no model directory: config.json is missing; name one that transformers can load")
    elif not policy.built_in and not any(path.glob("*.safetensors")):
        raise ConfigError(f"{path} holds no weights (*.safetensors); save the model there with save_pretrained")
