"""What a reward model knows: `python -m benchmarks.training.reward_accuracy MODEL PAIRS --policy DIRECTORY`.

Its accuracy on the held-out pairs (prompts that training never saw, in the task's own split), beside two
baselines that know nothing of right and wrong: the length alone, and the logprobs of the policy that
wrote the answers. A difference of 0 counts as half right. Prints a table and one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from flowrl.models import Chat, Policy, load_tokenizer, resolve
from flowrl.models.scorer import load_scorer
from flowrl.tasks import Row, Task, load_preferences

Differences = Sequence[float]
"""Chosen less rejected, of each pair."""
SEQUENCES_A_PASS = 64


@dataclass(frozen=True)
class Line:
    """One way to choose between the two answers of a pair."""

    name: str
    accuracy: float
    error: float
    """Standard error of the accuracy."""
    pairs: int

    @classmethod
    def of(cls, name: str, differences: Differences) -> Line:
        right = [1.0 if d > 0 else 0.5 if d == 0 else 0.0 for d in differences]
        accuracy = sum(right) / len(right)
        variance = sum((r - accuracy) ** 2 for r in right) / max(1, len(right) - 1)
        return cls(name, accuracy, math.sqrt(variance / len(right)), len(right))


def compare(model: str, pairs: Task, policy: Policy, *, most: int) -> list[Line]:
    """The reward model first, then the baselines; each baseline gets the better of its two directions in training."""
    rows = load_preferences(pairs, "pairs")
    train, held_out = rows.train[:most], rows.held_out[:most]
    scorer = load_scorer(model, system_prompt=pairs.system_prompt)
    lines = [Line.of("reward model", _differences(held_out, lambda asked: scorer.score(asked)))]
    logprobs = PolicyLogprobs(resolve(policy), pairs.system_prompt)
    baselines: dict[str, Callable[[Any], list[float]]] = {
        "length": lambda asked: [float(len(response)) for _, response in asked],
        "policy logprob": logprobs.sums,
        "policy logprob a token": logprobs.means,
    }
    for name, score in baselines.items():
        sign = 1.0 if Line.of(name, _differences(train, score)).accuracy >= 0.5 else -1.0
        lines.append(Line.of(name, [sign * d for d in _differences(held_out, score)]))
    return lines


def _differences(rows: Sequence[Row], score: Callable[[Any], list[float]]) -> list[float]:
    chosen = score([(row.turns, row.columns["chosen"]) for row in rows])
    rejected = score([(row.turns, row.columns["rejected"]) for row in rows])
    return [c - r for c, r in zip(chosen, rejected, strict=True)]


class PolicyLogprobs:
    """log p of answers under a policy, the end token included."""

    def __init__(self, model_dir: str, system_prompt: str) -> None:
        from flowrl.training.model.policy_model import load_policy_model

        self._model = load_policy_model(model_dir).eval()
        self._chat = Chat(load_tokenizer(model_dir), system_prompt)

    def sums(self, asked: Sequence[Any]) -> list[float]:
        return [total for total, _ in self._measured(asked)]

    def means(self, asked: Sequence[Any]) -> list[float]:
        return [total / num for total, num in self._measured(asked)]

    def _measured(self, asked: Sequence[Any]) -> list[tuple[float, int]]:
        """(sum, number of tokens) of each answer."""
        import torch

        from flowrl.training.model.row_layout import lay_out

        found: list[tuple[float, int]] = []
        for start in range(0, len(asked), SEQUENCES_A_PASS):
            rendered = [self._chat.encode_completion(*one) for one in asked[start : start + SEQUENCES_A_PASS]]
            rows = lay_out([ids for ids, _ in rendered], [mask for _, mask in rendered], layout="padded")
            with torch.no_grad():
                totals = rows.spread_values(self._model(rows)[0]).sum(dim=1).tolist()
            found += [(total, int(mask.sum())) for total, (_, mask) in zip(totals, rendered, strict=True)]
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", help="directory of the reward model")
    parser.add_argument("pairs", help="the pairs, as graphs/reward_model.py took them")
    parser.add_argument("--policy", default="tiny", help="whose answers the pairs are")
    parser.add_argument("--task", default="arithmetic", help="what a tiny policy was warm-started on")
    parser.add_argument("--most", type=int, default=2000, help="pairs of each part that are looked at")
    given = parser.parse_args()
    lines = compare(given.model, Task(given.pairs), Policy(given.policy, task=Task(given.task)), most=given.most)
    for line in lines:
        print(f"{line.name:24} {line.accuracy:.3f} ± {line.error:.3f}   of {line.pairs} held-out pairs")
    print(json.dumps([asdict(line) for line in lines]))


if __name__ == "__main__":
    main()
