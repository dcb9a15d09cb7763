"""Arrays that are sent outside a body: in raw frames of the multipart, or in shared memory."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np


class ArrayPlace(Protocol):
    """Puts arrays into shared memory."""

    def __call__(self, array: np.ndarray[Any, Any]) -> bytes | None:
        """Copy `array` into shared memory and return the address, None if that is not possible."""

    def take_back(self, address: bytes) -> None:
        """Free the array at `address`, which was not sent."""


def framed(shape: tuple[int, ...], dtype: np.dtype[Any], frame: Any) -> np.ndarray[Any, Any]:
    """The read-only array in a frame."""
    array: np.ndarray[Any, Any] = np.ndarray(shape, dtype, frame)
    return sealed(array if array.flags.aligned else array.copy())


def sealed(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The array itself, read-only from now on."""
    array.flags.writeable = False
    return array
