"""The event loop's ticks, for tests of what happens in one of them and in the next."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

AT_MOST = 10_000


async def ticks(number: int = 1) -> None:
    """Let everything run that is ready; what that makes ready runs in the tick after. Takes no time."""
    for _ in range(number):
        await asyncio.sleep(0)


async def ticks_until(condition: Callable[[], bool]) -> None:
    """As many ticks as it takes; for what the test's own process brings about without waiting for time or others."""
    for _ in range(AT_MOST):
        if condition():
            return
        await ticks()
    raise AssertionError(f"it has not come about in {AT_MOST} ticks")
