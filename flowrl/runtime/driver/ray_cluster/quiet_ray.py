"""What Ray prints in the driver about errors in its own processes, such as the death of an actor.

flowrl says itself what has died and what follows, so these texts would be a second voice, which knows less. Ray has no
option for them.
"""

from __future__ import annotations

from typing import Any

PRINTS = "print_to_stdstream"
"""The function of Ray's library that prints them, and what other processes print if `log_to_driver` is on."""


def keep_quiet() -> None:
    """Let Ray's library print none of them in this process. A Ray that prints them in another way does print them."""
    from ray._private import worker

    if hasattr(worker, PRINTS):
        setattr(worker, PRINTS, _print_nothing)


def _print_nothing(data: Any, *settings: Any, **more: Any) -> None:
    return
