"""The terms of docs/memory.md against bytes that real models, passes, optimizers and ZeRO ranks allocate on a CPU."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from flowrl.graph.node import Share
from flowrl.models import Policy
from flowrl.models.model_layout import CHARACTER_SHAPE, SMOLLM2_SHAPE, known_shape
from flowrl.nodes.model_memory import trainer_footprint
from flowrl.training import memory
from flowrl.training.engine import zero
from flowrl.training.memory import (
    BUCKET_BYTES,
    ModelShape,
    TrainerModel,
    head_bytes,
    layer_bytes,
    read_shape,
    scoring_bytes,
)
from flowrl.training.model import logprobs
from flowrl.training.model.tensors import whole_weights
from flowrl.training.settings import Dtype, LoRA, ZeroSettings
from tests.stack.ranks.loading_rank import Highest
from tests.stack.ranks.memory_rank import CASES, settings_of, tensor_size_of
from tests.stack.ranks.memory_rank import TOKENS as PASS_TOKENS
from tests.stack.ranks.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("one_thread")

MIB, GB = 1 << 20, 1 << 30
SHAPES = Path(__file__).parents[1] / "graph" / "shapes"
ROWS, LENGTH = 4, 65
TOKENS = ROWS * (LENGTH - 1)
"""A pass leaves out the last token of each row."""


def configuration(kind: str, **sizes: int) -> Any:
    import transformers

    config = getattr(transformers, f"{kind}Config")
    usual = {"hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 4, "num_key_value_heads": 2}
    return config(**{"vocab_size": 512, "num_hidden_layers": 2, "head_dim": 64, **usual, **sizes})


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("Qwen2", {}),
        ("Llama", {"num_key_value_heads": 4}),
        ("Qwen3", {"head_dim": 128}),
        ("Mistral", {"num_hidden_layers": 3}),
        ("Qwen3Moe", {"num_experts": 4, "moe_intermediate_size": 96, "num_experts_per_tok": 2, "mlp_only_layers": []}),
    ],
)
def test_parameters_are_counted_from_the_config(kind: str, sizes: dict[str, int], tied: bool) -> None:
    from transformers import AutoModelForCausalLM

    config = configuration(kind, tie_word_embeddings=tied, **sizes)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shape = ModelShape.of_config(config.to_dict(), "config.json")
    assert shape.num_parameters == sum(p.numel() for p in model.parameters())
    assert ModelShape.of_config({**config.to_dict(), "text_config": None}, "config.json") == shape


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("qwen2.5-0.5b", 494_032_768),
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen2.5-32b", 32_763_876_352),
        ("llama-70b", 70_553_706_496),
    ],
)
def test_published_models_have_their_published_sizes(name: str, parameters: int) -> None:
    shape = read_shape(SHAPES / f"{name}.json")
    assert shape is not None and shape.num_parameters == parameters


def test_the_built_in_models_have_the_shapes_that_are_predicted_from() -> None:
    from flowrl.models.built_in_models import make_random_model
    from flowrl.models.tokens.characters import character_tokenizer

    tiny = make_random_model(character_tokenizer())
    assert CHARACTER_SHAPE.num_parameters == sum(p.numel() for p in tiny.parameters())
    assert SMOLLM2_SHAPE.num_parameters == 134_515_008
    assert known_shape(Policy("/no/such/model")) is None


def test_adapters_are_counted() -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    config = configuration("Qwen2")
    with torch.device("meta"):
        model = get_peft_model(AutoModelForCausalLM.from_config(config), LoraConfig(r=8, target_modules="all-linear"))
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert ModelShape.of_config(config.to_dict(), "").adapter_parameters(8) == trained


def passed(
    shape: dict[str, int], dtype: Dtype, *, checkpointing: bool = False, scoring: bool = False
) -> tuple[int, int]:
    """(bytes that a forward keeps for its backward, the most bytes that forward and backward have at once)."""
    from torch.profiler import ProfilerActivity, profile
    from transformers import AutoModelForCausalLM

    from flowrl.training.model.policy_model import PolicyModel
    from flowrl.training.model.row_layout import lay_out

    torch.manual_seed(0)
    causal_lm = AutoModelForCausalLM.from_config(
        configuration("Qwen2", **shape), dtype=getattr(torch, dtype), attn_implementation="sdpa"
    )
    if checkpointing:
        causal_lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        causal_lm.train()
    model = PolicyModel(causal_lm)
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    rows = lay_out([np.arange(LENGTH, dtype=np.int32)] * ROWS, [np.ones(LENGTH, np.bool_)] * ROWS, layout="padded")
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.size()
        return tensor

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        if scoring:
            with torch.no_grad():
                model(rows, 1.0)
        else:
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                logprobs_N, _ = model(rows, 1.0)
            logprobs_N.sum().backward()
    events = [e for e in prof.profiler.kineto_results.events() if e.name() == "[memory]"]  # type: ignore[union-attr]
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return sum(kept.values()), int(np.cumsum(changes).max())


def shape_of(sizes: dict[str, int]) -> ModelShape:
    return ModelShape.of_config(configuration("Qwen2", **sizes).to_dict(), "")


SIZES = [
    {"intermediate_size": 1408},
    {"hidden_size": 384, "num_attention_heads": 6, "num_key_value_heads": 3},
    {"vocab_size": 4096},
]


@pytest.fixture(autouse=True)
def chunks_of_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Formulas are those of whole chunks, as on a GPU."""
    monkeypatch.setattr(logprobs, "CACHED_ON", ())


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_layer_keeps_exactly_what_the_formula_says(sizes: dict[str, int], dtype: Dtype) -> None:
    found = [passed({**sizes, "num_hidden_layers": layers}, dtype)[0] for layers in (1, 3)]
    element = {"bfloat16": 2, "float32": 4}[dtype]
    assert (found[1] - found[0]) / 2 == TOKENS * layer_bytes(shape_of(sizes), element)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("sizes", [*SIZES[1:], {"num_hidden_layers": 5}], ids=str)
def test_the_most_that_a_pass_has_at_once_is_predicted_and_not_by_much_too_high(
    sizes: dict[str, int], dtype: Dtype, checkpointing: bool
) -> None:
    _, most = passed(sizes, dtype, checkpointing=checkpointing)
    settings = ZeroSettings(dtype=dtype, gradient_checkpointing=checkpointing)
    predicted = TrainerModel(shape_of(sizes), settings, LoRA(), ranks=1).activation_bytes(TOKENS)
    assert most <= 1.02 * predicted, "what is predicted is enough"
    assert predicted <= 1.35 * most


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_scoring_takes_what_is_predicted(sizes: dict[str, int]) -> None:
    _, most = passed(sizes, "bfloat16", scoring=True)
    predicted = scoring_bytes(shape_of(sizes), 2, TOKENS)
    assert most <= 1.01 * predicted <= 1.4 * most


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("scoring", [False, True])
def test_logprobs_in_cache_take_no_more_than_chunks(
    dtype: Dtype, scoring: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprobs, "CACHED_ON", ("cpu",))
    monkeypatch.setattr(logprobs, "CACHE_BYTES", 8 * 4096)
    sizes = {"vocab_size": 4096}
    _, most = passed(sizes, dtype, scoring=scoring)
    element = {"bfloat16": 2, "float32": 4}[dtype]
    trained = TrainerModel(shape_of(sizes), ZeroSettings(dtype=dtype), LoRA(), ranks=1).activation_bytes(TOKENS)
    assert most <= (scoring_bytes(shape_of(sizes), element, TOKENS) if scoring else trained)


def test_logits_are_bounded_by_their_chunks() -> None:
    shape = ModelShape(64, 1, 1, 1, 64, 64, vocab=1 << 17)
    assert head_bytes(shape, 2, 100_000) - head_bytes(shape, 2, 99_999) == 8 * 64, "only the last norm grows"
    large, small = (head_bytes(shape, 2, 100_000, device_bytes) for device_bytes in (80 * GB, 16 * GB))
    assert large - small == 4 * (640 - 128) * MIB, "four tensors of a chunk"


def test_a_chunk_of_logits_grows_with_the_memory_of_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {torch.device("cuda", 0): 80 * GB, torch.device("cuda", 1): 8 * GB}
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=sizes[device]))
    found = [logprobs.logits_bytes_on(device) for device in (*sizes, torch.device("cpu"))]
    assert found == [640 * MIB, 128 * MIB, 128 * MIB]


def test_optimizers_keep_what_is_predicted() -> None:
    weights = [torch.nn.Parameter(torch.zeros(100, 50)), torch.nn.Parameter(torch.zeros(50))]
    for name, optimizer in (
        ("adamw", torch.optim.AdamW(weights, lr=0.1, fused=True)),
        ("sgd", torch.optim.SGD(weights, lr=0.1)),
    ):
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        optimizer.step()
        state = sum(v.nbytes for s in optimizer.state.values() for k, v in s.items() if k != "step")
        assert state == memory.MOMENTS_BYTES[name] * 5050


@pytest.mark.parametrize(
    ("name", "stage", "loading", "export"),
    [
        ("qwen2.5-0.5b", 2, 2 * 494_032_768, 2 * 494_032_768),
        ("qwen2.5-0.5b", 3, 4 * 896 * 151_936, 2 * 494_032_768),
        ("llama-70b", 2, 2 * 70_553_706_496, zero.SHARD_BYTES),
        ("llama-70b", 3, 4 * 8192 * 128_256, zero.SHARD_BYTES),
    ],
)
def test_a_rank_needs_host_memory_to_load_and_to_export(name: str, stage: int, loading: int, export: int) -> None:
    share = Share(2, first=True, gpus=1, device_bytes=80 * GB, time_shared=False, token_budget=1024, longest_sample=512)
    zero = ZeroSettings(dtype="bfloat16", stage=stage)
    found = trainer_footprint(Policy(str(SHAPES / f"{name}.json")), share, zero, LoRA(), scalar=False)
    assert found is not None
    assert found.num_bytes("loading", place="host") == loading
    assert found.num_bytes("export", place="host") == export


@pytest.mark.slow
def test_writing_a_model_takes_the_memory_of_one_file(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_config(configuration("Qwen2", hidden_size=512, num_hidden_layers=16))
    largest, shard_bytes = max(p.nbytes for p in network.parameters()), 16 * MIB
    held = SimpleNamespace(network=network)

    def write(path: Path) -> None:
        writer = zero.ModelWriter(held, {}, path, shard_bytes=shard_bytes)
        for entry in whole_weights(network):
            writer.add_tensors([entry.name], [entry.make(*(parameter.detach() for parameter in entry.parameters))])
        writer.close()

    write(tmp_path / "first")  # what the first one imports
    with Highest() as highest:
        write(tmp_path / "second")
    assert sum(p.nbytes for p in network.parameters()) > 4 * shard_bytes
    assert highest.most - highest.before <= shard_bytes + largest + 4 * MIB


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, int]]:
    """Case -> moment -> bytes of rank 0 of two."""
    from transformers import AutoModelForCausalLM

    directory = tmp_path_factory.mktemp("memory")
    model = AutoModelForCausalLM.from_config(configuration("Qwen2", vocab_size=2048, num_hidden_layers=4))
    model.save_pretrained(directory / "model")
    run_ranks("tests.stack.ranks.memory_rank", directory)
    found: dict[str, dict[str, int]] = json.loads((directory / "found-0.json").read_text())
    return found


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", CASES)
def test_a_real_rank_has_the_terms_that_are_predicted(ranks: dict[str, dict[str, int]], name: str) -> None:
    zero, lora = settings_of(CASES[name])
    shape = shape_of({"vocab_size": 2048, "num_hidden_layers": 4})
    model = TrainerModel(shape, zero, lora, ranks=2, tensor=tensor_size_of(CASES[name]))
    bucket = BUCKET_BYTES if model.zero_stage == 3 else 0  # below stage 3 it lives within a backward
    state = model.weight_bytes + model.optimizer_bytes
    predicted = state + model.gradient_bytes + model.offload_bytes + bucket
    assert ranks[name]["accumulated"] == pytest.approx(predicted, rel=0.01), "between backward and step"
    assert ranks[name]["stepped"] <= 1.01 * predicted, "the step needs no more"


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if "tensor" in case])
def test_a_layer_of_a_real_rank_keeps_exactly_what_is_predicted(ranks: dict[str, dict[str, int]], name: str) -> None:
    shape, size = shape_of({"vocab_size": 2048, "num_hidden_layers": 4}), tensor_size_of(CASES[name])
    heads = {"heads": shape.heads // size, "kv_heads": shape.kv_heads // size}
    own = dataclasses.replace(shape, **heads, feed_forward=shape.feed_forward // size)
    assert ranks[name]["layer"] == PASS_TOKENS * layer_bytes(own, 2)
