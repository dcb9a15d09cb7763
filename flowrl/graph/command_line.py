"""Command-line options of a configuration dataclass: tyro parses them; each mistake becomes one sentence.

An option whose value is a mapping takes `--zero.deepspeed zero_optimization.overlap_comm=true wall=3`: dots in a name
separate the names of nested mappings, and a value is read as JSON if it is valid JSON, else as text.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import io
import itertools
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from flowrl.errors import ConfigError
from flowrl.graph.option_help import asked_for_help, help_text, option_groups
from flowrl.graph.option_types import compose_config, is_composed, options_of

METAVAR = "NAME=VALUE"


def parse_mapping(texts: Sequence[str]) -> dict[str, Any]:
    """The mapping of `NAME=VALUE` texts. Raises ConfigError for a text that is not one, and for a name given twice."""
    found: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        path = name.split(".")
        if not equals or not all(path):
            raise ConfigError(f"{text!r} is not NAME=VALUE, such as zero_optimization.overlap_comm=true")
        within = found
        for part in path[:-1]:
            within = within.setdefault(part, {})
            if not isinstance(within, dict):
                raise ConfigError(f"{name} is given as a value and as a block of values; keep one of them")
        if path[-1] in within:
            raise ConfigError(f"{name} is given twice; keep one")
        try:
            within[path[-1]] = json.loads(value)
        except ValueError:
            within[path[-1]] = value
        except RecursionError:
            raise ConfigError(f"{value[:20]}… has lists or mappings that are nested too deeply") from None
    return found


def mapping_texts(mapping: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """The inverse of `parse_mapping`."""
    for name, value in mapping.items():
        if isinstance(value, Mapping) and value:
            yield from mapping_texts(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}={value if isinstance(value, str) else json.dumps(value)}"


def _tyro_rules() -> Any:
    """tyro's registry with a rule for fields of the type `Mapping[str, Any]`, and one for configurations with parts."""
    import tyro
    from tyro.constructors import (
        ConstructorRegistry,
        PrimitiveConstructorSpec,
        StructConstructorSpec,
        StructFieldSpec,
    )

    rules = ConstructorRegistry()

    def make_mapping(texts: list[str]) -> dict[str, Any]:
        try:
            return parse_mapping(texts)
        except ConfigError as problem:
            raise ValueError(str(problem)) from None  # tyro adds the name of the option

    @rules.primitive_rule
    def describe_mapping(info: Any) -> Any:
        if info.type != Mapping[str, Any]:
            return None
        return PrimitiveConstructorSpec(
            nargs="*",
            metavar=f"[{METAVAR} [{METAVAR} ...]]",
            instance_from_str=make_mapping,
            is_instance=lambda value: isinstance(value, Mapping),
            str_from_instance=lambda value: list(mapping_texts(value)),
        )

    @rules.struct_rule
    def describe_config(info: Any) -> Any:
        """A configuration that has parts is one dataclass with the options of all of them."""
        if not is_composed(info.type):
            return None
        given = info.default if isinstance(info.default, info.type) else None
        fields = []
        for one in options_of(info.type).values():
            default = one.default if given is None else one.value_in(given)
            default = tyro.MISSING if default is dataclasses.MISSING else default
            fields.append(StructFieldSpec(one.name, one.hint, default))
        return StructConstructorSpec(lambda **values: compose_config(info.type, values), tuple(fields))

    return rules


REWORDED = (
    (r"Error parsing (\S+): invalid literal for int\(\) with base 10: (.*)", "{0} is {1}; it needs an integer"),
    (r"Error parsing (\S+): could not convert string to float: (.*)", "{0} is {1}; it needs a number"),
    (
        r"Error parsing (\S+): no type matching \{?None\}?\|INT could be instantiated from \[(.*)\]",
        "{0} is {1}; it needs an integer, or None",
    ),
    (
        r"Error parsing (\S+): no type matching \{?None\}?\|FLOAT could be instantiated from \[(.*)\]",
        "{0} is {1}; it needs a number, or None",
    ),
    (r"invalid choice (.*) for argument '(\S+)'\. Expected one of \((.*)\)", "{1} is {0}; it needs one of {2}"),
    (r"Missing value for argument '(\S+)'\. Expected .*", "{0} has no value; write one after it"),
    (r"Error parsing (\S+): (.* is (?:not NAME=VALUE|given twice|given as a value).*)", "{0}: {1}"),
    (r"Unrecognized options: (.*)", "{0} belongs to no option; write --field value"),
)
"""(tyro's message, our replacement), as regular expression and format string."""
MOST_SUGGESTED = 3
OPTIONS = "options"
"""The group of what a command's own dataclass has outside of blocks."""

TABLES = ("options_of_others.txt", "options_of_verl.txt")
"""The tables of docs/options.md and docs/from-verl.md, which are linked here: a row has the options of others in its
first columns, then flowrl's, then how they compare."""


@functools.cache
def options_of_others() -> Mapping[str, str]:
    """An option of OpenRLHF, TRL, transformers or verl, with hyphens -> what the documents have in its place."""
    found: dict[str, str] = {}
    for file in TABLES:
        for line in (Path(__file__).parent.parent / file).read_text(encoding="utf-8").splitlines():
            cells = [cell.strip() for cell in line.strip("|").split(" | ")]
            if not line.startswith("| ") or len(cells) not in (2, 4):
                continue
            theirs, place = (cells[:2], cells[2]) if len(cells) == 4 else (cells[:1], cells[1])
            told = re.sub(r" ?\(?\[[^\]]*\]\([^)]*\)\)?", "", place if place != "–" else cells[3]).replace("`", "")
            for name in re.findall(r"`([^`]+)`", " ".join(theirs)):
                found.setdefault(_option_key(name.partition("=")[0]), told)
    return found


def _option_key(name: str) -> str:
    return name.removeprefix("--").replace("_", "-").lower()


def parse_options(
    config_type: type[Any], args: Sequence[str], *, prog: str, others: Iterable[str] = (), default: Any = None
) -> Any:
    """An instance of `config_type` with the values of `default` or its own defaults, and `--field value` overrides.

    A nested dataclass may be given by the value of its first field: `--policy tiny`. Raises
    ConfigError for unknown options and invalid values; `--help` prints and exits. `others` are options
    defined elsewhere; they are used for suggestions only.
    """
    if (asked := asked_for_help(args)) is not None:
        print(help_text(prog, asked, option_groups(config_type, default, own=OPTIONS), own=OPTIONS))
        sys.stdout.flush()  # a closed pipe is noticed here
        raise SystemExit(0)
    import tyro

    known = option_names(config_type)
    spelled = []
    for arg in args:
        name, equals, value = arg[2:].partition("=")
        leaf = known.get(name.replace("_", "-"))
        if arg.startswith("--") and leaf is None:
            hint = _nearest_option(name, (*known, *others), prog)
            raise ConfigError(f"there is no option --{name}; {hint}")
        spelled.append(f"--{leaf}{equals}{value}" if arg.startswith("--") else arg)
    stderr = io.StringIO()
    defaults = {} if default is None else {"default": default}
    try:
        with contextlib.redirect_stderr(stderr):
            return tyro.cli(config_type, args=spelled, prog=prog, registry=_tyro_rules(), **defaults)
    except SystemExit:
        raise ConfigError(f"{_reword_mistake(stderr.getvalue())}; {prog} --help-all lists the options") from None


def option_names(config_type: type[Any], prefix: str = "") -> dict[str, str]:
    """Every option as spelled on the command line, with the leaf field it sets."""
    found: dict[str, str] = {}
    for one in options_of(config_type).values():
        name = f"{prefix}{one.name}".replace("_", "-")
        found[name] = name
        for kind in (one.hint, *get_args(one.hint)):
            if isinstance(kind, type) and dataclasses.is_dataclass(kind):
                inner = option_names(kind, f"{name}.")
                found |= {**inner, name: next(iter(inner.values()), name)}
        if one.hint is bool:
            negative = f"{prefix}no-{one.name}".replace("_", "-")
            found[negative] = negative
    return found


def _nearest_option(name: str, candidates: Sequence[str], prog: str) -> str:
    if (theirs := options_of_others().get(_option_key(name))) is not None:
        return f"that option of another trainer is, in flowrl: {theirs} (docs/options.md)"
    spelled = name.replace("_", "-")
    longer = [one for one in dict.fromkeys(candidates) if one.endswith((f".{spelled}", f"-{spelled}"))]
    near = longer[:MOST_SUGGESTED] or difflib.get_close_matches(spelled, candidates, 1)
    if not near:
        return f"{prog} --help-all lists the options"
    *others, last = (f"--{one.replace('-', '_')}" for one in near)
    return f"did you mean {' or '.join(filter(None, (', '.join(others), last)))}?"


def _reword_mistake(box: str) -> str:
    """The first paragraph of tyro's text, whose frame is drawn in Unicode, or is absent on plain terminals. The most
    common messages of tyro and Python are reworded to say what was found and what was needed."""
    framed = box.startswith("╭")
    lines = [line.strip("│ ") for line in box.splitlines() if line[:1] not in ("╭", "╰")]
    rules = [index for index, line in enumerate(lines) if line and set(line) <= {"─", "-"}]
    start = 0 if framed or not rules else rules[0] + 1
    paragraph = itertools.takewhile(lambda line: line and set(line) - {"─", "-"}, lines[start:])
    sentence = " ".join(paragraph).rstrip(".") or box.strip()
    for pattern, words in REWORDED:
        if match := re.fullmatch(pattern, sentence):
            return words.format(*match.groups())
    return sentence
