"""Parts of a trainer's rank other than its engine: a scalar head's start, a teacher's layer, the weight publisher."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from flowrl.errors import ConfigError
from flowrl.graph.node import Context
from flowrl.graph.routes import readers_dtype
from flowrl.messages import Batch
from flowrl.models import Policy, resolve
from flowrl.models.directory import stored_dtype
from flowrl.training.loss.distillation_objective import ReverseKL
from flowrl.training.loss.objective import Objective
from flowrl.training.settings import LoRA, Start

if TYPE_CHECKING:
    from flowrl.training.engine.zero import ZeroEngine
    from flowrl.training.model.output_layer import OutputLayer
    from flowrl.weights.publish import Publisher


def head_start(source: str) -> Start:
    """How to initialise a scalar head: a model that already has one keeps it."""
    from flowrl.training.model.scalar_head import has_scalar_head

    return "reward_model" if has_scalar_head(source) else "policy"


def record_scores(engine: ZeroEngine, judged: Mapping[str, Any]) -> None:
    """Record mean and std of the scores on the held-out batch, if it has any, for the reward model's directory."""
    mean, square = judged.get("held_out/score_mean"), judged.get("held_out/score_square")
    if mean is not None and square is not None:
        engine.record_scores(mean, math.sqrt(max(0.0, square - mean**2)))


def split_alone(batch: Batch, node: str, num_ranks: int) -> Batch:
    """Split a whole batch, received over an edge without gang dispatch, for the single rank of a trainer."""
    if num_ranks > 1:
        raise ConfigError(
            f"node {node!r} has {num_ranks} ranks but received a batch that was not split; connect its batches with "
            'dispatch="gang"'
        )
    return batch.split(1)[0]


def load_teacher(
    teacher: Policy | None, objective: Objective, engine: ZeroEngine, progress: Callable[[str], None]
) -> OutputLayer | None:
    """The output layer of the model that `objective` compares the policy with; None without one."""
    if teacher is None:
        return None
    from flowrl.training.model.output_layer import load_output_layer

    path = resolve(teacher, progress=progress)
    return load_output_layer(
        path,
        vocab_size=engine.vocab_size,
        dtype=engine.settings.dtype,
        device=engine.device,
        trust_remote_code=teacher.trust_remote_code,
        beta=objective.beta if isinstance(objective, ReverseKL) else 1.0,
    )


def make_publisher(context: Context, policy: Policy, name: str, lora: LoRA, engine: Any, probe_every: int) -> Publisher:
    """The publisher of the trainer `name`, in the form that the readers of its weights take."""
    from flowrl.training.model.adapter import AdapterSource, vllm_adapter_config
    from flowrl.weights.narrowing import Narrowing, kept_in_float32
    from flowrl.weights.publish import Publisher

    readers = (route.dtype for route in context.weight_routes)
    dtype = readers_dtype(readers, auto=stored_dtype(resolve(policy)))
    adapter = vllm_adapter_config(lora, engine.model.network) if lora.synced_rank else None
    return Publisher(
        AdapterSource(engine) if adapter else engine,
        name,
        run_id=context.run_id,
        routes=context.weight_routes,
        narrowing=Narrowing(dtype, kept_in_float32(engine.model.network)),
        adapter=adapter,
        probe_every=probe_every,
    )
