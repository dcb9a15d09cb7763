"""A model's directory with the tokenizer that the user chose, for everything that loads the model by its path.

It is made once in flowrl's cache. It has links to the model's files, the tokenizer's files, and both configurations
with the ids of that tokenizer's special tokens. transformers, vLLM and checkpoints use this tokenizer like any other.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from flowrl.errors import ConfigError
from flowrl.machine.cache import RECIPE, Progress, cached_directory
from flowrl.models.find_model import TOKENIZER_FILE
from flowrl.models.policy import Policy
from flowrl.models.tokenizer_options import TokenizerOptions
from flowrl.models.tokens.chat import load_tokenizer
from flowrl.models.tokens.special_tokens import end_token_ids, with_special_tokens

CONFIGS = ("config.json", "generation_config.json")
GENERIC_CLASS = "PreTrainedTokenizerFast"
"""This class uses tokenizer.json unchanged; the classes of some model families rebuild parts of it."""
UNUSED_DAYS = 30
TRIED = "One of 12 lines:\n\tit's a <tag> \u00e9 \u4e2d."
"""A text on which two tokenizers are compared."""


def model_with_tokenizer(directory: Path, policy: Policy, source: Path | None, progress: Progress) -> Path:
    """The directory of the model in `directory` with the tokenizer in `source`, else its own, as the policy's options
    say. Raises ConfigError."""
    recipe = {
        "origin": str(directory.absolute()),
        "model": _files(directory),
        "tokenizer": None if source is None else _files(source),
        "options": asdict(policy.tokenizer),
        "transformers": version("transformers"),
    }
    name = re.sub(r"[^\w.]+", "_", Path(policy.model.partition("@")[0]).name)

    def make(target: Path) -> None:
        progress(f"writing {policy.model} with the tokenizer that --tokenizer chooses")
        _write(directory, policy, source, target)

    return cached_directory("tokenizers", name, recipe, make, progress, unused_days=UNUSED_DAYS)


def embedding_rows(directory: Path) -> int | None:
    """How many tokens the model has embeddings for, by its config; None if the config does not say."""
    config = _json(directory / "config.json")
    found = config.get("vocab_size", dict(config.get("text_config") or {}).get("vocab_size"))
    return found if isinstance(found, int) else None


def _write(directory: Path, policy: Policy, source: Path | None, target: Path) -> None:
    for path in directory.iterdir():
        if not TOKENIZER_FILE.fullmatch(path.name) and path.name not in (*CONFIGS, RECIPE):
            (target / path.name).symlink_to(path.absolute())
    for path in () if source is None else source.glob("*.py"):
        if not (target / path.name).exists():
            (target / path.name).symlink_to(path.absolute())
    options, trusted = policy.tokenizer, policy.trust_remote_code
    tokenizer = with_special_tokens(
        load_tokenizer(source or directory, trust_remote_code=trusted),
        options,
        rows=embedding_rows(directory),
        model=policy.model,
    )
    ids = _ids(tokenizer, options, source)
    for name in CONFIGS:
        if (directory / name).is_file() or "eos_token_id" in ids:
            described = _with_ids(dict(_json(directory / name)), ids)
            (target / name).write_text(json.dumps(described, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    _save(tokenizer, target, trusted=trusted, of=options.name or policy.model)


def _save(tokenizer: Any, target: Path, *, trusted: bool, of: str) -> None:
    """Write the tokenizer so that it is the same when it is loaded from `target`. Raises ConfigError if that fails."""
    tokenizer.save_pretrained(target)
    loaded = load_tokenizer(target, trust_remote_code=trusted)
    if tokenizer.is_fast and not _alike(tokenizer, loaded):
        file = target / "tokenizer_config.json"
        file.write_text(json.dumps({**_json(file), "tokenizer_class": GENERIC_CLASS}, indent=2) + "\n", "utf-8")
        loaded = load_tokenizer(target, trust_remote_code=trusted)
    if not _alike(tokenizer, loaded):
        kind = _json(target / "config.json").get("model_type")
        raise ConfigError(
            f"transformers loads a {type(loaded).__name__} for {kind} models, and that does not read texts as the "
            f"tokenizer of {of} ({type(tokenizer).__name__}) does with these options; leave them out, or name a "
            "tokenizer of the model's family"
        )


def _alike(one: Any, other: Any) -> bool:
    return _marks(one) == _marks(other)


def _marks(tokenizer: Any) -> tuple[object, ...]:
    return (
        tokenizer.get_vocab(),
        tokenizer.eos_token_id,
        tokenizer.pad_token_id,
        tokenizer.bos_token_id,
        sorted(tokenizer.all_special_ids),
        tokenizer.chat_template,
        *(tokenizer(TRIED, add_special_tokens=added)["input_ids"] for added in (True, False)),
    )


def _ids(tokenizer: Any, options: TokenizerOptions, source: Path | None) -> dict[str, int | list[int] | None]:
    """The ids of the special tokens that differ from the model's, by their keys in the two configurations."""
    found: dict[str, int | list[int] | None] = {}
    if source is not None:
        ends = _json(source / "generation_config.json").get("eos_token_id")
        found = {"eos_token_id": tokenizer.eos_token_id if ends is None else ends}
        found |= {"pad_token_id": tokenizer.pad_token_id, "bos_token_id": tokenizer.bos_token_id}
    if options.eos:
        ids = end_token_ids(tokenizer, options)
        found["eos_token_id"] = ids[0] if len(ids) == 1 else ids
    if options.pad:
        found["pad_token_id"] = tokenizer.pad_token_id
    if options.bos:
        found["bos_token_id"] = tokenizer.bos_token_id
    return found


def _with_ids(config: dict[str, Any], ids: Mapping[str, int | list[int] | None]) -> dict[str, Any]:
    """A configuration with these ids, also in its part about text if that part names them itself."""
    inner = config.get("text_config")
    if isinstance(inner, dict):
        config["text_config"] = {**inner, **{key: value for key, value in ids.items() if key in inner}}
    return {**config, **ids}


def _files(directory: Path) -> dict[str, Any]:
    """What distinguishes one state of a directory from another."""
    paths = (path for path in sorted(directory.iterdir()) if path.is_file() and path.name != RECIPE)
    found = {path.name: path.stat() for path in paths}
    return {
        "directory": str(directory.absolute()),
        "files": {name: [there.st_size, there.st_mtime_ns] for name, there in found.items()},
    }


def _json(path: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
