"""Digests of policy spans: they prove that the tokens a trainer was fed are the tokens that were sampled.

A policy span is a run of tokens that the policy sampled one after another. Its digest covers the ids of the whole
context before it, its own ids, and their values in every column that is declared `in_digest`: behavior logprobs,
versions, and those that nodes have added. The generator books the digest of each request, the trainer books the digests
of the rows that it is fed, and the audit compares the two.

Fields of messages are hashed as int32 and float32; integers beyond 32 bits are refused, floats are rounded. Values of
added columns are hashed as they are, after the column's name.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from flowrl.errors import FlowrlError
from flowrl.messages import Branch, ColumnValues, Sample

DIGEST_BYTES = 16
INT32, FLOAT32 = np.dtype("<i4"), np.dtype("<f4")
DIGESTED = tuple(
    (column.name, FLOAT32 if column.dtype == "float32" else INT32)
    for column in Sample.token_columns
    if column.in_digest and column.name != "token_ids"
)
"""The fields of which a digest covers the span's own values; of the ids it covers the whole context's."""
SIZES = struct.Struct("<qq")
"""The number of tokens of the context, and of the span: the last bytes that are hashed."""

Array = npt.NDArray[Any]


class PolicySpan(NamedTuple):
    """One policy span of a sequence."""

    start: int
    """The number of tokens before it."""
    tokens: int
    digest: str


def request_digest(context_ids: Array, token_ids: Array, logprobs: Array, versions: Array) -> str:
    """The digest of a request that sampled `token_ids` [N], `logprobs` [N] and `versions` [N] after `context_ids`."""
    ids = hashlib.blake2b(_as_int32(context_ids), digest_size=DIGEST_BYTES)
    ids.update(_as_int32(token_ids))
    return _finish_digest(ids, ((logprobs, FLOAT32), (versions, INT32)), (), len(context_ids), 0, len(logprobs))


def policy_spans(sample: Sample) -> list[PolicySpan]:
    """Every maximal run of `policy_mask` in each of the sample's sequences, in order. Hashes each token once."""
    if sample.added_columns is None and not sample.branches:
        return spans_of(sample)
    return [span for spans in spans_by_sequence(sample) for span in spans]


def spans_by_sequence(sample: Sample) -> list[list[PolicySpan]]:
    """The policy spans of each of the sample's sequences."""
    if sample.added_columns is None:
        return [spans_of(sequence) for sequence in sample.sequences]
    added = [(name.encode(), one) for name, one in sorted(sample.added_columns.items()) if one.in_digest]
    found, start = [], 0
    for sequence in sample.sequences:
        end = start + sequence.token_ids.size
        found.append(spans_of(sequence, [(name, values.cut(start, end)) for name, values in added]))
        start = end
    return found


def spans_of(sequence: Sample | Branch, added: Sequence[tuple[bytes, ColumnValues]] = ()) -> list[PolicySpan]:
    """The policy spans of one sequence: of a branch, or the sample's own. `added` are the names and values of the added
    columns, for this sequence alone."""
    starts, ends = _find_runs(sequence.policy_mask)
    token_ids = sequence.token_ids
    columns = [(getattr(sequence, name), number_type) for name, number_type in DIGESTED]
    ids, hashed = hashlib.blake2b(digest_size=DIGEST_BYTES), 0
    spans = []
    for start, end in zip(starts, ends, strict=True):
        ids.update(_as_int32(token_ids[hashed:end]))
        hashed = end
        digest = _finish_digest(ids.copy(), columns, added, start, start, end)
        spans.append(PolicySpan(start, end - start, digest))
    return spans


def _finish_digest(
    ids: hashlib.blake2b,
    columns: Sequence[tuple[Array, np.dtype[Any]]],
    added: Sequence[tuple[bytes, ColumnValues]],
    num_context: int,
    start: int,
    end: int,
) -> str:
    """The digest of the tokens from `start` to `end`, from the state after all ids; changes that state."""
    for values, number_type in columns:
        if number_type is FLOAT32:
            ids.update(np.ascontiguousarray(values[start:end], FLOAT32).data)
        else:
            ids.update(_as_int32(values[start:end]))
    for name, one in added:
        values = one.cut(start, end).flat
        ids.update(name)
        ids.update(np.ascontiguousarray(values, values.dtype.newbyteorder("<")).data)
    ids.update(SIZES.pack(num_context, end - start))
    return ids.hexdigest()


def _find_runs(mask: Array) -> tuple[list[int], list[int]]:
    """Where each maximal run of true elements begins, and the index after its last one."""
    padded = np.zeros(len(mask) + 2, np.int8)
    padded[1:-1] = mask
    edges = np.flatnonzero(np.diff(padded)).tolist()
    return edges[::2], edges[1::2]


def _as_int32(array: Array) -> memoryview:
    """The bytes of the array as int32. Raises FlowrlError if a value does not fit."""
    if array.dtype != INT32:
        cast = array.astype(INT32)
        if not np.array_equal(cast, array):
            raise FlowrlError(
                f"token ids and versions have to be integers of 32 bits, but an array of {array.dtype} has a value "
                "that is not; make them with dtype=np.int32"
            )
        array = cast
    return np.ascontiguousarray(array).data
