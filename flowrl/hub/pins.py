"""The commit to which each name of the Hub is resolved in this process.

A branch may move during a run, so a name is resolved only once: the driver resolves it before it starts anything, tells
every host, and writes the commits into the run's config.json. A resumed run reads them there.
"""

from __future__ import annotations

from collections.abc import Mapping

from flowrl.hub.name import HubName

_commits: dict[str, str] = {}


def pin(name: HubName, commit: str) -> None:
    """From now on, `name` resolves to `commit` in this process."""
    _commits[name.key] = commit


def pinned(name: HubName) -> str | None:
    """The commit that `name` resolves to; None if it has not been resolved."""
    return name.commit or _commits.get(name.key)


def use(commits: Mapping[str, str]) -> None:
    """Take over the commits that another process has resolved."""
    _commits.update(commits)


def commits() -> dict[str, str]:
    """All names that this process has resolved, by `HubName.key`."""
    return dict(sorted(_commits.items()))


def forget() -> None:
    """Forget all commits, so that every name is resolved again."""
    _commits.clear()
