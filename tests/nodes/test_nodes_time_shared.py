"""Models leave the GPU while other nodes of their lease use it: those that only score, and trainers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flowrl.models import Policy
from flowrl.nodes import Critic, Reference, RewardModel, Teacher, Trainer
from flowrl.nodes.model_memory import ResidentNode
from flowrl.nodes.scoring.scoring_model import ScoringNode
from flowrl.tasks import Task
from flowrl.training.engine import residence
from flowrl.training.engine.residence import Residence
from flowrl.training.scoring_models import LocalModel


class Model(torch.nn.Module):
    """Notes where it is moved to; there is no GPU here."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self.events = events

    def to(self, device: str) -> Model:  # type: ignore[override]
        self.events.append(device)
        return self


def reference(model: Any) -> ScoringNode:
    node = Reference(Policy("tiny"))
    node.scoring = LocalModel(model)
    return node


def teacher(model: Any) -> ScoringNode:
    node = Teacher(Policy("tiny"), student=Policy("tiny"))
    node.scoring = LocalModel(model)
    return node


def critic(model: Any) -> ScoringNode:
    node = Critic(Policy("tiny"))
    node.scoring = LocalModel(model)
    return node


def reward_model(model: Any) -> ScoringNode:
    node = RewardModel("models/reward", Policy("tiny"), Task("arithmetic"))
    node.scoring = LocalModel(model)
    return node


def placed(node: ScoringNode, *, gpus: tuple[int, ...], time_shared: bool) -> ScoringNode:
    async def blocking(fn: Callable[..., Any], *args: Any) -> Any:
        return fn(*args)

    context: Any = SimpleNamespace(gpus=gpus, time_shared=time_shared, blocking=blocking)
    node.context = context
    return node


MADE = [reference, teacher, critic, reward_model]


@pytest.mark.parametrize("made", MADE)
def test_a_model_is_on_the_gpu_in_its_own_turns_alone(
    made: Callable[[Any], ScoringNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: events.append("freed"))
    node = placed(made(Model(events)), gpus=(0,), time_shared=True)
    assert node.load_device == "cpu", "another node of the lease may have the device"
    for _ in range(2):
        asyncio.run(node.on_acquire())
        asyncio.run(node.on_release())
    assert events == ["cuda", "cpu", "freed"] * 2


@pytest.mark.parametrize("made", MADE)
def test_without_a_gpu_nothing_is_moved(made: Callable[[Any], ScoringNode]) -> None:
    events: list[str] = []
    node = placed(made(Model(events)), gpus=(), time_shared=True)
    asyncio.run(node.on_acquire())
    asyncio.run(node.on_release())
    assert events == [] and node.load_device == "cpu"


def test_a_model_with_a_gpu_of_its_own_is_loaded_there() -> None:
    assert placed(reference(Model([])), gpus=(2,), time_shared=False).load_device == "cuda"


class Trained(ResidentNode):
    """A node with a parameter on its device, for which the CPU stands."""

    def find_resident(self) -> object:
        return self.weight

    async def setup(self) -> None:
        self.weight = torch.arange(6.0)


def test_a_trainer_has_nothing_on_the_gpu_between_its_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    gauges: dict[str, float] = {}
    monkeypatch.setattr(residence, "Residence", lambda root, device: Residence(root, torch.device("cpu")))
    node: Any = placed(Trained(), gpus=(0,), time_shared=True)  # type: ignore[arg-type]
    node.context.gauge = gauges.__setitem__

    async def turns() -> None:
        await node.on_acquire()  # the lease is taken for the set-up: nothing has been moved yet
        await node.setup()
        for _ in range(2):
            await node.on_release()
            assert node.weight.untyped_storage().nbytes() == 0
            await node.on_acquire()
            assert node.weight.tolist() == [0, 1, 2, 3, 4, 5]
        await node.close()

    asyncio.run(turns())
    assert gauges["device_leave_bytes"] == 24 and {"device_leave_s", "device_return_s"} <= gauges.keys()


def test_a_trainer_without_a_gpu_moves_nothing() -> None:
    node: Any = placed(Trained(), gpus=(), time_shared=True)  # type: ignore[arg-type]
    asyncio.run(node.setup())
    asyncio.run(node.on_release())
    assert node.weight.untyped_storage().nbytes() == 24


class Turns:
    """Stands for the host of a trainer in turns; notes what is done, and whether the node has its devices then."""

    gpus, time_shared = (0,), True

    def __init__(self) -> None:
        self.events: list[str] = []
        self.has_devices = False

    def note(self, event: str) -> None:
        self.events.append(event if self.has_devices else f"{event} without devices")

    @asynccontextmanager
    async def on_devices(self) -> AsyncIterator[None]:
        self.has_devices = True
        yield
        self.has_devices = False

    @contextmanager
    def busy(self, name: str) -> Iterator[None]:
        yield

    async def blocking(self, fn: Callable[..., Any], *args: Any) -> Any:
        return fn(*args)

    # The publisher

    def publish_version(self, version: int, kind: str) -> None:
        self.note(f"publish {version}")

    def transmit_tensors(self) -> None:
        self.note("transmit")


def test_a_trainer_publishes_and_saves_on_its_devices() -> None:
    turns = Turns()
    node: Any = Trainer(Policy("tiny"))
    node.context = node._publisher = turns
    node._save_checkpoint = lambda path: turns.note(f"save {path}")

    async def life() -> None:
        await node._publish_version(changed=True)
        await node.checkpoint("there")

    asyncio.run(life())
    assert turns.events == ["publish 0", "transmit", "save there"] and not turns.has_devices
