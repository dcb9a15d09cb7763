"""Shortens what a policy is shown."""

from __future__ import annotations

LEAST_BYTES = 64
"""A shorter limit would leave no room for the mark."""


def without_middle(text: str, most_bytes: int) -> str:
    """`text` in at most `most_bytes` bytes of UTF-8: its beginning and its end, with a mark between them for what is
    left out.

    Halves of surrogate pairs, which nothing can send, become question marks. `most_bytes` is at least 64.
    """
    assert most_bytes >= LEAST_BYTES, most_bytes
    whole = text.encode("utf-8", "replace")
    if len(whole) <= most_bytes:
        return whole.decode()
    room = most_bytes - len(_mark(len(whole)).encode())
    head, tail = whole[: room - room // 2], whole[len(whole) - room // 2 :]
    return f"{head.decode(errors='ignore')}{_mark(len(whole) - room)}{tail.decode(errors='ignore')}"


def _mark(num_bytes: int) -> str:
    return f"\n[{num_bytes} bytes left out]\n"
