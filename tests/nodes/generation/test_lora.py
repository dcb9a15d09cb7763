"""LoRA without vLLM: what is refused, who agrees with whom, and which adapters an engine holds."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from flowrl import Graph, check
from flowrl.errors import ConfigError
from flowrl.graph.routes import WeightRoute, WeightTransport, through_hosts
from flowrl.models import Policy
from flowrl.nodes import Generator, Trainer
from flowrl.nodes.engine_options import AdapterSlots
from flowrl.nodes.generation.vllm_sampler import Adapters
from flowrl.training.engine.requirements import check_training, lora_problems
from flowrl.training.settings import LoRA, ZeroSettings
from tests.models.tiny_policy import make_policy
from tests.rigs.ticks import ticks


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"rank": -1}, "between 0 .no adapter. and 512"),
        ({"rank": 8, "alpha": 0}, "alpha is 0"),
        ({"rank": 8, "sync": "both"}, "choose one of adapter, merged"),
        ({"quantize": "nf4", "sync": "merged"}, "set a rank"),
        ({"rank": 8, "quantize": "nf4"}, "set sync='merged'"),
        ({"rank": 8, "quantize": "int4"}, "choose one of none, nf4, int8"),
    ],
)
def test_adapters_that_cannot_be(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        LoRA(**options)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"optimizer": "muon", "clip_grad_norm": 1.0}, "leave it out"),
        ({"muon_lr_factor": -1.0}, "muon_lr_factor is -1.0"),
        ({"betas": (0.9, 1.0)}, "betas is .0.9, 1.0."),
        ({"eps": 0.0}, "eps is 0.0; it has to be above 0"),
        ({"ema_decay": 1.0}, "ema_decay is 1.0"),
        ({"nvme_path": "/disk"}, "set offload too"),
        ({"nvme_path": "/disk", "offload": "optimizer", "stage": 2}, "needs ZeRO stage 3"),
        ({"nvme_path": "/disk", "offload": "all", "ema_decay": 0.9}, "leave one of them out"),
        ({"attention": "paged"}, "choose one of eager, sdpa, flash_attention_2"),
        ({"attention": "eager", "packing": True}, "choose sdpa or flash attention"),
    ],
)
def test_settings_that_cannot_be(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        ZeroSettings(**options)


def test_clipping_is_off_under_muon_unless_it_is_asked_for() -> None:
    assert (ZeroSettings().largest_norm, ZeroSettings(optimizer="muon").largest_norm) == (1.0, 0.0)
    assert ZeroSettings(clip_grad_norm=0.3).largest_norm == 0.3


def test_a_dtype_is_set_in_one_place() -> None:
    assert ZeroSettings(stage=2).with_dtype("bfloat16") == ZeroSettings(stage=2, dtype="bfloat16")
    assert ZeroSettings(dtype="bfloat16").with_dtype("bfloat16").dtype == "bfloat16"
    with pytest.raises(ConfigError, match="set only dtype"):
        ZeroSettings(dtype="bfloat16").with_dtype("float32")


def test_a_quantized_base_is_neither_sharded_nor_offloaded() -> None:
    lora = LoRA(rank=8, quantize="nf4", sync="merged")
    assert lora_problems(lora, ZeroSettings(stage=2)) == []
    sharded, offloaded = lora_problems(lora, ZeroSettings(offload="all"))
    assert "set the stage to 2" in sharded and "offload='optimizer'" in offloaded
    assert lora_problems(LoRA(rank=8), ZeroSettings()) == []


def test_a_missing_package_is_named_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowrl.training.engine.requirements.find_spec", lambda package: None)
    check_training(ZeroSettings(), LoRA(), model_dir=None)
    with pytest.raises(ConfigError, match="LoRA needs the package peft"):
        check_training(ZeroSettings(), LoRA(rank=1), model_dir=None)
    with pytest.raises(ConfigError, match="'flash_attention_2' needs the package flash_attn"):
        check_training(ZeroSettings(attention="flash_attention_2"), LoRA(), model_dir=None)


def test_a_disk_that_is_not_there_is_named_before_anything_starts(tmp_path: Path) -> None:
    zero = ZeroSettings(offload="optimizer", nvme_path=str(tmp_path / "disk"))
    with pytest.raises(ConfigError, match="is not a directory; create it"):
        check_training(zero, LoRA(), model_dir=None)


def test_a_target_that_the_model_lacks_is_named_with_those_it_has(tmp_path: Path) -> None:
    make_policy(tmp_path, tied=True)
    check_training(ZeroSettings(), LoRA(rank=4, targets=("q_proj",)), model_dir=tmp_path)
    with pytest.raises(ConfigError, match=r"no linear layer named query; .* choose from down_proj, gate_proj, k_proj"):
        check_training(ZeroSettings(), LoRA(rank=4, targets=("query", "q_proj")), model_dir=tmp_path)


def problems_of(sent: LoRA | None, taken: LoRA | None) -> list[str]:
    g = Graph("lora")
    policy = Policy("tiny")
    trainer = g.add("trainer", Trainer(policy, lora=sent))
    generator = g.add("generator", Generator(policy, lora=taken))
    g.latest(trainer.weights, generator.weights)
    return [problem for problem in check(g).problems if "lora" in problem]


def test_trainer_and_generator_have_to_agree_on_what_is_sent() -> None:
    assert problems_of(None, None) == problems_of(LoRA(rank=8), LoRA(rank=8)) == []
    assert problems_of(LoRA(rank=8, sync="merged"), None) == []
    (problem,) = problems_of(LoRA(rank=8), None)
    assert problem.startswith("trainer.weights sends adapters of rank 8 but generator.weights takes whole weights;")
    assert "rank 8 but generator.weights takes adapters of rank 4" in problems_of(LoRA(rank=8), LoRA(rank=4))[0]


def test_adapters_travel_through_host_memory() -> None:
    routes = (
        WeightRoute("generator/0", WeightTransport.SHM),
        WeightRoute("generator/1", WeightTransport.NCCL, 2),
    )
    assert [route.transport for route in through_hosts(routes)] == ["shm", "tcp"]


@pytest.mark.parametrize(("rank", "room"), [(1, 1), (4, 8), (8, 8), (9, 16), (300, 320), (512, 512)])
def test_slots_fit_the_rank(rank: int, room: int) -> None:
    assert AdapterSlots.slots_for(rank, 1).vllm_arguments["max_lora_rank"] == room


def test_slots_fit_the_versions_in_use() -> None:
    assert [AdapterSlots.slots_for(4, staleness).count for staleness in (0, 1, 4, 50)] == [2, 3, 6, 8]


class Engine:
    """Writes down which adapters it is told to hold."""

    def __init__(self) -> None:
        self.held: set[int] = set()

    async def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[float]:
        assert method == "load_adapter"
        self.held.add(args[2])
        return [0.1, 0.3]

    async def remove_lora(self, adapter_id: int) -> bool:
        self.held.remove(adapter_id)
        return True


def test_an_adapter_stays_until_its_last_request_and_the_next_one_waits_for_it() -> None:
    async def life() -> None:
        engine = Engine()
        adapters = Adapters(engine, AdapterSlots(4, 2))
        assert await adapters.load_adapter({}, {}, 0) == 0.3
        with adapters.use_current() as first:
            assert first == 1
            await adapters.wait_for_room()
            await adapters.load_adapter({}, {}, 1)
            assert engine.held == {1, 2}
            waiting = asyncio.create_task(adapters.wait_for_room())
            await ticks()
            assert not waiting.done()
            with adapters.use_current() as second:
                assert second == 2
        await waiting
        assert engine.held == {2}
        await adapters.load_adapter({}, {}, 2)
        assert engine.held == {2, 3}

    asyncio.run(life())
