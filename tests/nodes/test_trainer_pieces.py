"""The trainer's node with batches in pieces: books, weights, custody and snapshots, in the real engine.

The learner is real too, on one process without DeepSpeed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flowrl.messages import Batch, Weights
from flowrl.models import Policy
from flowrl.nodes import Trainer
from flowrl.testing import NodeRecord, NodeRig
from flowrl.training.learner import Learner
from tests.training.pieces import pieces_of
from tests.training.test_training_pieces import Engine, model_dir
from tests.training.training_cases import Case, make_batch

__all__ = ["model_dir"]


class Sgd(Engine):
    """Updates the weights as well."""

    def set_lr(self, lr: float) -> None:
        self.lr = lr

    def step_optimizer(self, *, divide_by: float = 1.0) -> Any:
        step = super().step_optimizer(divide_by=divide_by)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter -= self.lr * parameter.grad
        self.model.zero_grad()
        return step

    def weights(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self.model.parameters()]


class Manifests:
    """Publishes nothing but the manifest."""

    def publish_version(self, version: int, kind: str) -> Weights:
        return Weights("trainer", version, version, kind, "", 0, 0)

    def transmit_tensors(self) -> None: ...

    def close(self) -> None: ...


class OneProcessTrainer(Trainer):
    """A trainer whose model is at hand, with the weights of `path`."""

    def __init__(self, path: Path, **settings: Any) -> None:
        super().__init__(Policy(str(path)), lr=0.1, temperature=0.8, **settings)
        self.path = path

    def preflight(self) -> None: ...

    async def checkpoint(self, path: str) -> None: ...

    def _load_learner(self) -> Learner:
        from flowrl.training.model.policy_model import load_policy_model

        self.engine = Sgd(load_policy_model(self.path))
        self._publisher = Manifests()  # type: ignore[assignment]
        return Learner(self.engine, self.objective, temperature=0.8, max_staleness=2)  # type: ignore[arg-type]


def batch_of(number: int) -> Batch:
    """The batch that updates version `number`; samples of versions before 0 are as data, of no version."""
    batch = make_batch(number, Case("pieces"))
    samples = [
        replace(s, versions=np.where(s.policy_mask, np.maximum(s.versions, -1), -1).astype(np.int32))
        for s in batch.samples
    ]
    return replace(batch, samples=tuple(samples), metrics={"filtered_groups": float(number)})


def trained(path: Path, batches: Sequence[Batch], **settings: Any) -> tuple[NodeRecord, list[Tensor]]:
    async def life() -> tuple[NodeRecord, list[Tensor]]:
        node = OneProcessTrainer(path, **settings)
        async with NodeRig(node, ignore=("held_out",), max_staleness=2) as rig:
            rig.feed(node.batches, *batches)
            record = await rig.finished()
            return record, node.engine.weights()

    return asyncio.run(life())


SIZES = ((3, 2), (5, 2))
"""Of two batches."""


def test_books_weights_and_figures_are_those_of_whole_batches(model_dir: Path) -> None:
    whole = [batch_of(number) for number in range(2)]
    cut = [piece for batch, sizes in zip(whole, SIZES, strict=True) for piece in pieces_of(batch, sizes)]
    theirs, expected = trained(model_dir, whole)
    ours, weights = trained(model_dir, cut)
    for found, wanted in zip(weights, expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=2e-6)
    assert [one.version for one in ours.sent("weights")] == [0, 1, 2]
    assert len(ours.events("step")) == 2
    for (_, mine, uses), (_, whole_one, whole_uses) in zip(ours.events("step"), theirs.events("step"), strict=True):
        assert sorted(uses) == sorted(whole_uses)
        assert mine.keys() == whole_one.keys()
        for name, value in whole_one.items():
            if isinstance(value, float) and name != "tokens_computed":
                assert mine[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
            elif name not in ("tokens_computed", "behavior_gap_by_staleness"):
                assert mine[name] == value, name


def test_a_batch_is_finished_with_its_last_piece(model_dir: Path) -> None:
    first, second, last = pieces_of(batch_of(0), (3, 2))

    async def life() -> None:
        node = OneProcessTrainer(model_dir)
        async with NodeRig(node, ignore=("held_out",), max_staleness=2) as rig:
            feeder = rig._graph.feeders["batches"].port
            rig.feed(node.batches, first, second)
            await rig.taken(node.batches)
            async with rig.paused():
                assert (feeder.num_untaken, feeder.num_unfinished, node.version) == (0, 2, 0)
            rig.feed(node.batches, last)
            await rig.until(lambda record: bool(record.events("step")), "a step")
            await rig.finished()
            assert (feeder.num_unfinished, node.version) == (0, 1)

    asyncio.run(life())


def test_a_snapshot_between_pieces_loses_nothing_and_trains_nothing_twice(model_dir: Path, tmp_path: Path) -> None:
    _, expected = trained(model_dir, [batch_of(0)])
    pieces = pieces_of(batch_of(0), (3, 2))

    async def begun() -> None:
        node = OneProcessTrainer(model_dir)
        async with NodeRig(node, ignore=("held_out",), max_staleness=2) as rig:
            rig.feed(node.batches, *pieces[:2])
            await rig.taken(node.batches)
            await rig.snapshot(tmp_path / "snapshot")

    async def resumed() -> tuple[NodeRecord, list[Tensor]]:
        node = OneProcessTrainer(model_dir)
        rig = NodeRig(node, ignore=("held_out",), max_staleness=2, resume=tmp_path / "snapshot")
        async with rig:
            rig.feed(node.batches, pieces[2])
            record = await rig.finished()
            return record, node.engine.weights()

    asyncio.run(begun())
    record, weights = asyncio.run(resumed())
    ((_, _, uses),) = record.events("step")
    assert len(uses) == len(batch_of(0).samples)
    for found, wanted in zip(weights, expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=2e-6)


def test_warm_up_without_an_update_takes_pieces_as_well(model_dir: Path) -> None:
    record, weights = trained(model_dir, pieces_of(batch_of(0), (3, 2)), start_after=1)
    ((_, line, uses),) = record.events("step")
    assert line["unchanged"] and len(uses) == 7
    for found, wanted in zip(weights, trained(model_dir, [])[1], strict=True):
        assert bool((found == wanted).all())
