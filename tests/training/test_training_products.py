"""Products by oneDNN are torch's own, with their gradients; which products go there."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from flowrl.machine.cpu import cpu_maker
from flowrl.training.model import products
from flowrl.training.model.logprobs import cached_logprobs
from flowrl.training.model.policy_model import load_policy_model
from tests.training.training_cases import make_model

pytestmark = pytest.mark.skipif(not torch._C._has_mkldnn, reason="torch was built without oneDNN")
INTEL = "vendor_id\t: GenuineIntel\nflags\t\t: avx2 avx512f\n"


@pytest.fixture
def everything(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """All products in float32 go to oneDNN, however small."""
    monkeypatch.setattr(products, "LEAST", 0)
    monkeypatch.setattr(products, "prefers_onednn", lambda: True)
    yield


def grads(x: torch.Tensor, layer: nn.Linear, out: torch.Tensor) -> list[torch.Tensor]:
    wanted = [t for t in (x, *layer.parameters()) if t.requires_grad]
    return list(torch.autograd.grad(out.sin().sum(), wanted))


@pytest.mark.parametrize("shape", [(1, 8), (7, 8), (2, 5, 8)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("frozen", ["", "x", "weight"])
def test_a_layer_and_its_gradients_are_torchs(
    shape: tuple[int, ...], bias: bool, frozen: str, everything: None
) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(8, 6, bias=bias)
    layer.weight.requires_grad_(frozen != "weight")
    x = torch.randn(shape, requires_grad=frozen != "x")
    expected = layer(x)
    theirs = grads(x, layer, expected)
    products.multiply_fast(layer)
    found = layer(x)
    assert type(found.grad_fn).__name__ == "_LinearBackward"
    torch.testing.assert_close(found, expected)
    for ours, their in zip(grads(x, layer, found), theirs, strict=True):
        torch.testing.assert_close(ours, their)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), expected)


def test_matrices_of_any_strides(everything: None) -> None:
    draw = torch.Generator().manual_seed(0)
    first, second = torch.randn(9, 40, generator=draw), torch.randn(5, 9, generator=draw)
    torch.testing.assert_close(products.multiply_matrices(first.T, second.T), first.T @ second.T)
    some, others = first[:, 3:30:3], second.T[:, ::2]
    torch.testing.assert_close(products.multiply_matrices(some, others), some @ others)


def test_a_model_and_its_logprobs_are_torchs(everything: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model(tmp_path, tied=True)
    model = load_policy_model(tmp_path, layout="rows")
    products.multiply_fast(model.network)
    assert type(model.network.base_model.layers[0].mlp.up_proj) is products.FastLinear
    inputs = torch.arange(12).view(2, 6)

    def found() -> tuple[torch.Tensor, list[torch.Tensor]]:
        model.zero_grad()
        hidden = model.network.base_model(inputs)[0].flatten(0, 1)
        weight = model.network.get_output_embeddings().weight
        logprobs, _ = cached_logprobs(hidden, weight, None, inputs.flatten(), kept_bytes=400, product_bytes=2000)
        logprobs.sum().backward()
        return logprobs.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]

    logprobs, gradients = found()
    monkeypatch.setattr(products, "prefers_onednn", lambda: False)
    expected, theirs = found()
    torch.testing.assert_close(logprobs, expected)
    assert len(gradients) == len(theirs) > 10
    for ours, their in zip(gradients, theirs, strict=True):
        torch.testing.assert_close(ours, their, rtol=1e-4, atol=1e-4)


def test_a_model_is_freed_as_soon_as_nobody_holds_it(everything: None) -> None:
    """Without waiting for the collector of cycles: a second model would need the memory meanwhile."""
    network = nn.Sequential(nn.Linear(4, 4))
    products.multiply_fast(network)
    seen = weakref.ref(network[0])
    gc.disable()
    try:
        del network
        assert seen() is None
    finally:
        gc.enable()


def test_what_stays_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "prefers_onednn", lambda: True)
    big, small = torch.zeros(300, 600), torch.zeros(10, 10)
    assert products._is_for_onednn(big, torch.zeros(400, 600))
    assert not products._is_for_onednn(small, small), "a new shape costs more than such a product"
    assert not products._is_for_onednn(big.bfloat16(), torch.zeros(400, 600).bfloat16()), "torch does so itself"
    assert not products._is_for_onednn(big.double(), torch.zeros(400, 600).double())
    assert not products._is_for_onednn(big.to("meta"), torch.zeros(400, 600, device="meta"))


@pytest.mark.parametrize(
    ("cpuinfo", "prefers"),
    [
        (INTEL, False),
        (INTEL.replace("GenuineIntel", "AuthenticAMD"), True),
        ("vendor_id\t: AuthenticAMD\nflags\t\t: avx2\n", False),
        ("CPU implementer\t: 0x41\nFeatures\t: asimd bf16\n", False),
        ("", False),
    ],
)
def test_on_which_processors(cpuinfo: str, prefers: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text(cpuinfo)
    for name in ("cpu_flags", "cpu_maker"):
        real = getattr(products, name)
        monkeypatch.setattr(products, name, lambda real=real: real(file))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv(products.PLAIN, raising=False)
    assert products.prefers_onednn.__wrapped__() is prefers
    monkeypatch.setenv(products.PLAIN, "1")
    assert products.prefers_onednn.__wrapped__() is False
    assert cpu_maker(tmp_path / "none") == ""
