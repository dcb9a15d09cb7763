"""Options whose value is a mapping, on the command line: `--zero.deepspeed zero_optimization.overlap_comm=true wall=3`.

Dots in a name separate the names of nested mappings. A value is read as JSON if it is valid JSON, else as text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from flowrl.errors import ConfigError

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
        within[path[-1]] = _value(value)
    return found


def mapping_texts(mapping: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """The inverse of `parse_mapping`."""
    for name, value in mapping.items():
        if isinstance(value, Mapping) and value:
            yield from mapping_texts(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}={value if isinstance(value, str) else json.dumps(value)}"


def registry() -> Any:
    """tyro's registry with a rule for fields of the type `Mapping[str, Any]`."""
    from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec

    rules = ConstructorRegistry()

    @rules.primitive_rule
    def mapping_rule(info: Any) -> Any:
        if info.type != Mapping[str, Any]:
            return None
        return PrimitiveConstructorSpec(
            nargs="*",
            metavar=f"[{METAVAR} [{METAVAR} ...]]",
            instance_from_str=_parsed,
            is_instance=lambda value: isinstance(value, Mapping),
            str_from_instance=lambda value: list(mapping_texts(value)),
        )

    return rules


def _parsed(texts: list[str]) -> dict[str, Any]:
    try:
        return parse_mapping(texts)
    except ConfigError as problem:
        raise ValueError(str(problem)) from None  # tyro adds the name of the option


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
    except RecursionError:
        raise ConfigError(f"{text[:20]}… has lists or mappings that are nested too deeply") from None
