"""What a trainer's settings require from each other and from this machine; imports torch only if an option needs it."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from flowrl.errors import ConfigError
from flowrl.training.engine.compilers import check_nvcc, check_python_headers
from flowrl.training.settings import LoRA, ZeroSettings
from flowrl.user_path import user_path

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
    _check_packages(zero, lora)
    if zero.nvme_path:
        _check_nvme(zero.nvme_path)
    if lora.targets and model_dir is not None:
        _check_targets(model_dir, lora, trust_remote_code)


def part_path(path: Path, part: int, parts: int) -> Path:
    """The directory in `path` where the ranks that have part `part` of the model's matrices save their state."""
    return path if parts == 1 else path / PART.format(part=part, parts=parts)


def _saved_parts(path: Path) -> int:
    """The number of parts into which the matrices of the saved model were divided."""
    return len(list(path.glob(PART.format(part="*", parts="*")))) or len(list(path.glob(PART_OF_ALL))) or 1


def resume_problems(path: Path, zero: ZeroSettings, num_ranks: int, parts: int = 1) -> list[str]:
    """Reasons why ranks with these settings cannot load the training state that a checkpoint has in `path`.

    `parts` is the trainer's `tensor_parallel_size`.
    """
    if (saved := _saved_parts(path)) != parts:
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
        return [*_unsharded_problems(path, zero, num_ranks)]
    found = disks or len(list(path.glob("*optim_states.pt")))
    if zero.effective_stage(num_ranks) and found != num_ranks:  # stage 0 shards nothing, so any number of ranks works
        return [
            f"checkpoint {path} was written by {found} trainer ranks, but this run has {num_ranks}; "
            f"resume with {found} trainer replicas"
        ]
    return []


def in_shards(zero: ZeroSettings, num_ranks: int) -> bool:
    """Whether ranks with these settings save in a form that any number of ranks can load (`shards`)."""
    return zero.effective_stage(num_ranks) > 0 and zero.optimizer != "muon" and not zero.nvme_path


def is_sharded(path: Path) -> bool:
    """Whether the training state in `path` was saved in a form that any number of ranks can load."""
    return any(path.glob(SHARDS.format(rank="*")))


def _unsharded_problems(path: Path, zero: ZeroSettings, num_ranks: int) -> Iterator[str]:
    if not in_shards(zero, num_ranks):
        now = "optimizer muon" if zero.optimizer == "muon" else "ZeRO stage 0"
        yield (
            f"checkpoint {path} was written with adamw or sgd at ZeRO stage 1, 2 or 3, but this run has {now}, which "
            "keeps its state in another form; resume with the settings of the saved run"
        )


def _check_packages(zero: ZeroSettings, lora: LoRA) -> None:
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


def _check_nvme(path: str) -> None:
    if not user_path(path).is_dir():
        raise ConfigError(f"nvme_path {path} is not a directory; create it on a local disk")
    from deepspeed.ops.op_builder import AsyncIOBuilder

    check_python_headers("DeepSpeed's async_io (nvme_path)")
    check_nvcc("DeepSpeed's async_io (nvme_path)")
    if not AsyncIOBuilder().is_compatible(verbose=False):
        raise ConfigError(
            "nvme_path needs DeepSpeed's async_io, which cannot be compiled on this machine; install libaio with its "
            "headers (libaio-dev), or set CFLAGS and LDFLAGS to where they are"
        )


def _check_targets(path: Path, lora: LoRA, trust_remote_code: bool) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from flowrl.training.model.adapter import target_layers

    with torch.device("meta"):
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        target_layers(AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code), lora)
