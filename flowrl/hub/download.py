"""Finds a model or dataset of the Hub: in the cache, or by a download into it.

A name is resolved to a commit once in a process (`flowrl.hub.pins`). With a commit, files that the cache has are used
without a request. Tokens and the rest of the settings ($HF_TOKEN, $HF_HOME, $HF_ENDPOINT, $HF_HUB_OFFLINE) are handled
by huggingface_hub; the code here reads only addresses and whether it is offline, never a token.
"""

from __future__ import annotations

import glob
import logging
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flowrl.errors import ConfigError
from flowrl.hub.hub_cache import cached, files_in, referred, repo_dir, snapshot_dir
from flowrl.hub.hub_problems import gigabytes, not_cached, problem_of, require_room
from flowrl.hub.name import HubName
from flowrl.hub.pins import pin, pinned

Progress = Callable[[str], None]
Choose = Callable[[Iterable[str]], Sequence[str]]
"""All files of a repository -> those that are needed."""
TOLD_EVERY_S = 10.0


def fetched(name: HubName, choose: Choose, complete: Callable[[Path], bool], progress: Progress) -> Path:
    """The directory of `name`, with the files of `choose`. Raises ConfigError.

    `complete` says whether a directory in the cache has all needed files, without the repository's file list.
    """
    there = cached(name)
    whole = there is not None and complete(there)
    if there is not None and whole and pinned(name):
        return _pinned(name, there)
    if _offline():
        if there is None or not whole:
            raise not_cached(name, partly=there is not None)
        return _pinned(name, there)
    try:
        return _pinned(name, _downloaded(name, choose, progress))
    except _UnreachableError as error:
        if there is None or not whole:
            raise problem_of(error.cause, name) from None
        progress(f"{name}: the Hub does not answer, so the commit {there.name[:10]} in the cache is used")
        return _pinned(name, there)


def to_stderr(text: str) -> None:
    """A progress callback for work that is done before a run has its view."""
    print(f"flowrl: {text}", file=sys.stderr, flush=True)


class _UnreachableError(Exception):
    """The Hub did not answer, or answered with a failure of its own."""

    def __init__(self, cause: Exception) -> None:
        self.cause = cause


def _pinned(name: HubName, directory: Path) -> Path:
    pin(name, directory.name)
    return directory


def _offline() -> bool:
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def _downloaded(name: HubName, choose: Choose, progress: Progress) -> Path:
    with _problems_told(name):
        info = _info(name)
        sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
        directory = snapshot_dir(name, info.sha)
        wanted, here = choose(sizes), files_in(directory) if directory.is_dir() else {}
        missing = sum(sizes[file] for file in wanted if file not in here)
        if all(file in here for file in wanted) and info.sha in (name.commit, referred(name)):
            return directory
        require_room(name, missing)
        progress(f"{name}: downloading {gigabytes(missing)} of commit {info.sha[:10]} to {repo_dir(name).parent}")
        if sys.stderr.isatty():
            return _snapshot(name, info.sha, wanted)
        with _lines(name, missing, progress):
            return _snapshot(name, info.sha, wanted, tqdm_class=_no_bar())


def _info(name: HubName) -> Any:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError

    try:
        return HfApi().repo_info(
            name.repo, repo_type=name.kind, revision=pinned(name) or name.revision, files_metadata=True
        )
    except GatedRepoError:
        raise
    except failures() as error:
        if isinstance(error, HfHubHTTPError) and error.response is not None and error.response.status_code < 500:
            raise
        raise _UnreachableError(error) from None


def _snapshot(name: HubName, commit: str, files: Sequence[str], **options: Any) -> Path:
    from huggingface_hub import snapshot_download

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it logs every attempt; the last failure is raised

    # Ask for a branch or tag by its name, so that the cache also knows the name offline.
    path = snapshot_download(
        name.repo,
        repo_type=name.kind,
        revision=commit if pinned(name) else name.revision,
        allow_patterns=[glob.escape(file) for file in files],
        **options,
    )
    return Path(path)


def _no_bar() -> type[Any]:
    """A progress bar that is not shown."""
    from tqdm import tqdm

    class NoBar(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "disable": True})

    return NoBar


@contextmanager
def _problems_told(name: HubName) -> Iterator[None]:
    try:
        yield
    except (ConfigError, _UnreachableError):
        raise
    except failures() as error:
        raise problem_of(error, name) from None


def failures() -> tuple[type[Exception], ...]:
    """What huggingface_hub raises: OSError, the base class of its HTTP library's errors (whichever it uses), and
    ValueError."""
    from huggingface_hub.errors import HfHubHTTPError

    return (*(base for base in HfHubHTTPError.__bases__ if issubclass(base, Exception)), ValueError)


@contextmanager
def _lines(name: HubName, num_bytes: int, progress: Progress) -> Iterator[None]:
    """Within this context, a line every ten seconds reports the progress of the download; a terminal shows bars
    instead."""
    blobs, ended = repo_dir(name) / "blobs", threading.Event()
    before = _bytes_in(blobs)

    def report() -> None:
        while not ended.wait(TOLD_EVERY_S):
            progress(f"{name}: {gigabytes(_bytes_in(blobs) - before)} of {gigabytes(num_bytes)}")

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
