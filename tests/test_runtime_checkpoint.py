"""A cut: what is saved of the messages under way."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from flowrl.channel.envelope import Envelope
from flowrl.errors import ConfigError
from flowrl.messages import Batch, Group, Prompt, Sample, Trainable
from flowrl.runtime import checkpoint
from flowrl.runtime.checkpoint import Cut


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
    cut = Cut(
        messages=[
            ("a/0", "x.out -> y.in", "", Envelope(b"1", body=prompt("x"))),
            ("a/0", "x.out -> y.in", "", Envelope(b"2", body=prompt("y"))),
        ]
    )
    cut.ended.add(("y.in", b"1"))
    assert [envelope.id for *_, envelope in cut.settled()] == [b"2"]


def test_unfinished_prompts_carry_what_was_generated() -> None:
    tokens, logprobs, versions = np.array([5, 6], np.int32), np.array([-1, -2], np.float32), np.array([3, 4], np.int32)
    cut = Cut(
        messages=[("a/0", "x.out -> y.in", "", Envelope(b"1", body=prompt("x")))],
        prefixes={"x": (tokens, logprobs, versions)},
    )
    ((*_, envelope),) = cut.settled()
    assert isinstance(envelope.body, Prompt)
    assert envelope.body.prefix_token_ids.tolist() == [5, 6]
    assert envelope.body.prefix_versions.tolist() == [3, 4]


def test_the_parts_of_a_gangs_batch_are_joined_again() -> None:
    parts = [Envelope(b"1", body=batch("x", "y")), Envelope(b"1", body=batch("y", "z"))]
    cut = Cut(messages=[("batcher/0", "x.out -> y.in", "", part) for part in parts])
    ((*_, envelope),) = cut.settled()
    assert isinstance(envelope.body, Batch)
    assert [s.sample_id for s in envelope.body.samples] == ["x", "y", "z"]
    assert envelope.body.micro_batches == ()


def test_what_is_made_already_is_found_in_the_messages() -> None:
    rollout = Sample(**{f.name: getattr(sample("x"), f.name) for f in fields(Sample)})
    bodies = [rollout, sample("y"), Group("g", (sample("z"),), 1), batch("b"), prompt("p")]
    generated, scored = checkpoint.made(("a/0", "x.out -> y.in", "", Envelope(b"1", body=body)) for body in bodies)
    assert (generated, scored) == ({"x", "y", "z", "b"}, {"y", "z", "b"})


def test_state_survives_the_disk(tmp_path: Path) -> None:
    cut = Cut(
        messages=[("a/0", "x.out -> y.in", "", Envelope(b"1" * 16, 3, "g", 0, prompt("x")))],
        sent={b"9"},
        states={"a/0": b"s"},
    )
    checkpoint.write_state(tmp_path, cut, {"version": 5})
    state = checkpoint.read_state(tmp_path)
    ((producer, edge, consumer, envelope),) = state["messages"]
    assert (producer, edge, consumer, envelope.ticket, envelope.group_id) == ("a/0", "x.out -> y.in", "", 3, "g")
    assert envelope.body.token_ids.tolist() == [0, 1, 2]
    assert state["facts"] == {"version": 5} and state["sent"] == [b"9"] and state["states"] == {"a/0": b"s"}


def test_another_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "FORMAT", 9)
    checkpoint.write_state(tmp_path, Cut(), {})
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="format 9"):
        checkpoint.read_state(tmp_path)


def test_old_checkpoints_go(tmp_path: Path) -> None:
    for step in range(4):
        (tmp_path / f"step_{step:06d}").mkdir()
    checkpoint.prune(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000002", "step_000003"]
    checkpoint.prune(tmp_path, 0)
    assert len(list(tmp_path.iterdir())) == 2


def test_prefixes_leave_other_messages_alone() -> None:
    body = replace(sample("x"))
    cut = Cut(messages=[("a/0", "x.out -> y.in", "", Envelope(b"1", body=body))], prefixes={"x": (1, 2, 3)})
    assert cut.settled()[0][3].body is body
