"""The figures of an evaluation: means over its answers, and how likely some of several answers are right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import comb

from flowrl.runtime.ledger.ledger_client import EvaluationRow


def pass_at_k(num_answers: int, num_correct: int, k: int) -> float:
    """1 − C(n − c, k) / C(n, k): the probability that one of k answers drawn from n is right (arXiv 2107.03374)."""
    return 1.0 - comb(num_answers - num_correct, k) / comb(num_answers, k)


def summary(rows: Sequence[EvaluationRow], num_samples: int, *, tells_right: bool = True) -> dict[str, float]:
    """An evaluation's metrics. If `tells_right`, they include the share of right answers, and with several answers per
    prompt also mean@k and, for each k of `draws`, pass@k."""
    figures = {"exact_match": sum(row.correct for row in rows) / len(rows)} if tells_right else {}
    figures |= {
        "score": sum(row.score for row in rows) / len(rows),
        "num_answers": len(rows),
        "response_tokens_mean": sum(row.response_tokens for row in rows) / len(rows),
    }
    if known := versions_of(rows):
        figures |= {"oldest_version": min(known), "newest_version": max(known)}
    if num_samples < 2 or not tells_right:
        return figures
    figures[f"mean_at_{num_samples}"] = figures["exact_match"]
    answers: dict[str, list[bool]] = {}
    for row in rows:
        answers.setdefault(row.prompt_id, []).append(row.correct)
    for k in draws(num_samples):
        passed = [pass_at_k(len(given), sum(given), k) for given in answers.values() if len(given) >= k]
        if passed:
            figures[f"pass_at_{k}"] = sum(passed) / len(passed)
    return figures


def mean_parts(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each part over the answers that have it, by the part's name in training's metrics."""
    names = dict.fromkeys(name for of in parts for name in of)
    values = {name: [of[name] for of in parts if name in of] for name in names}
    return {f"reward/{name}": sum(found) / len(found) for name, found in values.items()}


def versions_of(rows: Sequence[EvaluationRow]) -> set[int]:
    """The versions of the first and the last token of each answer; an answer without a token has none."""
    ends = {version for row in rows for version in (row.oldest_version, row.newest_version)}
    return {version for version in ends if version is not None}


def draws(num_samples: int) -> list[int]:
    """The values of k for pass@k: 2, 4, 8, … up to the number of answers per prompt, and that number itself."""
    powers = (1 << power for power in range(1, num_samples.bit_length()))
    return sorted({*powers, num_samples} - {1})
