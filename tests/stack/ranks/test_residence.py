"""What an object has on a device is moved to host memory and back: any object, and real ZeRO ranks."""

from __future__ import annotations

import gc
import json
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.training.engine.residence import HostMemory, Residence, device_storages, page_lock, page_unlock
from tests.house.further_cases import chosen
from tests.stack.ranks.ranks import run_ranks
from tests.stack.ranks.residence_rank import CASES
from tests.training.test_memory_formulas import configuration

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
    gc.freeze()  # what other tests and imports have made: each turn collects garbage, in a second for a million objects
    held: list[torch.Tensor] = [tensor[tensor.numel() // 2 :] if views else tensor for tensor in tensors]
    root = SimpleNamespace(parts=[WRAPPED[wrap](tensor) for wrap, tensor in zip(wraps, held, strict=False)])
    root.itself = root
    wanted = [tensor.clone() for tensor in tensors]
    residence = Residence(root, CPU)
    for _ in range(2):
        assert residence.move_away() == sum(tensor.untyped_storage().nbytes() for tensor in wanted)
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
    residence.move_away()
    address = residence._host.reserve_for(0).data_ptr()
    residence.come_back()
    root.append(torch.ones(3))
    residence.move_away()
    residence.come_back()
    residence.move_away()
    assert residence._host.reserve_for(0).numel() >= 4000 + 12 and root[1].untyped_storage().nbytes() == 0
    residence.come_back()
    assert root[1].tolist() == [1, 1, 1] and address
    residence.free_memory()
    assert residence._host.reserve_for(0).numel() == 0


class CudaRuntime:
    """CUDA's page-locking as its documentation has it: what is locked cannot be locked again, an error stays."""

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}
        self.error = 0

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        if address in self.locked:
            self.error = 712
            return self.error
        self.locked[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        if address not in self.locked:
            self.error = 713
            return self.error
        del self.locked[address]
        return 0


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> CudaRuntime:
    runtime = CudaRuntime()

    def ones(size: int, device: str) -> torch.Tensor:
        """Torch's next kernel: raises the error that is left, once."""
        error, runtime.error = runtime.error, 0
        if error:
            raise RuntimeError(f"CUDA error {error}")
        return torch.tensor([1.0] * size)

    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch, "ones", ones)
    return runtime


def test_host_memory_is_unlocked_before_its_addresses_may_be_used_again(cuda: CudaRuntime) -> None:
    memory = HostMemory(pinned=True)
    memory.reserve_for(1000)
    assert list(cuda.locked.values()) == [1000]
    memory.reserve_for(5000)
    assert list(cuda.locked.values()) == [5000], "the smaller piece is given back"
    memory.free_memory()
    assert not cuda.locked
    memory.reserve_for(10)
    del memory  # as when a trainer is made anew in a process, without close
    assert not cuda.locked


def test_memory_that_cannot_be_locked_is_used_as_it_is_and_leaves_no_error(
    cuda: CudaRuntime, caplog: pytest.LogCaptureFixture
) -> None:
    memory = HostMemory(pinned=True)
    taken = torch.empty(100, dtype=torch.uint8)
    assert page_lock(taken) and not page_lock(taken)
    assert cuda.error == 0 and "CUDA error 712" in caplog.text and "ulimit -l" in caplog.text
    page_unlock(taken)
    page_unlock(taken)
    assert cuda.error == 0 and memory.reserve_for(3).numel() == 3
    memory.free_memory()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, dict[str, Any]]:
    from transformers import AutoModelForCausalLM

    directory = tmp_path_factory.mktemp("residence")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(configuration("Qwen2", vocab_size=512, tie_word_embeddings=True))
    model.save_pretrained(directory / "model")
    run_ranks("tests.stack.ranks.residence_rank", directory, *chosen(request, CASES))
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
