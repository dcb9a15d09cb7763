"""Finds the files of a model or tokenizer, in a directory or downloaded into the cache of Hugging Face, and checks
without loading it that they are a model that transformers and vLLM can load."""

from __future__ import annotations

import difflib
import json
import re
import struct
import zipfile
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from flowrl.errors import ConfigError
from flowrl.hub import cached_snapshot, fetch_snapshot, name_of_snapshot
from flowrl.machine.cache import Progress
from flowrl.models.policy import BUILT_IN, Policy

INDEX = "model.safetensors.index.json"
PICKLED, PICKLED_INDEX = "pytorch_model*.bin", "pytorch_model.bin.index.json"
LENGTH = struct.Struct("<Q")


def check_directory(path: Path) -> None:
    """Raise ConfigError unless `path` holds the config of a causal language model and all its weights."""
    if not (path / "config.json").is_file():
        if (path / "adapter_config.json").is_file():
            named = name_of_snapshot(path) or path
            raise ConfigError(
                f"{named} is a PEFT adapter without its base model; put it into the base's weights with "
                f"`flowrl merge {named} --out DIRECTORY`, and name that directory"
            )
        raise ConfigError(f"{path} is no model directory: config.json is missing; name one that transformers can load")
    config = read_json(path / "config.json")
    for file in weight_files(path):
        if file.suffix != ".bin":
            _check_weights(file)
        elif not zipfile.is_zipfile(file):  # the format before torch 1.6 cannot be read safely
            raise ConfigError(
                f"{file} is cut off, or was written before torch 1.6 ({file.stat().st_size} bytes); download it again, "
                "or load it with a torch that reads it and write safetensors with save_pretrained"
            )
    kind = config.get("model_type")
    if not isinstance(kind, str):
        raise ConfigError(f"{path}/config.json names no model_type; save the model there with save_pretrained")
    if kind not in _known_types() and "auto_map" not in config:
        raise ConfigError(
            f"{path}/config.json says model_type {kind!r}, which is no causal language model that the installed "
            "transformers knows; name another model, or install a transformers that has it"
        )


def check_code(path: str | Path, *, trusted: bool) -> None:
    """Raise ConfigError if the model needs its own Python files to be run, and they are not trusted."""
    config = read_json(Path(path) / "config.json")
    if "auto_map" in config and not trusted and config.get("model_type") not in _known_types():
        raise ConfigError(
            f"{path} is a {config.get('model_type')} model, whose Python files are part of it; read them, then add "
            "--trust-remote-code (trust_remote_code=True) to run them"
        )


def _known_types() -> Collection[str]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    known: Collection[str] = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys()
    return known


def stored_dtype(path: str | Path) -> str:
    """The dtype that the model's config.json names, such as bfloat16; "auto" if it names none."""
    config = read_json(Path(path) / "config.json")
    return str(config.get("dtype") or config.get("torch_dtype") or "auto")


def weight_files(path: Path) -> list[Path]:
    """The files with the weights: safetensors if there are any, and those that the index names if there is one. Raises
    ConfigError if files are missing."""
    files: list[Path] = []
    for name, pattern in ((INDEX, "*.safetensors"), (PICKLED_INDEX, PICKLED)):
        index = path / name
        if index.is_file():
            files = [path / file for file in dict.fromkeys(read_json(index).get("weight_map", {}).values())]
        if files := files or sorted(path.glob(pattern)):
            break
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ConfigError(f"{path} lacks {', '.join(missing)}, which its {index.name} names; download the model again")
    if not files:
        raise ConfigError(
            f"{path} holds no weights (*.safetensors, or else {PICKLED}); save the model there with save_pretrained"
        )
    return files


def _check_weights(file: Path) -> None:
    """Compare the file's length with its header, which detects a truncated download or a pointer file."""
    with file.open("rb") as stream:
        start = stream.read(LENGTH.size)
        (length,) = LENGTH.unpack(start) if len(start) == LENGTH.size else (0,)
        size = file.stat().st_size
        header = stream.read(length) if 0 < length < size else b""
    try:
        tensors = json.loads(header)
    except (ValueError, RecursionError):
        raise ConfigError(f"{file} is no safetensors file ({size} bytes); download the model again") from None
    ends = [tensor["data_offsets"][1] for name, tensor in tensors.items() if name != "__metadata__"]
    needed = LENGTH.size + length + max(ends, default=0)
    if size < needed:
        raise ConfigError(f"{file} is cut off: {size} bytes of {needed}; download the model again")


def context_length(path: str | Path) -> int:
    """The most tokens that fit into the context of the model in a directory, or of a config.json. Raises ConfigError if
    the config has no number."""
    file = Path(path) if Path(path).suffix == ".json" else Path(path) / "config.json"
    config = read_json(file)
    found = config.get("text_config", config).get("max_position_embeddings")
    if not isinstance(found, int):
        raise ConfigError(f"{file} has no max_position_embeddings; set limits.tokens, or add it there")
    return found


def read_json(file: Path) -> Mapping[str, Any]:
    """The JSON object in a model's file. Raises ConfigError."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as problem:
        raise ConfigError(f"{file} is not valid JSON ({problem}); save the model again with save_pretrained") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{file} holds a {type(content).__name__}, but an object was needed; save the model again")
    return content


def examine_json(file: Path) -> tuple[dict[str, Any], str]:
    """(the JSON object in a file, ""), or ({}, why there is none)."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as problem:
        return {}, str(problem)
    if not isinstance(content, dict):
        return {}, f"a {type(content).__name__} where an object was needed"
    return content, ""


def read_json_if_valid(file: Path) -> dict[str, Any]:
    """The JSON object in a file; {} if there is none, where whatever loads the file gives a better error."""
    return examine_json(file)[0]


BESIDE = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".py")
"""Suffixes of a model's files other than its weights."""
PICKLED_NAME = re.compile(r"pytorch_model(-\d+-of-\d+)?\.bin")
OTHER_LAYOUT = ("consolidated", "adapter_", "optimizer")
"""Beginnings of the names of weight files that are not in the layout of transformers, or not a model's weights."""
TOKENIZER_FILE = re.compile(
    r"(tokenizer|tekken|special_tokens_map|added_tokens|vocab|merges|spiece|sentencepiece|chat_template"
    r"|additional_chat_template).*(?<!\.py)|.+\.tiktoken"
)


def known_directory(policy: Policy) -> Path | None:
    """The directory of a model that is on this machine; None if the model is built in or not here yet. Uses no
    network."""
    if policy.built_in:
        return None
    if policy.path.is_dir():
        return policy.path
    return cached_snapshot(policy.hub_name) if policy.hub_name is not None else None


def known_config_file(policy: Policy) -> Path | None:
    """The config.json of a model that is on this machine, or that the policy names instead of a model, which is enough
    for `flowrl check`; None if there is none."""
    if policy.path.suffix == ".json" and policy.path.is_file():
        return policy.path
    directory = known_directory(policy)
    return None if directory is None or not (directory / "config.json").is_file() else directory / "config.json"


def found_directory(policy: Policy, progress: Progress) -> Path:
    """The directory of a model that is not built in; one of the Hub is downloaded. Raises ConfigError."""
    if policy.path.is_dir():
        return policy.path.resolve()
    if policy.hub_name is None:
        near = difflib.get_close_matches(policy.model, BUILT_IN, 1, 0.7)
        hint = f"did you mean {near[0]}?" if near else "correct the path, or write OWNER/NAME for a model of the Hub"
        raise ConfigError(
            f"there is no model {policy.model!r}: it is neither {', '.join(BUILT_IN[:-1])} nor {BUILT_IN[-1]} nor a "
            f"directory on this machine, and names on the Hub are OWNER/NAME or OWNER/NAME@REVISION; {hint}"
        )

    def is_complete(directory: Path) -> bool:
        try:
            check_directory(directory)
        except ConfigError:
            return False
        return True

    return fetch_snapshot(policy.hub_name, model_files, is_complete, progress)


def known_tokenizer_directory(policy: Policy) -> Path | None:
    """The directory of the tokenizer that the policy's options name; None if it is built in or not here yet."""
    directory = known_directory(Policy(policy.tokenizer.name))
    return directory if directory is not None and has_tokenizer(directory) else None


def found_tokenizer(policy: Policy, progress: Progress) -> Path:
    """The directory of the tokenizer that the policy's options name; one of the Hub is downloaded without its model.

    Raises ConfigError. Not for the tokenizer of a built-in model.
    """
    named = Policy(policy.tokenizer.name)
    if named.path.is_dir():
        if not has_tokenizer(named.path):
            raise ConfigError(
                f"--tokenizer names {named.path}, which holds no tokenizer (tokenizer.json, tokenizer_config.json or a "
                "vocabulary); name a directory that save_pretrained of a tokenizer has written"
            )
        return named.path.resolve()
    if named.hub_name is None:
        raise ConfigError(
            f"--tokenizer names {named.model!r}, which is no directory on this machine, and names on the Hub are "
            "OWNER/NAME or OWNER/NAME@REVISION; correct the path"
        )
    return fetch_snapshot(
        named.hub_name,
        lambda names: [name for name in model_files(names) if name.endswith(BESIDE)],
        has_tokenizer,
        progress,
    )


def has_tokenizer(directory: Path) -> bool:
    """Whether the directory has files of a tokenizer."""
    return any(TOKENIZER_FILE.fullmatch(path.name) and "chat_template" not in path.name for path in directory.iterdir())


def model_files(names: Iterable[str]) -> list[str]:
    """Those of a repository's files that transformers and vLLM need, with the weights in only one format."""
    names = list(names)
    top = [name for name in names if "/" not in name or name.startswith("additional_chat_templates/")]
    weights = [name for name in top if name.endswith(".safetensors") and not name.startswith(OTHER_LAYOUT)]
    if not weights:
        weights = [name for name in top if PICKLED_NAME.fullmatch(name)]
    return sorted({*weights, *(name for name in top if name.endswith(BESIDE))})
