"""What an object has on a device is moved to host memory and back: any object, and real ZeRO ranks."""

from __future__ import annotations

import json
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.training.engine.residence import Residence, device_storages
from tests.ranks import run_ranks
from tests.residence_rank import CASES
from tests.test_memory_formulas import configuration

CPU = torch.device("cpu")


class Slotted:
    """An object without a dictionary."""

    __slots__ = ("inside",)

    def __init__(self, inside: object) -> None:
        self.inside = inside


WRAPPED = [
    lambda x: x,
    lambda x: [x, "text", 3],
    lambda x: ({"key": x}, None),
    lambda x: {x},
    lambda x: {x: "state of a parameter"},
    lambda x: deque([1, x]),
    lambda x: SimpleNamespace(deeper=SimpleNamespace(x=x)),
    Slotted,
]


@given(
    sizes=st.lists(
        st.tuples(st.integers(1, 40), st.sampled_from([torch.float32, torch.bfloat16, torch.int8])), max_size=8
    ),
    wraps=st.lists(st.integers(0, len(WRAPPED) - 1), min_size=8, max_size=8),
    views=st.booleans(),
)
@settings(max_examples=20)  # each collects garbage
def test_every_tensor_leaves_and_comes_back_as_it_was(
    sizes: list[tuple[int, torch.dtype]], wraps: list[int], views: bool
) -> None:
    tensors = [torch.randint(-100, 100, (size,)).to(dtype) for size, dtype in sizes]
    held: list[torch.Tensor] = [tensor[tensor.numel() // 2 :] if views else tensor for tensor in tensors]
    root = SimpleNamespace(parts=[WRAPPED[wrap](tensor) for wrap, tensor in zip(wraps, held, strict=False)])
    root.itself = root
    wanted = [tensor.clone() for tensor in tensors]
    residence = Residence(root, CPU)
    for _ in range(2):
        assert residence.leave() == sum(tensor.untyped_storage().nbytes() for tensor in wanted)
        assert all(tensor.untyped_storage().nbytes() == 0 for tensor in tensors)
        assert residence.is_away == bool(tensors)
        residence.come_back()
        assert all(torch.equal(a, b) for a, b in zip(tensors, wanted, strict=True)), "views and what they are views of"
        for tensor, copy in zip(tensors, wanted, strict=True):  # the next turn works with them
            tensor += 1
            copy += 1


def test_gradients_and_optimizer_states_belong_to_it_and_other_devices_do_not() -> None:
    layer = torch.nn.Linear(5, 3)
    optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
    layer(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    elsewhere = torch.empty(7, device="meta")
    root: Any = SimpleNamespace(model=layer, optimizer=optimizer, elsewhere=elsewhere, fn=lambda: elsewhere)
    found = {storage.data_ptr() for storage in device_storages(root, CPU)}
    states = [value for state in optimizer.state.values() for value in state.values()]
    owned = [*layer.parameters(), *(p.grad for p in layer.parameters()), *states]
    wanted = {tensor.untyped_storage().data_ptr() for tensor in owned}
    assert found == wanted and len(found) == 2 + 2 + 6


def test_the_host_memory_is_used_again() -> None:
    root = [torch.zeros(1000)]
    residence = Residence(root, CPU)
    residence.leave()
    address = residence._host.of(0).data_ptr()
    residence.come_back()
    root.append(torch.ones(3))
    residence.leave()
    residence.come_back()
    residence.leave()
    assert residence._host.of(0).numel() >= 4000 + 12 and root[1].untyped_storage().nbytes() == 0
    residence.come_back()
    assert root[1].tolist() == [1, 1, 1] and address
    residence.close()
    assert residence._host.of(0).numel() == 0


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    from transformers import AutoModelForCausalLM

    directory = tmp_path_factory.mktemp("residence")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(configuration("Qwen2", vocab_size=512, tie_word_embeddings=True))
    model.save_pretrained(directory / "model")
    run_ranks("tests.residence_rank", directory)
    found: dict[str, dict[str, Any]] = json.loads((directory / "residence-0.json").read_text())
    return found


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", CASES)
def test_a_zero_rank_leaves_and_trains_on_as_if_it_had_not(ranks: dict[str, dict[str, Any]], name: str) -> None:
    found = ranks[name]
    assert found["norms"] and found["same"], "bit by bit"
    for kept, here in zip(found["kept"], found["here"], strict=True):
        assert kept < 0.01 * here, f"{kept} of {here} bytes stayed"
