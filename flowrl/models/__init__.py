"""Models: from a `Policy` to a Hugging Face directory that transformers and vLLM load.

A user may choose another tokenizer than the model's, its special tokens, and its chat template (a file, or no template,
and its variables' values). The model's directory with that tokenizer is made once in flowrl's cache. It has links to
the model's files, the tokenizer's files, and both configurations with the ids of that tokenizer's special tokens.
transformers, vLLM and checkpoints use this tokenizer like any other.

Values are written into the template as its first statements, so they apply wherever the template is rendered, here or
in a library. For the same reason the end token that a user chooses is written behind the last answer by the template
itself, if it writes no end there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from flowrl.errors import ConfigError
from flowrl.hub import to_stderr
from flowrl.machine.cache import RECIPE, Progress, cache_dir, cached_directory
from flowrl.machine.disk import user_path
from flowrl.models.model_files import (
    TOKENIZER_FILE,
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
    NONE,
    SMOLLM2_CONTEXT,
    TOOL_MODEL,
    Policy,
    TokenizerOptions,
)
from flowrl.models.tokens.chat import Chat, load_tokenizer, special_texts, template_end, template_next
from flowrl.models.tokens.tool_form import tool_form, uses_tools
from flowrl.models.tokens.vocabulary import describe_difference
from flowrl.tasks import Row
from flowrl.tasks.task_syntax import parse_options

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


FEW_PIECES = 6


def with_special_tokens(tokenizer: Any, options: TokenizerOptions, *, rows: int | None, model: str) -> Any:
    """`tokenizer` with the tokens of `options`. Raises ConfigError.

    `rows` is how many tokens the embeddings of `model` have room for; None if that is not known.
    """
    known, of = tokenizer.get_vocab(), options.name or model
    needed = [("eos", token) for token in options.eos]
    needed += [("pad", options.pad), ("bos", "" if options.bos == NONE else options.bos)]
    for option, named in needed:
        if not named or named in known or named in options.special:
            continue
        pieces = tokenizer.convert_ids_to_tokens(tokenizer(named, add_special_tokens=False)["input_ids"])
        shown = " ".join(map(repr, pieces[:FEW_PIECES])) + (" ..." if len(pieces) > FEW_PIECES else "")
        raise ConfigError(
            f"--tokenizer.{option} is {named!r}, which is no token of the tokenizer of {of}: it "
            f"is read as {len(pieces)} ({shown}); name a token as tokenizer.json has it, or make it one with "
            "--tokenizer.special"
        )

    if more := [*options.special, *(token for token in options.eos[1:] if token not in options.special)]:
        tokenizer.add_special_tokens({"extra_special_tokens": more}, replace_extra_special_tokens=False)
    roles = {"eos_token": options.eos[0] if options.eos else "", "pad_token": options.pad}
    if chosen := {role: token for role, token in roles.items() if token}:
        tokenizer.add_special_tokens(chosen)
    if options.bos:
        _begin_with(tokenizer, None if options.bos == NONE else options.bos, of)

    token, last = max(tokenizer.get_vocab().items(), key=lambda entry: entry[1])
    if rows is not None and last >= rows:
        remedy = "leave out --tokenizer.special" if options.special else "name the tokenizer that belongs to the model"
        raise ConfigError(
            f"the tokenizer has ids up to {last} ({token!r}), but the embeddings of {model} have room for {rows} "
            f"tokens, ids 0 to {rows - 1}; {remedy}, or enlarge the model's embeddings first"
        )
    return tokenizer


def _begin_with(tokenizer: Any, token: str | None, of: str) -> None:
    """Put `token`, or nothing, before every text that is tokenized with special tokens; tokens after the text are
    kept."""
    from tokenizers.processors import TemplateProcessing

    if not tokenizer.is_fast:
        raise ConfigError(
            f"--tokenizer.bos needs a tokenizer with a tokenizer.json, and {of} has none; leave it "
            "out, or save the tokenizer as a fast one"
        )
    plain, whole = tokenizer("a", add_special_tokens=False)["input_ids"], tokenizer("a")["input_ids"]
    begins = (n for n in range(len(whole) - len(plain), -1, -1) if whole[n : n + len(plain)] == plain)
    behind = next(begins, None)
    ending = [] if behind is None else list(whole[behind + len(plain) :])
    if token is None:
        tokenizer.bos_token = None
    else:
        tokenizer.add_special_tokens({"bos_token": token})
    ids = ([] if token is None else [tokenizer.bos_token_id], ending)
    marks = [
        {"id": name, "ids": some, "tokens": tokenizer.convert_ids_to_tokens(some)}
        for name, some in zip(("begin", "end"), ids, strict=True)
        if some
    ]
    names = [mark["id"] for mark in marks]
    single = [*(["begin:0"] if "begin" in names else []), "$A:0", *(["end:0"] if "end" in names else [])]
    pair = [*single, *(piece.replace(":0", ":1").replace("$A", "$B") for piece in single)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=single, pair=pair, special_tokens=marks)


ANSWERED = "messages and messages[-1]['role'] == 'assistant' and not add_generation_prompt"
"""The condition, in Jinja, that an answer is the last of what is rendered."""
WORDS = {"true": True, "false": False, "none": None, "null": None}


def with_template(tokenizer: Any, policy: Policy) -> Any:
    """`tokenizer` with the template, the values and the end of a turn that `policy` names. Raises ConfigError."""
    if policy.chat_template:
        tokenizer.chat_template = chosen_template(policy.chat_template)
    if policy.chat_template_kwargs:
        own = tokenizer.chat_template
        text = str((own.get("default") if isinstance(own, dict) else own) or "")
        if not text:
            raise ConfigError(
                f"chat_template_kwargs={policy.chat_template_kwargs} sets values of a chat template, and "
                f"{policy.model} has none; leave them out, or name a template"
            )
        statements = ""
        for name, value in read_values(policy).items():
            if not re.search(rf"\b{re.escape(name)}\b", text):
                raise ConfigError(
                    f"the chat template of {policy.model} does not read {name}; leave it out of chat_template_kwargs, "
                    "or spell it as the template does"
                )
            if not isinstance(value, bool | int | float | str | None):
                raise ConfigError(f"chat_template_kwargs holds {value!r}; it needs text, a number, true, false or none")
            literal = "none" if value is None else json.dumps(value, ensure_ascii=False)
            statements += f"{{%- set {name} = {literal} -%}}"
        tokenizer.chat_template = statements + text
    if policy.tokenizer.eos and isinstance(tokenizer.chat_template, str) and template_end(tokenizer) == "":
        end = json.dumps(policy.tokenizer.eos[0], ensure_ascii=False)
        tokenizer.chat_template += f"{{% if {ANSWERED} %}}{{{{ {end} }}}}{{% endif %}}"
    return tokenizer


def check_template(policy: Policy) -> None:
    """Raise ConfigError for a file that cannot be read, and for values that are not written as NAME=VALUE."""
    if policy.chat_template:
        chosen_template(policy.chat_template)
    read_values(policy)


def chosen_template(name: str) -> str | None:
    if name == NONE:
        return None
    try:
        return user_path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise ConfigError(
            f"the chat template {name} cannot be read ({problem}); name a file with a Jinja template, or none"
        ) from None


def read_values(policy: Policy) -> dict[str, Any]:
    found = parse_options("chat_template_kwargs", policy.chat_template_kwargs)
    return {name: WORDS.get(value, value) if isinstance(value, str) else value for name, value in found.items()}


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
        "model": files_to_link(directory),
        "tokenizer": None if source is None else files_to_link(source),
        "options": asdict(policy.tokenizer),
        "transformers": version("transformers"),
    }
    name = re.sub(r"[^\w.]+", "_", Path(policy.model.partition("@")[0]).name)

    def make(target: Path) -> None:
        progress(f"writing {policy.model} with the tokenizer that --tokenizer chooses")
        for path in directory.iterdir():
            if not TOKENIZER_FILE.fullmatch(path.name) and path.name not in (*CONFIGS, RECIPE):
                (target / path.name).symlink_to(path.absolute())
        for path in () if source is None else source.glob("*.py"):
            if not (target / path.name).exists():
                (target / path.name).symlink_to(path.absolute())

        options, trusted = policy.tokenizer, policy.trust_remote_code
        tokenizer = load_tokenizer(source or directory, trust_remote_code=trusted)
        with_special_tokens(tokenizer, options, rows=embedding_rows(directory), model=policy.model)
        ids = special_ids(tokenizer, options, source)
        for config in CONFIGS:
            if (directory / config).is_file() or "eos_token_id" in ids:
                described = read_json_if_valid(directory / config)
                if isinstance(inner := described.get("text_config"), dict):
                    inner.update({key: value for key, value in ids.items() if key in inner})
                text = json.dumps({**described, **ids}, indent=2, ensure_ascii=False)
                (target / config).write_text(text + "\n", encoding="utf-8")
        save_tokenizer(tokenizer, target, trusted=trusted, of=options.name or policy.model)

    return cached_directory("tokenizers", name, recipe, make, progress, unused_days=UNUSED_DAYS)


def embedding_rows(directory: Path) -> int | None:
    """How many tokens the model has embeddings for, by its config; None if the config does not say."""
    config = read_json_if_valid(directory / "config.json")
    found = config.get("vocab_size", dict(config.get("text_config") or {}).get("vocab_size"))
    return found if isinstance(found, int) else None


def save_tokenizer(tokenizer: Any, target: Path, *, trusted: bool, of: str) -> None:
    """Write the tokenizer so that it is the same when it is loaded from `target`. Raises ConfigError if that fails."""
    tokenizer.save_pretrained(target)
    loaded = load_tokenizer(target, trust_remote_code=trusted)
    if tokenizer.is_fast and tokenizer_traits(tokenizer) != tokenizer_traits(loaded):
        file = target / "tokenizer_config.json"
        file.write_text(
            json.dumps({**read_json_if_valid(file), "tokenizer_class": GENERIC_CLASS}, indent=2) + "\n", "utf-8"
        )
        loaded = load_tokenizer(target, trust_remote_code=trusted)
    if tokenizer_traits(tokenizer) != tokenizer_traits(loaded):
        kind = read_json_if_valid(target / "config.json").get("model_type")
        raise ConfigError(
            f"transformers loads a {type(loaded).__name__} for {kind} models, and that does not read texts as the "
            f"tokenizer of {of} ({type(tokenizer).__name__}) does with these options; leave them out, or name a "
            "tokenizer of the model's family"
        )


def tokenizer_traits(tokenizer: Any) -> tuple[object, ...]:
    """What has to be the same in two tokenizers that read texts in the same way."""
    return (
        tokenizer.get_vocab(),
        tokenizer.eos_token_id,
        tokenizer.pad_token_id,
        tokenizer.bos_token_id,
        sorted(tokenizer.all_special_ids),
        tokenizer.chat_template,
        *(tokenizer(TRIED, add_special_tokens=added)["input_ids"] for added in (True, False)),
    )


def special_ids(tokenizer: Any, options: TokenizerOptions, source: Path | None) -> dict[str, int | list[int] | None]:
    """The ids of the special tokens that differ from the model's, by their keys in the two configurations."""
    found: dict[str, int | list[int] | None] = {}
    if source is not None:
        ends = read_json_if_valid(source / "generation_config.json").get("eos_token_id")
        found = {"eos_token_id": tokenizer.eos_token_id if ends is None else ends}
        found |= {"pad_token_id": tokenizer.pad_token_id, "bos_token_id": tokenizer.bos_token_id}
    if options.eos:
        ids = [int(tokenizer.convert_tokens_to_ids(token)) for token in options.eos]
        found["eos_token_id"] = ids[0] if len(ids) == 1 else ids
    if options.pad:
        found["pad_token_id"] = tokenizer.pad_token_id
    if options.bos:
        found["bos_token_id"] = tokenizer.bos_token_id
    return found


def files_to_link(directory: Path) -> dict[str, Any]:
    """What distinguishes one state of a directory from another."""
    paths = (path for path in sorted(directory.iterdir()) if path.is_file() and path.name != RECIPE)
    found = {path.name: path.stat() for path in paths}
    return {
        "directory": str(directory.absolute()),
        "files": {name: [there.st_size, there.st_mtime_ns] for name, there in found.items()},
    }
