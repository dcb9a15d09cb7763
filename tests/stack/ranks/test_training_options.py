"""Trainer options on two real ZeRO ranks, against plain loops and formulas that share no code with them.

LoRA against PEFT's model under torch's SGD, on the gang test's loss; AdamW against torch's; Muon against
the paper's formula; the moving average against its definition over the weights of every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.house.further_cases import chosen
from tests.stack.ranks.options_cases import ADAM, BATCHES, DECAY, LORA, MUON, OPTIONS, Option, offloaded
from tests.stack.ranks.ranks import run_ranks
from tests.stack.ranks.test_training_gang import log_softmax_of, places, plain_loss, worst
from tests.training.training_cases import make_batch, make_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400), pytest.mark.usefixtures("one_thread")]

Named = dict[str, Tensor]
LARGE = 768
"""Hidden size from which on DeepSpeed puts a rank's half of a matrix on disk."""


def train(directory: Path, *more: str) -> None:
    make_model(directory / "tied", tied=True)
    make_model(directory / "untied", tied=False)
    run_ranks("tests.stack.ranks.options_rank", directory, *more, timeout_s=300)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    directory = tmp_path_factory.mktemp("options")
    train(directory, "in memory", *chosen(request, [option.name for option in OPTIONS]))
    return directory


def found(trained: Path, option: Option) -> list[Named]:
    """The weights before the first batch and after every one."""
    history: list[Named] = torch.load(trained / option.name / "found.pt")["history"]
    return history


def model_of(directory: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


def weights_of(directory: Path) -> Named:
    return {name: parameter.detach() for name, parameter in model_of(directory).named_parameters()}


def adapted(trained: Path, option: Option, adapter: str) -> Any:
    """PEFT's model: the base with an adapter that the engine exported."""
    from peft import PeftModel

    path = str(trained / option.name / adapter / "adapter")
    return PeftModel.from_pretrained(model_of(trained / option.base), path, is_trainable=True)


def merged(model: Any) -> Named:
    return {name: p.detach() for name, p in model.merge_and_unload().named_parameters()}


def named(prefix: str) -> dict[str, Any]:
    options = [option for option in OPTIONS if option.name.startswith(prefix)]
    return {"argvalues": options, "ids": [option.name for option in options]}


def loss_of(model: torch.nn.Module, option: Option, version: int) -> Tensor:
    samples = list(make_batch(version, option.case).samples)
    with torch.no_grad():
        old = {s.sample_id: gathered(model, s) for s in samples}
        if option.objective.get("kl_coef"):
            with model.disable_adapter():  # type: ignore[operator]
                for s in samples:
                    s.ref_logprobs[places(s)] = gathered(model, s)  # type: ignore[index]
    return plain_loss(model, samples, old, option.case, version)


def gathered(model: torch.nn.Module, sample: Any) -> Tensor:
    log_p = log_softmax_of(model, sample)
    return torch.stack([log_p[t - 1, int(sample.token_ids[t])] for t in places(sample)])


def steps(model: torch.nn.Module, optimizer: torch.optim.Optimizer, option: Option, clip: float = 0.0) -> None:
    for version in range(BATCHES):
        optimizer.zero_grad()
        loss_of(model, option, version).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()


@pytest.mark.parametrize("option", **named("lora"))
def test_an_adapter_is_trained_as_peft_would(option: Option, trained: Path) -> None:
    history = found(trained, option)
    plain = adapted(trained, option, "start")
    assert worst(history[0], weights_of(trained / option.base)) == 0.0, "a fresh adapter changes nothing"
    optimizer = torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=option.lr)
    steps(plain, optimizer, option)
    expected = merged(plain)
    moved = max(float((expected[n] - history[0][n]).abs().max()) for n in expected)
    assert moved > 1e-3
    assert worst(history[-1], expected) <= 1e-5


@pytest.mark.parametrize("option", **named("lora"))
def test_the_base_is_never_changed(option: Option, trained: Path) -> None:
    base = torch.load(trained / option.name / "found.pt")["base"][0]
    with torch.no_grad():
        log_p = torch.log_softmax(model_of(trained / option.base)(input_ids=torch.tensor([[1, 2, 3, 4, 5]])).logits, -1)
    assert base == pytest.approx([float(log_p[0, t - 1, t + 1]) for t in range(1, 5)], abs=1e-5)


@pytest.mark.parametrize("option", **named("lora"))
def test_the_adapter_directory_loads_in_peft(option: Option, trained: Path) -> None:
    """It is the same policy as the merged export, and adapts the layers that were asked for."""
    model = adapted(trained, option, "end")
    targets = set(option.lora.get("targets", ())) or {
        f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")
    }
    assert set(model.peft_config["default"].target_modules) == targets
    assert model.peft_config["default"].r == LORA["rank"]
    assert worst(merged(model), weights_of(trained / option.name / "end")) <= 1e-6


@pytest.mark.parametrize("option", OPTIONS, ids=[option.name for option in OPTIONS])
def test_a_resumed_trainer_goes_on_exactly(option: Option, trained: Path) -> None:
    straight, resumed = (weights_of(trained / option.name / which) for which in ("end", "resumed"))
    assert worst(straight, resumed) == 0.0
    if "ema" in option.name:
        straight, resumed = (weights_of(trained / option.name / which / "ema") for which in ("end", "resumed"))
        assert worst(straight, resumed) == 0.0


def test_adamw_is_torchs_with_decay_of_matrices_alone(trained: Path) -> None:
    option = next(option for option in OPTIONS if option.name == "adamw")
    model = model_of(trained / option.base)
    groups = [
        {"params": [p for p in model.parameters() if p.dim() == 2], "weight_decay": ADAM["weight_decay"]},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    steps(model, torch.optim.AdamW(groups, lr=option.lr, betas=ADAM["betas"], eps=ADAM["eps"]), option, clip=1.0)
    # Adam makes steps of near-zero gradients, rounding included; decayed vectors would be off by 6e-3.
    assert worst(found(trained, option)[-1], {n: p.detach() for n, p in model.named_parameters()}) <= 1e-4


@pytest.mark.parametrize("option", **named("ema"))
def test_the_moving_average_is_exported(option: Option, trained: Path) -> None:
    history = found(trained, option)
    exported = weights_of(trained / option.name / "end" / "ema")
    expected = averaged_adapter(trained, option) if option.lora else average(history)
    assert worst(exported, expected) <= 1e-6
    assert worst(exported, history[-1]) > 1e-3
    assert worst(weights_of(trained / option.name / "end"), history[-1]) == 0.0, "the weights are in their place again"


def average(history: Sequence[Named]) -> Named:
    mean = history[0]
    for weights in history[1:]:
        mean = {name: DECAY * mean[name] + (1 - DECAY) * weights[name] for name in weights}
    return mean


def averaged_adapter(trained: Path, option: Option) -> Named:
    """Averages of both factors, merged: their product is not the average of the products."""
    factors = average(torch.load(trained / option.name / "found.pt")["adapters"])
    weights = weights_of(trained / option.base)
    for name in [name for name in factors if ".lora_A." in name]:
        product = factors[name.replace("lora_A", "lora_B")] @ factors[name]
        weight = name.removeprefix("base_model.model.").replace(".lora_A", "")
        weights[weight] = weights[weight] + LORA["alpha"] / LORA["rank"] * product
    return weights


# Muon


def orthogonalized(matrix: Tensor) -> Tensor:
    """Five steps of the quintic Newton-Schulz iteration (kellerjordan.github.io/posts/muon), in fp32."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


class PlainMuon:
    """Nesterov momentum, orthogonalized; matrices of layers alone."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], lr: float, decay: float) -> None:
        self.parameters, self.lr, self.decay = parameters, lr, decay
        self.momentum = [torch.zeros_like(p) for p in parameters]

    @torch.no_grad()
    def step(self) -> None:
        for p, momentum in zip(self.parameters, self.momentum, strict=True):
            assert p.grad is not None
            momentum.lerp_(p.grad, 1 - MUON["momentum"])
            update = orthogonalized(p.grad.lerp(momentum, MUON["momentum"]))
            p.mul_(1 - self.lr * self.decay)
            p.sub_(self.lr * max(1.0, p.shape[0] / p.shape[1]) ** 0.5 * update)


class Both(torch.optim.Optimizer):
    """Muon and AdamW, stepped together."""

    def __init__(self, muon: PlainMuon, adamw: torch.optim.Optimizer) -> None:
        self.muon, self.adamw = muon, adamw
        self.matrices = muon.parameters

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.adamw.zero_grad(set_to_none)
        for p in self.matrices:
            p.grad = None

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.muon.step()
        self.adamw.step()


@pytest.mark.parametrize("option", **named("muon"))
def test_muon_orthogonalizes_whole_matrices(option: Option, trained: Path) -> None:
    """A flat shard, or rows of it, orthogonalized would be something else entirely."""
    model = adapted(trained, option, "start") if option.lora else model_of(trained / option.base)
    parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
    matrices = [p for n, p in parameters.items() if p.dim() == 2 and "embed" not in n and "lm_head" not in n]
    others = [p for p in parameters.values() if not any(p is matrix for matrix in matrices)]
    decay = option.settings["weight_decay"]
    groups = [
        {"params": [p for p in others if p.dim() == 2] or [torch.nn.Parameter(torch.zeros(()))], "weight_decay": decay},
        {"params": [p for p in others if p.dim() == 1], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW([g for g in groups if g["params"]], lr=option.lr)
    steps(model, Both(PlainMuon(matrices, option.lr * MUON["muon_lr_factor"], decay), adamw), option)
    expected = merged(model) if option.lora else {n: p.detach() for n, p in model.named_parameters()}
    history = found(trained, option)
    moved = max(float((expected[n] - history[0][n]).abs().max()) for n in expected)
    assert moved > 0.05
    assert worst(history[-1], expected) <= 0.01 * moved


def libaio() -> bool:
    from deepspeed.ops.op_builder import AsyncIOBuilder

    return bool(AsyncIOBuilder().is_compatible(verbose=False))


@pytest.mark.nvme
def test_what_is_offloaded_to_a_disk_trains_the_same(tmp_path: Path) -> None:
    if not libaio():
        pytest.skip("DeepSpeed's async_io does not build here: libaio-dev is not installed")
    (tmp_path / "disk").mkdir()
    make_model(tmp_path / "large", tied=True, hidden_size=LARGE)
    train(tmp_path, "on disk", str(tmp_path / "disk"))
    memory, disk = (torch.load(tmp_path / option.name / "found.pt") for option in offloaded(""))
    num_weights = sum(tensor.numel() for tensor in disk["history"][0].values())
    assert disk["on_disk"] > 3 * 4 * num_weights, "weights and both of AdamW's moments"
    for before, after in zip(memory["history"], disk["history"], strict=True):
        assert worst(before, after) <= 1e-6
    assert worst(memory["history"][0], memory["history"][-1]) > 1e-3
    straight, resumed = (weights_of(tmp_path / "large_on_disk" / which) for which in ("end", "resumed"))
    assert worst(straight, resumed) == 0.0
