"""What a trainer's settings require from each other and from this machine; imports torch only if an option needs it.

The names of DeepSpeed's settings, read from its source: importing deepspeed takes seconds.

DeepSpeed ignores an unknown name at the top level, and fails with a traceback at an unknown name of ZeRO's. If
DeepSpeed is not installed, no names are known, and every name is accepted.

DeepSpeed's async_io reads and writes data offloaded to a disk; it is compiled at its first use on a machine.

torch guards such a build by a lock file. If a process is killed while it compiles, the file stays, and every later
process waits forever. Here only one process at a time builds, under a lock that is released when the process ends. So a
lock file of torch that is found under this lock has no owner and can be removed.
"""

from __future__ import annotations

import ast
import difflib
import fcntl
import functools
import importlib.util
import re
import sys
import sysconfig
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from flowrl.errors import ConfigError
from flowrl.machine.disk import user_path
from flowrl.training.settings import LoRA, ZeroSettings

SHARDS = "shards_rank_{rank}.pt"
"""Files of the ranks' state that any number of ranks can load."""
PART = "part_{part}_of_{parts}"
"""The directory of such files if ranks have parts of the model's matrices (tensor parallelism)."""
PART_OF_ALL = "mp_rank_*_model_states.pt"
"""DeepSpeed's files for these parts at ZeRO stage 0, one file for each part."""
TAG = "zero"
"""The subdirectory of a trainer's directory that holds the state of its ranks."""


def lora_problems(lora: LoRA, zero: ZeroSettings) -> list[str]:
    """Problems of the combination of both settings, as complete sentences."""
    if lora.quantize == "none":
        return []
    found = []
    if zero.stage == 3:
        found.append(f"quantize={lora.quantize!r}: ZeRO stage 3 cannot shard quantized weights; set the stage to 2")
    if zero.offload == "all":
        found.append(f"quantize={lora.quantize!r}: quantized weights cannot be offloaded; set offload='optimizer'")
    return found


def check_training(zero: ZeroSettings, lora: LoRA, *, model_dir: Path | None, trust_remote_code: bool = False) -> None:
    """Raise ConfigError for a missing package, disk or layer. `model_dir` is None for a model not created yet."""
    needed = {}
    if lora.rank:
        needed["peft"] = "LoRA"
    if lora.quantize != "none":
        needed["bitsandbytes"] = f"quantize={lora.quantize!r}"
    if zero.attention == "flash_attention_2":
        needed["flash_attn"] = "attention='flash_attention_2'"
    if zero.attention == "flash_attention_3":
        needed["flash_attn_interface"] = "attention='flash_attention_3'"
    for package, option in needed.items():
        if find_spec(package) is None:
            raise ConfigError(
                f"{option} needs the package {package}, which is not installed; install it, or leave the option out"
            )

    if zero.nvme_path:
        if not user_path(zero.nvme_path).is_dir():
            raise ConfigError(f"nvme_path {zero.nvme_path} is not a directory; create it on a local disk")
        from deepspeed.ops.op_builder import AsyncIOBuilder

        check_python_headers("DeepSpeed's async_io (nvme_path)")
        check_nvcc("DeepSpeed's async_io (nvme_path)")
        if not AsyncIOBuilder().is_compatible(verbose=False):
            raise ConfigError(
                "nvme_path needs DeepSpeed's async_io, which cannot be compiled on this machine; install libaio with "
                "its headers (libaio-dev), or set CFLAGS and LDFLAGS to where they are"
            )

    if lora.targets and model_dir is not None:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        from flowrl.training.model.adapter import target_layers

        with torch.device("meta"):
            config = AutoConfig.from_pretrained(model_dir, trust_remote_code=trust_remote_code)
            target_layers(AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code), lora)


def part_path(path: Path, part: int, parts: int) -> Path:
    """The directory in `path` where the ranks that have part `part` of the model's matrices save their state."""
    return path if parts == 1 else path / PART.format(part=part, parts=parts)


def resume_problems(path: Path, zero: ZeroSettings, num_ranks: int, parts: int = 1) -> list[str]:
    """Reasons why ranks with these settings cannot load the training state that a checkpoint has in `path`.

    `parts` is the trainer's `tensor_parallel_size`.
    """
    saved = len(list(path.glob(PART.format(part="*", parts="*")))) or len(list(path.glob(PART_OF_ALL))) or 1
    if saved != parts:
        return [
            f"checkpoint {path} was written with tensor_parallel_size {saved}, but this run has {parts}; resume with "
            f"--trainer.tensor-parallel-size {saved}"
        ]
    disks = len(list(path.glob("on_disk_rank_*")))
    if bool(disks) != bool(zero.nvme_path):
        return [
            f"checkpoint {path} was written {'with' if disks else 'without'} nvme_path, but this run is "
            f"{'with' if zero.nvme_path else 'without'} it; resume with the setting of the saved run"
        ]
    if is_sharded(part_path(path, 0, parts)):
        if saves_in_shards(zero, num_ranks):
            return []
        now = "optimizer muon" if zero.optimizer == "muon" else "ZeRO stage 0"
        return [
            f"checkpoint {path} was written with adamw or sgd at ZeRO stage 1, 2 or 3, but this run has {now}, which "
            "keeps its state in another form; resume with the settings of the saved run"
        ]
    found = disks or len(list(path.glob("*optim_states.pt")))
    if zero.effective_stage(num_ranks) and found != num_ranks:  # stage 0 shards nothing, so any number of ranks works
        return [
            f"checkpoint {path} was written by {found} trainer ranks, but this run has {num_ranks}; "
            f"resume with {found} trainer replicas"
        ]
    return []


def saves_in_shards(zero: ZeroSettings, num_ranks: int) -> bool:
    """Whether ranks with these settings save in a form that any number of ranks can load (`save_shards`)."""
    return zero.effective_stage(num_ranks) > 0 and zero.optimizer != "muon" and not zero.nvme_path


def is_sharded(path: Path) -> bool:
    """Whether the training state in `path` was saved in a form that any number of ranks can load."""
    return any(path.glob(SHARDS.format(rank="*")))


def check_python_headers(what: str) -> None:
    """Raise ConfigError if this Python's C headers are missing. `what` is the part that needs them."""
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        name = f"python{sys.version_info.major}.{sys.version_info.minor}"
        raise ConfigError(
            f"{what} is compiled at its first use and needs Python.h, which {sysconfig.get_path('include')} does not "
            f"have; install the headers of this Python, on Debian: apt-get install {name}-dev"
        )


def check_nvcc(what: str) -> None:
    """Raise ConfigError if torch finds a GPU here but no CUDA compiler. Imports torch."""
    import torch
    from torch.utils.cpp_extension import CUDA_HOME

    if torch.cuda.is_available() and not (CUDA_HOME and (Path(CUDA_HOME) / "bin" / "nvcc").is_file()):
        raise ConfigError(
            f"{what} is compiled at its first use and needs nvcc on a machine with a GPU; install the CUDA toolkit "
            f"{torch.version.cuda}, and set CUDA_HOME to its directory"
        )


ZERO = "zero_optimization"
READ = ("config.py", "constants.py")
"""Names of the files, in all folders of DeepSpeed, whose string constants include the names of settings."""
OURS = {
    "train_batch_size": "--groups-per-step and --group-size",
    "gradient_clipping": "--zero.clip-grad-norm",
    "optimizer": "--zero.optimizer",
    "scheduler": "--schedule.decay",
    "fp16": "--dtype",
    "tensor_parallel": "--trainer.tensor-parallel-size",
}
"""Setting that a run decides itself -> the run's option for it."""


def setting_problems(settings: Mapping[str, Any]) -> list[str]:
    """What is wrong with the names of `--zero.deepspeed`, as complete sentences."""
    known, of_zero = known_settings()
    found: list[str] = []
    for name, value in settings.items():
        if name in OURS:
            found.append(
                f"--zero.deepspeed sets {name!r}, which a run decides itself; leave it out, and see {OURS[name]}"
            )
        elif known and name not in known:
            hint = hint_at_name(name, known)
            found.append(f"--zero.deepspeed names {name!r}, which is no setting of DeepSpeed; {hint}")
        elif name == ZERO and not isinstance(value, Mapping):
            found.append(
                f"--zero.deepspeed sets {ZERO} to {value!r}; name one of its settings, as {ZERO}.overlap_comm=true"
            )
        elif name == ZERO and of_zero:
            found += [
                f"--zero.deepspeed names '{ZERO}.{inner}', which is no setting of ZeRO; {hint_at_name(inner, of_zero)}"
                for inner in sorted(value.keys() - of_zero)
            ]
    return found


def hint_at_name(name: str, known: frozenset[str]) -> str:
    near = difflib.get_close_matches(name, known, 1)
    return f"did you mean {near[0]}?" if near else "its documentation lists them"


@functools.cache
def known_settings() -> tuple[frozenset[str], frozenset[str]]:
    """(names at the top level, names of zero_optimization); the first set also has some names of deeper levels."""
    spec = importlib.util.find_spec("deepspeed")
    if spec is None or not spec.submodule_search_locations:
        return frozenset(), frozenset()
    home = Path(next(iter(spec.submodule_search_locations)))
    files = [path for name in READ for path in home.rglob(name)]
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in files}
    texts = {node.value for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    names = {text for text in texts if isinstance(text, str) and re.fullmatch(r"[a-z][a-z0-9_]+", text)}

    of_zero: set[str] = set()
    of_config = trees.get(home / "runtime/zero/config.py")
    classes = [node for node in (of_config.body if of_config else ()) if isinstance(node, ast.ClassDef)]
    for field in (field for one in classes if one.name == "DeepSpeedZeroConfig" for field in one.body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            keywords = field.value.keywords if isinstance(field.value, ast.Call) else ()
            aliases = [keyword.value for keyword in keywords if keyword.arg == "alias"]
            of_zero |= {field.target.id, *(str(alias.value) for alias in aliases if isinstance(alias, ast.Constant))}
    return frozenset(names), frozenset(of_zero)


def build_async_io() -> None:
    """Compile async_io, or load the existing build. Takes minutes once; other processes of the machine wait."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    directory = find_build_directory()
    with (directory.parent / "flowrl-async_io.lock").open("w", encoding="utf-8") as mine:
        fcntl.flock(mine, fcntl.LOCK_EX)
        (directory / "lock").unlink(missing_ok=True)
        AsyncIOBuilder().load(verbose=False)


def is_built() -> bool:
    """Whether async_io is already compiled on this machine."""
    return any(find_build_directory().glob("*.so"))


def find_build_directory() -> Path:
    """The directory into which torch compiles it."""
    from deepspeed.ops.op_builder import AsyncIOBuilder
    from torch.utils.cpp_extension import _get_build_directory

    return Path(_get_build_directory(AsyncIOBuilder.NAME, verbose=False))
