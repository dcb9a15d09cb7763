"""The tokenizer that a user chooses for a policy: another one than the model's, its special tokens, and its chat
template (a file, or no template, and its variables' values).

The model's directory with that tokenizer is made once in flowrl's cache. It has links to the model's files, the
tokenizer's files, and both configurations with the ids of that tokenizer's special tokens. transformers, vLLM and
checkpoints use this tokenizer like any other.

Values are written into the template as its first statements, so they apply wherever the template is rendered, here or
in a library. For the same reason the end token that a user chooses is written behind the last answer by the template
itself, if it writes no end there.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from flowrl.errors import ConfigError
from flowrl.machine.cache import RECIPE, Progress, cached_directory
from flowrl.machine.disk import user_path
from flowrl.models.model_files import TOKENIZER_FILE, read_json_if_valid
from flowrl.models.policy import NONE, Policy, TokenizerOptions
from flowrl.models.tokens.chat import load_tokenizer, template_end
from flowrl.tasks.task_syntax import parse_options

FEW_PIECES = 6


def with_special_tokens(tokenizer: Any, options: TokenizerOptions, *, rows: int | None, model: str) -> Any:
    """`tokenizer` with the tokens of `options`. Raises ConfigError.

    `rows` is how many tokens the embeddings of `model` have room for; None if that is not known.
    """
    known, of = tokenizer.get_vocab(), options.name or model
    for option, named in options.named_tokens:
        if named in known or named in options.special:
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
