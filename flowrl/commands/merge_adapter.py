"""`flowrl merge ADAPTER --out DIR`: puts an adapter into the weights of its base model. Starts no Ray."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from flowrl.commands.model_directories import require_free, whole_directory
from flowrl.errors import ConfigError
from flowrl.graph.command_line import parse_options
from flowrl.hub import HubName, fetch_snapshot, gb_text
from flowrl.machine.disk import user_path
from flowrl.models import Policy, check_model, resolve, to_stderr
from flowrl.models.model_files import TOKENIZER_FILE, has_tokenizer, weight_files
from flowrl.runtime.telemetry.standard_streams import print_text

ADAPTER = "adapter"
"""Name of the directory in a checkpoint that has the adapter."""
LOADING = (OSError, ValueError, KeyError, RuntimeError, ImportError, AttributeError, TypeError)
"""What transformers and PEFT, or a model's own code, raise for files that do not fit together."""


@dataclass(frozen=True)
class MergeOptions:
    """Options of `flowrl merge`."""

    out: Path = Path("merged")
    """Directory of the model to write; it must not exist, or must be empty."""
    base: str = ""
    """Directory of the base model; empty: the one that the adapter names."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Data type of the written weights; auto: that of the base model."""
    trust_remote_code: bool = False
    """Run the Python files that come with the base model."""


def merge_adapter(args: Sequence[str]) -> int:
    """The command."""
    if not args or args[0].startswith("-"):
        if args and args[0] in ("-h", "--help"):
            parse_options(MergeOptions, ["--help"], prog="flowrl merge ADAPTER")
        raise ConfigError("flowrl merge needs an adapter's directory first: flowrl merge ADAPTER --out DIR")
    options = parse_options(MergeOptions, args[1:], prog="flowrl merge ADAPTER")
    adapter, out = adapter_dir(_fetch_adapter(args[0])), user_path(str(options.out))
    require_free(out)
    base = base_of(adapter, options.base, trust_remote_code=options.trust_remote_code)
    write_merged(adapter, base, out, options.dtype, trust_remote_code=options.trust_remote_code)
    print_text(f"wrote {out}")
    return 0


def _fetch_adapter(named: str) -> Path:
    """The adapter's directory; an adapter on the Hub, with its tokenizer, is downloaded."""

    def choose_files(names: Iterable[str]) -> list[str]:
        top = [name for name in names if "/" not in name]
        return sorted(name for name in top if name.startswith("adapter_") or TOKENIZER_FILE.fullmatch(name))

    def is_complete(directory: Path) -> bool:
        return (directory / "adapter_config.json").is_file() and any(directory.glob("adapter_model*"))

    path = user_path(named)
    on_hub = None if path.exists() else HubName.parse(named)
    return path if on_hub is None else fetch_snapshot(on_hub, choose_files, is_complete, to_stderr)


def adapter_dir(path: Path) -> Path:
    """The adapter at `path`, or the one of a checkpoint. Raises ConfigError."""
    found = next((one for one in (path, path / ADAPTER) if (one / "adapter_config.json").is_file()), None)
    if found is None:
        raise ConfigError(
            f"{path} holds no adapter (no adapter_config.json there, nor in {path / ADAPTER}); name a PEFT adapter's "
            "directory, or a checkpoint of a run with --lora.rank"
        )
    return found


def base_of(adapter: Path, named: str, *, trust_remote_code: bool = False) -> Path:
    """The directory of the base model, after a check that it can be loaded. Raises ConfigError."""
    try:
        config = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as problem:
        raise ConfigError(
            f"{adapter}/adapter_config.json is not valid JSON ({problem}); save the adapter again"
        ) from None
    if not isinstance(config, dict):
        raise ConfigError(
            f"{adapter}/adapter_config.json holds {type(config).__name__} and no mapping; save the adapter again"
        )
    base = named or config.get("base_model_name_or_path")
    found = base if isinstance(base, str) else ""
    revision = None if named else config.get("revision")
    if found and revision and not user_path(found).is_dir():
        found = f"{found}@{revision}"  # on the Hub, the commit that the adapter was trained on
    if not found or (Policy(found).hub_name is None and not (user_path(found) / "config.json").is_file()):
        raise ConfigError(f"the adapter's base model {base!r} is no model directory here; name it with --base")
    policy = Policy(found, trust_remote_code=trust_remote_code)
    check_model(policy)
    return Path(resolve(policy, progress=to_stderr))


def write_merged(adapter: Path, base: Path, out: Path, dtype: str, *, trust_remote_code: bool = False) -> None:
    """Write a model directory like `base`, with the adapter in its weights and the adapter's tokenizer if it has one.

    The directory is written completely, or not at all. A line is printed for each part of the work.
    """
    from flowrl.training.model.policy_model import read_companions

    weights = sum(file.stat().st_size for file in weight_files(base))
    print_text(f"loading {base}: {gb_text(weights)}", flush=True)
    merged = _merge_weights(adapter, base, dtype, trust_remote_code=trust_remote_code)
    written = sum(tensor.nbytes for tensor in merged.parameters())
    print_text(f"writing {gb_text(written)} to {out}", flush=True)
    with whole_directory(out) as temporary:
        merged.save_pretrained(temporary)
        for name, content in read_companions(base).items():
            if not (temporary / name).exists():
                (temporary / name).write_bytes(content)
        # The tokenizer and its end tokens are next to the adapter, or in the checkpoint that contains the adapter.
        places = [adapter, adapter.parent] if adapter.name == ADAPTER else [adapter]
        place = next((place for place in places if has_tokenizer(place)), None)
        for path in (path for path in place.iterdir() if path.is_file()) if place is not None else ():
            if TOKENIZER_FILE.fullmatch(path.name) or path.name == "generation_config.json":
                (temporary / path.name).write_bytes(path.read_bytes())


def _merge_weights(adapter: Path, base: Path, dtype: str, *, trust_remote_code: bool) -> Any:
    """The base model with the adapter in its weights, in host memory. Raises ConfigError."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # peft imports DeepSpeed, which warns where it has to guess
    wanted = "auto" if dtype == "auto" else getattr(torch, dtype)
    try:
        loaded = AutoModelForCausalLM.from_pretrained(base, dtype=wanted, trust_remote_code=trust_remote_code)
    except LOADING as problem:
        raise ConfigError(
            f"the base model {base} cannot be loaded ({_first_line(problem)}); name another with --base"
        ) from None
    print_text(f"merging {adapter} into it", flush=True)
    try:
        return PeftModel.from_pretrained(loaded, str(adapter)).merge_and_unload()
    except LOADING as problem:
        raise ConfigError(
            f"{adapter} does not fit {base} ({_first_line(problem)}); name its base model with --base"
        ) from None


def _first_line(problem: Exception) -> str:
    return (str(problem).strip().splitlines() or [type(problem).__name__])[0]
