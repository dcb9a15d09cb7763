"""Updates of layers in fp8 by vLLM's own classes, by every method and every way in which weights arrive.

Layers, methods, layerwise reload and transfer engines are vLLM's. What its CPU build lacks is replaced by the same
arithmetic in torch (the op that scales a tensor), or by nothing where only the multiplication would need it: here
nothing is computed with the weights, they are compared bit by bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flowrl.commands.gpu_check.weight_stages import RecordingGroup, RepeatingGroup
from flowrl.weights.publish import Publisher
from flowrl.weights.receive import SegmentReceiver
from tests.gpu.test_gpu_check import on_a_cpu
from tests.models.tiny_policy import make_policy
from tests.weights.test_weights_publish import published

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
METHODS = {"fp8": "weight_scale", "fp8_per_tensor": "weight_scale", "fp8_per_block": "weight_scale_inv"}
"""Method -> the name of its scales."""
HIDDEN, WIDE = 256, 384


def tensors_of(shapes: Mapping[str, tuple[int, ...]], version: int) -> dict[str, Tensor]:
    """In bfloat16; the largest value, and with it every scale, changes with the version."""
    draw = torch.Generator().manual_seed(version)
    sizes, dtype = shapes.items(), torch.float32
    return {name: (torch.randn(size, generator=draw, dtype=dtype) * (1 + version)).bfloat16() for name, size in sizes}


class Source:
    """A trainer's model of which one version after the other is published."""

    rank, vocab_size, version = 0, 50, 0

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.shapes = shapes

    def buckets(self, max_bytes: int) -> Iterator[tuple[Sequence[str], Sequence[Tensor]]]:
        for name, tensor in tensors_of(self.shapes, self.version).items():
            yield (name,), (tensor,)

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return [[0.0] * (len(sequence) - 1) for sequence in sequences]


class Layers(nn.Module):
    """The linear layers of a decoder: matrices of a checkpoint that share one of vLLM's, and a norm."""

    SHAPES = {
        **{f"{name}.weight": (rows, HIDDEN) for name, rows in {"q": HIDDEN, "k": 128, "v": 128}.items()},
        **{f"{name}.bias": (rows,) for name, rows in {"q": HIDDEN, "k": 128, "v": 128}.items()},
        "gate.weight": (WIDE, HIDDEN),
        "up.weight": (WIDE, HIDDEN),
        "down.weight": (HIDDEN, WIDE),
        "norm": (HIDDEN,),
    }
    """What a trainer publishes of them."""
    QUANTIZED = {f"{name}.weight": f"{name}.{{}}" for name in ("qkv", "ups", "down")}
    """Parameter -> its scales, with a place for the method's name of them."""
    PARTS = {"q": ("qkv", "q"), "k": ("qkv", "k"), "v": ("qkv", "v"), "gate": ("ups", 0), "up": ("ups", 1)}

    def __init__(self, config: Any) -> None:
        from vllm.model_executor.layers import linear

        super().__init__()
        alone: dict[str, Any] = {"quant_config": config, "disable_tp": True, "params_dtype": torch.bfloat16}
        self.qkv = linear.QKVParallelLinear(HIDDEN, 64, 4, 2, bias=True, prefix="qkv", **alone)
        self.ups = linear.MergedColumnParallelLinear(HIDDEN, [WIDE] * 2, bias=False, prefix="ups", **alone)
        self.down = linear.RowParallelLinear(WIDE, HIDDEN, bias=False, prefix="down", **alone)
        self.norm = nn.Parameter(torch.empty(HIDDEN, dtype=torch.bfloat16), requires_grad=False)

    def load_weights(self, weights: Any) -> set[str]:
        from vllm.model_executor.model_loader.weight_utils import default_weight_loader

        loaded = set()
        for name, tensor in weights:
            layer, _, kind = name.partition(".")
            held, part = self.PARTS.get(layer, (layer, None))
            parameter = self.get_parameter(".".join(filter(None, (held, kind))))
            loader = getattr(parameter, "weight_loader", default_weight_loader)
            loader(parameter, tensor, *(() if part is None else (part,)))
            loaded.add(".".join(filter(None, (held, kind))))
        return loaded


class Experts(nn.Module):
    """The experts of a layer: a trainer's three matrices of each, which in vLLM are two of all of them; and a norm."""

    NUM = 4
    SHAPES = {
        **{f"{expert}.{kind}": (128, HIDDEN) for expert in range(NUM) for kind in ("gate", "up")},
        **{f"{expert}.down": (HIDDEN, 128) for expert in range(NUM)},
        "norm": (HIDDEN,),
    }
    QUANTIZED = {f"experts.{name}_weight": f"experts.{name}_{{}}" for name in ("w13", "w2")}
    """As in `Layers`."""
    SHARDS = {"gate": ("w13_weight", "w1"), "up": ("w13_weight", "w3"), "down": ("w2_weight", "w2")}

    def __init__(self, config: Any) -> None:
        from vllm.model_executor.layers.fused_moe.layer import FusedMoEFactory

        super().__init__()
        alone: dict[str, Any] = {"tp_size": 1, "dp_size": 1, "pcp_size": 1, "params_dtype": torch.bfloat16}
        self.experts = FusedMoEFactory(
            self.NUM,
            2,
            HIDDEN,
            128,
            quant_config=config,
            runner_cls=lambda routed_experts, **_: routed_experts,
            **alone,
        )
        self.norm = nn.Parameter(torch.empty(HIDDEN, dtype=torch.bfloat16), requires_grad=False)

    def load_weights(self, weights: Any) -> set[str]:
        from vllm.model_executor.model_loader.weight_utils import default_weight_loader

        loaded = set()
        for name, tensor in weights:
            expert, _, kind = name.partition(".")
            held, shard = self.SHARDS.get(kind, (name, ""))
            parameter = self.experts.get_parameter(held) if kind else self.norm
            loader = getattr(parameter, "weight_loader", default_weight_loader)
            loader(parameter, tensor, *((held, shard, int(expert)) if kind else ()))
            loaded.add(f"experts.{held}" if kind else name)
        return loaded


class NoKernel:
    """Stands for a kernel that computes with weights as they were quantized."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """It packs nothing."""


def scaled(weight: Tensor, scale: Tensor | None, use_per_token_if_dynamic: bool = False) -> tuple[Tensor, Tensor]:
    """Without a scale there is one for each row."""
    scale = weight.float().abs().amax(-1, keepdim=True) / 448 if scale is None else scale
    return (weight.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("policy")
    make_policy(path, tied=True, dtype="bfloat16")
    return path


@pytest.fixture(params=METHODS)
def config(request: pytest.FixtureRequest, policy: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """vLLM's configuration of an engine that quantizes by this method."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.model_executor.layers.fused_moe.oracle import fp8 as oracle
    from vllm.model_executor.layers.quantization.online import fp8

    from flowrl.nodes.engine_options import Engine

    monkeypatch.setattr("vllm.distributed.parallel_state._TP", SimpleNamespace(world_size=1, rank_in_group=0))
    if request.param != "fp8":
        monkeypatch.setattr(fp8, "init_fp8_linear_kernel", lambda **options: NoKernel())
    monkeypatch.setattr(fp8.ops, "scaled_fp8_quant", scaled)
    backend = (oracle.Fp8MoeBackend.TRITON, object)  # it leaves weights and scales as they are
    monkeypatch.setattr(fp8, "select_fp8_moe_backend", lambda **options: backend)
    monkeypatch.setattr(oracle, "make_fp8_moe_kernel", lambda **options: NoKernel())
    engine = Engine(quantization=request.param, dtype="bfloat16").vllm_arguments(on_gpu=False)
    made = AsyncEngineArgs(model=str(policy), dtype="bfloat16", **engine).create_engine_config()
    with torch.compiler.set_stance("force_eager"):
        yield SimpleNamespace(vllm=made, scales=METHODS[request.param])


@pytest.fixture(params=[Layers, Experts])
def kind(request: pytest.FixtureRequest) -> Any:
    """What is loaded."""
    return request.param


def loaded(kind: Any, config: Any, version: int) -> Any:
    """Layers as vLLM loads them from a checkpoint at its start."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import reload
    from vllm.utils.torch_utils import set_default_torch_dtype

    with set_current_vllm_config(config.vllm), set_default_torch_dtype(torch.bfloat16):
        layers = kind(config.vllm.quant_config)
        reload.record_metadata_for_reloading(layers)
        layers.load_weights(tensors_of(kind.SHAPES, version).items())
        reload.finalize_layerwise_processing(layers, config.vllm.model_config)
    return layers


def assert_equal_to_a_fresh_load(layers: Any, config: Any, version: int) -> None:
    found, fresh = (dict(one.named_parameters()) for one in (layers, loaded(type(layers), config, version)))
    scales = {scale.format(config.scales) for scale in layers.QUANTIZED.values()}
    assert found.keys() == fresh.keys() and scales <= found.keys()
    quantized = {name for name, parameter in found.items() if parameter.dtype == torch.float8_e4m3fn}
    assert quantized == layers.QUANTIZED.keys()
    for name, parameter in found.items():
        assert torch.equal(parameter.view(torch.uint8), fresh[name].view(torch.uint8)), name


def assert_kernels_have_the_scales(layers: Experts, config: Any) -> None:
    """A kernel of experts refers to scales itself, beside the layer's parameters."""
    held = layers.experts.quant_method.moe_quant_config
    for name, scale in (("w13", held.w1_scale), ("w2", held.w2_scale)):
        assert torch.equal(scale, layers.experts.get_parameter(f"{name}_{config.scales}")), name


def test_through_host_memory(kind: Any, config: Any) -> None:
    """The engine of ours, which tcp uses, too; a version that lacks a tensor is still noticed."""
    from flowrl.weights.vllm_process.segment_engine import SharedMemoryEngine, all_loaded

    layers, source = loaded(kind, config, 0), Source(kind.SHAPES)
    engine = SharedMemoryEngine(config.vllm.weight_transfer_config, config.vllm, torch.device("cpu"), layers)
    publisher, kept = Publisher(source, "policy", run_id="fp8", probe_every=0), dict(layers.named_parameters())
    try:
        for source.version in (1, 2):
            fetched = SegmentReceiver("fp8").fetch_version(published(publisher, source.version))
            with all_loaded(layers):
                engine.start_weight_update()
                engine.update_weights(dict(fetched.update))
            engine.finish_weight_update()
            fetched.close()
            assert_equal_to_a_fresh_load(layers, config, source.version)
            if kind is Experts:
                assert_kernels_have_the_scales(layers, config)
        assert all(parameter is kept[name] for name, parameter in layers.named_parameters()), "graphs refer to them"
        less = {**fetched.update, "tensors": [row for row in fetched.update["tensors"] if row[0] != "norm"]}
        with (
            pytest.raises(ValueError, match=r"lacks 1 of the model's parameters, among them \['norm'\]"),
            all_loaded(layers),
        ):
            engine.start_weight_update()
            engine.update_weights(less)
    finally:
        publisher.close()


def test_over_nccl(kind: Any, config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's sender and receiver with a group that records; buffers end between matrices that share a layer.

    That a parameter has not arrived is noticed.
    """
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerWeightTransferEngine, NCCLWeightTransferEngine

    from flowrl.weights import device
    from flowrl.weights.vllm_process.segment_engine import all_loaded

    on_a_cpu(monkeypatch)
    layers, source, size = loaded(kind, config, 0), Source(kind.SHAPES), 2 * HIDDEN * HIDDEN + 1
    receiver = NCCLWeightTransferEngine(config.vllm.weight_transfer_config, config.vllm, torch.device("cpu"), layers)
    receiver.packed, receiver.packed_buffer_size_bytes = True, size
    for source.version in (1, 2):
        stream = device.ZeroSource(source)
        sender = NCCLTrainerWeightTransferEngine(
            client=device.Announced(), source=stream, packed=True, packed_buffer_size_bytes=size
        )
        group = sender.model_update_group = RecordingGroup()
        sender.send_weights()
        receiver.model_update_group = RepeatingGroup(group.sent)
        rows = [device.describe_tensor(meta) for meta in stream.metadata()]
        info = {"names": [row[0] for row in rows], "dtype_names": [row[1] for row in rows]}
        info["shapes"] = [list(row[2]) for row in rows]
        with all_loaded(layers):
            receiver.start_weight_update()
            receiver.receive_weights(receiver.parse_update_info(info))
        receiver.finish_weight_update()
        assert len(group.sent) > 3
        assert_equal_to_a_fresh_load(layers, config, source.version)
    receiver.packed = False
    lacking = f"lacks 1 of the model's parameters, among them .*{rows[-1][0]}"
    receiver.model_update_group = RepeatingGroup([tensor for _, tensor in tensors_of(kind.SHAPES, 2).items()])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    with (
        pytest.raises(ValueError, match=lacking),
        all_loaded(layers),
    ):
        receiver.start_weight_update()
        receiver.receive_weights(receiver.parse_update_info({name: values[:-1] for name, values in info.items()}))


def test_vllm_does_not_update_weights_that_it_keeps_in_host_memory(config: Any) -> None:
    """Why `Engine` refuses them. If this fails, vLLM has learnt to, and the refusal may go."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import reload
    from vllm.model_executor.offloader import prefetch, uva

    layers = loaded(Layers, config, 0)
    with set_current_vllm_config(config.vllm):
        begun = Layers(config.vllm.quant_config)
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
        uva.UVAOffloader(1 << 30).wrap_modules(iter([begun.qkv]))
    kept = prefetch._CpuParamOffloader(layers, "norm")
    kept.assign_static_buffer(torch.empty(HIDDEN, dtype=torch.bfloat16))
    reload.initialize_layerwise_reload(layers)
    layers.load_weights(tensors_of(Layers.SHAPES, 1).items())
    reload.finalize_layerwise_reload(layers, config.vllm.model_config)
    old, new = (tensors_of(Layers.SHAPES, version)["norm"] for version in (0, 1))
    assert torch.equal(layers.norm, new) and torch.equal(kept._cpu_storage, old), "the next pass reads the old ones"
