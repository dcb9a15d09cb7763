"""Whether the token that ends a turn in training is one at which generation stops.

A chat template may write nothing that ends the assistant's turn (GLM's turns end where the next role begins), or a
token at which generation does not stop (base models have the end token of texts, templates that of turns). A policy
that is trained so does not learn to stop, or is not stopped.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flowrl.models import Policy, known_directory, known_tokenizer
from flowrl.models.find_model import known_tokenizer_directory
from flowrl.models.tokens.chat import special_texts, template_end, template_next
from flowrl.models.tokens.special_tokens import end_token_ids


def end_problem(policy: Policy) -> str | None:
    """What is wrong with the end of the policy's turns, with the option that mends it; None if nothing is, and if the
    model has yet to be made."""
    tokenizer = known_tokenizer(policy)
    if tokenizer is None or not tokenizer.chat_template:
        return None
    stops = [str(token) for token in tokenizer.convert_ids_to_tokens(stop_ids(policy, tokenizer))]
    written = template_end(tokenizer)
    if written is None:
        return None  # rows are refused, with what the template does
    if any(stop in written for stop in stops):
        return None
    if not written:
        following = template_next(tokenizer)
        end = next((stop for stop in stops if following.startswith(stop)), stops[0] if stops else "TOKEN")
        return (
            f"the chat template of {policy.model} writes nothing that ends the assistant's turn, so no answer that is "
            f"trained has an end; with --tokenizer.eos '{end}' that token ends it, and generation stops there"
        )
    end = max((token for token in special_texts(tokenizer) if written.endswith(token)), key=len)
    others = " ".join(f"'{stop}'" for stop in stops)
    return (
        f"the chat template of {policy.model} ends the assistant's turn with '{end}', and generation does not stop "
        f"there (it stops at {others or 'no token'}); with --tokenizer.eos '{end}' {others}".rstrip()
        + " it does"
    )


def stop_ids(policy: Policy, tokenizer: Any) -> list[int]:
    """The ids at which generation with the policy stops, the tokenizer's end token first, as vLLM and transformers read
    them from the policy's files."""
    if policy.tokenizer.eos:
        return end_token_ids(tokenizer, policy.tokenizer)
    named = policy.tokenizer.name
    directory = known_tokenizer_directory(policy) if named else known_directory(policy)
    ids: Any = None
    if directory is not None:
        ids = _json(directory / "generation_config.json").get("eos_token_id")
        if ids is None and not named and not (directory / "generation_config.json").is_file():
            ids = _json(directory / "config.json").get("eos_token_id")
    found = ids if isinstance(ids, list) else [ids]
    own = tokenizer.eos_token_id
    return list({int(one): None for one in (own, *found) if one is not None})


def _json(path: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
