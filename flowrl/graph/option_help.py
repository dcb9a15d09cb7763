"""The options of a configuration for people: what each takes, what it means and its default, in groups.

`--help` shows the twenty options that most runs set and names the groups of the others, `--help GROUP` and
`--help OPTION` show a part of them whole, and `--help-all` shows all. The site's pages are made from the same lists.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import itertools
import re
import shutil
import sys
import textwrap
import types
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from flowrl.errors import ConfigError
from flowrl.graph.option_types import ConfigOption, options_of

FIRST = (
    "policy",
    "task",
    "task.reward",
    "groups-per-step",
    "group-size",
    "batch",
    "max-tokens",
    "max-length",
    "lr",
    "staleness",
    "dtype",
    "lora.rank",
    "generator.replicas",
    "generator.gpus",
    "trainer.replicas",
    "evaluate-task",
    "evaluate-every",
    "steps",
    "run-dir",
    "resume",
    "save-every",
    "track",
)
"""The options that most runs set, in this order; a graph has twenty of them at most."""
MOST_FIRST = 20
GRAPH, ALL = "graph", "all"


@dataclass(frozen=True)
class Option:
    """One leaf of a configuration."""

    name: str
    """As on the command line, without the two hyphens: zero.stage"""
    takes: str
    """The values that it takes, in words: number, text, a|b; "" for a flag."""
    default: Any
    """`dataclasses.MISSING` if it has to be given."""
    meaning: str
    """Its docstring, in one line."""
    short: str = ""
    """The name of its block, whose first option it is: `--task` means `--task.name`."""


@dataclass(frozen=True)
class OptionGroup:
    """Options that belong together."""

    name: str
    about: str
    options: tuple[Option, ...]


def option_groups(config_type: type[Any], values: Any = None, *, own: str = GRAPH) -> list[OptionGroup]:
    """All options of a configuration, each in one group: that of its block, else that of its part.

    Defaults are those of `values`, an instance, if it is given. Options outside of parts and blocks are in the group
    `own`, which comes first.
    """
    found: dict[str, list[Option]] = {own: []}
    about = {own: class_summary(config_type) if own != GRAPH else "What this graph has and no other."}
    for one in options_of(config_type).values():
        part = one.path[0].replace("_", "-") if len(one.path) > 1 else own
        about.setdefault(part, class_summary(one.home))
        for option in _leaf_options(one.name.replace("_", "-"), one.hint, _given_value(one, values), one.meaning):
            block = option.name.partition(".")[0]
            group = block if option.name != block else part
            found.setdefault(group, []).append(option)
            if option.name != block:
                about.setdefault(group, one.meaning or class_summary(one.hint))
    return [OptionGroup(name, about[name], tuple(options)) for name, options in found.items() if options]


def merge_groups(groups: Iterable[OptionGroup]) -> list[OptionGroup]:
    """Groups of one name become one, which is where the first of them is."""
    found: dict[str, OptionGroup] = {}
    for group in groups:
        before = found.get(group.name, dataclasses.replace(group, options=()))
        found[group.name] = dataclasses.replace(before, options=(*before.options, *group.options))
    return list(found.values())


def _given_value(one: ConfigOption, values: Any) -> Any:
    value = one.default if values is None else one.value_in(values)
    return dataclasses.MISSING if value is getattr(sys.modules.get("tyro"), "MISSING", dataclasses.MISSING) else value


def _leaf_options(name: str, hint: Any, value: Any, meaning: str) -> Iterator[Option]:
    if not (isinstance(hint, type) and dataclasses.is_dataclass(hint)):
        yield Option(name, value_words(hint), value, meaning)
        return
    inside = options_of(hint).values()
    for index, inner in enumerate(inside):
        within = None if value is dataclasses.MISSING else value
        leaves = _leaf_options(
            f"{name}.{inner.name.replace('_', '-')}", inner.hint, _given_value(inner, within), inner.meaning
        )
        for number, option in enumerate(leaves):
            yield dataclasses.replace(option, short=name) if index == number == 0 else option


def default_text(value: Any) -> str:
    """A value as it is written on the command line; on or off for a flag, "" for an empty one."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if value == "" or value == () or value == {}:
        return ""
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def class_summary(kind: type[Any]) -> str:
    """The docstring of a class in one line, without one that a dataclass makes up."""
    text = inspect.cleandoc(kind.__doc__ or "")
    return "" if text.startswith(f"{kind.__name__}(") else " ".join(text.split())


def value_words(kind: Any) -> str:
    """What an option of this type takes; "" for a flag."""
    if kind is bool:
        return ""
    if get_origin(kind) is Literal:
        return "|".join(map(str, get_args(kind)))
    if get_origin(kind) in (Union, types.UnionType):
        kinds = [one for one in get_args(kind) if one is not types.NoneType]
        return " or ".join(dict.fromkeys("True|False" if one is bool else value_words(one) for one in kinds))
    if get_origin(kind) is tuple:
        inner = [value_words(one) for one in get_args(kind) if one is not Ellipsis]
        return f"{inner[0]} ..." if Ellipsis in get_args(kind) else " ".join(inner)
    words = {int: "integer", float: "number", str: "text", Path: "path"}
    return words.get(kind, "NAME=VALUE ..." if get_origin(kind) is not None else getattr(kind, "__name__", ""))


def asked_for_help(args: Sequence[str]) -> str | None:
    """What `--help` in `args` is about: "", or the group or option after it, or all. None without `--help`."""
    for index, arg in enumerate(args):
        name, _, value = arg.partition("=")
        if name == "--help-all":
            return ALL
        if name in ("-h", "--help"):
            following = args[index + 1] if index + 1 < len(args) else ""
            return value or ("" if following.startswith("-") else following)
    return None


def help_text(prog: str, asked: str, groups: Sequence[OptionGroup], *, about: str = "", own: str = GRAPH) -> str:
    """What `--help` prints. Raises ConfigError if `asked` is neither a group nor an option.

    `own` is the group from which the first screen is filled up.
    """
    name = asked.lstrip("-").replace("_", "-")
    named = [group for group in groups if group.name == name]
    options = [option for group in groups for option in group.options]
    lines = [f"usage: {prog} [--OPTION VALUE ...]"]
    if not asked and len(options) > MOST_FIRST:
        described = ["", *_wrap_words(about)] if about else []
        return "\n".join([*lines, *described, *_first_screen(prog, groups, own)])
    if name in ("", ALL) or named:
        for group in named or groups:
            rows = [(_option_flags(option), _with_default(option.meaning, option)) for option in group.options]
            lines += ["", *_wrap_words(f"{group.name}: {group.about}"), "", *_option_table(rows)]
        return "\n".join([*lines, "", SWITCHED_OFF])
    if option := next((one for one in options if name in (one.name, one.short)), None):
        return "\n".join(_option_lines(_option_flags(option), _with_default(option.meaning, option), 8))
    known = [*(group.name for group in groups), *(option.name for option in options)]
    near = difflib.get_close_matches(name, known, 1)
    hint = f"did you mean {near[0]}?" if near else f"the groups are {', '.join(group.name for group in groups)}"
    raise ConfigError(f"--help {asked}: there is no group or option of this name; {hint}")


SWITCHED_OFF = "A flag is switched off with no-: --no-resume, --zero.no-keep-optimizer."


def first_options(groups: Sequence[OptionGroup], own: str = GRAPH) -> dict[str, Option]:
    """The options of the first screen by name: those of `FIRST`, then of the group `own`, twenty together."""
    known = {name: option for group in groups for option in group.options for name in (option.name, option.short)}
    chosen = {name: known[name] for name in FIRST if name in known}
    filling = [option for group in groups if group.name == own for option in group.options]
    chosen |= {option.name: option for option in filling if option not in chosen.values()}
    return dict(itertools.islice(chosen.items(), MOST_FIRST))


def _first_screen(prog: str, groups: Sequence[OptionGroup], own: str) -> Iterator[str]:
    first = first_options(groups, own)
    number = sum(len(group.options) for group in groups)
    yield from ("", f"{len(first)} of {number} options, those that most runs set:", "")
    rows = []
    for name, option in first.items():
        meaning = _help_beginning(option.meaning)
        told = meaning if option.default is None else _with_default(meaning, option)
        rows.append((f"--{name} <{option.takes}>" if option.takes else f"--{name}", told))
    yield from _option_table(rows)
    which = f"`{prog} --help GROUP` lists a group, `--help OPTION` says all about an option, `--help-all` lists all"
    yield from ("", *_wrap_words(f"The groups of all options; {which}:"), "")
    width = max(len(group.name) for group in groups)
    for group in groups:
        yield from _wrap_words(
            f"{group.name:<{width}} {len(group.options):>3}  {_help_beginning(group.about)}", 2, width + 8
        )


def _help_beginning(text: str) -> str:
    """What stands before the first details."""
    return re.split(r"[.;:] ", text)[0].rstrip(".")


def _option_flags(option: Option) -> str:
    short = f"--{option.short}, " if option.short else ""
    return f"{short}--{option.name} <{option.takes}>" if option.takes else f"{short}--{option.name}"


def _with_default(meaning: str, option: Option) -> str:
    if option.default is dataclasses.MISSING:
        return f"{meaning} (has to be given)".strip()
    text = default_text(option.default)
    if option.default is False or not text:
        return meaning
    return f"{meaning} (default: {text if text.isprintable() else repr(text)})".strip()


def _option_table(rows: Sequence[tuple[str, str]]) -> Iterator[str]:
    """(flags, meaning) of several options, whose meanings begin in one column."""
    column = min(max(len(flags) for flags, _ in rows) + 4, 32)
    for flags, text in rows:
        yield from _option_lines(flags, text, column)


def _option_lines(flags: str, text: str, column: int) -> list[str]:
    """An option: its meaning begins beside its flags, or below them if these are long."""
    if len(flags) > column - 4:
        return [f"  {flags}", *_wrap_words(text, column, column)]
    return _wrap_words(f"{flags:<{column - 2}}{text}", 2, column)


def _wrap_words(text: str, first: int = 0, others: int = 0) -> list[str]:
    width = min(max(shutil.get_terminal_size().columns, 60), 110)
    return textwrap.wrap(
        text,
        width,
        initial_indent=" " * first,
        subsequent_indent=" " * others,
        break_on_hyphens=False,
        break_long_words=False,
    )
