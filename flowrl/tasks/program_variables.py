"""The environment variables of programs that are not flowrl's own: environments, agents, commands, and rewards.

Such a program gets what programs need to run at all, and what the user names. It does not get what else the run's
process has: keys and tokens of services, and Ray's own variables. Whoever can read the token of Ray's cluster can
execute anything on all of its machines, so that is withheld from every program, whatever is named.

This keeps secrets out of logs and out of programs that send their environment elsewhere. It is no wall: a program of
the same user can read that user's files and, in /proc, the variables of that user's other processes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase

from flowrl.proxies import exceptions

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
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\*?|\*")


def program_variables(more: Mapping[str, str] | None = None, *, keep: Iterable[str] = ()) -> dict[str, str]:
    """The variables of a program that this process starts: those of BASIC and those that `keep` names, and `more`.

    `keep` has names, which may end in `*`. A program that was started with such variables hands all of its own on.
    """
    known = EVERYTHING if MARK in os.environ else (*BASIC, *keep)
    found = {name: text for name, text in os.environ.items() if _is_one(name, known) and not _is_one(name, WITHHELD)}
    return {**_without_proxy_to_loopback(found), MARK: "1", **(more or {})}


def keep_problems(keep: Iterable[str]) -> Iterator[str]:
    """A sentence for each name in the option `keep_variables` that is none."""
    for name in keep:
        if not NAME.fullmatch(name):
            yield f"keep_variables has {name!r}; it takes names of variables, such as OPENAI_API_KEY or WANDB_*"
        elif _is_one(name, WITHHELD):
            yield (
                f"keep_variables has {name}, which gives whoever has it all machines of Ray's cluster; no program gets "
                "it, so leave it out"
            )


def missing_variables(keep: Iterable[str]) -> list[str]:
    """The names in `keep` for which this process has no variable."""
    return [name for name in keep if name not in EVERYTHING and not any(_is_one(one, (name,)) for one in os.environ)]


def _is_one(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _without_proxy_to_loopback(variables: dict[str, str]) -> dict[str, str]:
    """The variables with loopback, where the run's own servers listen, exempt from proxies."""
    has_proxy = any(name.lower().endswith("_proxy") and name.lower() != "no_proxy" for name in variables)
    return {**variables, **exceptions(variables)} if has_proxy else variables
