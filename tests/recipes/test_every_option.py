"""Every option of every shipped graph changes what is built, or is refused in a sentence: none is taken and ignored."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import pytest

from flowrl.errors import FlowrlError
from flowrl.graph.load import load_file
from flowrl.graph.option_types import changed_config, options_of
from flowrl.training.advantages import Estimate
from flowrl.training.loss.policy_objective import PolicyObjective
from flowrl.training.settings import LoRA, Schedule, ZeroSettings

GRAPHS = sorted(path.stem for path in (Path(__file__).parents[2] / "graphs").glob("*.py"))
AGENTS = {"agent_tools", "agent_game", "step_groups", "agent_openai", "self_play"}
Values = Mapping[str, Any]

MODEL = {"reward_model.model": "a/reward/model"}
STEPS = {**MODEL, "step_separator": "\\n"}
LOSS_KL = {"objective.kl_coef": 0.1}
NOTHING_HELD_OUT: Values = {"evaluate": 0}
ONLINE: tuple[Values, ...] = ({}, NOTHING_HELD_OUT, LOSS_KL, {"lora.rank": 4, **LOSS_KL})
SCORED = (*ONLINE, STEPS)
WAYS: dict[str, tuple[Values, ...]] = {
    "agent_openai": (*ONLINE, {"agent": "verifiers/reverse_text"}, {"agent": "outside"}),
    "agent_tools": (*ONLINE, {"evaluate_task": ("set=arithmetic",)}),
    "self_play": (*ONLINE, {"opponent_every": 0}, {"opponent_every": 1}),
    "agent_game": ONLINE,
    "step_groups": ONLINE,
    "distill": (
        *ONLINE,
        {"beta": 0.5, "lmbda": 0.5},
        {"beta": 0.0, "lmbda": 0.0},
        {"beta": 0.0, "lmbda": 0.0, "evaluate": 0},
    ),
    "dpo": ({}, NOTHING_HELD_OUT, {"held_out": 0}),
    "kto": ({}, NOTHING_HELD_OUT, {"held_out": 0}),
    "sft": ({}, {"evaluate": 8, "held_out": 8}, {"pretrain_mode": "split"}),
    "iterative_dpo": ({}, NOTHING_HELD_OUT, {"reference.weights": "initial"}, STEPS),
    "ppo": (*SCORED, {"kl_coef": 0.0}),
    "rloo": (*SCORED, {"kl_coef": 0.0}),
    "reinforce_pp": (*SCORED, {"baseline": True}),
    "grpo": (*SCORED, {"reward_kl_coef": 0.1}),
    **dict.fromkeys(("dapo", "raft", "custom_node"), SCORED),
    **{name: ({}, STEPS) for name in ("generate", "pairs", "score", "evaluate")},
    "process_reward_model": ({}, {"held_out": 0}),
    "judge": (*ONLINE, {"rubric": "default", "way": "pointwise"}),
    "teachers": SCORED,
}
"""How a graph is used: in each of these ways every option is tried. Others are used as they are."""

VALUES: Values = {
    "task.reward": "rules.py:short",
    "task.reward_weights": "format=0.2",
    "task.template": "Q: {prompt}",
    "task.reasoning": "inline",
    "policy": "smollm2",
    "reward_away_s": 7.0,
    "lora.sync": "merged",
    "lora.quantize": "int8",
    "zero.stage": 1,
    "critic_zero.stage": 1,
    "objective.kind": "gspo",
    "objective.old": "behavior",
    "objective.dual_clip": 3.0,
    "advantage": "dr_grpo",
    "objective.sapo_temperatures": (1.5, 2.0),
    "objective.vespo_powers": (1.0, 2.0),
    "objective.vespo_decays": (1.0, 2.0),
    "objective.cov_share": 0.1,
    "objective.cov_range": (0.5, 4.0),
    "objective.ratio_penalty": 0.5,
    "objective.correction": "icepop",
    "objective.correction_range": (0.5, 1.5),
    "objective.correction_level": "sequence",
    "objective.aggregation": "sequence",
    "objective.kl_estimator": "k3_unbiased",
    "mean_between": (0.1, 0.9),
    "reward_clip": (-1.0, 1.0),
    "whiten": "mean",
    "dtype": "bfloat16",
    "label_smoothing": 0.25,
    "evaluate_task": ("other=arithmetic",),
    "evaluate_also": ("arithmetic:max_value=9",),
    "time_share": ("trainer", "generator"),
    "prefer": "rules.py:better",
}
"""Option -> the value it gets, where one chosen by its type is not valid, or is that of the default."""
BY_NAME: Values = {"cpus": 3.0, "gpus": 2.0, "dtype": "bfloat16", "replicas": 3, "sequence_parallel_kind": "ring"}
"""The same for the last part of a name: roles derive such values from each other."""
OTHERS: dict[tuple[str, str], Any] = {
    ("ppo", "time_share"): ("actor", "generator"),
    ("ppo", "critic_trainer.sequence_parallel_size"): 3,
    ("ppo", "critic_trainer.tensor_parallel_size"): 3,
    ("ppo", "reward_model.normalise"): False,
    ("generate", "time_share"): ("generator", "reward"),
    ("evaluate", "time_share"): ("generator", "reward"),
    ("pairs", "time_share"): ("generator", "reward"),
}

VESPO: Values = {"objective.correction": None, "objective.old": "behavior", "objective.kind": "vespo"}
COMPANIONS: Mapping[str, Values] = {
    "task.reasoning": {"task.name": "questions.jsonl"},  # rows that a task makes have none
    "lora": {"lora.rank": 4},
    "lora.quantize": {"lora.rank": 4, "lora.sync": "merged"},
    "zero.nvme_path": {"zero.offload": "all"},
    "zero.momentum": {"zero.optimizer": "muon"},
    "zero.muon_lr_factor": {"zero.optimizer": "muon"},
    "critic_zero.nvme_path": {"critic_zero.offload": "all"},
    "critic_zero.momentum": {"critic_zero.optimizer": "muon"},
    "critic_zero.muon_lr_factor": {"critic_zero.optimizer": "muon"},
    "schedule.floor": {"schedule.decay": "linear"},
    "critic_schedule.floor": {"critic_schedule.decay": "linear"},
    "curriculum": {"curriculum.chosen": 0.5},
    "reference": LOSS_KL,
    "reference.mixup": {**LOSS_KL, "reference.refresh_every": 2},
    "reward_model": MODEL,
    "step_separator": MODEL,
    "of_steps": STEPS,
    "objective.kl_estimator": LOSS_KL,
    "objective.old": {"objective.correction": None},
    "objective.length": {"objective.aggregation": "constant"},
    "objective.dual_clip": {"objective.kind": "ppo"},
    "objective.clip_low": {"objective.kind": "ppo"},
    "objective.clip_high": {"objective.kind": "ppo"},
    "pass_k": {"advantage": "pass_at_k", "pass_k": 2},
    "pass_at": {"advantage": "pass_at_k", "pass_k": 2},
    "objective.sapo_temperatures": {"objective.kind": "sapo"},
    "objective.vespo_powers": VESPO,
    "objective.vespo_decays": VESPO,
    "objective.cov_share": {"objective.kind": "kl_cov"},
    "objective.cov_range": {"objective.kind": "clip_cov"},
    "objective.ratio_penalty": {"objective.kind": "kl_cov"},
    "objective.correction_range": {"objective.correction": "tis"},
    "objective.correction_level": {"objective.correction": "tis"},
    "max_filtered_per_step": {"dynamic_sampling": True},
    "reward_kl": {"reward_kl_coef": 0.1},
    "kl_before_baseline": {"reward_kl_coef": 0.1},
    "kl_target": {"reward_kl_coef": 0.1},
    "overlong_factor": {"overlong_buffer": 4},
    "label_smoothing": {"kind": "cdpo", "label_smoothing": 0.1},
    "top_p": {"temperature": 0.5},
    "top_k": {"temperature": 0.5},
}
"""What an option needs to have an effect; that of a block is for all of its options."""
EVALUATED: Values = {"evaluate": 8}
ONE_SEAT: Values = {"opponent_every": 0}
UNCLIPPED: Values = {"objective.clip_high": None}
OF_ONE_GRAPH: Mapping[tuple[str, str], Values] = {
    ("dapo", "objective.sapo_temperatures"): {**UNCLIPPED, "objective.kind": "sapo"},
    ("dapo", "objective.vespo_powers"): {**UNCLIPPED, **VESPO},
    ("dapo", "objective.vespo_decays"): {**UNCLIPPED, **VESPO},
    ("dapo", "objective.cov_share"): {**UNCLIPPED, "objective.kind": "kl_cov"},
    ("dapo", "objective.ratio_penalty"): {**UNCLIPPED, "objective.kind": "kl_cov"},
    ("planner_executor", "objective.kl_coef"): {"lora.rank": 2},
    ("planner_executor", "objective.kl_estimator"): {"lora.rank": 2, "objective.kl_coef": 0.1},
    ("iterative_dpo", "reference"): {"reference.weights": "initial"},
    ("iterative_dpo", "reference.mixup"): {"reference.weights": "initial", "reference.refresh_every": 2},
    ("distill", "lmbda"): {"beta": 0.5},
    ("distill", "max_answer_tokens"): {"beta": 0.5, "lmbda": 0.5},
    ("generate", "best"): {"group_size": 4},
    ("generate", "time_share"): MODEL,
    ("evaluate", "time_share"): MODEL,
    ("pairs", "time_share"): MODEL,
    ("sft", "judge_every"): {"held_out": 8},
    **{("self_play", name): ONE_SEAT for name in ("dynamic_sampling", "mean_between", "normalise_rewards")},
    ("self_play", "max_filtered_per_step"): {**ONE_SEAT, "dynamic_sampling": True},
    **{
        ("generate", name): {"score": True}
        for name in ("task.reward", "task.reward_weights", "reward_timeout_s", "reward_concurrency", "reward_away_s")
    },
    **{
        (graph, name): EVALUATED
        for graph in ("sft", "custom_node")
        for name in (
            *("generator", "engine", "stop_strings", "probe_tolerance", "reward_timeout_s", "answer_tokens"),
            *("evaluate_samples", "evaluate_every", "evaluate_also", "evaluate_max_prompt_tokens", "time_share"),
        )
    },
}
"""The same in one graph."""
REFUSED: Mapping[str, set[str]] = {
    "zero.dtype": set(GRAPHS),  # --dtype says it for every model
    "critic_zero.dtype": {"ppo"},
    "task.reward": AGENTS,  # an environment or an agent scores
    "reward_timeout_s": AGENTS,
    "evaluate_max_prompt_tokens": AGENTS,  # --limits.tokens bounds all of an episode
    "evaluate_also": AGENTS - {"agent_openai"},  # an environment has its own questions
    "task.template": AGENTS - {"agent_openai"},
    "task.reasoning": AGENTS - {"agent_openai"},
    "evaluate_task": {"agent_game", "step_groups", "self_play"},  # games have no questions; other environments do
    **{
        f"reference.{name}": {"planner_executor"}  # it has none
        for name in ("gpus", "cpus", "dtype", "token_budget", "refresh_every", "mixup")
    },
    "credit": {"step_groups"},  # it compares replies in its own way
    "time_share": {"score", "process_reward_model", "reward_model"},  # one node has devices
    "reference.replicas": {"dpo", "kto", "planner_executor"},  # one process computes its logprobs once
    "on_limit": {"iterative_dpo"},  # one answer of a pair would be masked
    "overlong_filter": {"iterative_dpo"},
}
"""Option -> the graphs in which it never has an effect, and says so."""
SAID_ANYWAY: Mapping[str, set[str]] = {"generate": {"score"}}
"""Options that follow from others in one of the uses: with a reward model responses are scored."""


# What an object has, as far as it matters

IDLE: Mapping[type, Any] = {
    LoRA: lambda one: set() if one.rank else {"alpha", "rank_stabilized", "targets", "sync", "quantize"},
    Schedule: lambda one: {"floor"} if one.decay == "constant" else set(),
    ZeroSettings: lambda one: {
        "adamw": {"momentum", "muon_lr_factor"},
        "sgd": {"momentum", "muon_lr_factor", "betas", "eps"},
    }.get(one.optimizer, set()),
    Estimate: lambda one: set() if one.kl_coef else {"kl_estimator", "kl_before_baseline"},
    PolicyObjective: lambda one: (
        (set() if one.kl_coef else {"kl_estimator"})
        | (set() if one.correction else {"correction_range"})
        | (set() if one.correction == "tis" else {"correction_level"})
    ),
}
"""The fields that mean nothing beside the values of the others."""
PLAIN = (str, int, float, bool, bytes, type(None))


def differs(one: Any, other: Any, seen: set[tuple[int, int]]) -> bool:
    """Whether two objects that are built have different settings."""
    if one is other:
        return False
    if type(one) is not type(other):
        return True
    if isinstance(one, PLAIN):
        return bool(one != other)
    if isinstance(one, Mapping):
        return one.keys() != other.keys() or any(differs(one[key], other[key], seen) for key in one)
    if isinstance(one, tuple | list):
        return len(one) != len(other) or any(differs(*both, seen) for both in zip(one, other, strict=True))
    if callable(one) and hasattr(one, "__qualname__"):
        return bool(one.__qualname__ != other.__qualname__)
    if not type(one).__module__.startswith("flowrl") or (id(one), id(other)) in seen:
        return False
    seen.add((id(one), id(other)))
    idle = IDLE.get(type(one), lambda _: set())(one)
    mine, theirs = ({name: value for name, value in vars(each).items() if name not in idle} for each in (one, other))
    return differs(mine, theirs, seen)


# Options and their values


def leaves(config: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(name, type, value) of every option."""
    for one in options_of(type(config)).values():
        value = one.value_in(config)
        if dataclasses.is_dataclass(value):
            yield from leaves(value, f"{prefix}{one.name}.")
        else:
            yield f"{prefix}{one.name}", one.hint, value


def other_value(graph: str, name: str, kind: Any, value: Any) -> Any:
    """A valid value that is not the one it has."""
    last = name.rpartition(".")[2]
    for known, key in ((OTHERS, (graph, name)), (VALUES, name), (BY_NAME, last)):
        if key in known and known[key] != value:  # type: ignore[index]
            return known[key]  # type: ignore[index]
    return by_type(kind, value)


def by_type(kind: Any, value: Any) -> Any:
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Literal:
        return next(choice for choice in inner if choice != value)
    if origin in (Union, types.UnionType):
        return by_type(next(one for one in inner if one is not type(None)), value)
    if origin is tuple:
        parts = inner[:1] if inner[1:] == (...,) else inner
        return tuple(by_type(one, part) for one, part in zip(parts, (value or [None] * len(parts)), strict=False)) or (
            by_type(parts[0], None),
        )
    if origin is not None and issubclass(origin, Mapping):
        return {"wall_clock_breakdown": True}
    if kind is bool:
        return not value
    if kind is int:
        return (value or 0) + 1
    return f"other{value or ''}" if kind is str else 0.25 if value == 0.5 else 0.5


@dataclasses.dataclass(frozen=True)
class Tried:
    """What became of the options of a graph that is used in one way."""

    ignored: list[str]
    refused: dict[str, str]


def tried(graph: str, way: Values) -> Tried:
    file = load_file(graph)
    config = changed_config(file.config_type(), way)
    built = file.build(config)
    ignored: list[str] = []
    refused: dict[str, str] = {}
    for name, kind, value in leaves(config):
        if name in way:
            continue
        try:
            found = file.build(changed_config(config, {name: other_value(graph, name, kind, value)}))
        except FlowrlError as error:
            refused[name] = str(error)
            continue
        if not differs(built, found, set()):
            ignored.append(name)
    return Tried(ignored, refused)


def uses(graph: str) -> tuple[Values, ...]:
    return WAYS.get(graph, ({},))


tried_as = functools.cache(lambda graph, number: tried(graph, uses(graph)[number]))


@pytest.mark.parametrize(("graph", "number"), [(graph, n) for graph in GRAPHS for n in range(len(uses(graph)))])
def test_no_option_is_taken_and_ignored(graph: str, number: int) -> None:
    found: Tried = tried_as(graph, number)
    ignored = set(found.ignored) - (SAID_ANYWAY.get(graph, set()) if number else set())
    assert ignored == set(), f"nothing differs with any of these, where {graph} is used with {uses(graph)[number]}"
    for name, sentence in found.refused.items():
        assert "\n" not in sentence, name


def companions(graph: str, name: str) -> Values | None:
    block = name.partition(".")[0]
    keys = [(graph, name), (graph, block), name, block]
    return next((found[key] for key in keys for found in (OF_ONE_GRAPH, COMPANIONS) if key in found), None)  # type: ignore[index]


@pytest.mark.parametrize("graph", GRAPHS)
def test_what_is_refused_by_itself_has_an_effect_with_what_it_needs(graph: str) -> None:
    file = load_file(graph)
    plain = file.config_type()
    known = {name: (kind, value) for name, kind, value in leaves(plain)}
    for name, sentence in tried_as(graph, 0).refused.items():
        if graph in REFUSED.get(name, ()):
            continue
        needed = companions(graph, name)
        assert needed is not None, f"{graph} refuses {name} by itself ({sentence}); say here what it needs"
        config = changed_config(plain, needed)
        found = changed_config(config, {name: other_value(graph, name, *known[name])})
        assert differs(file.build(config), file.build(found), set()), f"{graph}: {name} changes nothing with {needed}"


@pytest.mark.parametrize("graph", GRAPHS)
def test_options_said_to_have_no_effect_have_none(graph: str) -> None:
    refused = tried_as(graph, 0).refused
    for name, graphs in REFUSED.items():
        if graph in graphs and name in dict.fromkeys(one for one, *_ in leaves(load_file(graph).config_type())):
            assert name in refused, f"{graph} takes {name}"


@pytest.mark.parametrize("graph", GRAPHS)
def test_two_graphs_of_the_same_options_do_not_differ(graph: str) -> None:
    """Else any option would seem to have an effect."""
    file = load_file(graph)
    assert not differs(file.build(file.config_type()), file.build(file.config_type()), set())


def test_options_that_mean_nothing_are_found() -> None:
    """The settings of a block that is off are no effect."""
    assert not differs(LoRA(), LoRA(alpha=3), set()) and differs(LoRA(rank=2), LoRA(rank=2, alpha=3), set())
    assert not differs(Estimate(), Estimate(kl_estimator="k2"), set()) and differs(Estimate(), Estimate("rloo"), set())
    assert differs((1, [Schedule()]), (1, [Schedule(decay="linear")]), set())
