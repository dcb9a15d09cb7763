"""`flowrl export RUN|CHECKPOINT --to dir|hub`: the model of a checkpoint without what only a resume needs.

Starts no Ray. For a run, the checkpoint is its best one if the run has kept it, else its newest.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from flowrl.commands.model_directories import model_dir, whole_directory
from flowrl.errors import ConfigError
from flowrl.graph.command_line import parse_options
from flowrl.hub import gb_text
from flowrl.machine.disk import user_path
from flowrl.runtime.telemetry.standard_streams import print_text

LEFT_OUT = ("ledger.sqlite", "manifest.json", "state.msgpack")
"""Files of a checkpoint that are no part of a model; directories are left out as well, except `adapter`."""
LARGE_BYTES = 100_000_000
"""A line is printed for each copied file of at least this size."""


@dataclass(frozen=True)
class ExportOptions:
    """Options of `flowrl export`."""

    to: Literal["dir", "hub"] = "dir"
    """Copy to a directory, or upload to the Hugging Face Hub."""
    name: str = ""
    """The directory to write, or the repository OWNER/NAME on the Hub."""
    public: bool = False
    """Create a public repository; without this option, it is private."""
    revision: str = "main"
    """Branch of the repository."""
    message: str = "Upload a model trained with flowrl"
    """Message of the commit."""

    def __post_init__(self) -> None:
        if not self.name:
            raise ConfigError("flowrl export needs to know where to: --name DIRECTORY, or --to hub --name OWNER/NAME")


def export_model(args: Sequence[str]) -> int:
    """The command."""
    if not args or args[0].startswith("-"):
        if args and args[0] in ("-h", "--help"):
            parse_options(ExportOptions, ["--help"], prog="flowrl export RUN")
        raise ConfigError("flowrl export needs a run, checkpoint or model first: flowrl export runs/NAME --name DIR")
    options = parse_options(ExportOptions, args[1:], prog="flowrl export RUN")
    source = model_dir(user_path(args[0]))
    files = files_of(source)
    size = sum(file.stat().st_size for file in files)
    print_text(f"{source}: {len(files)} files, {size / 1e6:.1f} MB", flush=True)
    if options.to == "dir":
        copy_files(source, files, user_path(options.name))
        print_text(f"wrote {options.name}")
    else:
        print_text(f"uploaded to {upload_files(source, files, options)}")
    return 0


def files_of(source: Path) -> list[Path]:
    """The files of the model at `source`: those of a Hugging Face directory, and its adapter's."""
    beside = [file for file in sorted(source.iterdir()) if file.is_file() and file.name not in LEFT_OUT]
    adapter = sorted((source / "adapter").glob("*")) if (source / "adapter").is_dir() else []
    return [file for file in (*beside, *adapter) if not file.name.startswith(".")]


def copy_files(source: Path, files: Sequence[Path], target: Path) -> None:
    """Copy the files to `target`, completely or not at all; prints a line for each large file. Raises ConfigError."""
    total, copied = sum(file.stat().st_size for file in files), 0
    with whole_directory(target) as temporary:
        for file in files:
            into = temporary / file.relative_to(source)
            into.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, into)  # not `copy`: a run's own files are readable only by its user
            copied += into.stat().st_size
            if into.stat().st_size >= LARGE_BYTES:
                print_text(f"copied {file.name}: {gb_text(copied)} of {gb_text(total)}", flush=True)


def upload_files(source: Path, files: Sequence[Path], options: ExportOptions) -> str:
    """Upload the files in one commit; returns the address. The token is the Hub's own: HF_TOKEN, or `hf auth login`."""
    from huggingface_hub import HfApi

    from flowrl.hub import hub_failures

    api = HfApi()
    try:
        made = api.create_repo(options.name, private=not options.public, exist_ok=True)
        if options.revision != "main":
            api.create_branch(made.repo_id, branch=options.revision, exist_ok=True)
        api.upload_folder(
            repo_id=made.repo_id,
            folder_path=source,
            allow_patterns=[str(file.relative_to(source)) for file in files],
            revision=options.revision,
            commit_message=options.message,
        )
    except hub_failures() as error:
        if isinstance(error, OSError) and error.filename is not None:  # an error of a file here
            raise ConfigError(f"{error.filename} cannot be read: {error.strerror}; nothing was uploaded") from None
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        remedy = "log in with hf auth login, or set HF_TOKEN to a token that may write there"
        if not isinstance(error, OSError | ValueError):  # an error of the HTTP library: there was no answer
            remedy = "the connection failed, so run it again when there is one"
        raise ConfigError(f"{options.name} cannot be uploaded: {first}; {remedy}") from None
    return str(made)
