"""Suppresses what Ray prints in the driver about errors in its own processes, such as the death of an actor.

flowrl itself reports what has died and what follows, so Ray's texts would repeat that with less knowledge. Ray has no
option to suppress them.
"""

from __future__ import annotations

from typing import Any

PRINTS = "print_to_stdstream"
"""The function of Ray's library that prints these texts, and the output of other processes if `log_to_driver` is on."""


def keep_quiet() -> None:
    """Make Ray's library print none of these texts in this process. A version that prints in another way still does."""
    from ray._private import worker

    if hasattr(worker, PRINTS):
        setattr(worker, PRINTS, _print_nothing)


def _print_nothing(data: Any, *settings: Any, **more: Any) -> None:
    return
