"""Models: from a `Policy` to a Hugging Face directory that transformers and vLLM load."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from flowrl.errors import ConfigError
from flowrl.hub import to_stderr
from flowrl.machine.cache import Progress, cache_dir
from flowrl.models.chosen_tokenizer import (
    check_template,
    embedding_rows,
    model_with_tokenizer,
    with_special_tokens,
    with_template,
)
from flowrl.models.model_files import (
    check_code,
    check_directory,
    context_length,
    found_directory,
    found_tokenizer,
    known_directory,
    known_tokenizer_directory,
    read_json_if_valid,
)
from flowrl.models.policy import (
    CHARACTER_CONTEXT,
    CHARACTER_MODELS,
    SMOLLM2_CONTEXT,
    TOOL_MODEL,
    Policy,
    TokenizerOptions,
)
from flowrl.models.tokens.chat import Chat, load_tokenizer, special_texts, template_end, template_next
from flowrl.models.tokens.tool_form import tool_form, uses_tools
from flowrl.models.tokens.vocabulary import describe_difference
from flowrl.tasks import Row

__all__ = [
    "Chat",
    "Policy",
    "TokenizerOptions",
    "cache_dir",
    "check_model",
    "check_prompts",
    "check_tools",
    "end_problem",
    "known_context",
    "known_directory",
    "known_tokenizer",
    "load_tokenizer",
    "require_same_vocabulary",
    "resolve",
    "stop_ids",
    "to_stderr",
    "tokenizer_of",
    "with_template",
]


def ignore_progress(text: str) -> None:
    """A progress callback that does nothing."""


def resolve(policy: Policy, *, progress: Progress = ignore_progress) -> str:
    """The local model directory of `policy`. A model that is not on this machine is made or downloaded first.

    Safe to call from several processes: one creates the model, the others wait. `progress` is called with one line per
    stage. Raises ConfigError if the model, or the tokenizer that the policy's options name, does not exist.
    """
    directory = find_directory(policy, progress)
    if not policy.tokenizer.is_chosen:
        return str(directory)
    return str(model_with_tokenizer(directory, policy, _tokenizer_directory(policy, progress), progress))


def find_directory(policy: Policy, progress: Progress) -> Path:
    """The directory of the model with its own tokenizer."""
    if policy.model in CHARACTER_MODELS:
        from flowrl.models.built_in_models import tiny_model

        return tiny_model(policy.model, policy.task, progress)
    if policy.model == "smollm2":
        from flowrl.models.built_in_models import smollm2_model

        return smollm2_model(progress)
    directory = found_directory(policy, progress)
    check_directory(directory)
    return directory


def _tokenizer_directory(policy: Policy, progress: Progress) -> Path | None:
    """The directory of the tokenizer that the policy's options name; None if they name none."""
    named = Policy(policy.tokenizer.name) if policy.tokenizer.name else None
    if named is None:
        return None
    return find_directory(named, progress) if named.built_in else found_tokenizer(policy, progress)


def check_model(policy: Policy, *, progress: Progress = to_stderr) -> None:
    """Raise ConfigError unless `policy` names a built-in model or a directory that looks like a model.

    A model of the Hub is downloaded. `tiny_agent` is refused with a task on which it cannot be warm-started.
    """
    check_template(policy)
    if policy.model == "smollm2":
        from flowrl.models.built_in_models import find_gguf

        find_gguf()
    elif policy.model == TOOL_MODEL and policy.task is not None:
        from flowrl.models.built_in_models import check_tool_task

        check_tool_task(policy.task)
    elif not policy.built_in:
        check_code(find_directory(policy, progress), trusted=policy.trust_remote_code)
    if policy.tokenizer.is_chosen and policy.model not in CHARACTER_MODELS:
        resolve(policy, progress=progress)
    elif policy.tokenizer.name and policy.tokenizer.name not in CHARACTER_MODELS:
        _tokenizer_directory(policy, progress)
    if policy.chat_template or policy.chat_template_kwargs or policy.tokenizer.is_chosen:
        known_tokenizer(policy)


def tokenizer_of(policy: Policy, *, progress: Progress = ignore_progress) -> Any:
    """The tokenizer of `policy`, whose model is made or downloaded first if it is not on this machine."""
    found = load_tokenizer(resolve(policy, progress=progress), trust_remote_code=policy.trust_remote_code)
    return with_template(found, policy)


def require_same_vocabulary(scored: Policy, scorer: Policy) -> None:
    """Compare the loaded tokenizers, for models whose files alone do not show whether they agree. Raises ConfigError if
    they differ."""
    mine, other = (tokenizer_of(policy).get_vocab() for policy in (scored, scorer))
    if mine != other:
        raise ConfigError(describe_difference(scored.model, mine, scorer.model, other))


def known_context(policy: Policy) -> int | None:
    """The most tokens that fit into the model's context; None if that is not known before the model is found."""
    if policy.model in CHARACTER_MODELS:
        return CHARACTER_CONTEXT
    if policy.model == "smollm2":
        return SMOLLM2_CONTEXT
    directory = known_directory(policy)
    return context_length(directory) if directory is not None and (directory / "config.json").is_file() else None


def known_tokenizer(policy: Policy) -> Any | None:
    """The model's tokenizer; None if the model, or the tokenizer that the options name, has yet to be made or found."""
    tokenizer = _character_tokenizer(policy.tokenizer.name or policy.model)
    if tokenizer is None:
        directory = known_tokenizer_directory(policy) if policy.tokenizer.name else known_directory(policy)
        if directory is None:
            return None
        tokenizer = load_tokenizer(directory, trust_remote_code=policy.trust_remote_code)
    if policy.tokenizer.is_chosen:
        rows: int | None = None
        if (own := _character_tokenizer(policy.model)) is not None:
            rows = len(own)
        elif (of_model := known_directory(policy)) is not None:
            rows = embedding_rows(of_model)
        tokenizer = with_special_tokens(tokenizer, policy.tokenizer, rows=rows, model=policy.model)
    return with_template(tokenizer, policy)


def _character_tokenizer(model: str) -> Any | None:
    """The tokenizer of a character model; None for any other."""
    if model not in CHARACTER_MODELS:
        return None
    from flowrl.models.tokens.characters import character_tokenizer, tool_tokenizer

    return tool_tokenizer() if model == TOOL_MODEL else character_tokenizer()


def check_prompts(policy: Policy, rows: Sequence[Row], system_prompt: str) -> None:
    """Raise ConfigError if the model has no chat template for tools, a system prompt or earlier turns, and these have
    some."""
    check_tools(policy, rows)
    if policy.built_in:
        return
    tokenizer = tokenizer_of(policy)
    if not tokenizer.chat_template and (system_prompt or any(len(row.turns) > 1 for row in rows)):
        raise ConfigError(
            f"{policy.model} has no chat template, so a system prompt and earlier turns cannot be passed to it; "
            "name a chat model, add a chat_template.jinja, or ask with single turns and without a system prompt"
        )


def check_tools(policy: Policy, rows: Iterable[Row]) -> None:
    """Raise ConfigError if `rows` have tools, or calls of them, that the model's chat template leaves out."""
    tokenizer: Any = None
    for row in rows:
        if not uses_tools(row.all_turns, row.tools):
            continue
        if tokenizer is None and (tokenizer := known_tokenizer(policy)) is None:
            return
        if not tokenizer.chat_template:
            Chat(tokenizer).encode_prompt(row.turns)
        tool_form(tokenizer).require_shown(row.all_turns, row.tools)


def end_problem(policy: Policy) -> str | None:
    """What is wrong with the end of the policy's turns, with the option that mends it; None if nothing is, and if the
    model has yet to be made.

    A chat template may write nothing that ends the assistant's turn (GLM's turns end where the next role begins), or a
    token at which generation does not stop (base models have the end token of texts, templates that of turns). A policy
    that is trained so does not learn to stop, or is not stopped.
    """
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
        return [int(tokenizer.convert_tokens_to_ids(token)) for token in policy.tokenizer.eos]
    named = policy.tokenizer.name
    directory = known_tokenizer_directory(policy) if named else known_directory(policy)
    ids: Any = None
    if directory is not None:
        ids = read_json_if_valid(directory / "generation_config.json").get("eos_token_id")
        if ids is None and not named and not (directory / "generation_config.json").is_file():
            ids = read_json_if_valid(directory / "config.json").get("eos_token_id")
    found = ids if isinstance(ids, list) else [ids]
    own = tokenizer.eos_token_id
    return list({int(one): None for one in (own, *found) if one is not None})
