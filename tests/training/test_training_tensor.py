"""Tensor parallelism: ranks that have a part of every matrix, and train as if each had a whole model.

Gradients, norms, weights and checkpoints of real ranks are among the cases of `tests.stack.ranks.test_training_gang`
(two ranks) and `tests.training.test_training_sequence` (four); here is what is refused, and what follows from the size.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flowrl import Cluster, ConfigError, Graph, Machine, check
from flowrl.graph.load import load_file
from flowrl.nodes import Trainer
from flowrl.training.engine.gang import Gang
from flowrl.training.engine.requirements import SHARDS, part_path, resume_problems
from flowrl.training.layouts import tensor_problems
from flowrl.training.memory import ModelShape, TrainerModel
from flowrl.training.model.tensors import ABOUT, Entry, divided_dimension, partition_config, plan_layers, whole_shape
from flowrl.training.settings import LoRA, ZeroSettings
from tests.training.test_memory_formulas import configuration

CPU = torch.device("cpu")
CLUSTER = Cluster((Machine(tuple(range(32)), gpus=16),))
DIVIDED = ("--trainer.replicas", "4", "--trainer.tensor-parallel-size", "2", "--zero.stage", "1")


def graph(name: str, *given: str) -> Graph:
    file = load_file(name)
    return file.build(file.parse(given))


def model(kind: str, **sizes: Any) -> Any:
    """A transformers model without weights."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(configuration(kind, **sizes))


# The graph


@pytest.mark.parametrize("name", ["grpo", "sft", "dpo", "ppo", "reward_model", "distill", "kto"])
def test_every_graph_with_a_trainer_can_divide_its_model(name: str) -> None:
    critic = ("--critic-zero.stage", "1") if name == "ppo" else ()
    made = graph(name, *DIVIDED, *critic)
    assert check(made, CLUSTER).problems == ()
    trainers = [node for node in made.nodes.values() if isinstance(node, Trainer)]
    assert trainers and {node.tensor_parallel_size for node in trainers} == {2}
    assert {node.facts().ranks_per_part for node in trainers} == {2}
    assert "each 2 ranks share their micro-batches, a part of every layer's" in "".join(trainers[0].notes())


def test_the_critics_trainer_can_divide_its_model_in_another_way() -> None:
    own = ("--critic-trainer.tensor-parallel-size", "1", "--critic-trainer.replicas", "3")
    trainer: Any = graph("ppo", *DIVIDED, *own).nodes["critic_trainer"]
    assert trainer.tensor_parallel_size == 1
    (problem,) = check(graph("ppo", *DIVIDED), CLUSTER).problems
    assert problem.startswith("node critic_trainer") and "ZeRO stage 3 shards every weight itself" in problem


def test_a_batch_needs_a_sequence_for_each_copy_of_the_model() -> None:
    small = ("--groups-per-step", "1", "--group-size", "2")
    assert check(graph("grpo", *DIVIDED, *small), CLUSTER).problems == ()
    (problem,) = check(graph("grpo", *DIVIDED, *small, "--trainer.replicas", "8"), CLUSTER).problems
    assert "a batch has 2 sequences (1 groups × 2), but trainer has 8 ranks in groups of 2" in problem


def test_what_ranks_of_a_model_have_in_common_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Gang, "gather_objects", lambda gang, item: [item, item, item + 1, item + 1])
    gang = Gang(1, 4, CPU, tensor_size=2)
    assert gang.gather_parts(5) == [5, 6] and gang.num_copies == 2
    assert Gang(1, 4, CPU).num_copies == 4


# What is refused

LLAMA = {"num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 96}
TWO = ZeroSettings(stage=2)


@pytest.mark.parametrize(
    ("zero", "lora", "config", "words"),
    [
        (TWO, LoRA(), LLAMA, ""),
        (ZeroSettings(stage=0), LoRA(), {"text_config": LLAMA}, ""),
        (TWO, LoRA(), {}, ""),
        (ZeroSettings(), LoRA(), LLAMA, "but ZeRO stage 3 shards every weight itself; set the stage to 2, 1 or 0"),
        (ZeroSettings(stage=2, optimizer="muon"), LoRA(), LLAMA, "but muon orthogonalizes whole matrices"),
        (TWO, LoRA(rank=4), LLAMA, "but adapters are not divided among ranks"),
        (TWO, LoRA(), LLAMA | {"num_local_experts": 8}, "but the experts of a mixture are not divided"),
        (TWO, LoRA(), LLAMA | {"num_key_value_heads": 2}, "2 heads of keys and 96 features in a feed-forward layer"),
        (TWO, LoRA(), LLAMA | {"num_key_value_heads": 2}, "have to share equally; choose one of 1, 2"),
        (TWO, LoRA(), {"text_config": LLAMA | {"num_attention_heads": 6}}, "choose one of 1, 2"),
        (TWO, LoRA(), LLAMA | {"intermediate_size": 90}, "choose one of 1, 2"),
    ],
)
def test_trainers_that_cannot_divide_a_model_are_refused(
    zero: ZeroSettings, lora: LoRA, config: dict[str, Any], words: str
) -> None:
    found = list(tensor_problems(4, zero, lora, config))
    assert [words in problem for problem in found] == ([True] if words else [])
    assert not list(tensor_problems(1, zero, lora, config))


def test_ranks_divide_positions_or_matrices() -> None:
    (problem,) = tensor_problems(2, TWO, LoRA(), LLAMA, sequence=2)
    assert "sequence_parallel_size is 2; ranks divide matrices or positions, so set one to 1" in problem


def test_transformers_plan_says_what_is_divided() -> None:
    network = model("Qwen3", num_hidden_layers=11, num_attention_heads=4, num_key_value_heads=2)
    styles = plan_layers(network)
    layers = [name for name in styles if ".layers.10." in name]
    assert {name.rpartition(".")[2]: styles[name] for name in layers} == {
        **dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), "colwise"),
        **dict.fromkeys(("o_proj", "down_proj"), "rowwise"),
        **dict.fromkeys(("q_norm", "k_norm"), "replicated_with_grad_allreduce"),
    }
    assert len(styles) == 11 * 9, "embeddings, norms of layers and the output layer stay whole"
    specs = partition_config(network, 2)["layer_specs"]
    assert {spec["partition_type"]: spec["grad_allreduce"] for spec in specs} == {
        "column": False,
        "row": False,
        "skip": True,
    }


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("Phi3", "in a way that flowrl does not know (colwise_gather_output, rowwise_split_input)"),
        ("Mixtral", "in a way that flowrl does not know (moe_tp_experts)"),
        ("GPT2", "transformers has no plan of how GPT2LMHeadModel is divided"),
    ],
)
def test_models_without_a_plan_that_is_known_are_refused(kind: str, words: str) -> None:
    network = model(kind, pad_token_id=0)
    with pytest.raises(ConfigError) as error:
        partition_config(network, 2)
    assert words in str(error.value)


def test_no_rank_has_a_part_of_a_head() -> None:
    network = model("Llama", num_attention_heads=4, num_key_value_heads=2)
    partition_config(network, 2)
    with pytest.raises(ConfigError, match=r"layers\.0\.self_attn\.k_proj has \d+ outputs in heads of \d+, of which"):
        partition_config(network, 4)


# Sizes


def test_a_divided_parameter_counts_as_a_whole_one() -> None:
    part = torch.nn.Parameter(torch.zeros(3, 4))
    assert divided_dimension(part) is None and Entry("any", (part,)).num_bytes == 48
    setattr(part, ABOUT, {"partition_dim": 1, "original_shape": (3, 8)})
    assert divided_dimension(part) == 1 and whole_shape(part) == (3, 8) and Entry("any", (part,)).num_bytes == 96


def test_a_rank_has_its_part_of_the_layers_and_zero_shards_it_among_the_copies() -> None:
    shape = ModelShape(512, 4, 8, 4, 64, 1024, 1000, biased=True)
    alone = TrainerModel(shape, TWO, LoRA(), ranks=8)
    divided = replace(alone, tensor=4)
    matrices = 4 * (sum(i * o for i, o in shape.linear_shapes) + shape.query_width + 2 * shape.key_width)
    assert divided.num_parameters == alone.num_parameters, "what is exported and published is whole"
    assert divided.num_trained == alone.num_parameters - matrices + matrices // 4
    assert divided.weight_bytes == 4 * divided.num_trained
    assert divided.gradient_bytes == 4 * divided.num_trained // 2, "two copies"
    narrow = replace(divided, zero=replace(TWO, dtype="bfloat16"))
    assert narrow.optimizer_bytes == 4 * divided.num_trained // 2 + 8 * divided.num_trained // 2, "masters and moments"
    assert divided.optimizer_bytes == 8 * divided.num_trained // 2, "weights in float32 are their own masters"
    assert replace(divided, scalar=True).num_trained == divided.num_trained - 1000 * 512
    kept = [replace(one, zero=ZeroSettings(stage=1)).gradient_bytes for one in (alone, divided)]
    assert kept == [8 * alone.num_trained, 8 * divided.num_trained]


def test_a_checkpoint_of_a_divided_model_needs_the_same_parts(tmp_path: Path) -> None:
    for part in range(2):
        file = part_path(tmp_path, part, 2) / SHARDS.format(rank=part)
        file.parent.mkdir()
        file.touch()
    assert resume_problems(tmp_path, TWO, 2, 2) == [] == resume_problems(tmp_path, TWO, 8, 2)
    for parts in (1, 4):
        (problem,) = resume_problems(tmp_path, TWO, 4, parts)
        assert (
            f"with tensor_parallel_size 2, but this run has {parts}; resume with --trainer.tensor-parallel" in problem
        )


def test_deepspeeds_checkpoints_of_stage_0_have_a_file_for_each_part(tmp_path: Path) -> None:
    for part in range(2):
        (tmp_path / f"mp_rank_{part:02d}_model_states.pt").touch()
    assert resume_problems(tmp_path, ZeroSettings(stage=0), 4, 2) == []
    (problem,) = resume_problems(tmp_path, ZeroSettings(stage=0), 2)
    assert "with tensor_parallel_size 2, but this run has 1" in problem
