"""The options of a configuration for people: what each takes, what it means and its default, in groups.

`--help` shows the twenty options that most runs set and names the groups of the others, `--help GROUP` and
`--help OPTION` show a part of them whole, and `--help-all` shows all. The site's pages are made from the same lists.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import inspect
import itertools
import re
import shutil
import sys
import textwrap
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from flowrl.errors import ConfigError
from flowrl.graph.annotations import declared_types

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
GROUPS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    GRAPH: ("What this graph has and no other.", ()),
    "policy": (
        "The model that is trained or asked, and its chat template.",
        ("policy", "trust-remote-code", "chat-template", "chat-template-kwargs"),
    ),
    "data": (
        "How many prompts or rows there are, and how long they may be.",
        (
            *("num-prompts", "max-prompt-tokens", "max-answer-tokens", "max-length", "too-long", "batch", "held-out"),
            *("dynamic-sampling", "mean-between", "max-filtered-per-step"),
        ),
    ),
    "sampling": (
        "How responses are sampled, and how old their weights may be.",
        (
            *("groups-per-step", "group-size", "max-tokens", "temperature", "top-p", "top-k", "stop-strings"),
            *("staleness", "on-limit", "look-ahead"),
        ),
    ),
    "episodes": (
        "Processes of environments and agents, and what the policy sees of an episode.",
        (
            *("processes", "episodes-per-process", "keep-variables", "memory-gb", "affinity-margin", "history"),
            *("tool-parser", "reasoning-parser"),
        ),
    ),
    "reward": (
        "How rewards are asked for and shaped.",
        (
            *("reward-timeout-s", "reward-concurrency", "reward-away-s", "step-separator", "of-steps"),
            *("reward-clip", "stop-penalty", "overlong-filter", "overlong-buffer", "overlong-factor"),
            *("negate-rewards", "shuffle-rewards"),
        ),
    ),
    "advantage": (
        "What a sample is compared with, and a KL in the reward.",
        (
            *("advantage", "credit", "gamma", "normalise-rewards", "whiten"),
            *("reward-kl-coef", "reward-kl", "kl-coef", "kl-estimator", "kl-before-baseline", "kl-target"),
        ),
    ),
    "trainer": (
        "Learning rate, data type, size of batches, and ranks of the policy's trainer.",
        ("lr", "dtype", "token-budget", "optimizer-steps", "epochs", "accumulate", "router-aux-loss-coef"),
    ),
    "evaluation": (
        "Held-out prompts and rows, before, during and after training.",
        (
            *("evaluate", "evaluate-task", "evaluate-samples", "evaluate-every", "evaluate-also"),
            *("evaluate-max-prompt-tokens", "judge-every", "probe-tolerance"),
        ),
    ),
    "placement": ("Which nodes share devices.", ("time-share",)),
}
"""Group -> what it is about, and the options outside of blocks that belong to it. A block of options, such as `--zero`,
is in the group of its name; what is in no group belongs to the graph."""


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
    """All options of a configuration, each in one group. Defaults are those of `values`, an instance, if it is given.

    Options that no block and no group has are in the group `own`, which comes first.
    """
    found: dict[str, list[Option]] = {own: []}
    about = {name: text for name, (text, _) in GROUPS.items()}
    homes = {option: name for name, (_, options) in GROUPS.items() for option in options} if own == GRAPH else {}
    for field, option in _options(config_type, values):
        block = option.name.partition(".")[0]
        group = block if option.name != block else homes.get(option.name, own)
        found.setdefault(group, []).append(option)
        if option.name != block:
            about.setdefault(group, field_text(config_type, field.name) or class_summary(type(_default(field))))
    about.setdefault(own, class_summary(config_type))
    return [OptionGroup(name, about[name], tuple(options)) for name, options in found.items() if options]


def merge_groups(groups: Iterable[OptionGroup]) -> list[OptionGroup]:
    """Groups of one name become one, which is where the first of them is."""
    found: dict[str, OptionGroup] = {}
    for group in groups:
        before = found.get(group.name, dataclasses.replace(group, options=()))
        found[group.name] = dataclasses.replace(before, options=(*before.options, *group.options))
    return list(found.values())


def _options(config_type: type[Any], values: Any) -> Iterator[tuple[dataclasses.Field[Any], Option]]:
    """Each option, with the field of `config_type` that it is, or is in."""
    for field in dataclasses.fields(config_type):
        for option in _leaves(config_type, field, values, ""):
            yield field, option


def _leaves(kind: type[Any], field: dataclasses.Field[Any], values: Any, prefix: str) -> Iterator[Option]:
    name, hint = f"{prefix}{field.name.replace('_', '-')}", declared_types(kind)[field.name]
    value = _default(field) if values is None else getattr(values, field.name)
    if not (isinstance(hint, type) and dataclasses.is_dataclass(hint)):
        missing = value is getattr(sys.modules.get("tyro"), "MISSING", dataclasses.MISSING)
        yield Option(name, value_words(hint), dataclasses.MISSING if missing else value, field_text(kind, field.name))
        return
    inside = None if value is dataclasses.MISSING else value
    for index, inner in enumerate(dataclasses.fields(hint)):
        for number, option in enumerate(_leaves(hint, inner, inside, f"{name}.")):
            yield dataclasses.replace(option, short=name) if index == number == 0 else option


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


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


def field_text(kind: type[Any], name: str) -> str:
    """The docstring under a field, of the nearest class that has one."""
    return next((text for owner in kind.__mro__ if (text := _own_texts(owner).get(name))), "")


def _own_texts(kind: type[Any]) -> Mapping[str, str]:
    """Field -> the docstring under it, for the fields that the class itself declares."""
    path = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return _texts_of_file(path).get(kind.__qualname__, {}) if path else {}


@functools.cache
def _texts_of_file(path: str) -> Mapping[str, Mapping[str, str]]:
    """Qualified name of each class in a file -> field -> the docstring under it."""
    found: dict[str, dict[str, str]] = {}

    def visit(body: Sequence[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef):
                found[f"{prefix}{node.name}"] = dict(_texts_of_class(node.body))
                visit(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                visit(node.body, f"{prefix}{node.name}.<locals>.")

    visit(ast.parse(Path(path).read_bytes()).body, "")
    return found


def _texts_of_class(body: Sequence[ast.stmt]) -> Iterator[tuple[str, str]]:
    for field, after in itertools.pairwise(body):
        match field, after:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                yield name, " ".join(text.split())


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
    usage = f"usage: {prog} [--OPTION VALUE ...]"
    if not asked and len(options) > MOST_FIRST:
        described = ["", *_wrapped(about)] if about else []
        return "\n".join([usage, *described, *_first_screen(prog, groups, own)])
    if name in ("", ALL) or named:
        shown = named or groups
        return "\n".join([usage, *(line for group in shown for line in _lines_of_group(group)), "", SWITCHED_OFF])
    if option := next((one for one in options if name in (one.name, one.short)), None):
        return "\n".join(_lines(_flags(option), _whole(option), 8))
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
    flags = {name: f"--{name}{_placeholder(option)}" for name, option in first.items()}
    for name, option in first.items():
        default = _default_note(option) if option.default is not None else ""
        yield from _lines(flags[name], f"{_beginning(option.meaning)}{default}", _column(flags.values()))
    which = f"`{prog} --help GROUP` lists a group, `--help OPTION` says all about an option, `--help-all` lists all"
    yield from ("", *_wrapped(f"The groups of all options; {which}:"), "")
    width = max(len(group.name) for group in groups)
    for group in groups:
        yield from _wrapped(f"{group.name:<{width}} {len(group.options):>3}  {_beginning(group.about)}", 2, width + 8)


def _beginning(text: str) -> str:
    """What stands before the first details."""
    return re.split(r"[.;:] ", text)[0].rstrip(".")


def _lines_of_group(group: OptionGroup) -> Iterator[str]:
    yield from ("", *_wrapped(f"{group.name}: {group.about}"), "")
    for option in group.options:
        yield from _lines(_flags(option), _whole(option), _column(map(_flags, group.options)))


def _flags(option: Option) -> str:
    short = f"--{option.short}, " if option.short else ""
    return f"{short}--{option.name}{_placeholder(option)}"


def _placeholder(option: Option) -> str:
    return f" <{option.takes}>" if option.takes else ""


def _whole(option: Option) -> str:
    return f"{option.meaning}{_default_note(option)}".strip()


def _default_note(option: Option) -> str:
    if option.default is dataclasses.MISSING:
        return " (has to be given)"
    text = default_text(option.default)
    if option.default is False or not text:
        return ""
    return f" (default: {text if text.isprintable() else repr(text)})"


def _column(flags: Iterable[str]) -> int:
    """Where meanings begin."""
    return min(max(map(len, flags)) + 4, 32)


def _lines(flags: str, text: str, column: int = 0) -> list[str]:
    """An option: its meaning begins beside its flags, or below them if these are long."""
    if len(flags) > column - 4:
        return [f"  {flags}", *_wrapped(text, column, column)]
    return _wrapped(f"{flags:<{column - 2}}{text}", 2, column)


def _wrapped(text: str, first: int = 0, others: int = 0) -> list[str]:
    width = min(max(shutil.get_terminal_size().columns, 60), 110)
    return textwrap.wrap(
        text,
        width,
        initial_indent=" " * first,
        subsequent_indent=" " * others,
        break_on_hyphens=False,
        break_long_words=False,
    )
