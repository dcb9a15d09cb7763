"""What a model does with the logits of its output layer: some families multiply them, some cap them softly.

The model's own code is called, with a stand-in for everything before and inside the output layer. The stand-in gives it
hidden states and logits, and the logits that the model returns show the function. So a family needs no entry in a
table, and a family whose logits are another function is refused. No weights are read: they may be sharded, or on the
meta device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flowrl.errors import ConfigError

SMALL, LARGE = 2.0**-16, 2.0**40
"""A logit that shows only the factor, and one that shows only the cap."""
PLACES = 4


@dataclass(frozen=True)
class LogitScaling:
    """cap · tanh(factor · logit / cap), or factor · logit without a cap."""

    factor: float = 1.0
    cap: float | None = None

    def apply_(self, logits: Tensor) -> Tensor:
        """The model's logits, from those of its output layer; changes `logits`."""
        if self.factor != 1.0:
            logits.mul_(self.factor)
        return logits if self.cap is None else logits.div_(self.cap).tanh_().mul_(self.cap)

    def backward_(self, grad: Tensor, scaled: Tensor) -> Tensor:
        """The gradient of the output layer's logits, from the gradient `grad` of the scaled logits; changes `grad`."""
        if self.cap is not None:
            grad.mul_(1.0 - (scaled / self.cap).square_())
        return grad if self.factor == 1.0 else grad.mul_(self.factor)


UNSCALED = LogitScaling()


def found_scaling(causal_lm: Any) -> LogitScaling:
    """The scaling of a transformers model. Raises ConfigError with the reason if the model cannot be trained."""
    head = causal_lm.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise untrainable(causal_lm, f"its output layer is a {type(head).__name__}, and a linear one is needed")
    vocabulary = int(getattr(head.weight, "ds_shape", head.weight.shape)[0])
    given = 20 * torch.randn(1, PLACES, vocabulary, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    given[..., 0], given[..., 1] = SMALL, LARGE
    asked = _Stand(causal_lm, head)
    returned = asked.logits(given)
    factor = asked.hidden_factor()
    scaling = LogitScaling()
    if returned.shape == given.shape:
        scaling = _fitted(float(returned[0, 0, 0]) / SMALL, float(returned[0, 0, 1]))
    expected = scaling.apply_(given.clone())
    if returned.shape != given.shape or not torch.allclose(returned.double(), expected, rtol=1e-4, atol=1e-5):
        raise untrainable(causal_lm, "it changes its logits by more than a factor and a soft cap")
    if factor != 1.0 and head.bias is not None:
        raise untrainable(causal_lm, "it scales hidden states before an output layer with a bias")
    return LogitScaling(scaling.factor * factor, scaling.cap)


def untrainable(causal_lm: Any, reason: str) -> ConfigError:
    """The message for a model whose logprobs flowrl cannot compute."""
    return ConfigError(
        f"{causal_lm.config.model_type} models ({type(causal_lm).__name__}) cannot be trained: {reason}; choose a "
        "model of another family"
    )


def _fitted(factor: float, limit: float) -> LogitScaling:
    linear = math.isclose(limit, factor * LARGE, rel_tol=1e-4)
    return LogitScaling(_round(factor), None if linear else _round(limit))


def _round(number: float) -> float:
    """`number` without the rounding error of float32, if it is that close to a number of four digits."""
    short = float(f"{number:.4g}")
    return short if math.isclose(number, short, rel_tol=2e-7) else number


class _Stand:
    """Calls a model's own forward with hidden states and logits that are given to it."""

    def __init__(self, causal_lm: Any, head: nn.Linear) -> None:
        self._model = causal_lm
        self._head = head
        width = int(getattr(head.weight, "ds_shape", head.weight.shape)[1])
        self._hidden = torch.randn(1, PLACES, width, generator=torch.Generator().manual_seed(1))
        self._received: list[Tensor] = []

    def logits(self, given: Tensor) -> Tensor:
        """What the model returns if its output layer gives `given`."""
        from transformers.modeling_outputs import BaseModelOutputWithPast

        def body(*args: Any, **kwargs: Any) -> Any:
            return _Lenient(BaseModelOutputWithPast(last_hidden_state=self._hidden))

        def output(hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            self._received.append(hidden)
            return given.clone()

        bodies = {id(one): one for one in (self._model.base_model, *_decoders(self._model))}
        ids = torch.zeros(1, PLACES, dtype=torch.long)
        try:
            with _replaced([(one, body) for one in bodies.values()] + [(self._head, output)]), torch.no_grad():
                returned = self._model(input_ids=ids, use_cache=False).logits
        except Exception as error:  # the boundary to the code of a model, which may raise anything
            first_line = (str(error).strip().splitlines() or [""])[0]
            raise untrainable(
                self._model,
                f"its output layer does not read the last hidden states ({type(error).__name__}: {first_line})",
            ) from None
        tensor: Tensor = returned
        return tensor

    def hidden_factor(self) -> float:
        """The factor by which the model multiplied the hidden states before the output layer."""
        if len(self._received) != 1 or self._received[0].shape != self._hidden.shape:
            raise untrainable(self._model, "its output layer does not read the last hidden states once")
        received = self._received[0].float()
        factor = float(received[0, 0, 0] / self._hidden[0, 0, 0])
        if not torch.allclose(received, factor * self._hidden, rtol=1e-4, atol=1e-5):
            raise untrainable(self._model, "its output layer reads something else than the last hidden states")
        return _round(factor)


class _Lenient:
    """An output that returns None for everything that it does not have, such as the routing of experts."""

    def __init__(self, output: Any) -> None:
        self._output = output

    def __getitem__(self, index: Any) -> Any:
        return self._output[index]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._output, name, None)


def _decoders(causal_lm: Any) -> list[Any]:
    """The body's own decoder, which some models call in place of the body."""
    found = [getattr(causal_lm.base_model, name, None) for name in ("decoder", "transformer")]
    return [one for one in found if isinstance(one, nn.Module)]


@contextmanager
def _replaced(forwards: list[tuple[Any, Callable[..., Any]]]) -> Iterator[None]:
    """Within this context the modules have other forwards."""
    for module, forward in forwards:
        module.__dict__["forward"] = forward
    try:
        yield
    finally:
        for module, _ in forwards:
            module.__dict__.pop("forward", None)
