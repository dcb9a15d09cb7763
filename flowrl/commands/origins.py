"""Where the values of options that depend on the model or the machine come from: given, derived, or `tiny`'s own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flowrl.graph.command_line import option_names
from flowrl.graph.load import GraphFile
from flowrl.graph.option_types import has_option, value_of
from flowrl.models.policy import CHARACTER_MODELS
from flowrl.options.size_defaults import BY_SIZE, ENGINE_DTYPE, SizeDefaults
from flowrl.runtime.telemetry.standard_streams import print_text

Origins = Mapping[str, tuple[Any, str]]
GIVEN = "given"


def values_given(args: Sequence[str], config_type: type[Any]) -> dict[str, Any]:
    """Option -> the text after it, for the options on the command line: "lora.rank" -> "8". Nothing is checked here."""
    leaves, found, name = option_names(config_type), dict[str, Any](), ""
    for arg in args:
        if arg.startswith("--"):
            spelled, equals, value = arg[2:].partition("=")
            name = leaves.get(spelled.replace("_", "-"), "").replace("-", "_")
            found |= {name: value if equals else None} if name else {}
        elif name and found[name] is None:
            found[name] = arg
    return found


def find_origins(file: GraphFile, cfg: Any, fitting: SizeDefaults, given: Mapping[str, Any]) -> Origins:
    """Every option of the graph that depends on model or machine -> (its value, where the value comes from)."""
    model = _leaf_value(cfg, "policy")
    if not isinstance(model, str) or getattr(cfg, "learning", None) is None:
        return {}
    own = f"{model}'s own" if model in CHARACTER_MODELS else f"of {file.shown}"
    found = {}
    for name in BY_SIZE:
        value = _leaf_value(cfg, name)
        if value is not None:
            found[name] = (
                value,
                GIVEN if name in given else fitting.origin_of(name) if name in fitting.values else own,
            )
        if name == "dtype" and (sampled := _leaf_value(cfg, ENGINE_DTYPE)) is not None:
            left = "what the model is stored in" if sampled == "auto" else f"of {file.shown}"
            told = fitting.origin_of(ENGINE_DTYPE) if ENGINE_DTYPE in fitting.values else left
            found[ENGINE_DTYPE] = (sampled, GIVEN if ENGINE_DTYPE in given else told)
    return found


def print_origins(found: Origins) -> None:
    """A line for each option: name, value, where it comes from."""
    if not found:
        return
    width = max(map(len, found), default=0)
    shown = {name: _value_text(value) for name, (value, _) in found.items()}
    column = max(map(len, shown.values()), default=0)
    print_text("\noptions that depend on the model and the machine:")
    print_text(*(f"  {name:<{width}}  {shown[name]:<{column}}  {why}" for name, (_, why) in found.items()), sep="\n")


def derived_text(found: Origins) -> str:
    """What was derived from the model's size, in one line; empty if nothing was."""
    derived = {name: (value, why) for name, (value, why) in found.items() if why.startswith("default for")}
    if not derived:
        return ""
    why = next(why for _, why in derived.values()).replace("default", "defaults", 1)
    return f"{why}: {', '.join(f'{name} {_value_text(value)}' for name, (value, _) in derived.items())}"


def _value_text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _leaf_value(cfg: Any, name: str) -> Any:
    return value_of(cfg, name) if has_option(cfg, name) else None
