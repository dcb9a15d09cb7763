"""Which commit each name of the Hub stands for in this process.

A branch may move on while a run lasts, so a name is resolved once: the driver does it before it starts anything, tells
every host, and writes the commits into the run's config.json. A resumed run reads them there.
"""

from __future__ import annotations

from collections.abc import Mapping

from flowrl.hub.name import HubName

_commits: dict[str, str] = {}


def pin(name: HubName, commit: str) -> None:
    """From now on `name` stands for `commit` in this process."""
    _commits[name.key] = commit


def pinned(name: HubName) -> str | None:
    """The commit that `name` stands for; None if it has not been resolved."""
    return name.commit or _commits.get(name.key)


def use(commits: Mapping[str, str]) -> None:
    """Take over what another process has resolved."""
    _commits.update(commits)


def commits() -> dict[str, str]:
    """All names that this process has resolved, by `HubName.key`."""
    return dict(sorted(_commits.items()))


def forget() -> None:
    """Every name is to be resolved again."""
    _commits.clear()
