"""Half-done episodes at a checkpoint: what a resumed run makes of them. In one process, in virtual time."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from flowrl.episode import EpisodeRecord
from flowrl.messages import Prompt
from flowrl.runtime.checkpoints.checkpoint import read_state
from flowrl.testing import GraphRun, VirtualClock, run_graph
from tests.half_done import SEEN, new_life

FILE = Path(__file__).parent / "graphs_episodes" / "half_done.py"
STEPS = 4
SAMPLES = STEPS * 56


def play(run_dir: Path, *, resume: bool = False, **config: Any) -> GraphRun:
    new_life()
    options: dict[str, Any] = {"steps": STEPS, "resume": resume, "save_every": 1, "keep": 0}
    ran = run_graph(FILE, run_dir, config, clock=VirtualClock(), timeout_s=36_000, **options)
    report = ran.audit()
    assert report.ok, str(report)
    assert ran.states() == {"trained": SAMPLES}, "none lost, none twice"
    return ran


def killed(run_dir: Path, *, after: int) -> dict[str, EpisodeRecord]:
    """Forget all checkpoints after that step, as if the run had been killed then: its records, by sample."""
    checkpoints = run_dir / "checkpoints"
    for later in checkpoints.iterdir():
        if later.name > f"step_{after:06d}":
            shutil.rmtree(later)
    bodies = [envelope.body for *_, envelope in read_state(checkpoints / f"step_{after:06d}")["messages"]]
    prompts = [body for body in bodies if isinstance(body, Prompt)]
    return {body.sample_id: body.record for body in prompts if isinstance(body.record, EpisodeRecord)}


def fates(ran: GraphRun) -> dict[str, list[tuple[int, str | None]]]:
    """Request -> tokens and reason, of each time that it was booked."""
    found: dict[str, list[tuple[int, str | None]]] = {}
    for request_id, *fate in ran.rows("SELECT request_id, tokens, abandoned FROM requests ORDER BY number"):
        found.setdefault(request_id, []).append((fate[0], fate[1]))
    return found


def require_kept(ran: GraphRun, records: dict[str, EpisodeRecord]) -> int:
    """Every token in the records was trained and not sampled again. Returns their number."""
    booked, tokens = fates(ran), 0
    for record in records.values():
        for reply in record.replies:
            assert booked[reply.request_id] == [(reply.token_ids.size, None)]
            assert reply.request_id not in SEEN.sampled
            tokens += reply.token_ids.size
        if size := record.prefix_token_ids.size:
            ((whole, abandoned),) = booked[record.asked]
            assert abandoned is None and SEEN.prefixed[record.asked] == size
            assert SEEN.sampled[record.asked] == whole - size
            tokens += size
    return tokens


@pytest.mark.parametrize("kind", ["Paced", "Saving"])
@pytest.mark.parametrize("step_s", [0.02, 0.5])
def test_half_done_episodes_go_on_where_they_were(tmp_path: Path, kind: str, step_s: float) -> None:
    play(tmp_path / "run", kind=kind, step_s=step_s)
    records = killed(tmp_path / "run", after=2)
    assert len(records) >= 48 and max(len(record.replies) for record in records.values()) > 1
    ran = play(tmp_path / "run", kind=kind, step_s=step_s, resume=True)
    assert require_kept(ran, records) > 200
    assert ran.rows("SELECT SUM(redone_tokens) FROM samples") == [(0,)]
    assert (SEEN.restored > 40) == (kind == "Saving")


def test_a_checkpoint_finds_episodes_in_every_state(tmp_path: Path) -> None:
    play(tmp_path / "run", step_s=0.2)
    assert SEEN.ending > 0, "replies that were under way"
    records = list(killed(tmp_path / "run", after=2).values())
    shown = [record for record in records if record.first is not None]
    assert any(record.prefix_token_ids.size for record in shown), "a reply is unfinished"
    assert any(record.asked and not record.prefix_token_ids.size for record in shown) or len(records) > 50
    assert any(len(record.replies) > len(record.steps) for record in shown), "a step is under way"
