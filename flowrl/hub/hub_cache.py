"""The Hugging Face cache on this machine, read without the network ($HF_HUB_CACHE, else hub in $HF_HOME).

models--OWNER--NAME/refs/main            the commit of main when it was last asked for
models--OWNER--NAME/snapshots/COMMIT/    the files of a commit, or some of them
"""

from __future__ import annotations

from pathlib import Path

from flowrl.hub.name import HubName
from flowrl.hub.pins import pinned


def cache_home() -> Path:
    """The directory of the cache."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def repo_dir(name: HubName) -> Path:
    """The cache's directory of `name`, whether it exists or not."""
    return cache_home() / f"{name.kind}s--{name.repo.replace('/', '--')}"


def snapshot_dir(name: HubName, commit: str) -> Path:
    """The cache's directory of one commit, whether it exists or not."""
    return repo_dir(name) / "snapshots" / commit


def referred(name: HubName) -> str | None:
    """The commit that the cache knows for the branch or tag."""
    try:
        return (repo_dir(name) / "refs" / name.revision).read_text(encoding="utf-8").strip() or None
    except OSError:
        return None


def cached(name: HubName) -> Path | None:
    """The directory of `name` in the cache, with some or all of its files; None if there is none."""
    commit = pinned(name) or referred(name)
    directory = snapshot_dir(name, commit) if commit else None
    return directory if directory is not None and directory.is_dir() else None


def name_of(directory: Path) -> HubName | None:
    """The repository and commit of a directory in the cache; None for any other directory."""
    *_, repo, snapshots, commit = ("", "", *directory.parts)
    kind, _, name = repo.partition("--")
    if snapshots != "snapshots" or kind not in ("models", "datasets"):
        return None
    return HubName(name.replace("--", "/"), commit, "model" if kind == "models" else "dataset")


def files_in(directory: Path) -> dict[str, int]:
    """Path below `directory` -> number of bytes, for every complete file."""
    found = (path for path in directory.rglob("*") if path.is_file())
    return {path.relative_to(directory).as_posix(): path.stat().st_size for path in found}
