"""What went wrong between this machine and the Hub, in one sentence with the remedy."""

from __future__ import annotations

import errno
import shutil
from urllib.parse import urlsplit

from flowrl.errors import ConfigError
from flowrl.hub.hub_cache import cache_home
from flowrl.hub.name import HubName

LOGIN = "log in with `hf auth login`, or set HF_TOKEN"


def endpoint() -> str:
    """The Hub's address without a user's name and password."""
    from huggingface_hub import constants

    parts = urlsplit(constants.ENDPOINT)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def problem_of(error: Exception, name: HubName) -> ConfigError:
    """The message for an exception of huggingface_hub."""
    from huggingface_hub import errors

    page = f"{endpoint()}/{'datasets/' if name.kind == 'dataset' else ''}{name.repo}"
    if isinstance(error, errors.GatedRepoError):
        text = f"{name} is gated; ask for access at {page}, then {LOGIN}"
    elif isinstance(error, errors.RevisionNotFoundError):
        text = f"{name.repo} has no revision {name.revision!r}; name a branch, tag or commit that {page} lists"
    elif isinstance(error, errors.RepositoryNotFoundError):
        text = _nowhere(name)
    elif isinstance(error, errors.HfHubHTTPError) and error.response is not None:
        text = _refused(error.response.status_code, name, page)
    elif isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        text = _full(name)
    elif isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        text = f"{name}: {cache_home()} cannot be written ({error.strerror}); set HF_HOME to a directory of yours"
    else:
        text = f"{name} is not on this machine, and {_lost(error)}; run it again: what has been downloaded is kept"
    return ConfigError(text)


def not_cached(name: HubName, *, partly: bool) -> ConfigError:
    """The error for a name that is not in the cache, in a process that may not use the network."""
    found = "only some of its files are" if partly else "it is not"
    return ConfigError(
        f"{name}: HF_HUB_OFFLINE is set, and {found} in the cache {cache_home()}; unset it to download them, or set "
        "HF_HOME to a cache that has them"
    )


def require_room(name: HubName, num_bytes: int) -> None:
    """Raise ConfigError unless the disk of the cache has room for `num_bytes`."""
    home = cache_home()
    there = next(path for path in (home, *home.parents) if path.exists())
    free = shutil.disk_usage(there).free
    if free < num_bytes:
        raise ConfigError(
            f"{name} needs {gigabytes(num_bytes)} in {home}, whose disk has {gigabytes(free)} left; make room, or set "
            "HF_HOME to a directory on a larger disk"
        )


def gigabytes(num_bytes: int) -> str:
    """A size as text, in GB or MB."""
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.1f} MB"


def _nowhere(name: HubName) -> str:
    here = "a model directory" if name.kind == "model" else "a file or directory"
    return (
        f"there is no {name.kind} {name.repo!r}: it is neither {here} on this machine nor public at {endpoint()}; "
        f"correct the name or, if it is private, {LOGIN}"
    )


def _refused(status: int, name: HubName, page: str) -> str:
    if status == 401:
        return f"{name}: {endpoint()} does not accept this machine's token; {LOGIN} with a valid one"
    if status == 403:
        return f"{name}: the account of this machine's token may not read {page}; {LOGIN} of one that may"
    if status == 429:
        return f"{name}: {endpoint()} has answered too many requests of this machine; wait some minutes, or {LOGIN}"
    return f"{name}: {endpoint()} answered with status {status}; try again later: what has been downloaded is kept"


def _full(name: HubName) -> str:
    return f"{name}: the disk of {cache_home()} is full; make room, or set HF_HOME to a directory on a larger disk"


def _lost(error: Exception) -> str:
    cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
    first_line = (str(cause).strip().splitlines() or [""])[0]
    return f"the connection to {endpoint()} was lost ({first_line or type(cause).__name__})"
