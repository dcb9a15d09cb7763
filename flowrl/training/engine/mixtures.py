"""Mixtures of experts under ZeRO-3, whose ranks have to gather the same parameters in the same order.

If the experts of a layer are a list of modules, a rank runs only the experts that its tokens are routed to, so ranks
would wait for each other in different collectives. DeepSpeed gathers all parameters of a leaf module at once, before
its forward, and reduces a zero gradient for those that were not used. Experts that are stored in one tensor, as in
transformers' own classes, are gathered whole anyway.
"""

from __future__ import annotations

from torch import nn


def expert_layers(network: nn.Module) -> list[nn.Module]:
    """The layers of `network` that choose among a list of experts."""
    lists = [
        name
        for name, module in network.named_modules()
        if isinstance(module, nn.ModuleList) and "expert" in name.rpartition(".")[2]
    ]
    return [network.get_submodule(name.rpartition(".")[0]) for name in lists]


def gather_at_once(network: nn.Module) -> None:
    """Make ZeRO-3 treat the `expert_layers` as leaves. Call this before DeepSpeed puts its hooks on the model."""
    from deepspeed.utils import set_z3_leaf_modules

    if kinds := {type(layer) for layer in expert_layers(network)}:
        set_z3_leaf_modules(network, list(kinds))
