"""The generator's side: get a published version onto this machine, checked, before anything is paused."""

from __future__ import annotations

from flowrl.errors import FlowrlError
from flowrl.messages import Weights
from flowrl.weights.manifest import verify
from flowrl.weights.shm import DATA_OFFSET, Segment, open_version


def fetch(manifest: Weights) -> Segment:
    """The segment with the manifest's content, locked for reading and its checksum verified. Blocks.

    The caller closes it after use. Raises SegmentLost when newer weights took its place, for which the
    answer is the next manifest, and ChecksumMismatch.
    """
    scheme, _, name = manifest.transport.partition(":")
    if scheme != "shm":
        raise FlowrlError(
            f"weights of {manifest.policy!r} were published over {manifest.transport!r}; "
            "this generator reads shared memory (shm:NAME)"
        )
    segment = open_version(name, manifest.base_version)
    try:
        verify(manifest, segment.map(), start=DATA_OFFSET)
    except FlowrlError:
        segment.close()
        raise
    return segment
