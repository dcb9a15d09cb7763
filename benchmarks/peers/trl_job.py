"""One run of TRL's GRPO, for trainers.py: started by the Python of TRL's environment, on one JSON argument.

Settings are those of flowrl's run of the same job: no reference model, no checkpointed layers, a constant rate, samples
at temperature 1. TRL's bfloat16 is its own default: weights in fp32 and passes under autocast.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks.peers.job_reward import correct


def main() -> None:
    asked: dict[str, Any] = json.loads(sys.argv[1])
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    ends_s: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **further: Any) -> None:
            ends_s.append(perf_counter())

    rows = [json.loads(line) for line in Path(asked["data"]).read_text().splitlines()]
    per_pass = asked["micro_batch"]
    config = GRPOConfig(
        output_dir=asked["run_dir"],
        use_cpu=not torch.cuda.is_available(),
        bf16=asked["dtype"] == "bfloat16",
        per_device_train_batch_size=per_pass,
        gradient_accumulation_steps=asked["prompts"] * asked["samples"] // per_pass,
        num_generations=asked["samples"],
        max_completion_length=asked["max_tokens"],
        learning_rate=asked["lr"],
        lr_scheduler_type="constant",
        max_steps=asked["steps"],
        gradient_checkpointing=False,
        shuffle_dataset=False,
        seed=asked["seed"],
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=asked["model"],
        reward_funcs=correct,
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(asked["model"]),
        callbacks=[Clock()],
    )
    trainer.train()
    lines = [line for line in trainer.state.log_history if "completions/mean_length" in line]
    found = {
        "ends_s": ends_s,
        "response_tokens": [line["completions/mean_length"] for line in lines],
        "reward": [line["reward"] for line in lines],
    }
    Path(asked["result"]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
