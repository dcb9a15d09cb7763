"""The chat template that a user chooses: a file, or no template, in place of the model's own; and its variables'
values.

Values are written into the template as its first statements, so they apply wherever the template is rendered, here or
in a library. For the same reason the end token that a user chooses is written behind the last answer by the template
itself, if it writes no end there.
"""

from __future__ import annotations

import json
import re
from typing import Any

from flowrl.errors import ConfigError
from flowrl.machine.disk import user_path
from flowrl.models.policy import Policy
from flowrl.models.tokens.chat import template_end
from flowrl.tasks.task_syntax import parse_options

NONE = "none"
ANSWERED = "messages and messages[-1]['role'] == 'assistant' and not add_generation_prompt"
"""The condition, in Jinja, that an answer is the last of what is rendered."""
WORDS = {"true": True, "false": False, "none": None, "null": None}


def with_template(tokenizer: Any, policy: Policy) -> Any:
    """`tokenizer` with the template, the values and the end of a turn that `policy` names. Raises ConfigError."""
    if policy.chat_template:
        tokenizer.chat_template = _chosen(policy.chat_template)
    if policy.chat_template_kwargs:
        tokenizer.chat_template = _with_values(tokenizer.chat_template, policy)
    if policy.tokenizer.eos and isinstance(tokenizer.chat_template, str) and template_end(tokenizer) == "":
        end = json.dumps(policy.tokenizer.eos[0], ensure_ascii=False)
        tokenizer.chat_template += f"{{% if {ANSWERED} %}}{{{{ {end} }}}}{{% endif %}}"
    return tokenizer


def check_template(policy: Policy) -> None:
    """Raise ConfigError for a file that cannot be read, and for values that are not written as NAME=VALUE."""
    if policy.chat_template:
        _chosen(policy.chat_template)
    _values(policy)


def _chosen(name: str) -> str | None:
    if name == NONE:
        return None
    try:
        return user_path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise ConfigError(
            f"the chat template {name} cannot be read ({problem}); name a file with a Jinja template, or none"
        ) from None


def _with_values(template: Any, policy: Policy) -> str:
    text = template.get("default") if isinstance(template, dict) else template
    if not text:
        raise ConfigError(
            f"chat_template_kwargs={policy.chat_template_kwargs} sets values of a chat template, and {policy.model} "
            "has none; leave them out, or name a template"
        )
    values = _values(policy)
    if unread := [name for name in values if not re.search(rf"\b{re.escape(name)}\b", text)]:
        raise ConfigError(
            f"the chat template of {policy.model} does not read {unread[0]}; leave it out of chat_template_kwargs, or "
            "spell it as the template does"
        )
    return "".join(f"{{%- set {name} = {_jinja(value)} -%}}" for name, value in values.items()) + str(text)


def _values(policy: Policy) -> dict[str, Any]:
    found = parse_options("chat_template_kwargs", policy.chat_template_kwargs)
    return {name: WORDS.get(value, value) if isinstance(value, str) else value for name, value in found.items()}


def _jinja(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool | int | float | str):
        return json.dumps(value, ensure_ascii=False)
    raise ConfigError(f"chat_template_kwargs holds {value!r}; it needs text, a number, true, false or none")
