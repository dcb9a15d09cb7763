"""Finds the files of a model or tokenizer: in a directory, or downloaded into the cache of Hugging Face."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from pathlib import Path

from flowrl.errors import ConfigError
from flowrl.hub import cached_snapshot, fetch_snapshot
from flowrl.machine.cache import Progress
from flowrl.models.directory import check_directory
from flowrl.models.policy import BUILT_IN, Policy

BESIDE = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".py")
"""Suffixes of a model's files other than its weights."""
PICKLED = re.compile(r"pytorch_model(-\d+-of-\d+)?\.bin")
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


def found_directory(policy: Policy, progress: Progress) -> Path:
    """The directory of a model that is not built in; one of the Hub is downloaded. Raises ConfigError."""
    if policy.path.is_dir():
        return policy.path.resolve()
    if policy.hub_name is None:
        raise ConfigError(_nowhere(policy))
    return fetch_snapshot(policy.hub_name, model_files, _complete, progress)


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
    return fetch_snapshot(named.hub_name, tokenizer_files, has_tokenizer, progress)


def has_tokenizer(directory: Path) -> bool:
    """Whether the directory has files of a tokenizer."""
    return any(TOKENIZER_FILE.fullmatch(path.name) and "chat_template" not in path.name for path in directory.iterdir())


def tokenizer_files(names: Iterable[str]) -> list[str]:
    """Those of a repository's files that a tokenizer needs."""
    return [name for name in model_files(names) if name.endswith(BESIDE)]


def model_files(names: Iterable[str]) -> list[str]:
    """Those of a repository's files that transformers and vLLM need, with the weights in only one format."""
    names = list(names)
    top = [name for name in names if "/" not in name or name.startswith("additional_chat_templates/")]
    weights = [name for name in top if name.endswith(".safetensors") and not name.startswith(OTHER_LAYOUT)]
    if not weights:
        weights = [name for name in top if PICKLED.fullmatch(name)]
    return sorted({*weights, *(name for name in top if name.endswith(BESIDE))})


def _complete(directory: Path) -> bool:
    try:
        check_directory(directory)
    except ConfigError:
        return False
    return True


def _nowhere(policy: Policy) -> str:
    near = difflib.get_close_matches(policy.model, BUILT_IN, 1, 0.7)
    hint = f"; did you mean {near[0]}?" if near else "; correct the path, or write OWNER/NAME for a model of the Hub"
    return (
        f"there is no model {policy.model!r}: it is neither {', '.join(BUILT_IN[:-1])} nor {BUILT_IN[-1]} nor a "
        f"directory on this machine, and names on the Hub are OWNER/NAME or OWNER/NAME@REVISION{hint}"
    )
