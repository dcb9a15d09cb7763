"""Tools of a user's own, right and wrong, for tests of tools and of the environment that offers them."""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any, Literal

from flowrl.environments.tools import Tool, ToolError, Tools


def add(a: int, b: int = 1) -> int:
    """Adds two numbers.

    Args:
        a: The first one.
        b (int): The second one,
            which may be left out.

    Returns:
        Their sum.
    """
    return a + b


def every(
    text: str,
    share: float,
    flag: bool,
    unit: Literal["m", "km"],
    numbers: list[float],
    sizes: dict[str, int],
    schema: dict = {},  # noqa: B006
    maximum: int | None = None,
    *,
    either: int | str = 0,
) -> dict[str, Any]:
    """Takes every type."""
    return {
        "text": text,
        "share": share,
        "flag": flag,
        "unit": unit,
        "numbers": numbers,
        "sizes": sizes,
        "schema": schema,
        "m": maximum,
    }


def misbehaves(how: str) -> Any:
    """Does what it is told.

    Args:
        how: What.
    """
    match how.split():
        case ["raise"]:
            raise LookupError("no such thing\nand more")
        case ["answer"]:
            raise ToolError("There is nothing.")
        case ["exit"]:
            sys.exit(3)
        case ["memory"]:
            raise MemoryError
        case ["deep"]:
            return misbehaves(how)
        case ["loop"]:
            while True:
                pass
        case ["sleep"]:
            time.sleep(1000)  # what is cut short
        case ["swallow"]:
            return swallowing()
        case ["stubborn"]:
            return stubborn()
        case ["long"]:
            return "ab" * 100_000
        case ["half"]:
            return "a\ud800b"
        case ["object"]:
            return {"found": [1, None, complex(1, 2)]}
        case ["digits"]:
            return 10**5000
    return how


def swallowing() -> str:
    """Catches the first alarm, and returns after the second."""
    for _ in range(2):
        try:
            time.sleep(1000)  # what is cut short
        except BaseException:
            continue
    time.sleep(1000)  # what is cut short
    return ""


def stubborn() -> str:
    """Catches every alarm."""
    while True:
        try:
            time.sleep(1000)  # what is cut short
        except BaseException:
            continue


async def waits(seconds: float) -> str:
    """Waits."""
    if seconds < 0:
        raise asyncio.CancelledError
    await asyncio.sleep(seconds)  # the tool's work
    return "waited"


COLLECTION = Tools([misbehaves, waits], call_s=0.2, observation_bytes=200)
FUNCTIONS = [add, every]
NUMBER = 3
MIXED: list[Any | Tool] = [*COLLECTION, add]
