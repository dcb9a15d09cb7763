"""Reference logprobs of a fixed set of sequences, computed once and kept on disk.

Invariants
- A cache belongs to one model's files, one precision and one set of sequences, by hash: after a change
  the logprobs are computed again, under another name.
- A cache under its final name is complete (`flowrl.cache`).
- When `reference_cache` returns, the model that it loaded has been freed.

The file is memory-mapped for reading: data that nobody requests stay on disk.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from flowrl.cache import Progress, cached_directory
from flowrl.messages import Bool, Float32, Int32
from flowrl.training.model.row_layout import policy_places
from flowrl.training.scoring.local_model import ScoringModel
from flowrl.training.scoring.passes import logprobs_of
from flowrl.training.settings import Dtype
from flowrl.tree_packing import passes_over

VERSION = 1
"""Increased by changes of this file that give other numbers."""
LOGPROBS, KEYS, OFFSETS = "logprobs.npy", "keys.npy", "offsets.npy"
KEY_BYTES = 16


class ReferenceCache:
    """The cache in one directory."""

    def __init__(self, directory: Path) -> None:
        self._logprobs: Float32 = np.load(directory / LOGPROBS, mmap_mode="r")
        self._offsets: npt.NDArray[np.int64] = np.load(directory / OFFSETS)
        keys = np.load(directory / KEYS)
        self._index = {row.tobytes(): number for number, row in enumerate(keys)}

    def __len__(self) -> int:
        return len(self._index)

    def logprobs(self, token_ids: Int32, mask: Bool) -> Float32:
        """log p of the tokens in `mask` at their positions, 0 elsewhere. Raises KeyError for an unknown sequence."""
        number = self._index[key_of(token_ids, mask)]
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
    """The cache of `sequences` (token ids, and which of them count) under the model, created first if missing.

    One process creates it; others that request the same cache meanwhile wait. One pass of the model takes at
    most `token_budget` tokens, padding included, or a single longer sequence.
    """
    known = {key_of(token_ids, mask): (token_ids, mask) for token_ids, mask in sequences}
    recipe = {
        "version": VERSION,
        "model": fingerprint(Path(model_dir)),
        "dtype": dtype,
        "data": hashlib.blake2b(b"".join(sorted(known)), digest_size=KEY_BYTES).hexdigest(),
    }

    def make(target: Path) -> None:
        progress(f"reference logprobs of {len(known)} sequences: computing them, kept for later runs")
        _Pass(open_model, token_budget, progress).write(known, target)

    return ReferenceCache(cached_directory("references", "reference", recipe, make, progress))


def key_of(token_ids: Int32, mask: Bool) -> bytes:
    """The key of a sequence: from its tokens and which of them count."""
    content = np.ascontiguousarray(token_ids, np.int32).tobytes() + np.packbits(mask).tobytes()
    return hashlib.blake2b(content, digest_size=KEY_BYTES).digest()


def fingerprint(model_dir: Path) -> str:
    """A hash over the names and bytes of the model's config and weights files."""
    digest = hashlib.blake2b(digest_size=KEY_BYTES)
    for file in sorted(model_dir.iterdir()):
        if file.suffix in (".safetensors", ".bin") or file.name == "config.json":
            digest.update(file.name.encode())
            with file.open("rb") as stream:
                while chunk := stream.read(1 << 24):
                    digest.update(chunk)
    return digest.hexdigest()


class _Pass:
    """One pass of the reference over all sequences."""

    def __init__(self, open_model: Callable[[], ScoringModel], token_budget: int, progress: Progress) -> None:
        self._open = open_model
        self._token_budget = token_budget
        self._progress = progress

    def write(self, known: Mapping[bytes, tuple[Int32, Bool]], target: Path) -> None:
        """Fill `target` with the logprobs of all `known` sequences; the model is freed at the end."""
        found = sorted(known.values(), key=lambda sequence: -len(sequence[0]))
        offsets = np.cumsum([0, *(policy_places(mask).size for _, mask in found)])
        np.save(target / OFFSETS, offsets.astype(np.int64))
        keys = b"".join(key_of(*sequence) for sequence in found)
        np.save(target / KEYS, np.frombuffer(keys, np.uint8).reshape(-1, KEY_BYTES))
        logprobs: Float32 = np.lib.format.open_memmap(  # type: ignore[no-untyped-call]
            target / LOGPROBS, mode="w+", dtype=np.float32, shape=(int(offsets[-1]),)
        )
        self._fill(logprobs, found, offsets)
        del logprobs  # flushes the memory map

    def _fill(self, logprobs: Float32, found: Sequence[tuple[Int32, Bool]], offsets: npt.NDArray[np.int64]) -> None:
        model = self._open()
        try:
            passes, trees = passes_over([tokens for tokens, _ in found], self._token_budget, model.layout)
            items = [[found[number] for number in part] for part in passes]
            done = told = 0
            for part, results in zip(passes, model.run(logprobs_of, items, trees, 1.0), strict=True):
                for number, logprobs_T in zip(part, results, strict=True):
                    places = policy_places(found[number][1])
                    logprobs[offsets[number] : offsets[number + 1]] = logprobs_T[places]
                done += len(part)
                if (tenth := 10 * done // len(found)) > told:
                    told = tenth
                    self._progress(f"reference logprobs: {10 * tenth} %")
        finally:
            model.close()
