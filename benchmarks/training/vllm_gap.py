"""How far vLLM's logprobs are from the trainer's, for families that scale or cap their logits.

    python -m benchmarks.training.vllm_gap [--families gemma2 cohere] [--dtypes float32 bfloat16]

A tiny model of the family's real architecture with random weights samples in vLLM (temperature 0.8, logprobs after it),
and the trainer's model computes the logprobs of the same tokens. Each family runs in a process of its own; where vLLM
does not run it, its message is printed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flowrl.training.settings import Dtype

SIZES = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "qwen2": {"tie_word_embeddings": True},
    "gemma": {},
    "gemma2": {"final_logit_softcapping": 3.0, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 32},
    "gemma3_text": {"query_pre_attn_scalar": 32},
    "cohere": {"logit_scale": 0.25},
    "cohere2": {"logit_scale": 0.25},
    "granite": {"logits_scaling": 8.0, "embedding_multiplier": 2.0, "residual_multiplier": 0.5},
}
"""transformers' name of the family -> its own settings. qwen2 is there to compare with."""
PROMPTS = tuple(tuple(range(start, start + length)) for start, length in ((5, 3), (40, 9), (90, 17), (150, 30)))
TEMPERATURE = 0.8
NEW_TOKENS = 40
LIMIT_S = 300


@dataclass(frozen=True)
class Gap:
    """The differences between two logprobs of the same tokens, in nats."""

    family: str
    dtype: Dtype
    tokens: int = 0
    largest: float = 0.0
    mean: float = 0.0
    spread: float = 0.0
    """Standard deviation of the logprobs: what the differences are to be compared with."""
    message: str = ""
    """Why vLLM does not run it."""


def make_model(family: str, dtype: Dtype, folder: Path) -> None:
    """Write a random model whose logits are far from 0."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES, **FAMILIES[family]))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.to(getattr(torch, dtype)).save_pretrained(folder)


def sampled(folder: Path, dtype: Dtype) -> list[tuple[list[int], list[float]]]:
    """(tokens of prompt and response, logprobs of the response) of each prompt, by vLLM."""
    from flowrl.nodes.generation.vllm_processes import prepare_environment

    prepare_environment(cores=(), on_gpu=False)
    from vllm import LLM, SamplingParams

    engine = LLM(
        str(folder),
        dtype=dtype,
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=SIZES["max_position_embeddings"],
        logprobs_mode="processed_logprobs",
        kv_cache_memory_bytes=64 << 20,
        block_size=32,
        distributed_executor_backend="uni",
        disable_log_stats=True,
    )
    settings = SamplingParams(
        temperature=TEMPERATURE, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=0, seed=7, detokenize=False
    )
    prompts = [{"prompt_token_ids": list(prompt)} for prompt in PROMPTS]
    found = []
    for result in engine.generate(prompts, settings, use_tqdm=False):
        output = result.outputs[0]
        ids = list(output.token_ids)
        logprobs = [table[token].logprob for table, token in zip(output.logprobs, ids, strict=True)]
        found.append(([*result.prompt_token_ids, *ids], logprobs))
    return found


def computed(folder: Path, dtype: Dtype, samples: Sequence[tuple[list[int], list[float]]]) -> list[list[float]]:
    """The logprobs of the responses by the trainer's model."""
    import numpy as np
    import torch

    from flowrl.training.model.policy_model import load_policy_model
    from flowrl.training.model.row_layout import lay_out

    model = load_policy_model(folder, dtype=dtype).eval()
    tokens = [np.asarray(ids, np.int32) for ids, _ in samples]
    masks = [np.arange(len(ids)) >= len(ids) - len(logprobs) for ids, logprobs in samples]
    with torch.no_grad():
        logprobs_N, _ = model(lay_out(tokens, masks, layout="padded"), TEMPERATURE)
    return [part.tolist() for part in logprobs_N.float().split([len(logprobs) for _, logprobs in samples])]


def measure(family: str, dtype: Dtype) -> Gap:
    """The gap of one family, in this process."""
    import numpy as np

    with tempfile.TemporaryDirectory() as folder:
        make_model(family, dtype, Path(folder))
        samples = sampled(Path(folder), dtype)
        ours = np.concatenate(computed(Path(folder), dtype, samples))
    theirs = np.concatenate([logprobs for _, logprobs in samples])
    away = np.abs(ours - theirs)
    return Gap(family, dtype, len(away), float(away.max()), float(away.mean()), float(theirs.std()))


def measured_apart(family: str, dtype: Dtype) -> Gap:
    """The gap of one family, measured in a process of its own; with vLLM's message if that fails."""
    command = [sys.executable, "-m", "benchmarks.training.vllm_gap", "--one", "--families", family, "--dtypes", dtype]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return Gap(family, dtype, message=f"no answer after {LIMIT_S} s")
    if done.returncode == 0:
        return Gap(**json.loads(done.stdout.splitlines()[-1]))
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    errors = [line for line in lines if "Error: " in line and not line.startswith(("File", "raise"))]
    return Gap(family, dtype, message=(errors or lines or [f"status {done.returncode}"])[-1])


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    if options.one:
        print(json.dumps(asdict(measure(options.families[0], options.dtypes[0]))))
        return 0
    print("| family | type | largest difference | mean | standard deviation of the logprobs |\n|---|---|---|---|---|")
    gaps = []
    for family in options.families:
        for dtype in options.dtypes:
            gap = measured_apart(family, dtype)
            figures = gap.message or f"{gap.largest:.2g} | {gap.mean:.2g} | {gap.spread:.2g}"
            print(f"| {family} | {dtype} | {figures} |", flush=True)
            gaps.append(gap)
    for gap in gaps:
        print(json.dumps({"benchmark": "vllm_gap", **asdict(gap)}))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=list(FAMILIES), metavar="FAMILY")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument("--one", action="store_true", help="measure the first family in this process, as JSON")
    return parser


if __name__ == "__main__":
    sys.exit(main())
