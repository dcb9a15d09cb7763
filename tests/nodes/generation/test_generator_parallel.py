"""A generator on several GPUs: sizes whose product is the number of its GPUs, found before Ray starts."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flowrl import Cluster, ConfigError, Graph, Machine, check
from flowrl.graph.analysis.plan import make_plan, routes_of
from flowrl.graph.routes import rank_offset, world_size
from flowrl.models import Policy
from flowrl.nodes import Generator, Trainer
from flowrl.nodes.engine_options import Engine
from flowrl.options import EvaluationOptions, GeneratorOptions, Size, TrainerOptions, TrainerSize
from flowrl.recipes.grpo import GRPO, graph

EIGHT = Cluster((Machine(tuple(range(32)), gpus=8),))
PP = "pipeline_parallel_size"


@pytest.mark.parametrize(
    ("engine", "gpus", "sizes"),
    [
        ({}, 0, (1, 1, 1)),
        ({}, 0.5, (1, 1, 1)),
        ({}, 1, (1, 1, 1)),
        ({}, 4, (4, 1, 1)),
        ({PP: 2}, 4, (2, 2, 1)),
        ({PP: 2, "data_parallel_size": 2}, 8, (2, 2, 2)),
        ({"tensor_parallel_size": 2, "data_parallel_size": 4}, 8, (2, 1, 4)),
    ],
)
def test_what_is_not_asked_for_is_tensor_parallel(
    engine: dict[str, int], gpus: float, sizes: tuple[int, int, int]
) -> None:
    options = Engine(**engine)
    assert options.parallel_problems(gpus) == []
    found = options.size_arguments(int(gpus))
    assert tuple(found[f"{name}_parallel_size"] for name in ("tensor", "pipeline", "data")) == sizes
    assert found.get("distributed_executor_backend") == ("mp" if gpus > 1 else None)


@pytest.mark.parametrize(
    ("engine", "gpus", "problem"),
    [
        ({"tensor_parallel_size": 2}, 4, "tensor 2 × pipeline 1 × data 1 parallel parts, but gpus is 4"),
        ({PP: 2}, 3, "tensor any × pipeline 2 × data 1 parallel parts, but gpus is 3"),
        ({"tensor_parallel_size": 2}, 0, "but gpus is 0; set gpus=2"),
        ({"tensor_parallel_size": 2}, 0.5, "but gpus is 0.5; set gpus=2"),
        ({}, 1.5, "gpus is 1.5; above 1 it has to be a whole number"),
        ({"extra": ("distributed_executor_backend=ray",)}, 1, "sets 'distributed_executor_backend', which flowrl sets"),
    ],
)
def test_other_sizes_are_refused(engine: dict[str, Any], gpus: float, problem: str) -> None:
    g = Graph("one")
    g.add("generator", Generator(Policy("tiny"), engine=Engine(**engine)), gpus=gpus)
    assert any(problem in text for text in check(g, EIGHT).problems), check(g, EIGHT).problems


def test_heads_that_cannot_be_split_are_found_before_the_start(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": 14}))
    g = Graph("one")
    generator = g.add("generator", Generator(Policy(str(tmp_path))), gpus=4)
    with pytest.raises(ConfigError, match="4 tensor-parallel parts, but the model has 14 attention heads"):
        generator.preflight()
    assert Engine(pipeline_parallel_size=2).head_problems(tmp_path, 4) == []


def test_two_gpus_of_a_generator_are_two_ranks_beside_the_trainer() -> None:
    generator, trainer = GeneratorOptions(Size(2, 2)), TrainerOptions(size=TrainerSize(2))
    g = graph(GRPO(generator=generator, trainer=trainer, evaluation=EvaluationOptions(evaluate=0)))
    assert check(g, EIGHT).problems == ()
    plan = make_plan(g, EIGHT)
    routes = routes_of(plan, "trainer")
    assert world_size(routes) == 5
    assert [rank_offset(routes, f"generator/{index}") for index in range(2)] == [1, 3]
    assert [len(plan.host_of(name).gpus) for name in ("generator/0", "generator/1", "trainer/0")] == [2, 2, 1]


def test_a_rank_of_a_trainer_has_one_gpu() -> None:
    g = Graph("one")
    g.add("trainer", Trainer(Policy("tiny")), gpus=2)
    assert any("gpus is 2, but a rank trains on one GPU" in text for text in check(g, EIGHT).problems)


@pytest.mark.slow
def test_vllm_takes_our_executor_within_a_placement_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own configuration, where Ray says that this process is in a placement group, as a host is."""
    import ray
    from vllm.config import ParallelConfig

    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr("ray.util.get_current_placement_group", lambda: SimpleNamespace(bundle_specs=[]))
    assert ParallelConfig(tensor_parallel_size=2).distributed_executor_backend == "ray"
    ours = Engine().size_arguments(2)
    assert ParallelConfig(**ours).distributed_executor_backend == "mp"
    assert ParallelConfig(**ours).world_size == 2
