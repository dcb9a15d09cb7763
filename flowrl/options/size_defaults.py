"""The defaults of a graph's options for the model that it trains.

A default that flowrl declares (in a block or a shipped graph) is meant for `tiny`. For every other model, the defaults
that depend on the model are replaced from the table of `flowrl.models.model_size`. An option that the user gives
takes precedence, and so does a default in the user's own graph file.

On a CPU `engine.dtype` is replaced as well, for every model. vLLM's own choice, the dtype that the model is stored in,
may be one that the processor computes ten times slower, or another one than the trainer's. A micro-batch is as small
there as the longest sample allows: activations are in the memory that all processes share, and a core reaches its speed
with a few hundred tokens.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from inspect import get_annotations
from pathlib import Path
from types import MappingProxyType
from typing import Any

from flowrl.graph.option_types import ConfigOption, options_of
from flowrl.models.model_size import (
    ADAPTER_FACTOR,
    CRITIC_FACTOR,
    EVALUATED,
    GROUP_SIZE,
    MICRO_BATCH,
    Learning,
    SizeRow,
    model_context,
    model_size,
    row_for,
)
from flowrl.models.policy import CHARACTER_MODELS, Policy

BY_SIZE = (
    "lr",
    "critic_lr",
    "dtype",
    "max_tokens",
    "max_prompt_tokens",
    "max_length",
    "answer_tokens",
    "limits.tokens",
    "token_budget",
    "group_size",
    "groups_per_step",
    "evaluate",
    "overlong_buffer",
)
"""The options of all graphs whose defaults depend on the model."""
ENGINE_DTYPE = "engine.dtype"
TOKEN_BUDGET = "token_budget"
SLOW = "this CPU is slow in bfloat16"
RESUMED = "of the run that is resumed"
OURS = Path(__file__).resolve().parents[1]
SHIPPED = (OURS / "recipes").resolve()


@dataclass(frozen=True)
class SizeDefaults:
    """Option -> default for a model of this size, and why."""

    values: Mapping[str, Any]
    why: str
    others: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Option -> why, for options with another reason than `why`."""

    def origin_of(self, name: str) -> str:
        """Where the value of an option comes from."""
        return self.others.get(name, self.why)


def size_defaults(
    kind: type[Any],
    given: Mapping[str, Any],
    *,
    slow_bfloat16: bool | None = None,
    resumed: Mapping[str, Any] = MappingProxyType({}),
) -> SizeDefaults:
    """The defaults of the configuration `kind` for the model in `given`; those by size not for the `tiny` family.

    `given` has the options that a user has set, by name ("lora.rank"); only some of their values are read.
    `slow_bfloat16`: whether the CPU that the run is on is slow in bfloat16; None: the run may use other devices.
    `resumed`: the options of the run that is resumed; a default that depends on the machine stays as in that run.
    """
    fields = options_of(kind)
    learning: Learning | None = getattr(kind, "learning", None)
    model = given.get("policy", getattr(fields.get("policy"), "default", None))
    found, others, why = dict[str, Any](), dict[str, str](), ""
    if learning is not None and isinstance(model, str) and model and model not in CHARACTER_MODELS:
        policy = Policy(model)
        size = model_size(policy)
        least = MICRO_BATCH if slow_bfloat16 is None else 0
        row = row_for(size.parameters)
        found, why = dict(_size_values(row, learning, given, model_context(policy), fields, least)), str(size)
        if least == 0 and TOKEN_BUDGET in found:
            found[TOKEN_BUDGET] = resumed.get(TOKEN_BUDGET, found[TOKEN_BUDGET])
            others[TOKEN_BUDGET] = RESUMED if TOKEN_BUDGET in resumed else f"default for {why} on a CPU"
    if "dtype" in found and "dtype" in resumed:
        found["dtype"], others["dtype"] = resumed["dtype"], RESUMED
    elif slow_bfloat16 and "dtype" in found:
        found["dtype"], others["dtype"] = "float32", f"default for {why} on a CPU that is slow in bfloat16"
    if "engine" in fields and _answers_prompts(learning, given, fields):
        trained = given.get("dtype", found.get("dtype", fields["dtype"].default)) if "dtype" in fields else None
        if (sampled := _sampled_dtype(trained, given, slow_bfloat16, resumed)) is not None:
            found[ENGINE_DTYPE], others[ENGINE_DTYPE] = sampled
    wanted = {name: value for name, value in found.items() if name not in given and _is_ours(kind, name)}
    return SizeDefaults(wanted, f"default for {why}" if why else "", others)


def _sampled_dtype(
    trained: str | None, given: Mapping[str, Any], slow_bfloat16: bool | None, resumed: Mapping[str, Any]
) -> tuple[str, str] | None:
    """(the engine's dtype, why) beside a trainer in the dtype `trained`, None without a trainer; None: vLLM's choice.

    A quantized model is left to vLLM, because its methods need dtypes of their own.
    """
    before = resumed.get("engine")
    if isinstance(before, Mapping) and "dtype" in before:
        return before["dtype"], RESUMED
    if slow_bfloat16 is None or given.get("engine.quantization"):
        return None
    if slow_bfloat16 and trained != "float32":
        return "float32", SLOW
    return None if trained is None else (trained, "the trainer's, on a CPU")


def _size_values(
    row: SizeRow,
    learning: Learning,
    given: Mapping[str, Any],
    context: int | None,
    fields: Mapping[str, ConfigOption],
    micro_batch: int,
) -> Iterator[tuple[str, Any]]:
    """The defaults by size. `micro_batch` is the least number of tokens of a micro-batch."""
    rate = row.lr(learning) * (ADAPTER_FACTOR if str(given.get("lora.rank", 0)) != "0" else 1.0)
    yield "lr", float(f"{rate:.3g}")
    yield "critic_lr", float(f"{CRITIC_FACTOR * row.lr(learning):.3g}")
    if str(given.get("zero.stage", "")) != "0":
        yield "dtype", "bfloat16"
    most = 3 * (context or sys.maxsize) // 8
    response, prompt = min(row.response, most), min(row.prompt, most)
    if "limits" in fields:
        yield "limits.tokens", min(4 * row.response, context or sys.maxsize)
        yield TOKEN_BUDGET, max(micro_batch, 4 * row.response)
        response = min(512, response)
    elif learning == "samples":
        if getattr(fields.get("max_prompt_tokens"), "default", None) is not None:
            yield "max_prompt_tokens", prompt
        longest = _number_given(given, "max_tokens", response) + _number_given(given, "max_prompt_tokens", prompt)
        yield TOKEN_BUDGET, max(micro_batch, longest)
    answers = _answers_prompts(learning, given, fields)
    if learning == "rows":
        if answers:
            yield "answer_tokens", response
        response += prompt
    if answers or learning == "rows":
        yield "max_tokens", response
    yield "max_length", response + prompt
    if getattr(fields.get("overlong_buffer"), "default", 0):
        yield "overlong_buffer", _number_given(given, "max_tokens", response) // 8
    if "groups_per_step" in fields:
        yield "group_size", GROUP_SIZE
        yield "groups_per_step", row.groups
    if getattr(fields.get("evaluate"), "default", 0):
        yield "evaluate", EVALUATED


def _answers_prompts(learning: Learning | None, given: Mapping[str, Any], fields: Mapping[str, ConfigOption]) -> bool:
    """Whether the model answers prompts in a run: to train on its samples, or to be evaluated."""
    sampled = learning == "samples" and _number_given(given, "lmbda", 1) != 0
    evaluated = _number_given(given, "evaluate", getattr(fields.get("evaluate"), "default", 0)) != 0
    return sampled or evaluated or "evaluate_task" in given


def _number_given(given: Mapping[str, Any], name: str, default: int) -> int:
    """An option's value as the user has set it. A value that is no number is reported where options are read."""
    try:
        return int(str(given[name])) if name in given else default
    except ValueError:
        return default


def _is_ours(kind: type[Any], name: str) -> bool:
    """Whether the option's default is declared by flowrl, and not by a user's own graph file.

    A default that a user's file gives to a part of flowrl's counts as the user's if it is not the part's own.
    """
    one = options_of(kind).get(name.partition(".")[0])
    if one is None:
        return False
    if one.home is kind:
        return _is_of_flowrl(_declared_in(kind, one.path[0]))
    own = one.default == options_of(one.home)[one.name].default and _is_of_flowrl(_declared_in(one.home, one.path[-1]))
    return own or _is_of_flowrl(_declared_in(kind, one.path[0]))


def _declared_in(kind: type[Any], field: str) -> type[Any]:
    """The nearest class that declares the field."""
    return next(base for base in kind.__mro__ if field in get_annotations(base))


def _is_of_flowrl(home: type[Any]) -> bool:
    file = Path(getattr(sys.modules.get(home.__module__), "__file__", None) or "/").resolve()
    return file.is_relative_to(OURS) or file.parent == SHIPPED
