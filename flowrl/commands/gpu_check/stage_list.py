"""The stages of `flowrl gpu-check`, in the order in which they run. Plain data: nothing heavy is imported."""

from __future__ import annotations

from dataclasses import dataclass

from flowrl.nodes.engine_options import LEAST_CAPABILITY

HERE = "flowrl.commands.gpu_check"
LONGEST_S = 470.0
"""No stage takes longer, so that a machine that is lent for ten minutes at a time can complete one."""


@dataclass(frozen=True)
class CheckStage:
    """One stage: a separate process with a time limit."""

    name: str
    shows: str
    target: str
    """ "module:function" of a function that takes a Bench."""
    packages: tuple[str, ...] = ()
    """Modules without which the stage is skipped."""
    on_cpu: bool = True
    """Whether the stage is meaningful on a machine without a GPU."""
    least_gpus: int = 1
    """Minimum number of GPUs, on a machine with GPUs."""
    least_capability: float = 0.0
    """Minimum compute capability of each GPU."""
    limit_s: float = LONGEST_S


STAGES = (
    CheckStage(
        "gradients",
        "ZeRO stages 2 and 3, with and without offload: gradients of the device are those of a CPU",
        f"{HERE}.training_stages:gradients",
    ),
    CheckStage(
        "sequence-parallel",
        "two ranks divide the positions of their micro-batches: gradients and norms are those of a CPU",
        f"{HERE}.shared_stages:sequence_parallel",
        least_gpus=2,
    ),
    CheckStage(
        "tensor-parallel",
        "two ranks divide the matrices of all layers: gradients and norms are those of a CPU",
        f"{HERE}.shared_stages:tensor_parallel",
        least_gpus=2,
    ),
    CheckStage(
        "residence",
        "a trainer leaves its device and comes back 20 times, and trains on as if it had not",
        f"{HERE}.training_stages:residence",
    ),
    CheckStage("lora", "gradients of adapters are those of a CPU", f"{HERE}.training_stages:lora", ("peft",)),
    CheckStage(
        "qlora",
        "an adapter learns on a base of 4 bits, which leaves the device and comes back",
        f"{HERE}.training_stages:qlora",
        ("peft", "bitsandbytes"),
    ),
    CheckStage(
        "trees", "trees of shared prefixes give what rows give, and how much faster", f"{HERE}.pass_stages:trees"
    ),
    CheckStage("packing", "sequences packed into one row give what rows give", f"{HERE}.pass_stages:packing"),
    CheckStage(
        "sharded-scoring",
        "a reference over two GPUs gives the logprobs of the whole model on a CPU, before and after it was away",
        f"{HERE}.shared_stages:sharded_scoring",
        least_gpus=2,
    ),
    CheckStage("precision", "logprobs in bfloat16 against float32 on a CPU", f"{HERE}.pass_stages:precision"),
    CheckStage(
        "shared-memory",
        "vLLM takes weights through shared memory, sleeps and wakes by parts",
        f"{HERE}.weight_stages:shared_memory",
        ("vllm",),
    ),
    CheckStage(
        "generation",
        "vLLM's first runner samples what a trainer's model says, before, amid and after an update",
        f"{HERE}.generation_stages:generation",
        ("vllm",),
    ),
    CheckStage(
        "generation-v2",
        "the same with vLLM's second runner, which it takes on GPUs",
        f"{HERE}.generation_stages:generation_v2",
        ("vllm", "triton"),
    ),
    CheckStage(
        "attention",
        "FlashAttention, Triton and FlashInfer sample in bfloat16 with a trainer's logprobs",
        f"{HERE}.generation_stages:attention",
        ("vllm",),
    ),
    CheckStage(
        "fp8",
        "an engine in fp8 has after an update the weights, scales and logprobs of a fresh one; the gap to bfloat16",
        f"{HERE}.fp8_stage:fp8",
        ("vllm",),
        least_capability=LEAST_CAPABILITY,
    ),
    CheckStage(
        "nccl-packing",
        "vLLM's own packed broadcast takes a trainer's buckets apart as they were put in",
        f"{HERE}.weight_stages:nccl_packing",
        ("vllm",),
        on_cpu=False,
    ),
    CheckStage(
        "nccl",
        "a trainer on one GPU broadcasts its weights to vLLM on another",
        f"{HERE}.weight_stages:nccl",
        ("vllm",),
        on_cpu=False,
        least_gpus=2,
    ),
    CheckStage("devices", "every process of a run sees the GPUs of its plan", f"{HERE}.run_stages:devices", ("ray",)),
    CheckStage(
        "lease",
        "a trainer and a process that takes 90% of the GPU use it in turns, checkpoints included",
        f"{HERE}.run_stages:lease",
        ("ray",),
    ),
    CheckStage(
        "whole-run",
        "GRPO from prompt to weights: audit ok, and the policy learns",
        f"{HERE}.run_stages:whole_run",
        ("ray", "vllm", "deepspeed"),
    ),
    CheckStage(
        "adapter-run",
        "GRPO with LoRA: audit ok, vLLM serves the versions as adapters",
        f"{HERE}.run_stages:adapter_run",
        ("ray", "vllm", "deepspeed", "peft"),
    ),
    CheckStage(
        "wide-run",
        "two ranks at ZeRO 3 and two engines, over NCCL on GPUs: audit ok",
        f"{HERE}.run_stages:wide_run",
        ("ray", "vllm", "deepspeed"),
        least_gpus=4,
    ),
    CheckStage("speeds", "matrix products, copies, and a step of training", f"{HERE}.speed_stages:speeds"),
)
