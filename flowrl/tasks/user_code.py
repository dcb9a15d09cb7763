"""Code that is not flowrl's own: rewards, environments, tools and agents of users, and the programs that these start.

It is imported by path or by name. A process of its own gets the variables that programs need to run at all, and what
the user names. It does not get what else the run's process has: keys and tokens of services, and Ray's own variables.
Whoever can read the token of Ray's cluster can execute anything on all of its machines, so that is withheld from every
program, whatever is named. This keeps secrets out of logs and out of programs that send their environment elsewhere. It
is no wall: a program of the same user can read that user's files and, in /proc, the variables of that user's other
processes.

Messages to and from such a process are length-prefixed msgpack over a socket that is the process's alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import importlib.util
import os
import re
import socket
import struct
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from types import ModuleType
from typing import IO, Any

import msgpack

from flowrl.errors import ConfigError
from flowrl.machine.disk import user_path
from flowrl.machine.proxies import exceptions

# Importing it


def load_user_module(where: str, *, owner: str) -> ModuleType:
    """The module at `file.py` or `package.module`. Raises ConfigError.

    `owner` is "reward", "environment", "tool" or "agent".
    """
    if where.endswith(".py"):
        return _load_file(where, owner)
    with _import_problems(f"the {owner}'s module {where!r}"):
        return importlib.import_module(where)


def one_line(problem: BaseException) -> str:
    """Type and first line of an exception."""
    text = str(problem).strip().splitlines()
    return f"{type(problem).__name__}: {text[0]}" if text else type(problem).__name__


@contextlib.contextmanager
def refuse_exit(what: str) -> Iterator[None]:
    """Raise ConfigError if the code that is imported within calls sys.exit. `what` names it, as in "the reward's file
    r.py"."""
    try:
        yield
    except SystemExit as end:
        raise ConfigError(
            f"{what} calls sys.exit({end.code!r}) while it is imported; put what it does as a script under "
            "if __name__ == '__main__':"
        ) from None


@contextlib.contextmanager
def _import_problems(what: str) -> Iterator[None]:
    """Turn any exception of the user's module into a ConfigError."""
    with refuse_exit(what):
        try:
            yield
        except Exception as problem:  # the boundary to the user's module
            raise ConfigError(f"{what} does not import: {one_line(problem)}") from None


@functools.lru_cache(maxsize=16)
def _load_file(name: str, owner: str) -> ModuleType:
    path = user_path(name).resolve()
    if not path.is_file():
        raise ConfigError(f"the {owner}'s file {name} does not exist (looked for {path})")
    module_name = f"flowrl_{owner}_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    with _import_problems(f"the {owner}'s file {name}"):
        spec.loader.exec_module(module)
    return module


# The variables of its processes


EVERYTHING = ("*",)
"""`keep` for code that does what the run's own user does, such as a reward that asks a service with a key."""
WITHHELD = ("RAY_AUTH_*",)
MARK = "FLOWRL_PROGRAM"
"""Set in a process that got these variables: what it has besides them is its own, and goes to what it starts."""
BASIC = (
    # the system and its user
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "TZ", "TMPDIR", "TMP", "TEMP", "XDG_*", "DISPLAY"),
    *("LANG", "LANGUAGE", "LC_*"),
    # Python, and how libraries are found
    *("PYTHON*", "VIRTUAL_ENV", "CONDA_PREFIX", "CONDA_DEFAULT_ENV", "LD_LIBRARY_PATH", "LD_PRELOAD"),
    *("JAVA_HOME", "NODE_PATH"),
    # the network
    *("http_proxy", "https_proxy", "all_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "NODE_EXTRA_CA_CERTS"),
    # threads and devices
    *("OMP_*", "MKL_*", "OPENBLAS_*", "NUMEXPR_*", "RAYON_*", "TOKENIZERS_PARALLELISM", "MALLOC_*"),
    *("CUDA_*", "NVIDIA_*", "MUJOCO_GL", "PYOPENGL_PLATFORM", "SDL_*", "MPLBACKEND", "MPLCONFIGDIR"),
    # places of models and data, and whether the network may be asked for them
    *("HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "HF_ASSETS_CACHE", "HF_MODULES_CACHE", "HF_XET_CACHE"),
    *("HF_ENDPOINT", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE", "TRANSFORMERS_CACHE"),
    *("TORCH_HOME", "NLTK_DATA", "TIKTOKEN_CACHE_DIR"),
    # flowrl's own: the cache, and the mark by which what a run has left is found
    "FLOWRL_*",
)
"""Names, with `*` for any text."""
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\*?|\*")


def program_variables(more: Mapping[str, str] | None = None, *, keep: Iterable[str] = ()) -> dict[str, str]:
    """The variables of a program that this process starts: those of BASIC and those that `keep` names, and `more`.

    `keep` has names, which may end in `*`. A program that was started with such variables hands all of its own on.
    """
    known = EVERYTHING if MARK in os.environ else (*BASIC, *keep)
    found = {
        name: text
        for name, text in os.environ.items()
        if _matches_any(name, known) and not _matches_any(name, WITHHELD)
    }
    if any(name.lower().endswith("_proxy") and name.lower() != "no_proxy" for name in found):
        found |= exceptions(found)  # loopback, where the run's own servers listen, is exempt from proxies
    return {**found, MARK: "1", **(more or {})}


def keep_problems(keep: Iterable[str]) -> Iterator[str]:
    """A sentence for each name in the option `keep_variables` that is none."""
    for name in keep:
        if not VARIABLE.fullmatch(name):
            yield f"keep_variables has {name!r}; it takes names of variables, such as OPENAI_API_KEY or WANDB_*"
        elif _matches_any(name, WITHHELD):
            yield (
                f"keep_variables has {name}, which gives whoever has it all machines of Ray's cluster; no program gets "
                "it, so leave it out"
            )


def missing_variables(keep: Iterable[str]) -> list[str]:
    """The names in `keep` for which this process has no variable."""
    return [
        name for name in keep if name not in EVERYTHING and not any(_matches_any(one, (name,)) for one in os.environ)
    ]


def _matches_any(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


# Messages


LENGTH = struct.Struct("<I")
MOST_BYTES = (1 << 32) - 1
_private_connections: weakref.WeakSet[socket.socket] = weakref.WeakSet()
"""Connections that forked processes close."""


class Garbage(Exception):
    """The bytes that arrived are no message."""


def pack_message(message: Any) -> bytes:
    """The bytes of one message."""
    body: bytes = msgpack.packb(message)
    return LENGTH.pack(len(body)) + body


async def receive_message(reader: asyncio.StreamReader, *, most_bytes: int = MOST_BYTES) -> Any:
    """The next message. Raises asyncio.IncompleteReadError at the end of the connection.

    Raises Garbage for bytes that are no message, and for a message longer than `most_bytes`.
    """
    (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    if length > most_bytes:
        raise Garbage(f"a message of {length} bytes was announced; at most {most_bytes} are allowed")
    return _unpack_message(await reader.readexactly(length))


def read_message(inbox: IO[bytes]) -> Any:
    """The next message, None at the end of the connection. Raises Garbage."""
    head = inbox.read(LENGTH.size)
    return _unpack_message(inbox.read(LENGTH.unpack(head)[0])) if len(head) == LENGTH.size else None


def write_message(outbox: IO[bytes], message: Any) -> None:
    """Send one message."""
    outbox.write(pack_message(message))
    outbox.flush()


def keep_to_this_process(connection: socket.socket) -> None:
    """From now on, no process that this one starts or forks has the connection."""
    connection.set_inheritable(False)
    _private_connections.add(connection)


def _close_private() -> None:
    for connection in _private_connections:
        if connection.fileno() >= 0:
            os.close(connection.detach())


os.register_at_fork(after_in_child=_close_private)


def _unpack_message(body: bytes) -> Any:
    try:
        return msgpack.unpackb(body)
    except (ValueError, msgpack.UnpackException) as problem:
        raise Garbage(f"{len(body)} bytes are no message: {type(problem).__name__}") from None
