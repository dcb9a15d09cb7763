"""How large a message is in memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from flowrl.channel.encoding.schema import schema_of
from flowrl.channel.encoding.values import SCALARS
from flowrl.messages import Message


def payload_bytes(value: Any) -> int:
    """Approximate size of a value in memory: the bytes of arrays and texts, 8 for any other scalar."""
    kind = type(value)
    if kind is np.ndarray:
        return int(value.nbytes)
    if kind is str or kind is bytes:
        return len(value)
    if kind in SCALARS:
        return 8
    if isinstance(value, Message):
        return sum(map(payload_bytes, schema_of(kind).values(value)))
    if kind is tuple or kind is list:
        return sum(map(payload_bytes, value))
    if isinstance(value, Mapping):
        return sum(map(payload_bytes, value.values()))
    return 8
