"""The optimizer under DeepSpeed: AdamW, Muon or SGD, by parameter groups; rates are set before every step.

The gradient sums of a trainer with one rank.

DeepSpeed's optimizer of ZeRO 2 copies each gradient into a bucket, divides and flattens the bucket, converts it
for its reduction and back, and adds the result to fp32 sums. With one rank nothing has to be reduced. Here a gradient
is written into the sums, or added to them, as soon as a backward pass has made it.

The sums are the object from which DeepSpeed's `step` takes its flat gradient, so clipping, division, optimizer and
checkpoints are unchanged. The norm is also computed here: DeepSpeed copies each gradient to fp64 as a whole, and before
that looks for infinities in two passes, although an infinity makes the norm infinite anyway.

Dividing an accumulated gradient by a number that is known only at its end.

DeepSpeed's ZeRO optimizers divide by their loss scale before norm, clipping and update, wherever the gradient is: on
the device, in host memory or on a disk. So the number is multiplied into the loss scale. Without ZeRO, and in
BF16_Optimizer, the gradient itself is divided.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from flowrl.errors import ConfigError
from flowrl.training.settings import ZeroSettings

ENDS = ("embed", "lm_head", "score")
"""Matrices that AdamW trains under Muon, because they map from or to the vocabulary, or to a score."""


def make_optimizer(model: nn.Module, settings: ZeroSettings) -> torch.optim.Optimizer:
    """The optimizer for the trained parameters of `model`. Their rate is 0 until they are set."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if settings.optimizer == "muon":
        return make_muon(trained, settings)
    # DeepSpeed imports its Muon for every optimizer. Its decorator imports the compiler, which takes seconds, so it is
    # imported undecorated here.
    compile_, torch.compile = torch.compile, lambda function: function  # type: ignore[assignment]
    try:
        import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401
    finally:
        torch.compile = compile_
    if settings.optimizer == "sgd":
        return torch.optim.SGD(trained.values(), lr=0.0)
    groups = group_by_decay(trained, settings)
    if not settings.weight_decay:
        groups = [{"params": list(trained.values()), "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.0, betas=settings.betas, eps=settings.eps, fused=True)


def group_by_decay(parameters: Mapping[str, nn.Parameter], settings: ZeroSettings) -> list[dict[str, Any]]:
    """A group of matrices with weight decay and a group of all others without; empty groups are left out."""
    matrices = [p for p in parameters.values() if len(whole_parameter_shape(p)) > 1]
    others = [p for p in parameters.values() if len(whole_parameter_shape(p)) <= 1]
    groups = ({"params": matrices, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0})
    return [group for group in groups if group["params"]]


def make_muon(parameters: Mapping[str, nn.Parameter], settings: ZeroSettings) -> torch.optim.Optimizer:
    """DeepSpeed's Muon: it gathers and orthogonalizes whole gradients, even if ZeRO shards them flat."""
    torch._dynamo.config.disable = not torch.cuda.is_available()  # compiling for the CPU needs a compiler, and a minute
    from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

    for name, parameter in parameters.items():
        parameter.use_muon = len(whole_parameter_shape(parameter)) == 2 and not any(end in name for end in ENDS)  # type: ignore[attr-defined]
    matrices = [p for p in parameters.values() if p.use_muon]  # type: ignore[attr-defined]
    others = {name: p for name, p in parameters.items() if not p.use_muon}  # type: ignore[attr-defined]
    if not matrices:
        raise ConfigError("muon trains matrices of layers, and this model has none that are trained; choose adamw")
    adam = {"lr": 0.0, "betas": settings.betas, "eps": settings.eps, "use_muon": False}
    muon = {"lr": 0.0, "momentum": settings.momentum, "weight_decay": settings.weight_decay, "use_muon": True}
    groups = [{"params": matrices, **muon}, *({**group, **adam} for group in group_by_decay(others, settings))]
    optimizer: torch.optim.Optimizer = MuonWithAuxAdam(groups)
    return optimizer


def whole_parameter_shape(parameter: nn.Parameter) -> tuple[int, ...]:
    """The parameter's whole shape; under ZeRO-3 its own `shape` is that of an empty tensor."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def share_masters(optimizer: Any) -> None:
    """Make weights in float32 their own masters, in a DeepSpeed optimizer of ZeRO 1 or 2 without offload.

    DeepSpeed copies a rank's part of the weights to masters in fp32, updates these, and copies them back. In float32
    both have the same numbers all the time, so here they have the same memory, and the copy back does nothing. Muon's
    masters stay copies: DeepSpeed writes its checkpoints, in which a part would bring all of its storage along.
    """
    from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    if not isinstance(optimizer, DeepSpeedZeroOptimizer) or optimizer.cpu_offload:
        return
    if isinstance(optimizer.optimizer, MuonWithAuxAdam):
        return
    for number, master in enumerate(optimizer.single_partition_of_fp32_groups):
        rank = torch.distributed.get_rank(group=optimizer.real_dp_process_group[number])
        own = optimizer.parallel_partitioned_bit16_groups[number][rank]
        if own.dtype == master.dtype:
            master.data = own.detach()
    optimizer._link_all_hp_params()  # parameters refer to their masters' elements


def allocate_moments(optimizer: Any) -> None:
    """Make AdamW's moments before the first step, for weights on a CPU in a DeepSpeed optimizer of ZeRO 1 or 2.

    AdamW would make them after the first backward pass, in the heap's room for activations. The next pass then needs
    more of the heap, which a process that keeps its memory never gives back.
    """
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    if not isinstance(optimizer, DeepSpeedZeroOptimizer) or type(optimizer.optimizer) is not torch.optim.AdamW:
        return
    for master in optimizer.single_partition_of_fp32_groups:
        if master.device.type == "cpu" and not optimizer.cpu_offload:
            moments = {name: torch.zeros_like(master).detach() for name in ("exp_avg", "exp_avg_sq")}
            optimizer.optimizer.state[master] = {"step": torch.zeros(()), **moments}


def sum_at_once(optimizer: Any) -> None:
    """Make a DeepSpeed optimizer of ZeRO 2 with one rank sum gradients without its buckets.

    A single rank runs at stage 2 unless its settings ask for a lower stage, or offload parameters. Optimizers of other
    kinds are not changed: those of stages 0, 1 and 3, those with `overlap_comm` or with states in host memory, and
    Muon, which needs DeepSpeed's own sums.
    """
    from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    if not isinstance(optimizer, DeepSpeedZeroOptimizer) or optimizer.cpu_offload:
        return
    if isinstance(optimizer.optimizer, MuonWithAuxAdam) or optimizer.overlap_comm or not optimizer.partition_gradients:
        return
    sums = _GradientSums(optimizer)
    optimizer.process_gradients = sums.add_gradient
    optimizer._use_compact_grad_partition_buffer = lambda group: True
    optimizer._build_compact_grad_partition_buffer = sums.begin_sums
    optimizer.reduce_ipg_grads = lambda comm_dtype=None: None  # nothing is ever in a bucket
    optimizer.independent_gradient_partition_epilogue = sums.wrap_epilogue(
        optimizer.independent_gradient_partition_epilogue
    )
    if optimizer.compute_grad_norm:
        optimizer.scaled_global_norm = sums.compute_norm
        optimizer.check_overflow = lambda partition_gradients=True: None


NORM_CHUNK = 1 << 18
"""Elements of a gradient that are squared in fp64 at a time: 2 MiB, which fits into a cache."""


class _GradientSums:
    """The gradient sums of one optimizer step, one flat fp32 tensor for each parameter group."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._missing: dict[int, dict[int, Tensor]] = {}
        """Group -> id of a parameter without a gradient so far -> its part of the sums, not yet written."""
        self._parts: dict[int, Tensor] = {}
        """id of a parameter -> its part of the sums."""
        self._kept: dict[int, Tensor] = {}
        """Group -> memory of its sums, kept on a CPU: new pages would take as long as writing the sums into them. It is
        taken before the first pass, as in `allocate_moments`."""
        for group, master in enumerate(optimizer.single_partition_of_fp32_groups):
            if master.device.type == "cpu":
                self._kept[group] = torch.empty(int(optimizer.partition_size[group]), dtype=torch.float32)

    def begin_sums(self, group: int) -> Any:
        """New sums for a group, which DeepSpeed keeps until its step."""
        from deepspeed.runtime.zero.stage_1_and_2 import GradPartitionBufferGroup

        optimizer = self._optimizer
        parameters: Sequence[Tensor] = optimizer.params_in_partition[group]
        offsets = optimizer.grad_partition_insertion_offset[group][0]
        flat = self._kept.pop(group, None)
        if flat is None:
            flat = torch.empty(int(optimizer.partition_size[group]), dtype=torch.float32, device=parameters[0].device)
        if flat.device.type == "cpu":
            self._kept[group] = flat  # a GPU's memory is freed between steps, for processes that time-share the GPU
        parts, end = [], 0
        for parameter in parameters:
            start = int(offsets[optimizer.get_param_id(parameter)])
            flat[end:start].zero_()  # the gap by which DeepSpeed aligns parameters
            end = start + parameter.numel()
            parts.append(flat[start:end].view(parameter.shape))
        flat[end:].zero_()
        self._missing[group] = {id(parameter): part for parameter, part in zip(parameters, parts, strict=True)}
        self._parts |= self._missing[group]
        return GradPartitionBufferGroup(parts, flat)

    def add_gradient(self, parameter: Tensor, group: int) -> None:
        """Take the gradient that a backward pass has just made."""
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            return
        self._optimizer._get_compact_grad_partition_buffer(group)
        missing = self._missing[group].pop(id(parameter), None)
        _take_gradient(gradient, self._parts[id(parameter)], first=missing is not None)

    def wrap_epilogue(self, epilogue: Callable[[], None]) -> Callable[[], None]:
        """DeepSpeed's end of a backward pass; after a step's last pass, it also sets sums without any gradient to 0."""

        def end_backward() -> None:
            epilogue()  # starts the sums of groups in which no parameter had a gradient
            if not self._optimizer.is_gradient_accumulation_boundary():
                return
            for missing in self._missing.values():
                for part in missing.values():
                    part.zero_()
                missing.clear()
            self._parts.clear()

        return end_backward

    def compute_norm(self, norm_type: int = 2) -> Tensor:
        """The L2 norm of all sums; infinite if one of them is not finite."""
        groups = self._optimizer.averaged_gradients.values()
        total = torch.stack([sum_squares(group.flat_partition) for group in groups]).sum()
        return total.where(total.isfinite(), torch.inf).sqrt().float()


def _take_gradient(gradient: Tensor, part: Tensor, *, first: bool) -> None:
    if first:
        part.copy_(gradient)
    else:
        part.add_(gradient)


def sum_squares(flat: Tensor) -> Tensor:
    """The sum of squares, in fp64."""
    if flat.device.type != "cpu":
        norm: Tensor = torch.linalg.vector_norm(flat, dtype=torch.float64)
        return norm.square()
    wide, total = torch.empty(min(NORM_CHUNK, len(flat)), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for chunk in torch.split(flat, NORM_CHUNK):
        part = wide[: len(chunk)].copy_(chunk)
        total += torch.dot(part, part)
    return total


@contextmanager
def divide_gradient(engine: Any, number: float) -> Iterator[None]:
    """Within this context, a DeepSpeed engine's next step divides its accumulated gradient by `number`."""
    optimizer = engine.optimizer
    if number == 1.0:
        yield
    elif hasattr(type(optimizer), "loss_scale"):
        before = optimizer.loss_scale
        optimizer.loss_scale = before * number
        try:
            yield
        finally:
            optimizer.loss_scale = before
    else:
        # In place: the fp32 sums of BF16_Optimizer, or the gradients of the parameters.
        sums = getattr(optimizer, "fp32_groups_gradients_flat", None)
        gradients = [p.grad for p in engine.module.parameters() if p.grad is not None] if sums is None else sums
        with torch.no_grad():
            for gradient in gradients:
                gradient.div_(number)
        yield
