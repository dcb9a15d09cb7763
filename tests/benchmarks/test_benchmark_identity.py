"""What benchmarks/agents/identity.py reads in the episodes that a run kept, and when it is content."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.agents.identity import IdentityRun, Retokenized, counted, missing, replies_of
from flowrl.models.tokens.characters import character_tokenizer
from flowrl.runtime.audit.audit import AuditReport
from flowrl.runtime.audit.audit_rules import Violation
from flowrl.runtime.samples.rollout_files import write_rollouts


class Merging:
    """Writes `ab` as one token, which nobody has to have sampled."""

    def decode(self, ids: list[int], **options: bool) -> str:
        return "".join(("a", "b", "ab", "c")[token] for token in ids)

    def __call__(self, text: str, **options: bool) -> dict[str, list[int]]:
        return {"input_ids": ["abc".index(sign) if sign != "c" else 3 for sign in text.replace("ab", "c")]}


def test_a_reply_of_several_versions_is_one_and_what_was_fed_divides_replies() -> None:
    spans = [{"tokens": n, "version": v} for n, v in ((2, -1), (1, 0), (2, 1), (1, -1), (3, 1))]
    assert replies_of(list(range(9)), spans) == [[2, 3, 4], [6, 7, 8]]


def test_trained_episodes_are_read_from_the_runs_files(tmp_path: Path) -> None:
    def row(name: str, state: str, ids: list[int]) -> dict[str, object]:
        spans = [(1, -1), (2, 0), (1, -1), (len(ids) - 4, 0)]
        told = {"sample_id": name, "phase": "train", "step": 1, "state": state, "spans": spans, "closed_s": 0.0}
        return told | {"token_ids": np.array(ids, np.int32).tobytes()}

    same, other = [0, 1, 0, 1, 1, 0], [0, 0, 1, 1, 1, 0]
    write_rollouts(tmp_path, [row("a", "trained", same), row("b", "trained", other), row("c", "failed", other)], 0)
    assert counted(tmp_path, Merging()) == Retokenized(2, 4, 1, 1)
    assert counted(tmp_path, character_tokenizer()).replies == 4


def test_each_condition_is_missed_alone() -> None:
    found, wanted = Retokenized(10, 30, 6, 4), IdentityRun(episodes=10, least_share=0.4)
    report = AuditReport(figures={"policy spans": 30, "policy spans proven": 30})
    assert list(missing(found, report, wanted)) == []
    for one in (
        (replace(found, episodes=9, episodes_differ=4), report, wanted),
        (replace(found, replies=31), report, wanted),
        (found, AuditReport(figures=report.figures | {"policy spans proven": 29}), wanted),
        (found, replace(report, violations=[Violation("unproven", "a")]), wanted),
        (found, report, replace(wanted, least_share=0.41)),
    ):
        assert len(list(missing(*one))) == 1
