"""Half-done episodes at a checkpoint: what a resumed run makes of them. In one process, in virtual time."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from flowrl.messages import Prompt
from flowrl.messages.episode import Episode, EpisodeRecord
from flowrl.runtime.checkpoints.snapshots import read_state
from flowrl.testing import GraphRun, VirtualClock, run_graph
from tests.runtime.checkpoints.half_done import SEEN, new_life

FILE = Path(__file__).parents[1] / "runs" / "graphs_episodes" / "half_done.py"
STEPS = 3


def play(run_dir: Path, *, steps: int = STEPS, resume: bool = False, slow: float = 1.0, **config: Any) -> GraphRun:
    new_life(slow=slow)
    options: dict[str, Any] = {"steps": steps, "resume": resume, "save_every": 1, "keep": 0}
    ran = run_graph(FILE, run_dir, config, clock=VirtualClock(), timeout_s=36_000, **options)
    report = ran.audit()
    assert report.ok, str(report)
    samples = steps * 4 * config.get("groups_per_step", 14)
    assert ran.states() == {"trained": samples}, "none lost, none twice"
    return ran


def killed(run_dir: Path, *, after: int) -> dict[str, EpisodeRecord]:
    """Forget all checkpoints after that step, as if the run had been killed then: its records, by sample."""
    checkpoints = run_dir / "checkpoints"
    for later in checkpoints.iterdir():
        if later.name > f"step_{after:06d}":
            shutil.rmtree(later)
    return records_of(run_dir, after)


def records_of(run_dir: Path, step: int) -> dict[str, EpisodeRecord]:
    """The records in the checkpoint of that step, by sample; an episode that was sent is done."""
    messages = read_state(run_dir / "checkpoints" / f"step_{step:06d}")["messages"]
    bodies = [envelope.body for *_, envelope in messages]
    sent = {body.sample_id for body in bodies if isinstance(body, Episode)}
    prompts = [body for body in bodies if isinstance(body, Prompt) and body.sample_id not in sent]
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


SLOW = pytest.mark.slow  # `make test` plays them all


@pytest.mark.parametrize(
    ("kind", "step_s"),
    [("Paced", 0.02), pytest.param("Paced", 0.5, marks=SLOW), pytest.param("Saving", 0.2, marks=SLOW)],
)
def test_half_done_episodes_go_on_where_they_were(tmp_path: Path, kind: str, step_s: float) -> None:
    play(tmp_path / "run", kind=kind, step_s=step_s)
    records = killed(tmp_path / "run", after=2)
    assert len(records) >= 48 and max(len(record.replies) for record in records.values()) > 1
    ran = play(tmp_path / "run", kind=kind, step_s=step_s, resume=True)
    assert require_kept(ran, records) > 200
    assert ran.rows("SELECT SUM(redone_tokens) FROM samples") == [(0,)]
    assert (SEEN.restored > 40) == (kind == "Saving")


def test_a_checkpoint_finds_episodes_in_every_state(tmp_path: Path) -> None:
    play(tmp_path / "run", step_s=0.25)
    assert SEEN.ending > 0, "replies that were under way"
    records = list(killed(tmp_path / "run", after=2).values())
    shown = [record for record in records if record.first is not None]
    assert any(record.prefix_token_ids.size for record in shown), "a reply is unfinished"
    assert any(len(record.replies) > len(record.steps) for record in shown), "a step is under way"


def begun_anew(ran: GraphRun, records: dict[str, EpisodeRecord], cause: str) -> set[str]:
    """The samples whose attempt a resume has made void; the other ones have kept what they had."""
    anew = {sample_id for (sample_id,) in ran.rows("SELECT sample_id FROM attempts WHERE cause = ?", cause)}
    abandoned = ran.rows("SELECT SUM(tokens) FROM requests WHERE abandoned = ?", cause)
    assert abandoned == ran.rows("SELECT SUM(redone_tokens) FROM samples") != [(0,)]
    assert ran.rows("SELECT COUNT(*) FROM attempts WHERE cause <> ?", cause) == [(0,)]
    assert ran.rows("SELECT COUNT(*) FROM episodes WHERE attempts = 2") == [(len(anew),)]
    assert require_kept(ran, {name: record for name, record in records.items() if name not in anew}) >= 0
    return anew


@SLOW
def test_an_attempt_whose_replay_differs_is_void_and_begins_anew(tmp_path: Path) -> None:
    play(tmp_path / "run", kind="Drifting", step_s=0.2)
    records = killed(tmp_path / "run", after=2)
    ran = play(tmp_path / "run", kind="Drifting", step_s=0.2, resume=True)
    anew = begun_anew(ran, records, "replay_differs")
    assert anew == {name for name, record in records.items() if len(record.steps) > 1}, "the second step differs"
    (counted,) = {name for line in ran.metrics() for name in line if "replay_differs" in name}
    assert max(line.get(counted, 0) for line in ran.metrics()) == len(anew)


@SLOW
def test_an_environment_that_neither_replays_nor_saves_begins_anew(tmp_path: Path) -> None:
    play(tmp_path / "run", kind="Once", step_s=0.2)
    records = killed(tmp_path / "run", after=2)
    ran = play(tmp_path / "run", kind="Once", step_s=0.2, resume=True)
    assert begun_anew(ran, records, "resumed") == {name for name, record in records.items() if record.first is not None}


@SLOW
@pytest.mark.parametrize("kind", ["Paced", "Saving"])
def test_a_second_resume_goes_on_from_the_middle_of_a_replay(tmp_path: Path, kind: str) -> None:
    config: dict[str, Any] = {"kind": kind, "step_s": 0.5, "groups_per_step": 5, "staleness": 2, "steps": 5}
    play(tmp_path / "run", **config)
    before = killed(tmp_path / "run", after=2)
    assert require_kept(play(tmp_path / "run", resume=True, slow=4.0, **config), before) > 20
    again = killed(tmp_path / "run", after=3)
    both = {name: record for name, record in before.items() if name in again and record.replies}
    held = [again[name].prefix_token_ids for name, record in both.items() if again[name].asked == record.asked != ""]
    assert kind == "Saving" or any(prefix.size for prefix in held), "some are replayed still, and keep their tokens"
    for name, record in both.items():
        assert again[name].request_ids[: len(record.request_ids)] == record.request_ids
    ran = play(tmp_path / "run", resume=True, **config)
    assert require_kept(ran, again) > 20
    assert ran.rows("SELECT SUM(redone_tokens) FROM samples") == [(0,)]


def test_a_pause_waits_for_no_environment(tmp_path: Path) -> None:
    play(tmp_path / "run", step_s=8.0)
    assert len(SEEN.pauses_s) >= 2 and max(SEEN.pauses_s) < 1.0
    records = killed(tmp_path / "run", after=2)
    assert sum(len(record.replies) > len(record.steps) for record in records.values()) > 40


def test_an_engine_that_dies_costs_requests_and_no_episode(tmp_path: Path) -> None:
    """Its replica holds the versions that it leaves out, so tickets return; a checkpoint is taken with it."""
    ran = play(tmp_path / "run", kind="Paced", step_s=0.02, groups_per_step=3, turns=2, generators=2, dies_s=0.35)
    asked = ran.rows("SELECT generator, abandoned, COUNT(*), SUM(tokens) FROM requests GROUP BY 1, 2 ORDER BY 1, 2")
    (_, alive, *_), (_, used, *_), (dead, reason, times, tokens) = asked
    assert (alive, used, dead, reason) == (None, None, "generator/1", "generator_died") and times > 0
    assert ran.rows("SELECT SUM(redone_tokens) FROM samples") == [(tokens,)] and tokens > 0
    again = ran.rows(
        "SELECT COUNT(*) FROM requests JOIN requests r USING (request_id) WHERE requests.abandoned IS NOT NULL"
        " AND r.abandoned IS NULL AND r.generator = 'generator/0'"
    )
    assert again == [(times,)], "asked of the other one under the same id"
    assert sum(line.get("generators_lost", 0) for line in ran.metrics()) == 1
