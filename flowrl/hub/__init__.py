"""Models and datasets by their name on the Hugging Face Hub: found in the cache on this machine, or downloaded.

A branch may move during a run, so a name is resolved to a commit only once in a process: the driver resolves it before
it starts anything, tells every host, and writes the commits into the run's config.json, where a resumed run reads them.
With a commit, files that the cache has are used without a request.

The cache ($HF_HUB_CACHE, else hub in $HF_HOME) has, for each repository,
    models--OWNER--NAME/refs/main            the commit of main when it was last asked for
    models--OWNER--NAME/snapshots/COMMIT/    the files of a commit, or some of them

Tokens and the rest of the settings ($HF_TOKEN, $HF_ENDPOINT, $HF_HUB_OFFLINE) are handled by huggingface_hub; the code
here reads only addresses and whether it is offline, never a token.
"""

from __future__ import annotations

import errno
import glob
import logging
import re
import shutil
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from flowrl.errors import ConfigError

Kind = Literal["model", "dataset"]
Progress = Callable[[str], None]
Choose = Callable[[Iterable[str]], Sequence[str]]
"""All files of a repository -> those that are needed."""
DEFAULT_REVISION = "main"
WORD = r"[A-Za-z0-9](?:[\w.-]*[A-Za-z0-9_])?"
NAME = re.compile(rf"(?P<repo>{WORD}/{WORD})(?:@(?P<revision>[\w][\w./-]*))?", re.ASCII)
COMMIT = re.compile(r"[0-9a-f]{40}")
LONGEST = 96
"""Maximum number of characters in OWNER/NAME."""
LOGIN = "log in with `hf auth login`, or set HF_TOKEN"
TOLD_EVERY_S = 10.0


@dataclass(frozen=True)
class HubName:
    """A repository of the Hub, in one of its states: OWNER/NAME, with @REVISION for a state other than the newest."""

    repo: str
    """OWNER/NAME."""
    revision: str = DEFAULT_REVISION
    """Branch, tag or commit."""
    kind: Kind = "model"

    @classmethod
    def parse(cls, text: str, kind: Kind = "model") -> HubName | None:
        """The name in `text`; None if `text` does not have the form of a name on the Hub."""
        found = NAME.fullmatch(text)
        if found is None or len(found["repo"]) > LONGEST or "--" in found["repo"] or ".." in found["repo"]:
            return None
        return cls(found["repo"], found["revision"] or DEFAULT_REVISION, kind)

    def __str__(self) -> str:
        return self.repo if self.revision == DEFAULT_REVISION else f"{self.repo}@{self.revision}"

    @property
    def key(self) -> str:
        """The name's form in a run's record."""
        return f"{self.kind} {self.repo}@{self.revision}"

    @property
    def commit(self) -> str | None:
        """The commit, if the revision is one and not a branch or tag."""
        return self.revision if COMMIT.fullmatch(self.revision) else None


# Commits


_commits: dict[str, str] = {}
"""`HubName.key` -> the commit that the name resolves to in this process."""


def pinned_commit(name: HubName) -> str | None:
    """The commit that `name` resolves to; None if it has not been resolved."""
    return name.commit or _commits.get(name.key)


def take_commits(commits: Mapping[str, str]) -> None:
    """Take over the commits that another process has resolved."""
    _commits.update(commits)


def pinned_commits() -> dict[str, str]:
    """All names that this process has resolved, by `HubName.key`."""
    return dict(sorted(_commits.items()))


def forget_commits() -> None:
    """Forget all commits, so that every name is resolved again."""
    _commits.clear()


# The cache on this machine, read without the network


def cache_home() -> Path:
    """The directory of the cache."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def repo_dir(name: HubName) -> Path:
    """The cache's directory of `name`, whether it exists or not."""
    return cache_home() / f"{name.kind}s--{name.repo.replace('/', '--')}"


def cached_commit(name: HubName) -> str | None:
    """The commit that the cache knows for the branch or tag."""
    try:
        return (repo_dir(name) / "refs" / name.revision).read_text(encoding="utf-8").strip() or None
    except OSError:
        return None


def cached_snapshot(name: HubName) -> Path | None:
    """The directory of `name` in the cache, with some or all of its files; None if there is none."""
    commit = pinned_commit(name) or cached_commit(name)
    directory = repo_dir(name) / "snapshots" / commit if commit else None
    return directory if directory is not None and directory.is_dir() else None


def name_of_snapshot(directory: Path) -> HubName | None:
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


# Downloads


def fetch_snapshot(name: HubName, choose: Choose, is_complete: Callable[[Path], bool], progress: Progress) -> Path:
    """The directory of `name`, with the files of `choose`. From then on `name` resolves to its commit. Raises
    ConfigError.

    `is_complete` says whether a directory in the cache has all needed files, without the repository's file list.
    """
    from huggingface_hub import constants

    there = cached_snapshot(name)
    whole = there is not None and is_complete(there)
    if not (there is not None and whole and pinned_commit(name)):
        if constants.HF_HUB_OFFLINE:
            if there is None or not whole:
                found = "it is not" if there is None else "only some of its files are"
                raise ConfigError(
                    f"{name}: HF_HUB_OFFLINE is set, and {found} in the cache {cache_home()}; unset it to download "
                    "them, or set HF_HOME to a cache that has them"
                )
        else:
            try:
                there = _download_snapshot(name, choose, progress)
            except _UnreachableError as error:
                if there is None or not whole:
                    raise problem_of(error.cause, name) from None
                progress(f"{name}: the Hub does not answer, so the commit {there.name[:10]} in the cache is used")
    assert there is not None
    _commits[name.key] = there.name
    return there


def to_stderr(text: str) -> None:
    """A progress callback for work that is done before a run has its view."""
    print(f"flowrl: {text}", file=sys.stderr, flush=True)


class _UnreachableError(Exception):
    """The Hub did not answer, or answered with a failure of its own."""

    def __init__(self, cause: Exception) -> None:
        self.cause = cause


def _download_snapshot(name: HubName, choose: Choose, progress: Progress) -> Path:
    try:
        info = _ask_for_files(name)
        sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
        directory = repo_dir(name) / "snapshots" / str(info.sha)
        wanted, here = choose(sizes), files_in(directory) if directory.is_dir() else {}
        missing = sum(sizes[file] for file in wanted if file not in here)
        if all(file in here for file in wanted) and info.sha in (name.commit, cached_commit(name)):
            return directory
        require_room(name, missing)
        progress(f"{name}: downloading {gb_text(missing)} of commit {info.sha[:10]} to {repo_dir(name).parent}")
        if sys.stderr.isatty():
            return _download_files(name, info.sha, wanted)
        from tqdm import tqdm

        class HiddenBar(tqdm):  # type: ignore[misc]
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **{**kwargs, "disable": True})

        with _report_progress(name, missing, progress):
            return _download_files(name, info.sha, wanted, tqdm_class=HiddenBar)
    except (ConfigError, _UnreachableError):
        raise
    except hub_failures() as error:
        raise problem_of(error, name) from None


def _ask_for_files(name: HubName) -> Any:
    """What the Hub knows about `name`: its commit, and its files with their sizes."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError

    revision = pinned_commit(name) or name.revision
    try:
        return HfApi().repo_info(name.repo, repo_type=name.kind, revision=revision, files_metadata=True)
    except GatedRepoError:
        raise
    except hub_failures() as error:
        if isinstance(error, HfHubHTTPError) and error.response is not None and error.response.status_code < 500:
            raise
        raise _UnreachableError(error) from None


def _download_files(name: HubName, commit: str, files: Sequence[str], **options: Any) -> Path:
    from huggingface_hub import snapshot_download

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it logs every attempt; the last failure is raised
    # A branch or tag is asked for by its name, so that the cache also knows the name offline.
    revision = commit if pinned_commit(name) else name.revision
    patterns = [glob.escape(file) for file in files]
    return Path(
        snapshot_download(name.repo, repo_type=name.kind, revision=revision, allow_patterns=patterns, **options)
    )


@contextmanager
def _report_progress(name: HubName, num_bytes: int, progress: Progress) -> Iterator[None]:
    """Within this context, a line every ten seconds reports the progress of the download; a terminal shows bars
    instead."""
    blobs, ended = repo_dir(name) / "blobs", threading.Event()
    before = _bytes_in(blobs)

    def report() -> None:
        while not ended.wait(TOLD_EVERY_S):
            progress(f"{name}: {gb_text(_bytes_in(blobs) - before)} of {gb_text(num_bytes)}")

    thread = threading.Thread(target=report, name="download-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _bytes_in(directory: Path) -> int:
    total = 0
    for path in directory.glob("*"):
        try:
            total += path.stat().st_size
        except OSError:  # renamed meanwhile
            continue
    return total


# What went wrong between this machine and the Hub, in one sentence with the remedy


def hub_failures() -> tuple[type[Exception], ...]:
    """What huggingface_hub raises: OSError, the base class of its HTTP library's errors (whichever it uses), and
    ValueError."""
    from huggingface_hub.errors import HfHubHTTPError

    return (*(base for base in HfHubHTTPError.__bases__ if issubclass(base, Exception)), ValueError)


def hub_url() -> str:
    """The Hub's address without a user's name and password."""
    from huggingface_hub import constants

    parts = urlsplit(constants.ENDPOINT)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def problem_of(error: Exception, name: HubName) -> ConfigError:
    """The message for an exception of huggingface_hub."""
    from huggingface_hub import errors

    hub = hub_url()
    page = f"{hub}/{'datasets/' if name.kind == 'dataset' else ''}{name.repo}"
    if isinstance(error, errors.GatedRepoError):
        text = f"{name} is gated; ask for access at {page}, then {LOGIN}"
    elif isinstance(error, errors.RevisionNotFoundError):
        text = f"{name.repo} has no revision {name.revision!r}; name a branch, tag or commit that {page} lists"
    elif isinstance(error, errors.RepositoryNotFoundError):
        here = "a model directory" if name.kind == "model" else "a file or directory"
        text = (
            f"there is no {name.kind} {name.repo!r}: it is neither {here} on this machine nor public at {hub}; "
            f"correct the name or, if it is private, {LOGIN}"
        )
    elif isinstance(error, errors.HfHubHTTPError) and error.response is not None:
        status = error.response.status_code
        text = {
            401: f"{name}: {hub} does not accept this machine's token; {LOGIN} with a valid one",
            403: f"{name}: the account of this machine's token may not read {page}; {LOGIN} of one that may",
            429: f"{name}: {hub} has answered too many requests of this machine; wait some minutes, or {LOGIN}",
        }.get(
            status,
            f"{name}: {hub} answered with status {status}; try again later: what has been downloaded is kept",
        )
    elif isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        home = cache_home()
        text = f"{name}: the disk of {home} is full; make room, or set HF_HOME to a directory on a larger disk"
    elif isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        text = f"{name}: {cache_home()} cannot be written ({error.strerror}); set HF_HOME to a directory of yours"
    else:
        cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
        first_line = (str(cause).strip().splitlines() or [""])[0] or type(cause).__name__
        text = (
            f"{name} is not on this machine, and the connection to {hub} was lost ({first_line}); run it again: "
            "what has been downloaded is kept"
        )
    return ConfigError(text)


def require_room(name: HubName, num_bytes: int) -> None:
    """Raise ConfigError unless the disk of the cache has room for `num_bytes`."""
    home = cache_home()
    there = next(path for path in (home, *home.parents) if path.exists())
    free = shutil.disk_usage(there).free
    if free < num_bytes:
        raise ConfigError(
            f"{name} needs {gb_text(num_bytes)} in {home}, whose disk has {gb_text(free)} left; make room, or set "
            "HF_HOME to a directory on a larger disk"
        )


def gb_text(num_bytes: int) -> str:
    """A size as text, in GB or MB."""
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.1f} MB"
