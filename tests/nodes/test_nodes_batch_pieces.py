"""The batcher sends a batch in pieces where its trainers wait; whole where they do not, and where they need it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flowrl.messages import Batch, Group
from flowrl.nodes import TokenBatch
from flowrl.nodes.groups import batch as batch_module
from flowrl.nodes.groups.batch import Pace
from flowrl.testing import NodeRig, lost
from tests.nodes.test_nodes_batch import batches, group


@pytest.fixture(autouse=True)
def at_any_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups come as fast as they can; a real run's batch would be whole sooner than a piece is due."""
    monkeypatch.setattr(batch_module, "PACE_S", 0.0)


def names(found: Sequence[Batch]) -> list[tuple[list[str], int, bool]]:
    """(groups, number of the piece, whether it is the last) of each."""
    return [(list(dict.fromkeys(sample.group_id for sample in one.samples)), one.piece, one.last) for one in found]


def groups(first: int, last: int) -> list[Group]:
    """Groups that differ in all that a batch's figures are of."""
    made = [group(f"g{n}", rewards=(float(n % 3), 0.5), response=2 + n) for n in range(first, last)]
    return [replace(one, metrics={"judged_groups": 2.0, **JUDGED}) for one in made]


JUDGED = {"filtered_groups": 1.0, "filtered_tokens": 7.0, "judged_raw_reward": 0.5}


class Trainer:
    """Stands behind the batcher: takes what it sends, and finishes it when told to."""

    def __init__(self, rig: NodeRig, node: TokenBatch) -> None:
        self.rig, self.node = rig, node
        self._collector = rig._graph.collectors["batches"]
        self._finish, self._held = self._collector.finish, list[Any]()
        self._collector.finish = self._held.append
        self._moved = asyncio.Event()
        for edge in node.batches.live.edges:  # type: ignore[attr-defined]
            edge.on_taken(lambda ids: self._moved.set())
            edge.on_acked(lambda ids: self._moved.set())

    async def takes(self) -> Batch:
        """The next piece, once the batcher knows that it is taken."""
        found: Batch = await self.rig.receive("batches")
        await self._until(lambda: self.node.batches.num_untaken == 0)
        return found

    async def finishes(self) -> None:
        """Finish all that is taken."""
        for item in self._held:
            self._finish(item)
        self._held.clear()
        await self._until(lambda: self.node.batches.num_unfinished == 0)

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._moved.clear()
            await self._moved.wait()


async def feed(rig: NodeRig, node: TokenBatch, made: Sequence[Group], first: int = 0) -> None:
    for ticket, one in enumerate(made, first):
        rig.feed(node.groups, one, ticket=ticket)
    await rig.taken(node.groups)


def test_a_trainer_that_waits_gets_every_group_at_once_and_the_figures_with_the_last() -> None:
    node, made = TokenBatch(3), groups(0, 3)

    async def life() -> list[Batch]:
        async with NodeRig(node, window=1, in_pieces=True) as rig:
            trainer, found = Trainer(rig, node), []
            for ticket, one in enumerate(made):
                await feed(rig, node, [one], ticket)
                found.append(await trainer.takes())
            await trainer.finishes()
            await rig.finished()
            return found

    found = asyncio.run(life())
    assert names(found) == [(["g0"], 0, False), (["g1"], 1, False), (["g2"], 2, True)]
    assert [one.num_groups for one in found] == [1, 1, 1]
    assert [one.num_tokens for one in found] == [4, 6, 8]
    (whole,) = batches(TokenBatch(3), list(enumerate(made)))
    assert [one.metrics for one in found] == [{}, {}, whole.metrics]
    assert whole.metrics["filtered_groups"] == 3.0


def test_a_busy_trainer_gets_whole_batches() -> None:
    node = TokenBatch(2)

    async def life() -> list[Batch]:
        async with NodeRig(node, window=1, in_pieces=True) as rig:
            trainer = Trainer(rig, node)
            await feed(rig, node, groups(0, 1))
            first = await trainer.takes()
            await feed(rig, node, groups(1, 3), 1)
            second = await trainer.takes()
            await feed(rig, node, groups(3, 4), 3)  # g2 has waited: the first batch is not finished
            third = await trainer.takes()
            await trainer.finishes()
            return [first, second, third]

    assert names(asyncio.run(life())) == [(["g0"], 0, False), (["g1"], 1, True), (["g2", "g3"], 0, True)]


def test_a_piece_follows_when_the_one_before_is_taken_and_has_all_that_has_come() -> None:
    node = TokenBatch(5)

    async def life() -> list[Batch]:
        async with NodeRig(node, window=1, in_pieces=True, unread=("batches",)) as rig:
            trainer = Trainer(rig, node)
            await feed(rig, node, groups(0, 3))
            rig.read("batches")
            found = [await trainer.takes()]
            await feed(rig, node, groups(3, 4), 3)
            found.append(await trainer.takes())
            await feed(rig, node, groups(4, 5), 4)
            found.append(await trainer.takes())
            await trainer.finishes()
            return found

    assert names(asyncio.run(life())) == [(["g0"], 0, False), (["g1", "g2", "g3"], 1, False), (["g4"], 2, True)]


def test_a_piece_has_an_eighth_of_the_batch_at_least() -> None:
    node = TokenBatch(17)

    async def life() -> list[Batch]:
        async with NodeRig(node, window=1, in_pieces=True) as rig:
            trainer = Trainer(rig, node)
            await feed(rig, node, groups(0, 2))
            assert rig.record.sent("batches") == []
            await feed(rig, node, groups(2, 3), 2)
            return [await trainer.takes()]

    assert names(asyncio.run(life())) == [(["g0", "g1", "g2"], 0, False)]


def test_a_batch_that_forms_quickly_comes_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_module, "PACE_S", 1e9)
    node = TokenBatch(2)

    async def life() -> list[Batch]:
        async with NodeRig(node, window=1, in_pieces=True) as rig:
            trainer = Trainer(rig, node)
            await feed(rig, node, groups(0, 2))
            return [await trainer.takes()]

    assert names(asyncio.run(life())) == [(["g0", "g1"], 0, True)]


def test_a_piece_is_due_some_time_after_the_last_one_or_after_the_batchs_first_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(batch_module, "PACE_S", 0.5)
    pace = Pace()
    assert not pace.is_due(7.0), "no group has come"
    pace.begin_batch(10.0)
    pace.begin_batch(10.4)
    assert [pace.is_due(now) for now in (10.4, 10.5)] == [False, True]
    pace.note_sent(10.6, last=False)
    assert [pace.is_due(now) for now in (11.0, 11.2)] == [False, True]
    pace.note_sent(11.2, last=True)
    pace.begin_batch(20.0)
    assert [pace.is_due(now) for now in (20.1, 20.5)] == [False, True]


def test_groups_that_will_be_in_the_batch_do_not_wait_for_older_ones() -> None:
    node, made = TokenBatch(3), groups(0, 4)

    async def life() -> list[Batch]:
        async with NodeRig(node, window=1, in_pieces=True) as rig:
            trainer = Trainer(rig, node)
            await feed(rig, node, [made[3]], 3)  # may be in the next batch: three are older
            await feed(rig, node, [made[2]], 2)
            found = [await trainer.takes()]
            rig.feed(node.groups, lost(-1, group="g0"), ticket=0)
            await feed(rig, node, [], 0)
            found.append(await trainer.takes())
            await feed(rig, node, [made[1]], 1)
            found.append(await trainer.takes())
            await trainer.finishes()
            return found

    found = asyncio.run(life())
    assert names(found) == [(["g2"], 0, False), (["g3"], 1, False), (["g1"], 2, True)]


def test_the_end_of_the_stream_completes_a_batch_with_what_is_there_or_nothing() -> None:
    made = groups(0, 2)

    async def life(rest: Sequence[Any]) -> list[Batch]:
        node = TokenBatch(3)
        async with NodeRig(node, window=1, in_pieces=True) as rig:
            trainer = Trainer(rig, node)
            await feed(rig, node, made[:1])
            found = [await trainer.takes()]
            await feed(rig, node, rest, 1)
            rig.end()
            found += [await trainer.takes() for _ in range(1 + bool(rest[1:]))]
            await trainer.finishes()
            await rig.finished()
            return found

    (whole,) = batches(TokenBatch(3), [(0, made[0])])
    first, nothing = asyncio.run(life([lost(-1, group="g1")]))
    assert names([first, nothing]) == [(["g0"], 0, False), ([], 1, True)]
    assert nothing.metrics == whole.metrics
    assert [part.micro_batches for part in nothing.split(2)] == [((),), ((),)]
    assert names(asyncio.run(life([made[1], lost(-1, group="g2")])))[-1] == ([], 2, True)


def test_whole_batches_where_the_trainers_need_them() -> None:
    found = batches(TokenBatch(2), list(enumerate(groups(0, 4))))
    assert names(found) == [(["g0", "g1"], 0, True), (["g2", "g3"], 0, True)]
    assert all(one.whole for one in found)


def test_a_snapshot_between_pieces_has_those_sent_and_a_resumed_run_goes_on_with_the_rest(tmp_path: Path) -> None:
    made = groups(0, 3)

    async def begun() -> None:
        node = TokenBatch(3)
        async with NodeRig(node, window=1, in_pieces=True, start_version=4) as rig:
            trainer = Trainer(rig, node)
            await feed(rig, node, made[:1])
            await trainer.takes()
            await rig.snapshot(tmp_path / "snapshot")

    async def resumed() -> list[Batch]:
        node = TokenBatch(3)
        async with NodeRig(node, window=1, in_pieces=True, start_version=4, resume=tmp_path / "snapshot") as rig:
            trainer = Trainer(rig, node)
            found = [await trainer.takes()]
            for ticket, one in enumerate(made[1:], 1):
                await feed(rig, node, [one], ticket)
                found.append(await trainer.takes())
            await trainer.finishes()
            await rig.finished()
            return found

    asyncio.run(begun())
    found = asyncio.run(resumed())
    assert names(found) == [(["g0"], 0, False), (["g1"], 1, False), (["g2"], 2, True)]
    (whole,) = batches(TokenBatch(3), list(enumerate(made)))
    assert found[-1].metrics == whole.metrics


def test_without_a_window_a_piece_masks_what_the_whole_batch_would() -> None:
    node, made = TokenBatch(2, mask_truncated=True), groups(0, 2)
    cut = replace(made[0].samples[0], truncated=True)
    made[0] = replace(made[0], samples=(cut, *made[0].samples[1:]))

    async def life() -> list[Batch]:
        async with NodeRig(node, window=0, max_staleness=1, in_pieces=True) as rig:
            trainer, found = Trainer(rig, node), []
            for ticket, one in ((5, made[1]), (3, made[0])):
                await feed(rig, node, [one], ticket)
                found.append(await trainer.takes())
            await trainer.finishes()
            return found

    found = asyncio.run(life())
    assert names(found) == [(["g1"], 0, False), (["g0"], 1, True)]
    assert [one.mask_staleness for one in found] == [1, 1]
    assert not np.any(found[1].samples[0].loss_mask)
    assert found[1].metrics["overlong_share"] == 0.25
