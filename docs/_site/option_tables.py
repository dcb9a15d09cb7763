"""The options of a configuration as Markdown, from the lists that `--help` shows."""

from __future__ import annotations

import dataclasses
from typing import Any

from flowrl.graph.annotations import declared_types
from flowrl.graph.option_help import Option, OptionGroup, default_text, option_groups, value_words
from flowrl.graph.option_types import field_text

HEAD = "| option | default | |\n|---|---|---|\n"


def option_tables(config_type: type[Any]) -> str:
    """A section for each group of options."""
    return "".join(_section(group) for group in option_groups(config_type))


def option_rows(*kinds: type[Any]) -> str:
    """One table of all options of these dataclasses."""
    groups = [group for kind in kinds for group in option_groups(kind, own="")]
    return HEAD + "".join(option_row(option) for group in groups for option in group.options)


def option_row(option: Option) -> str:
    """An option's name with what it takes, its default and its meaning."""
    takes = option.takes or "flag"
    return f"| `--{option.name}` *{_cell(takes)}* | {_default(option.default)} | {_cell(option.meaning)} |\n"


def field_table(kind: type[Any]) -> str:
    """The fields of a dataclass, as they are named in Python."""
    hints = declared_types(kind)
    rows = ""
    for field in dataclasses.fields(kind):
        factory = field.default_factory
        default = field.default if factory is dataclasses.MISSING else factory()
        takes, meaning = _cell(value_words(hints[field.name]) or "flag"), _cell(field_text(kind, field.name))
        rows += f"| `{field.name}` *{takes}* | {_default(default)} | {meaning} |\n"
    return f"| field | default | |\n|---|---|---|\n{rows}\n"


def _section(group: OptionGroup) -> str:
    return f"### {group.name}\n\n{group.about}\n\n{HEAD}{''.join(map(option_row, group.options))}\n"


def _default(value: Any) -> str:
    text = default_text(value)
    if value in (None, dataclasses.MISSING) or not text:
        return "–"
    return text if isinstance(value, bool) else f"`{text}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
