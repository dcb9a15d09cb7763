"""The optimizer under DeepSpeed: AdamW, Muon or SGD, by parameter groups; rates are set before every step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from flowrl.errors import ConfigError
from flowrl.training.settings import ZeroSettings

ENDS = ("embed", "lm_head", "score")
"""Matrices that AdamW trains under Muon, because they map from or to the vocabulary, or to a score."""


def make_optimizer(model: nn.Module, settings: ZeroSettings) -> torch.optim.Optimizer:
    """The optimizer for the trained parameters of `model`. Their rate is 0 until `rates` are set."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if settings.optimizer != "muon":
        _import_unused_muon()
    if settings.optimizer == "sgd":
        return torch.optim.SGD(trained.values(), lr=0.0)
    if settings.optimizer == "muon":
        return _muon(trained, settings)
    if not settings.weight_decay:
        return _adamw([{"params": list(trained.values()), "weight_decay": 0.0}], settings)
    return _adamw(_by_decay(trained, settings), settings)


def rates(
    groups: Sequence[dict[str, Any]], lr: float, settings: ZeroSettings
) -> Iterator[tuple[dict[str, Any], float]]:
    """Every parameter group with its learning rate."""
    for group in groups:
        yield group, lr * settings.muon_lr_factor if group.get("use_muon") else lr


def _adamw(groups: list[dict[str, Any]], settings: ZeroSettings) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=0.0, betas=settings.betas, eps=settings.eps, fused=True)


def _by_decay(parameters: Mapping[str, nn.Parameter], settings: ZeroSettings) -> list[dict[str, Any]]:
    """A group of matrices with weight decay and a group of all others without; empty groups are left out."""
    matrices = [p for p in parameters.values() if len(_shape(p)) > 1]
    others = [p for p in parameters.values() if len(_shape(p)) <= 1]
    groups = ({"params": matrices, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0})
    return [group for group in groups if group["params"]]


def _muon(parameters: Mapping[str, nn.Parameter], settings: ZeroSettings) -> torch.optim.Optimizer:
    """DeepSpeed's Muon: it gathers and orthogonalizes whole gradients, even if ZeRO shards them flat."""
    torch._dynamo.config.disable = not torch.cuda.is_available()  # compiling for the CPU needs a compiler, and a minute
    from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

    for name, parameter in parameters.items():
        parameter.use_muon = len(_shape(parameter)) == 2 and not any(end in name for end in ENDS)  # type: ignore[attr-defined]
    matrices = [p for p in parameters.values() if p.use_muon]  # type: ignore[attr-defined]
    others = {name: p for name, p in parameters.items() if not p.use_muon}  # type: ignore[attr-defined]
    if not matrices:
        raise ConfigError("muon trains matrices of layers, and this model has none that are trained; choose adamw")
    adam = {"lr": 0.0, "betas": settings.betas, "eps": settings.eps, "use_muon": False}
    muon = {"lr": 0.0, "momentum": settings.momentum, "weight_decay": settings.weight_decay, "use_muon": True}
    groups = [{"params": matrices, **muon}, *({**group, **adam} for group in _by_decay(others, settings))]
    optimizer: torch.optim.Optimizer = MuonWithAuxAdam(groups)
    return optimizer


def _import_unused_muon() -> None:
    """Import DeepSpeed's Muon undecorated. DeepSpeed imports it for every optimizer, and its decorator imports the
    compiler, which takes seconds."""
    compile_, torch.compile = torch.compile, lambda function: function  # type: ignore[assignment]
    try:
        import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401
    finally:
        torch.compile = compile_


def _shape(parameter: nn.Parameter) -> tuple[int, ...]:
    """The parameter's whole shape; under ZeRO-3 its own `shape` is that of an empty tensor."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))
