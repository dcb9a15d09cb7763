"""kernels.py: what is a product, where the time of an operation is booked, and how rates are told."""

from __future__ import annotations

import pytest
import torch

from benchmarks.training.kernels import Product, Profile, Rate, _recorded, _summed, alone_s, kind_of, rate_of, report


def profile_of_a_pass() -> Profile:
    first, second = torch.randn(20, 30, requires_grad=True), torch.randn(30, 40)

    class Layer:
        def forward(self) -> torch.Tensor:
            return first.exp() @ second

    def run() -> None:
        _recorded(Layer.forward, "logits")(Layer()).sum().backward()

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profiler:
        run()
    return _summed(profiler.events(), 1.0)


def test_products_are_counted_with_their_shapes_forward_and_backward() -> None:
    products = profile_of_a_pass().products
    assert products[Product("aten::mm", ((20, 30), (30, 40)))] == 1
    assert products[Product("aten::mm", ((20, 40), (40, 30)))] == 1, "the gradient of the first factor"
    assert sum(product.flops * number for product, number in products.items()) == 2 * (2 * 20 * 30 * 40)


def test_operations_are_booked_in_the_part_around_them() -> None:
    profile = profile_of_a_pass()
    assert profile.by_part["logits", "matmul"] > 0 and profile.by_part["logits", "elementwise"] > 0
    assert profile.by_part["layers", "matmul"] > 0, "a backward that carries no label"
    assert profile.unseen_s == pytest.approx(1.0 - sum(profile.by_part.values()))


def test_a_batched_product_counts_each_of_its_matrices() -> None:
    assert Product("aten::bmm", ((3, 4, 5), (3, 5, 6))).flops == 3 * 2 * 4 * 5 * 6
    assert alone_s(Product("aten::bmm", ((3, 4, 5), (3, 5, 6))), torch.float32) > 0


def test_kinds_of_operations() -> None:
    assert [kind_of(f"aten::{name}") for name in ("addmm", "copy_", "mul", "_fused_adamw_")] == [
        "matmul",
        "copy",
        "elementwise",
        "optimizer",
    ]


def test_the_share_of_the_rate_is_the_time_of_the_products_alone_over_that_of_an_update() -> None:
    profile = Profile(5.0, {("layers", "matmul"): 3.0}, {"aten::mm": 3.0}, {Product("aten::mm", ((1, 2), (2, 3))): 1})
    text = report("float32", [4.0, 5.0, 4.5], 4.2, profile, Rate(2.25, 9_000_000_000), 1)
    assert "an update takes 4.50 s (4.00–5.00), 4.20 CPU seconds; profiled, it took 5.00 s" in text
    assert "alone 2.25 s at 4 GFLOP/s; the update makes 2 GFLOP/s, 50% of that rate" in text
    assert "| in no operation | 0.00 s | 0.00 s | 0.00 s | 0.00 s | 2.00 s |" in text
    assert rate_of(profile, torch.float32).flops == 12
