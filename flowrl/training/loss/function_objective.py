"""An objective made of one plain function, for losses that need nothing else.

The function is called with the `LossInputs` of a micro-batch and returns its loss, or (loss, stats):

    def reinforce(inputs: LossInputs) -> Tensor:
        gain_BT = inputs.columns["advantages"] * inputs.logprobs_BT
        return -gain_BT[inputs.mask_BT].sum() / inputs.totals.num_tokens

    Trainer(policy, objective=FunctionObjective(reinforce, columns=("advantages",)))
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, get_args

import numpy as np

from flowrl.errors import FlowrlError
from flowrl.messages import Column, Trainable
from flowrl.training.loss.objective import COLUMNS, LossFunction, LossInputs, MeanOver, Objective, SampleColumns

if TYPE_CHECKING:
    from torch import Tensor


class FunctionObjective(Objective):
    """`function` as an objective, for a language model.

    `columns` are what the function reads of the samples: names of fields, and the declarations (`Column`) of what nodes
    add. `stats` names the stats that it returns. `offline` says that the samples are data, not rollouts.
    `entropy_gradient` says that gradients flow through `entropies_BT`.
    `mean_over` says that the whole loss is a sum divided by this number of `inputs.totals`, see `Objective.mean_over`.
    `flowrl check` runs the function once on made-up data, see `function_trial`; this loads torch.
    """

    stats: tuple[str, ...] = ()
    offline: bool = False
    needs_entropy_gradient: bool = False
    needs_reference: bool = False
    needed_columns: tuple[Column, ...] = ()
    mean_over: MeanOver | None = None

    def __init__(
        self,
        function: LossFunction,
        *,
        columns: Sequence[str | Column] = (),
        stats: Sequence[str] = (),
        offline: bool = False,
        entropy_gradient: bool = False,
        mean_over: MeanOver | None = None,
    ) -> None:
        self._function = function
        self._columns = (columns,) if isinstance(columns, str | Column) else tuple(columns)
        self._names = tuple(one if isinstance(one, str) else one.name for one in self._columns)
        self.name: str = getattr(function, "__name__", type(function).__name__)
        """For messages."""
        self.stats = (stats,) if isinstance(stats, str) else tuple(stats)
        self.offline = offline
        self.needs_entropy_gradient = entropy_gradient
        self.needs_reference = "ref_logprobs" in self._names
        self.needed_columns = tuple(one for one in self._columns if isinstance(one, Column))
        self.mean_over = mean_over

    @property
    def correction_name(self) -> str | None:
        return None if self.offline or "behavior_logprobs" in self._names else ""

    def columns(self, sample: Trainable) -> SampleColumns:
        num_tokens = len(sample.token_ids)
        found = {name: sample.column(name) for name in self._names}
        for column in self.needed_columns:
            values = found[column.name]
            if values is None and not sample.sample_id:  # the padding of an empty micro-batch
                found[column.name] = column.make_zeros(num_tokens)
            elif values is not None and column.per == "sample":
                found[column.name] = np.repeat(values, num_tokens, axis=0)
        if missing := [name for name, values in found.items() if values is None or len(values) != num_tokens]:
            raise FlowrlError(
                f"sample {sample.sample_id!r} has no {', '.join(missing)}, which the loss {self.name} reads: "
                "connect the node that computes this, or leave it out of columns="
            )
        return found

    def loss(self, inputs: LossInputs) -> tuple[Tensor, Mapping[str, Tensor]]:
        result = self._function(inputs)
        return result if isinstance(result, tuple) else (result, {})

    def problems(self) -> list[str]:
        from flowrl.training.loss.function_trial import trial_problem

        problem: str | None = None
        if self.mean_over not in (None, *get_args(MeanOver)):
            problem = f"has mean_over={self.mean_over!r}; it takes {', '.join(get_args(MeanOver))}, or None"
        elif not callable(self._function):
            problem = "is not a function; pass one that takes the LossInputs of a micro-batch"
        elif unknown := [name for name in self._columns if isinstance(name, str) and name not in COLUMNS]:
            problem = (
                f"reads the columns {', '.join(unknown)}; columns= takes {', '.join(COLUMNS)}, and the Column that "
                "declares what a node adds"
            )
        elif not self._takes_inputs():
            problem = (
                f"takes {inspect.signature(self._function)}; it has to take one argument, the LossInputs of a "
                "micro-batch, and to return its loss as a tensor, or (loss, stats)"
            )
        else:
            problem = trial_problem(self._function, self._names, self)
        return [] if problem is None else [f"the loss {self.name} {problem}"]

    def _takes_inputs(self) -> bool:
        """Whether the function can be called with one argument, as far as its signature says."""
        try:
            inspect.signature(self._function).bind(None)
        except TypeError:
            return False
        except ValueError:  # some functions written in C have no signature
            return True
        return True
