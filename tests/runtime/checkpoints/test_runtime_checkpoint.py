"""A snapshot: what is saved of the messages under way."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flowrl.errors import ConfigError
from flowrl.messages import Batch, Group, Prompt, Sample, Tombstone, Trainable
from flowrl.runtime.checkpoints import checkpoint, snapshots
from flowrl.runtime.checkpoints.snapshots import Snapshot
from flowrl.wire.encoding.schema import Envelope


def prompt(name: str) -> Prompt:
    return Prompt(name, "g", "p", 0, 0, 1, 7, "text", np.arange(3, dtype=np.int32))


def sample(name: str) -> Trainable:
    ids = np.arange(3, dtype=np.int32)
    return Trainable(
        name, "g", "p", 0, 0, 1, "q", "a", ids, ids > 0, np.zeros(3, np.float32), ids, 1, False, "generator/0"
    )


def batch(*names: str) -> Batch:
    return Batch(tuple(map(sample, names)), ((0,),), 2, 4, 1)


def test_what_has_ended_is_left_out() -> None:
    snapshot = Snapshot(
        messages=[
            ("a/0", "x.out -> y.in", "", Envelope(b"1", body=prompt("x"))),
            ("a/0", "x.out -> y.in", "", Envelope(b"2", body=prompt("y"))),
        ]
    )
    snapshot.ended.add(("y.in", b"1"))
    assert [envelope.id for *_, envelope in snapshot.unfinished()] == [b"2"]


def test_unfinished_prompts_carry_what_was_generated() -> None:
    tokens, logprobs, versions = np.array([5, 6], np.int32), np.array([-1, -2], np.float32), np.array([3, 4], np.int32)
    snapshot = Snapshot(
        messages=[("a/0", "x.out -> y.in", "", Envelope(b"1", body=prompt("x")))],
        prefixes={"x": (tokens, logprobs, versions)},
    )
    ((*_, envelope),) = snapshot.unfinished()
    assert isinstance(envelope.body, Prompt)
    assert envelope.body.prefix_token_ids.tolist() == [5, 6]
    assert envelope.body.prefix_versions.tolist() == [3, 4]


def test_a_gangs_message_is_kept_whole_until_a_rank_has_done_its_part() -> None:
    whole = ("batcher/0", "x.out -> y.in", "", Envelope(b"1", body=batch("x", "y", "z")))
    parts = {("x.out -> y.in", b"1"): {"y/0": b"p0", "y/1": b"p1", "y/2": b"p2"}}
    snapshot = Snapshot(messages=[whole], parts=parts)
    assert snapshot.unfinished() == [whole]
    snapshot.ended.add(("y.in", b"p1"))
    assert [(consumer, envelope) for _, _, consumer, envelope in snapshot.unfinished()] == [
        ("y/0", whole[3]),
        ("y/2", whole[3]),
    ]


def test_a_rank_that_has_finished_its_part_is_left_out_and_one_that_lost_it_gets_the_marker() -> None:
    marker = Tombstone("g", 0, "failed", "r", "n")
    snapshot = Snapshot(
        messages=[("batcher/0", "x.out -> y.in", "", Envelope(b"1", body=batch("x", "y")))],
        parts={("x.out -> y.in", b"1"): {"y/0": b"", "y/1": b"p1"}},
        lost={("y.in", b"p1"): marker},
    )
    assert [(consumer, envelope.body) for _, _, consumer, envelope in snapshot.unfinished()] == [("y/1", marker)]


def test_a_batch_under_way_trains_the_same_samples_in_the_same_steps_after_a_resume(tmp_path: Path) -> None:
    """Also where it was split for two ranks and is split for three."""
    rows = [replace(sample(f"s{i}"), token_ids=np.zeros(2 + i * 7 % 11, np.int32)) for i in range(8)]
    sent = replace(batch(), samples=tuple(rows), optimizer_steps=2, token_budget=64)
    snapshot = Snapshot(messages=[("batcher/0", "x.out -> y.in", "", Envelope(b"1" * 16, body=sent))])
    snapshots.write_state(tmp_path, snapshot, {})
    ((*_, envelope),) = snapshots.read_state(tmp_path)["messages"]
    assert steps(envelope.body.split(2)) == steps(envelope.body.split(3)) == steps(sent.split(2))
    assert steps(sent.split(2)) == [{"s0", "s1", "s2", "s3"}, {"s4", "s5", "s6", "s7"}]


def steps(parts: Sequence[Batch]) -> list[set[str]]:
    """The samples of each optimizer step, of all ranks."""
    found: list[set[str]] = [set() for _ in parts[0].step_ends]
    for part in parts:
        begins = (0, *part.step_ends)
        for number, end in enumerate(part.step_ends):
            indices = itertools.chain(*part.micro_batches[begins[number] : end])
            found[number] |= {part.samples[index].sample_id for index in indices}
    return found


def test_what_is_made_already_is_found_in_the_messages() -> None:
    rollout = Sample(**{f.name: getattr(sample("x"), f.name) for f in fields(Sample)})
    bodies = [rollout, sample("y"), Group("g", (sample("z"),), 1), batch("b"), prompt("p")]
    generated, scored = snapshots.samples_in(("a/0", "x.out -> y.in", "", Envelope(b"1", body=body)) for body in bodies)
    assert (generated, scored) == ({"x", "y", "z", "b"}, {"y", "z", "b"})


def test_state_survives_the_disk(tmp_path: Path) -> None:
    snapshot = Snapshot(
        messages=[("a/0", "x.out -> y.in", "", Envelope(b"1" * 16, 3, "g", 0, prompt("x")))],
        sent={b"9"},
        states={"a/0": b"s"},
    )
    snapshots.write_state(tmp_path, snapshot, {"version": 5})
    state = snapshots.read_state(tmp_path)
    ((producer, edge, consumer, envelope),) = state["messages"]
    assert (producer, edge, consumer, envelope.ticket, envelope.group_id) == ("a/0", "x.out -> y.in", "", 3, "g")
    assert envelope.body.token_ids.tolist() == [0, 1, 2]
    assert state["facts"] == {"version": 5} and state["sent"] == [b"9"] and state["states"] == {"a/0": b"s"}


def test_another_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "FORMAT", 9)
    snapshots.write_state(tmp_path, Snapshot(), {})
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="format 9"):
        snapshots.read_state(tmp_path)


def test_old_checkpoints_go(tmp_path: Path) -> None:
    for step in range(4):
        (tmp_path / f"step_{step:06d}").mkdir()
    checkpoint.prune_checkpoints(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000002", "step_000003"]
    checkpoint.prune_checkpoints(tmp_path, 0)
    assert len(list(tmp_path.iterdir())) == 2


def test_prefixes_leave_other_messages_alone() -> None:
    body = replace(sample("x"))
    snapshot = Snapshot(messages=[("a/0", "x.out -> y.in", "", Envelope(b"1", body=body))], prefixes={"x": (1, 2, 3)})
    assert snapshot.unfinished()[0][3].body is body


# Directories, and a crash at any point


CHANGES = ("replace", "rename", "rmdir", "unlink", "fsync")
"""Of `os`: whatever `publish`, `prune` and `recover` do to the disk."""


class Killed(BaseException):
    """The process is dead: from the call that raised it on nothing reaches the disk."""


@contextmanager
def failing(at: int, error: type[BaseException]) -> Iterator[list[str]]:
    """The disk's change number `at` does not happen, and after `Killed` no later one; yields those asked for."""
    asked: list[str] = []

    def guarded(name: str, change: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            asked.append(name)
            if len(asked) - 1 == at or (error is Killed and len(asked) > at):
                raise error(name)
            return change(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in CHANGES:
            patch.setattr(os, name, guarded(name, getattr(os, name)))
        yield asked


def written(path: Path, content: str) -> Path:
    """A checkpoint of two files, both with the same content."""
    (path / "model").mkdir(parents=True)
    for name in ("state.msgpack", "model/weights"):
        (path / name).write_text(content)
    return path


def publish(temporary: Path, final: Path) -> None:
    checkpoint.publish_checkpoint(temporary, final, {"step": 4}, threading.Event())


def content(path: Path) -> str:
    """Of a checkpoint that is whole, which its manifest says too where `publish` made it."""
    if (path / "manifest.json").exists():
        checkpoint.verify_files(path)
    (only,) = {(path / name).read_text() for name in ("state.msgpack", "model/weights")}
    return only


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize("error", [Killed, OSError])
def test_a_checkpoint_written_twice_is_there_whatever_happens(tmp_path: Path, error: type[BaseException]) -> None:
    """The only one there is (`--keep 1`), and its second writing fails at every change of the disk in turn."""
    seen = []
    for at in itertools.count():
        final = written(tmp_path / str(at) / "step_000004", "old")
        new = written(final.with_name(".step_000004.tmp"), "new")
        try:
            with failing(at, error) as asked:
                publish(new, final)
        except error:
            aside = final.with_name(".step_000004.old")
            seen.append(content(final if final.exists() else aside))
            assert error is Killed or final.exists()
        else:
            break
        checkpoint.recover_checkpoints(final.parent)
        assert (names(final.parent), content(final)) == (["step_000004"], seen[-1])
        publish(written(final.with_name(".step_000004.tmp"), "newer"), final)
        assert (names(final.parent), content(final)) == (["step_000004"], "newer")
    assert asked[:8] == ["fsync"] * 5 + ["replace", "replace", "fsync"], "first what is in it, and last its name"
    assert sorted(asked[8:]) == ["rmdir", "rmdir", "unlink", "unlink"]
    assert seen == ["old"] * 7 + ["new"] * 5
    assert (names(final.parent), content(final)) == (["step_000004"], "new")


def test_a_killed_mending_is_gone_on_with(tmp_path: Path) -> None:
    for at in itertools.count():
        directory = tmp_path / str(at)
        for name in (".step_000004.old", ".step_000008.old", ".step_000008.tmp", ".step_000012.tmp"):
            written(directory / name, "old")
        written(directory / "step_000008", "new")
        try:
            with failing(at, Killed):
                checkpoint.recover_checkpoints(directory)
        except Killed:
            checkpoint.recover_checkpoints(directory)
        else:
            break
        assert names(directory) == ["step_000004", "step_000008"]
        assert [content(directory / name) for name in names(directory)] == ["old", "new"]
    assert at > 4


def test_what_was_left_aside_is_settled_by_the_next_writing_too(tmp_path: Path) -> None:
    written(tmp_path / ".step_000004.old", "old")
    new = written(tmp_path / ".step_000004.tmp", "new")
    with pytest.raises(OSError, match="replace"), failing(7, OSError):
        publish(new, tmp_path / "step_000004")
    assert content(tmp_path / "step_000004") == "old"
    publish(new, tmp_path / "step_000004")
    assert (names(tmp_path), content(tmp_path / "step_000004")) == (["step_000004"], "new")


def test_a_checkpoint_is_whole_or_gone_while_old_ones_are_removed(tmp_path: Path) -> None:
    for at in itertools.count():
        directory = tmp_path / str(at)
        for step in (4, 8, 12):
            written(directory / f"step_{step:06d}", str(step))
        written(directory / ".step_000004.tmp", "left over")
        try:
            with failing(at, Killed):
                checkpoint.prune_checkpoints(directory, 1)
        except Killed:
            for path in directory.glob("step_*"):
                assert content(path) == str(int(path.name.removeprefix("step_")))
            checkpoint.recover_checkpoints(directory)
            checkpoint.prune_checkpoints(directory, 1)
        else:
            break
        assert names(directory) == ["step_000012"]
    assert (names(directory), content(directory / "step_000012")) == (["step_000012"], "12")
