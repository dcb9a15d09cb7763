"""Reference logprobs of a fixed set of sequences, computed once and kept on disk.

Invariants
- A cache belongs to one model's files, one precision and one set of sequences, by hash: after a change
  the logprobs are computed again, under another name.
- A cache under its final name is complete (`flowrl.machine.cache`).
- When `reference_cache` returns, the model that it loaded has been freed.

The file is memory-mapped for reading: data that are never requested stay on disk. The sequences are also kept in a file
until their logprobs are known.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from flowrl.machine.cache import Progress, cached_directory
from flowrl.messages import Bool, Float32, Int32
from flowrl.messages.packing import passes_over
from flowrl.models.token_store import TokenFile
from flowrl.training.model.row_layout import policy_places
from flowrl.training.scoring_models import ScoringModel, logprobs_of
from flowrl.training.settings import Dtype

VERSION = 1
"""Increased when a change of this file gives other numbers."""
LOGPROBS, KEYS, OFFSETS = "logprobs.npy", "keys.npy", "offsets.npy"
KEY_BYTES = 16
KEY = np.dtype(f"S{KEY_BYTES}")
RowKeys = npt.NDArray[np.bytes_]
BLOCK_TOKENS = 1 << 22
"""Sequences with about this many tokens together are in memory at a time, and are divided into passes together."""


class ReferenceCache:
    """The cache in one directory."""

    def __init__(self, directory: Path) -> None:
        self._logprobs: Float32 = np.load(directory / LOGPROBS, mmap_mode="r")
        self._offsets: npt.NDArray[np.int64] = np.load(directory / OFFSETS)
        self._keys: RowKeys = np.load(directory / KEYS).reshape(-1).view(KEY)
        self._order = np.argsort(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def read_logprobs(self, token_ids: Int32, mask: Bool) -> Float32:
        """log p of the tokens in `mask` at their positions, 0 elsewhere. Raises KeyError for an unknown sequence."""
        wanted = np.array(key_of(token_ids, mask), KEY)
        place = int(np.searchsorted(self._keys, wanted, sorter=self._order))
        if place == len(self) or self._keys[self._order[place]] != wanted:
            raise KeyError("the reference logprobs of this sequence were not computed")
        number = self._order[place]
        result = np.zeros(len(token_ids), np.float32)
        result[policy_places(mask)] = self._logprobs[self._offsets[number] : self._offsets[number + 1]]
        return result


def reference_cache(
    model_dir: str | Path,
    sequences: Iterable[tuple[Int32, Bool]],
    *,
    dtype: Dtype,
    open_model: Callable[[], ScoringModel],
    token_budget: int,
    progress: Progress,
) -> ReferenceCache:
    """The cache for `sequences` (token ids, and which of them count) and the model, created first if missing.

    One process creates it; others that request the same cache meanwhile wait. One pass of the model takes at
    most `token_budget` tokens, padding included, or a single longer sequence.
    """
    known = SpooledSequences(sequences)
    recipe = {
        "version": VERSION,
        "model": model_fingerprint(Path(model_dir)),
        "dtype": dtype,
        "data": hashlib.blake2b(np.sort(known.keys).tobytes(), digest_size=KEY_BYTES).hexdigest(),
    }

    def make(target: Path) -> None:
        progress(f"reference logprobs of {len(known)} sequences: computing them, kept for later runs")
        model = open_model()
        try:
            write_logprobs(known, target, model, token_budget, progress)
        finally:
            model.close()

    return ReferenceCache(cached_directory("references", "reference", recipe, make, progress))


def key_of(token_ids: Int32, mask: Bool) -> bytes:
    """The key of a sequence: from its tokens and which of them count."""
    content = np.ascontiguousarray(token_ids, np.int32).tobytes() + np.packbits(mask).tobytes()
    return hashlib.blake2b(content, digest_size=KEY_BYTES).digest()


def model_fingerprint(model_dir: Path) -> str:
    """A hash over the names and bytes of the model's config and weights files."""
    digest = hashlib.blake2b(digest_size=KEY_BYTES)
    for file in sorted(model_dir.iterdir()):
        if file.suffix in (".safetensors", ".bin") or file.name == "config.json":
            digest.update(file.name.encode())
            with file.open("rb") as stream:
                while chunk := stream.read(1 << 24):
                    digest.update(chunk)
    return digest.hexdigest()


class SpooledSequences:
    """Sequences in a file, each once, in their order. A token that does not count is stored as its bitwise
    complement."""

    def __init__(self, sequences: Iterable[tuple[Int32, Bool]]) -> None:
        self._tokens, keys, counted, bounds = TokenFile(), bytearray(), array("q"), array("q", [0])
        for token_ids, mask in sequences:
            keys += key_of(token_ids, mask)
            counted.append(policy_places(mask).size)
            bounds.append(bounds[-1] + len(token_ids))
            self._tokens.add_tokens(np.where(mask, token_ids, ~token_ids))
        _, firsts = np.unique(np.frombuffer(keys, KEY), return_index=True)
        firsts.sort()
        self.keys: RowKeys = np.frombuffer(keys, KEY)[firsts]
        self.counted = np.array(counted, np.int64)[firsts]
        """Number of logprobs of each sequence."""
        self._starts, self._stops = (np.array(bounds, np.int64)[firsts + n] for n in (0, 1))

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, index: int) -> tuple[Int32, Bool]:
        stored = self._tokens.read_tokens(int(self._starts[index]), int(self._stops[index]))
        mask = stored >= 0
        return np.where(mask, stored, ~stored), mask

    def iter_blocks(self) -> list[npt.NDArray[np.int64]]:
        """Blocks of neighbouring sequences, each of about `BLOCK_TOKENS` tokens, as indices; the longest of a block
        first."""
        lengths = self._stops - self._starts
        block = (np.cumsum(lengths) - lengths) // BLOCK_TOKENS
        parts = np.split(np.arange(len(self)), np.flatnonzero(np.diff(block)) + 1)
        return [part[np.argsort(-lengths[part], kind="stable")] for part in parts]


def write_logprobs(
    known: SpooledSequences, target: Path, model: ScoringModel, token_budget: int, progress: Progress
) -> None:
    """Fill `target` with the logprobs of all `known` sequences."""
    blocks = known.iter_blocks()
    order = np.concatenate(blocks)
    offsets = np.concatenate(([0], np.cumsum(known.counted[order])))
    np.save(target / OFFSETS, offsets.astype(np.int64))
    np.save(target / KEYS, known.keys[order].view(np.uint8).reshape(-1, KEY_BYTES))
    logprobs: Float32 = np.lib.format.open_memmap(  # type: ignore[no-untyped-call]
        target / LOGPROBS, mode="w+", dtype=np.float32, shape=(int(offsets[-1]),)
    )
    first = num_done = reported_tenths = 0
    for block in blocks:
        places = offsets[first : (first := first + len(block)) + 1]
        found = [known[int(index)] for index in block]
        passes, trees = passes_over([tokens for tokens, _ in found], token_budget, model.layout)
        items = [[found[number] for number in part] for part in passes]
        for part, results in zip(passes, model.run(logprobs_of, items, trees, 1.0), strict=True):
            for number, logprobs_T in zip(part, results, strict=True):
                logprobs[places[number] : places[number + 1]] = logprobs_T[policy_places(found[number][1])]
            num_done += len(part)
            if (tenths := 10 * num_done // len(known)) > reported_tenths:
                reported_tenths = tenths
                progress(f"reference logprobs: {10 * tenths} %")
    del logprobs  # flushes the memory map
