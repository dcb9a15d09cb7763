"""Waits for one piece of work, and raises what fails first."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any


async def first_failure(work: Awaitable[Any], *others: asyncio.Future[Any]) -> Any:
    """The result of `work`, unless one of `others` fails first: then that failure is raised."""
    main = asyncio.ensure_future(work)
    pending: set[asyncio.Future[Any]] = {main, *others}
    try:
        while not main.done():
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        return main.result()
    finally:
        main.cancel()
        await asyncio.gather(main, return_exceptions=True)
