"""What Ray's errors say about the death of a host's process, in one clause."""

from __future__ import annotations

import re

MEMORY_USED = re.compile(r"Memory usage (\d+)B exceeded .* of (\d+)B limit")
MEMORY_USER = re.compile(r"^(\d+)\t([\d.]+)\t(.+)$", re.MULTILINE)
LARGEST = 3
"""Number of processes that are named when memory has run out."""
GB = 1e9


def deaths() -> tuple[type[Exception], ...]:
    """Ray's errors for an actor whose process has died."""
    from ray.exceptions import ActorDiedError, OutOfMemoryError, RayActorError

    return ActorDiedError, RayActorError, OutOfMemoryError


def ray_errors() -> type[Exception]:
    from ray.exceptions import RayError

    error: type[Exception] = RayError
    return error


def rays_detail(error: Exception) -> str:
    """Ray's own detail about a death, in parentheses, without its list of common causes; "" if it has none."""
    text = str(error)
    detail = _memory(text) or _exit_detail(text)
    return f" ({detail})" if detail else ""


def _memory(text: str) -> str:
    """Ray's report of a kill for lack of memory, in one clause instead of some forty lines; "" if `text` has none."""
    if (used := MEMORY_USED.search(text)) is None:
        return ""
    users = [f"{command} {gb} GB" for _, gb, command in MEMORY_USER.findall(text)[:LARGEST]]
    largest = f", most of it by {', '.join(users)}" if users else ""
    now, limit = (int(number) / GB for number in used.groups())
    return f"Ray killed it because {now:.1f} of {limit:.1f} GB of the machine's memory were used{largest}"


def _exit_detail(text: str) -> str:
    line = next((line for line in text.splitlines() if "Worker exit detail:" in line), "")
    return line.partition("Worker exit detail:")[2].partition("Some common causes")[0].strip().rstrip(".")
