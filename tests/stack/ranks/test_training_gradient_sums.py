"""A trainer with one rank sums its gradients without DeepSpeed's buckets, and in float32 its weights are their own
masters: the same numbers, on a real engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from flowrl.training.engine import optimizer, zero
from flowrl.training.engine.gang import Gang
from flowrl.training.engine.training_state import master_weights, whole_master_weight
from flowrl.training.engine.zero import ZeroEngine
from flowrl.training.settings import LoRA, ZeroSettings
from tests.training.training_cases import make_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
SETTINGS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "clipped": {"clip_grad_norm": 0.05},
    "not_clipped": {"clip_grad_norm": 0.0, "dtype": "bfloat16"},
    "decayed": {"weight_decay": 0.1, "dtype": "bfloat16"},
    "stage_1": {"stage": 1, "dtype": "bfloat16"},
    "sgd": {"optimizer": "sgd"},
    "muon": {"optimizer": "muon", "dtype": "bfloat16"},
    "offloaded": {"offload": "optimizer"},
    "average": {"ema_decay": 0.5},
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_model(path, tied=False)
    return path


def opened(path: Path, settings: dict[str, Any], lora: LoRA | None = None) -> ZeroEngine:
    torch.manual_seed(0)
    return ZeroEngine(path, ZeroSettings(**settings), Gang.meet_ranks(0, 1, "", torch.device("cpu")), lora=lora)


def losses(engine: ZeroEngine) -> Callable[[int], torch.Tensor]:
    """A loss of some parameters only: of every second one in odd passes."""
    trained = [p for p in engine.model.parameters() if p.requires_grad]

    def loss(number: int) -> torch.Tensor:
        terms = [(p.float() * (i + number + 1)).sin().sum() for i, p in enumerate(trained) if not (i * number) % 2]
        return torch.stack(terms).sum() * 0.01

    return loss


def trained(engine: ZeroEngine, *, passes: int = 2, steps: int = 3) -> tuple[list[float], list[torch.Tensor]]:
    loss, norms = losses(engine), []
    for _ in range(steps):
        engine.set_lr(0.02)
        for number in range(passes):
            engine.add_gradient(loss(number), last=number == passes - 1)
        norms.append(engine.step_optimizer(divide_by=3.0).grad_norm)
    return norms, [p.detach().clone() for p in engine.model.parameters()]


def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zero, "sum_at_once", lambda optimizer: None)


@pytest.mark.parametrize("name", SETTINGS)
def test_weights_are_those_of_deepspeeds_own_sums(name: str, model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    norms, weights = trained(opened(model_dir, SETTINGS[name]))
    plain(monkeypatch)
    other_norms, others = trained(opened(model_dir, SETTINGS[name]))
    assert norms == pytest.approx(other_norms, rel=1e-6)
    for ours, theirs in zip(weights, others, strict=True):
        # Exact but for the norm's rounding, which scales what is clipped.
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_parameters_without_a_gradient_keep_their_weights(name: str, model_dir: Path) -> None:
    """Also those that had one in the step before, in memory that the sums use again."""
    engine = opened(model_dir, {**SETTINGS[name], "optimizer": "sgd"})
    loss = losses(engine)
    engine.set_lr(0.02)
    for number in (0, 1):
        before = [p.detach().clone() for p in engine.model.parameters()]
        engine.add_gradient(loss(number), last=True)
        engine.step_optimizer()
        moved = [not torch.equal(a, b) for a, b in zip(engine.model.parameters(), before, strict=True)]
        assert any(moved) and not any(change for i, change in enumerate(moved) if (i * number) % 2)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_a_gradient_that_is_not_finite_is_not_applied(name: str, bad: float, model_dir: Path) -> None:
    engine = opened(model_dir, SETTINGS[name])
    before = [p.detach().clone() for p in engine.model.parameters()]
    loss = losses(engine)
    engine.set_lr(0.02)
    engine.add_gradient(loss(0) * bad, last=True)
    step = engine.step_optimizer()
    assert not step.applied and step.grad_norm == float("inf")
    assert all(torch.equal(a, b) for a, b in zip(engine.model.parameters(), before, strict=True))
    engine.add_gradient(loss(0), last=True)
    assert engine.step_optimizer().applied, "and the next one is"


def test_an_adapter_is_summed_too(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lora = LoRA(rank=2)
    norms, weights = trained(opened(model_dir, {}, lora))
    plain(monkeypatch)
    other_norms, others = trained(opened(model_dir, {}, lora))
    assert norms == pytest.approx(other_norms, rel=1e-6)
    for ours, theirs in zip(weights, others, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ["float32", "clipped", "sgd", "average", "stage 1 in float32"])
def test_weights_in_float32_are_their_own_masters(name: str, model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit by bit what a copy would make of them, in half of the memory; and what DeepSpeed gathers as masters."""
    settings = {**SETTINGS, "stage 1 in float32": {"stage": 1}}[name]
    engine = opened(model_dir, settings)
    norms, weights = trained(engine)
    owners = {p.untyped_storage().data_ptr() for p in engine.model.parameters()}
    assert {flat.untyped_storage().data_ptr() for flat in master_weights(engine._engine)} == owners
    for parameter in engine.model.parameters():
        assert torch.equal(whole_master_weight(parameter), parameter)
    monkeypatch.setattr(zero, "share_masters", lambda optimizer: None)
    copying = opened(model_dir, settings)
    other_norms, others = trained(copying)
    assert norms == other_norms
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(weights, others, strict=True))
    assert not owners & {flat.untyped_storage().data_ptr() for flat in master_weights(copying._engine)}


@pytest.mark.parametrize(
    "settings", [{"dtype": "bfloat16"}, {"optimizer": "muon"}, {"offload": "optimizer"}, {"stage": 0}]
)
def test_other_weights_have_masters_or_none(settings: dict[str, Any], model_dir: Path) -> None:
    engine = opened(model_dir, settings)
    owners = {p.untyped_storage().data_ptr() for p in engine.model.parameters()}
    shared = owners & {flat.untyped_storage().data_ptr() for flat in master_weights(engine._engine)}
    assert bool(shared) is (settings == {"stage": 0}), "without ZeRO, weights are what the optimizer has"


def test_which_optimizers_it_is_for(model_dir: Path) -> None:
    def changed(settings: dict[str, Any]) -> bool:
        return "process_gradients" in vars(opened(model_dir, settings)._engine.optimizer)

    assert {name: changed(SETTINGS[name]) for name in ("float32", "bfloat16", "sgd", "muon", "offloaded")} == {
        "float32": True,
        "bfloat16": True,
        "sgd": True,
        "muon": False,
        "offloaded": False,
    }
    assert optimizer.NORM_CHUNK * 8 == 2 << 20
