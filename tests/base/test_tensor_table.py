"""The manifest of weights: rows come back as they were, and the tensors of the largest mixtures fit into one."""

from __future__ import annotations

import time

import numpy as np
import pytest

from flowrl.messages import TensorRow, TensorTable, Weights
from flowrl.wire.encoding.multiparts import DATA, MessageDecoder, MessageEncoder, Refused
from flowrl.wire.encoding.schema import Envelope

ROWS: list[TensorRow] = [
    ("a.weight", "float32", (3, 5), 0, 60),
    ("计算.bias", "bfloat16", (7,), 64, 14),
    ("scale", "float32", (), 128, 4),
]


def arrived(manifest: Weights) -> Weights:
    """The manifest as another process gets it."""
    encoder = MessageEncoder("trainer/0", 0)
    encoder.add([(DATA, 1, 0, 0, [Envelope(bytes(16), body=manifest)])])
    (parts,) = encoder.multiparts()
    (frame,) = MessageDecoder().decode([bytes(part) for part in parts])
    assert not isinstance(frame, Refused), frame.reason
    found = frame[4][0].body
    assert isinstance(found, Weights)
    return found


def manifest_of(table: TensorTable) -> Weights:
    return Weights("policy", 1, 1, "full", "shm:x", 0, 0, table)


@pytest.mark.parametrize("number", [0, 1, 3])
def test_rows_come_back_as_they_were(number: int) -> None:
    table = TensorTable.of(iter(ROWS[:number]))
    assert [*table] == [*table] == ROWS[:number] and len(table) == number
    assert set(table.dtypes) == {dtype for _, dtype, *_ in ROWS[:number]}
    assert [*arrived(manifest_of(table)).tensors] == ROWS[:number]


def test_a_mixture_of_a_hundred_thousand_matrices_travels_in_one_manifest() -> None:
    rows: list[TensorRow] = [
        (f"model.layers.{layer}.mlp.experts.{expert}.{name}_proj.weight", "bfloat16", (2048, 7168), at << 25, 1 << 25)
        for layer in range(94)
        for expert in range(512)
        for at, name in enumerate(("gate", "up", "down"))
    ]
    manifest = manifest_of(TensorTable.of(rows))
    began = time.perf_counter()
    found = arrived(manifest)
    assert time.perf_counter() - began < 1.0, "decoding a manifest blocks the generator's event loop"
    assert len(rows) == 144_384 and [*found.tensors] == rows
    assert not found.tensors.num_bytes.flags.writeable
    assert found.tensors.num_bytes.dtype == np.int64
