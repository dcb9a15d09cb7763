"""Digests of policy spans: they prove that the tokens a trainer was fed are the tokens that were sampled.

A policy span is a run of tokens that the policy sampled one after another. Its digest covers the ids of the whole
context before it, its own ids, their behavior logprobs and their versions. The generator books the digest of each
request, the trainer books the digests of the rows that it is fed, and the audit compares the two.

Arrays are hashed as int32 and float32; integers beyond 32 bits are refused, floats are rounded.
"""

from __future__ import annotations

import hashlib
import struct
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from flowrl.errors import FlowrlError
from flowrl.messages import Branch, Sample

DIGEST_BYTES = 16
INT32, FLOAT32 = np.dtype("<i4"), np.dtype("<f4")
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
    ids = hashlib.blake2b(_integers(context_ids), digest_size=DIGEST_BYTES)
    ids.update(_integers(token_ids))
    return _digest(ids, logprobs, versions, len(context_ids))


def policy_spans(sample: Sample) -> list[PolicySpan]:
    """Every maximal run of `policy_mask` in each of the sample's sequences, in order. Hashes each token once."""
    return [span for sequence in sample.sequences for span in spans_of(sequence)]


def spans_of(sequence: Sample | Branch) -> list[PolicySpan]:
    """The policy spans of one sequence: of a branch, or the sample's own."""
    starts, ends = _runs(sequence.policy_mask)
    token_ids, logprobs, versions = sequence.token_ids, sequence.behavior_logprobs, sequence.versions
    ids, hashed = hashlib.blake2b(digest_size=DIGEST_BYTES), 0
    spans = []
    for start, end in zip(starts, ends, strict=True):
        ids.update(_integers(token_ids[hashed:end]))
        hashed = end
        digest = _digest(ids.copy(), logprobs[start:end], versions[start:end], start)
        spans.append(PolicySpan(start, end - start, digest))
    return spans


def _digest(ids: hashlib.blake2b, logprobs: Array, versions: Array, num_context: int) -> str:
    """The digest from the state after all ids; changes that state."""
    ids.update(np.ascontiguousarray(logprobs, FLOAT32).data)
    ids.update(_integers(versions))
    ids.update(SIZES.pack(num_context, len(logprobs)))
    return ids.hexdigest()


def _runs(mask: Array) -> tuple[list[int], list[int]]:
    """Where each maximal run of true elements begins, and the index after its last one."""
    padded = np.zeros(len(mask) + 2, np.int8)
    padded[1:-1] = mask
    edges = np.flatnonzero(np.diff(padded)).tolist()
    return edges[::2], edges[1::2]


def _integers(array: Array) -> memoryview:
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
