"""What the project's own tests change in a run that `flowrl.testing.run_graph` makes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

from flowrl.runtime.driver import driver as drivers
from flowrl.runtime.driver.driver import Driver
from flowrl.wire import endpoint as endpoints


def looking_every(seconds: float) -> AbstractContextManager[Any]:
    """Inside, drivers look that often whether their nodes are alive."""
    return mock.patch.object(drivers, "LOOK_EVERY_S", seconds)


def over_sockets() -> AbstractContextManager[Any]:
    """Inside, hosts of one process send to each other as hosts of several do: through the codec and zmq's sockets."""
    return mock.patch.object(endpoints, "_local", _Nobody())


@contextmanager
def seeing_the_driver(see: Callable[[Driver], None]) -> Iterator[None]:
    """Inside, `see` gets every driver before it starts."""

    class Seen(Driver):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            see(self)

    with mock.patch.object(drivers, "Driver", Seen):
        yield


class _Nobody(dict[str, Any]):
    """Knows no endpoint of this process: each is reached by its socket."""

    def get(self, *_: Any) -> None:
        return None

    def pop(self, *_: Any) -> None:
        return None

    def __setitem__(self, *_: Any) -> None:
        pass
