"""`flowrl merge ADAPTER --out DIR`: puts an adapter into the weights of its base model. Starts no Ray."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from flowrl.errors import ConfigError
from flowrl.graph.command_line import parse_options
from flowrl.models import Policy, resolve, to_stderr
from flowrl.user_path import user_path


@dataclass(frozen=True)
class MergeOptions:
    """Options of `flowrl merge`."""

    out: Path = Path("merged")
    """Directory of the model that is written; it must not exist, or be empty."""
    base: str = ""
    """Directory of the base model; empty: the one that the adapter names."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Data type of the written weights; auto: that of the base model."""


def merge(args: Sequence[str]) -> int:
    """The command."""
    if not args or args[0].startswith("-"):
        if args and args[0] in ("-h", "--help"):
            parse_options(MergeOptions, ["--help"], prog="flowrl merge ADAPTER")
        raise ConfigError("flowrl merge needs an adapter's directory first: flowrl merge ADAPTER --out DIR")
    options = parse_options(MergeOptions, args[1:], prog="flowrl merge ADAPTER")
    adapter = adapter_dir(user_path(args[0]))
    base = base_of(adapter, options.base)
    require_free(options.out)
    print(f"merging {adapter} into {base}", flush=True)
    write_merged(adapter, base, options.out, options.dtype)
    print(f"wrote {options.out}")
    return 0


def adapter_dir(path: Path) -> Path:
    """The adapter at `path`, or the one of a checkpoint. Raises ConfigError."""
    found = next((one for one in (path, path / "adapter") if (one / "adapter_config.json").is_file()), None)
    if found is None:
        raise ConfigError(
            f"{path} holds no adapter (no adapter_config.json there, nor in {path / 'adapter'}); name a PEFT adapter's "
            "directory, or a checkpoint of a run with --lora.rank"
        )
    return found


def base_of(adapter: Path, named: str) -> Path:
    """The directory of the base model. Raises ConfigError."""
    try:
        config = json.loads((adapter / "adapter_config.json").read_text())
    except ValueError as problem:
        raise ConfigError(
            f"{adapter}/adapter_config.json is not valid JSON ({problem}); save the adapter again"
        ) from None
    base = named or config.get("base_model_name_or_path")
    if base and (policy := Policy(_with_commit(base, None if named else config.get("revision")))).hub_name is not None:
        return Path(resolve(policy, progress=to_stderr))
    if not base or not (user_path(base) / "config.json").is_file():
        raise ConfigError(f"the adapter's base model {base!r} is no model directory here; name it with --base")
    return user_path(base)


def _with_commit(base: str, revision: str | None) -> str:
    """The name of a base on the Hub with the commit that the adapter was trained on; a directory as it is."""
    return f"{base}@{revision}" if revision and not user_path(base).is_dir() else base


def require_free(out: Path) -> None:
    """Raise ConfigError unless a model can be written to `out`."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} already exists; name another directory, or remove it")


def write_merged(adapter: Path, base: Path, out: Path, dtype: str) -> None:
    """Write a model directory like `base`, with the adapter in its weights."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    from flowrl.training.model.policy_model import companions

    disable_progress_bar()
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # peft imports DeepSpeed, which warns where it has to guess
    loaded = AutoModelForCausalLM.from_pretrained(base, dtype="auto" if dtype == "auto" else getattr(torch, dtype))
    try:
        merged = PeftModel.from_pretrained(loaded, str(adapter)).merge_and_unload()
    except (ValueError, KeyError, RuntimeError) as problem:
        first = str(problem).splitlines()[0]
        raise ConfigError(f"{adapter} does not fit {base} ({first}); name its base model with --base") from None
    merged.save_pretrained(out)
    for name, content in companions(base).items():
        if not (out / name).exists():
            (out / name).write_bytes(content)
