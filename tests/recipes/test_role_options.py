"""Sizes of roles and options of the engine: one word each, and the same in every graph that has the role."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest

from flowrl import Cluster, Graph, Machine, check
from flowrl.errors import ConfigError
from flowrl.graph.command_line import option_names
from flowrl.graph.load import load_file
from flowrl.nodes import Critic, Engine, Generator, Reference, RewardModel, Teacher, Trainer
from flowrl.nodes.vllm_options import known_options, parse_extra
from flowrl.options.sizes import ScoringSize, Size

GRAPHS = sorted(path.stem for path in (Path(__file__).parents[2] / "graphs").glob("*.py"))
CLUSTER = Cluster((Machine(tuple(range(32)), gpus=16),))
SIZE = {field.name.replace("_", "-") for field in dataclasses.fields(Size)}
SCORING = {field.name.replace("_", "-") for field in dataclasses.fields(ScoringSize)}
ENGINE = {field.name.replace("_", "-") for field in dataclasses.fields(Engine)}
ROLES: dict[str, tuple[type[Any], set[str]]] = {
    "generator": (Generator, SIZE),
    "engine": (Generator, ENGINE),
    "trainer": (Trainer, SIZE),
    "reference": (Reference, SCORING),
    "critic": (Critic, SCORING),
    "teacher": (Teacher, SCORING),
    "reward-model": (RewardModel, SCORING),
}
"""Role -> its nodes, and the options that it has at least."""
OPTIONAL = {"reference": "--kl-coef 0.1", "reward-model": "--reward-model a/reward/model"}
"""What makes a graph add the role."""


def options(name: str) -> set[str]:
    return set(option_names(load_file(name).config_type))


def graph(name: str, *given: str) -> Graph:
    file = load_file(name)
    return file.build(file.parse(given))


@pytest.mark.parametrize("name", GRAPHS)
def test_a_graph_has_the_options_of_its_roles_and_of_no_others(name: str) -> None:
    found = options(name)
    kinds = {type(node) for node in graph(name).nodes.values()}
    for role, (kind, words) in ROLES.items():
        mine = {option.partition(".")[2] for option in found if option.startswith(f"{role}.")}
        assert not mine or words <= mine, role
        assert mine or kind not in kinds, f"{role} is a node of {name}, and has no size"
    assert "time-share" in found
    assert not {"gpus", "cpus", "num-generators", "num-trainers", "time-share.name"} & found


@pytest.mark.parametrize("name", GRAPHS)
def test_sizes_reach_the_nodes(name: str) -> None:
    given = {
        "generator": ("--generator.replicas", "2", "--generator.gpus", "2", "--engine.pipeline-parallel-size", "2"),
        "trainer": ("--trainer.replicas", "3", "--trainer.gpus", "1"),
    }
    asked = [text for role, texts in given.items() if f"{role}.replicas" in options(name) for text in texts]
    made = graph(name, *asked, *(("--evaluate", "4") if "evaluate" in options(name) else ()))
    for node_name, placed in made.placed.items():
        expected = {"generator": (2, 2.0), "trainer": (3, 1.0), "actor": (3, 1.0), "critic_trainer": (3, 1.0)}
        if node_name in expected:
            assert (placed.replicas, placed.gpus) == expected[node_name], node_name
        elif isinstance(placed.node, Generator):
            assert (placed.replicas, placed.gpus) == (1, 2.0), node_name
        elif isinstance(placed.node, Reference | Critic | Teacher):
            assert placed.gpus == 1.0, f"{node_name} has a GPU where others have"
        if isinstance(placed.node, Generator):
            assert placed.node.engine.pipeline_parallel_size == 2
            assert placed.node.engine.parallel_problems(placed.gpus_each) == []


@pytest.mark.parametrize(
    ("name", "role", "node", "given"),
    [
        ("grpo", "reference", "reference", ("--objective.kl-coef", "0.1")),
        ("rloo", "reference", "reference", ()),
        ("reinforce_pp", "reference", "reference", ()),
        ("iterative_dpo", "reference", "reference", ("--reference", "initial")),
        ("ppo", "reference", "reference", ()),
        ("dpo", "reference", "reference", ()),
        ("kto", "reference", "reference", ()),
        ("ppo", "critic", "critic", ("--critic", "some/model")),
        ("distill", "teacher", "teacher", ()),
        ("ppo", "reward-model", "reward", ("--reward-model", "some/model")),
        ("raft", "reward-model", "reward", ("--reward-model", "some/model")),
        ("iterative_dpo", "reward-model", "reward", ("--reward-model", "some/model")),
    ],
)
def test_models_that_score_have_dtype_and_budget_of_their_own(
    name: str, role: str, node: str, given: tuple[str, ...]
) -> None:
    own = (f"--{role}.gpus", "0.5", f"--{role}.cpus", "2", f"--{role}.dtype", "bfloat16")
    made = graph(name, *given, *own, f"--{role}.token-budget", "9000").placed[node]
    found: Any = made.node
    assert (made.gpus, made.cpus, found.dtype, found.token_budget) == (0.5, 2, "bfloat16", 9000)
    plain: Any = graph(name, *given, "--dtype", "bfloat16", "--token-budget", "9001", f"--{role}.dtype", "None")
    found = plain.nodes[node]
    assert (found.dtype, found.token_budget) == ("bfloat16", 9001), "those of the trainer"


def test_what_an_engine_asks_for_are_its_generators_gpus() -> None:
    made = graph("grpo", "--engine.tensor-parallel-size", "2", "--engine.data-parallel-size", "2", "--evaluate", "0")
    assert {name: made.placed[name].gpus for name in ("generator", "trainer")} == {"generator": 4, "trainer": 1}
    assert check(made, CLUSTER).problems == ()


def test_time_share_names_nodes_in_place_of_the_graphs_own_turns() -> None:
    ppo = "--trainer.gpus", "1"
    assert graph("ppo", *ppo).time_shared == [("actor", "reference"), ("critic_trainer", "critic")]
    assert graph("ppo", *ppo, "--time-share").time_shared == []
    turns = ("generator", "actor", "reference", "critic_trainer", "critic")
    made = graph("ppo", *ppo, "--time-share", *turns)
    assert made.time_shared == [turns]
    report = check(made, Cluster((Machine(tuple(range(8)), gpus=1),)))
    assert report.problems == ()
    assert {host.gpus for host in report.plan.hosts if host.name != "core"} == {(0,)}
    with pytest.raises(ConfigError, match="names batcher, which is no node with cores or GPUs of its own"):
        graph("ppo", *ppo, "--time-share", "actor", "batcher")


@pytest.mark.parametrize(
    ("offload", "said"),
    [
        ("--engine.cpu-offload-gb 2", "--engine.cpu-offload-gb is 2.0"),
        ("--engine.extra offload-group-size=2", "--engine.extra sets 'offload_group_size'"),
    ],
)
def test_weights_in_host_memory_are_for_generators_whose_weights_stay(offload: str, said: str) -> None:
    given = ("--generator.gpus", "1", *offload.split())
    (problem,) = check(graph("grpo", *given), CLUSTER).problems
    assert problem == (
        f"trainer.weights sends weights to generator.weights, which takes none: {said}, and vLLM cannot replace the "
        "weights that it keeps in host memory by an update; leave it out, or train adapters (--lora.rank 32), which "
        "leave those weights as they are."
    )
    assert check(graph("grpo", *given, "--lora.rank", "8", "--lora.sync", "merged"), CLUSTER).problems == (problem,)
    assert check(graph("grpo", *given, "--lora.rank", "8"), CLUSTER).problems == ()
    assert check(graph("pairs", *given), CLUSTER).problems == ()
    fp8 = ("--engine.quantization", "fp8", "--engine.dtype", "bfloat16")
    (problem,) = check(graph("pairs", *given, *fp8), CLUSTER).problems
    assert f"fp8 and {said}, but vLLM cannot keep weights in host memory that it quantizes" in problem


def test_further_options_have_the_types_of_vllms_source() -> None:
    loaded = "vllm" in sys.modules  # by another test of this process
    assert known_options() is not None
    given = {
        "max_num_batched_tokens=8192": 8192,
        "max-num-batched-tokens=None": None,
        "enable_prefix_caching=false": False,
        "watermark=0.5": 0.5,
        'limit_mm_per_prompt={"image": 1}': {"image": 1},
        "load_format=dummy": "dummy",
        "model_impl=1": "1",
        "async_scheduling=True": True,
    }
    assert [parse_extra(text)[1] for text in given] == list(given.values())
    assert ("vllm" in sys.modules) is loaded, "reading the source loads nothing"
    arguments = Engine(extra=tuple(given), concurrency=4).vllm_arguments(on_gpu=True)
    assert arguments["max_num_seqs"] == 8 and arguments["watermark"] == 0.5
    assert "gpu_memory_utilization" not in arguments, "vLLM's own default"
    assert (arguments["enforce_eager"], Engine().vllm_arguments(on_gpu=False)["enforce_eager"]) == (False, True)


def test_without_vllm_any_further_option_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowrl.nodes.vllm_options.known_options", lambda: None)
    assert parse_extra("whatever=[1, 2]") == ("whatever", [1, 2])
    with pytest.raises(ConfigError, match="write NAME=VALUE"):
        parse_extra("=3")


@pytest.mark.slow
def test_vllm_takes_every_option_of_the_engine_under_its_name() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    engine = Engine(
        gpu_memory_utilization=0.5, max_model_len=64, quantization="fp8", kv_cache_bytes=1, cpu_offload_gb=1.0
    )
    names = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    assert set(engine.vllm_arguments(on_gpu=True)) <= names
    known = known_options()
    assert known is not None and set(known) == names, "the source is read completely"
