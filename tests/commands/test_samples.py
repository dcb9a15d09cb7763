"""Samples that a run keeps: which, how they are joined with their states, files, resumes, and reading them."""

from __future__ import annotations

import asyncio
import json
import resource
import shutil
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flowrl.cli import main
from flowrl.errors import ConfigError
from flowrl.messages import Prompt, Sample, Trainable
from flowrl.runtime.samples import kept_samples, rollout_files
from flowrl.runtime.samples.kept_samples import KeptSamples
from flowrl.runtime.samples.rollout_files import (
    SampleQuery,
    bound_rollouts,
    find_pairs,
    find_rows,
    find_sample,
    rewind_rollouts,
    write_rollouts,
)
from flowrl.runtime.samples.sample_notes import (
    MOST_S,
    PART_OF_TIME,
    SampleChoice,
    SampleNotes,
    SampleRecord,
    SampleShare,
    record_of,
    version_spans,
)
from flowrl.runtime.show import pair_text
from tests.runtime.runs.test_runtime_episodes import play


def sample(number: int = 0, member: int = 0, *, reward: float = 1.0, tokens: int = 3, text: str = "42") -> Trainable:
    ids = np.arange(2 + tokens, dtype=np.int32)
    mask = ids >= 2
    return Trainable(
        sample_id=f"g:{number}:{member}",
        group_id=f"g:{number}",
        prompt_id=f"p{number}",
        epoch=0,
        member=member,
        group_size=2,
        prompt_text="12 + 30 =",
        response_text=text,
        token_ids=ids,
        policy_mask=mask,
        behavior_logprobs=np.zeros(ids.size, np.float32),
        versions=np.where(mask, 4, -1).astype(np.int32),
        prompt_tokens=2,
        truncated=False,
        generator="generator/0",
        reward=reward,
        raw_reward=reward,
        reward_parts={"exact": reward},
        advantages=np.where(mask, 0.5, 0.0).astype(np.float32),
    )


def row(number: int, *, step: int = 1, reward: float | None = 1.0, state: str = "trained", **more: Any) -> SampleRecord:
    found = record_of(sample(number), token_ids=False)
    return found | {"reward": reward, "step": step, "state": state, "reason": None, "closed_s": float(step)} | more


def answer(number: int, step: int, reward: float, text: str) -> SampleRecord:
    place = {"phase": "during", "task": "sums", "response": text, "prompt_id": f"p{number}"}
    return row(number, step=step, reward=reward, state="held_out", **place)


# Which samples


@pytest.mark.parametrize(("text", "share"), [("auto", None), ("all", 1.0), ("0.25", 0.25), ("none", 0.0)])
def test_a_share_is_parsed(text: str, share: float | None) -> None:
    assert SampleShare.parse(text) == SampleShare(share, held_out=True)


@pytest.mark.parametrize("text", ["0", "1.5", "many", "nan", "-0.1", ""])
def test_what_is_no_share_is_told(text: str) -> None:
    with pytest.raises(ConfigError, match="auto, all, none, off, or a share"):
        SampleShare.parse(text)


def test_keeping_takes_the_part_of_the_time_that_it_may_take() -> None:
    now_s = 0.0
    choice = SampleChoice(None, lambda: now_s)
    spent_s = 0.0
    for _ in range(20_000):  # 50 groups a second, each costs 1 ms: all of them would be 5% of the time
        now_s += 0.02
        if choice.keeps_group("g"):
            with choice.count_time():
                now_s += 0.001
            spent_s += 0.001
    assert spent_s / now_s == pytest.approx(PART_OF_TIME, rel=0.02)


def test_what_is_saved_up_is_bounded() -> None:
    now_s = 0.0
    choice = SampleChoice(None, lambda: now_s)
    assert choice.keeps_group("g")
    now_s = 1e6
    assert choice.keeps_group("g")
    with choice.count_time():
        now_s += 2 * MOST_S
    assert not choice.keeps_group("g")


def noted(keep: str, samples: list[Prompt | Sample], **how: Any) -> list[SampleRecord]:
    sent: list[SampleRecord] = []
    SampleNotes(sent.extend, SampleShare.parse(keep), token_ids=False).send_decided(samples, **how)
    return sent


def test_groups_are_kept_whole_and_a_share_chooses_the_same_ones_again() -> None:
    groups = [sample(number, member) for number in range(400) for member in range(2)]
    kept = noted("0.25", [*groups])
    assert 150 < len(kept) < 250 and set(Counter(one["group_id"] for one in kept).values()) == {2}
    assert noted("0.25", [*reversed(groups)]) != [] and {one["sample_id"] for one in kept} == {
        one["sample_id"] for one in noted("0.25", [*reversed(groups)])
    }
    assert len(noted("all", [*groups])) == 800 and not noted("none", [*groups]) and not noted("off", [*groups])


def test_failed_samples_are_kept_whatever_the_share() -> None:
    groups = [sample(number) for number in range(50)]
    assert len(noted("0.01", [*groups], failed=True)) == 50 and not noted("none", [*groups], failed=True)


def test_a_held_out_answer_is_kept_unless_nothing_is() -> None:
    for keep, number in (("none", 1), ("auto", 1), ("off", 0)):
        sent: list[SampleRecord] = []
        notes = SampleNotes(sent.extend, SampleShare.parse(keep), token_ids=False)
        notes.held_out(sample(), phase="before", step=0, task="sums", score=0.5, correct=False)
        assert len(sent) == number
    assert (sent or [row(0)])[0]["prompt"] == "12 + 30 ="


def test_records_are_sent_in_parts_of_a_bounded_size() -> None:
    sent: list[list[SampleRecord]] = []
    notes = SampleNotes(sent.append, SampleShare(1.0), token_ids=False)
    notes.send_decided([sample(number, text="x" * (3 << 20)) for number in range(4)])
    assert [len(part) for part in sent] == [1, 1, 1, 1]


def test_a_record_has_what_became_of_the_tokens() -> None:
    record = record_of(sample(), token_ids=True)
    assert record["spans"] == [(2, -1), (3, 4)] and record["advantage"] == pytest.approx(0.5)
    assert record["parts"] == {"exact": 1.0}
    assert np.frombuffer(record["token_ids"], np.int32).tolist() == [0, 1, 2, 3, 4]
    assert version_spans(np.zeros(0, np.bool_), np.zeros(0, np.int32)) == []


def test_keeping_takes_its_part_of_the_time_and_no_more() -> None:
    now_s, spent_s, kept = 0.0, 0.0, 0
    choice = SampleChoice(None, clock=lambda: now_s)
    for _ in range(10_000):
        now_s += 0.003
        if choice.keeps_group("group"):
            with choice.count_time():
                now_s += 0.0005
            spent_s, kept = spent_s + 0.0005, kept + 1
    assert kept > 100 and spent_s / now_s == pytest.approx(PART_OF_TIME, rel=0.05)


# Joined with their states


@dataclass
class Books:
    """The samples of a run, those of training by their number, and which of them are in flight."""

    open: set[str] = field(default_factory=set)

    def is_open(self, sample_id: str) -> bool:
        return sample_id in self.open

    def was_admitted(self, sample_id: str) -> bool:
        return sample_id.startswith("g:")


def keeper(
    run_dir: Path, told: list[str] | None = None, open_: set[str] | None = None, in_flight: int = 0
) -> KeptSamples:
    books = Books(set() if open_ is None else open_)
    return KeptSamples(
        run_dir,
        is_open=books.is_open,
        was_admitted=books.was_admitted,
        in_flight=in_flight,
        warn=[].append if told is None else told.append,
    )


def kept(run_dir: Path) -> list[dict[str, Any]]:
    import pyarrow.parquet as pq

    files = rollout_files.rollout_files(run_dir)
    return [one for file in files for one in pq.read_table(file.path, partitioning=None).to_pylist()]


@pytest.mark.parametrize("state_first", [True, False])
def test_record_and_state_may_come_in_either_order_and_a_second_record_is_dropped(
    tmp_path: Path, state_first: bool
) -> None:
    open_ = {"g:0:0"}
    keeping = keeper(tmp_path, open_=open_)
    record = record_of(sample(), token_ids=False)

    def close() -> None:
        open_.clear()
        keeping.note_closed("g:0:0", "trained", None, 7)

    for step in (
        (close, lambda: keeping.add_records([record]))
        if state_first
        else (lambda: keeping.add_records([record]), close)
    ):
        step()
    keeping.add_records([record])
    keeping.close()
    (found,) = kept(tmp_path)
    assert (found["state"], found["step"], found["response"], found["token_ids"]) == ("trained", 7, "42", None)


def test_a_full_disk_stops_the_keeping_and_is_told_once(tmp_path: Path) -> None:
    told: list[str] = []
    keeping = keeper(tmp_path, told)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))

    async def write() -> None:
        for number in range(3):
            keeping.add_records([answer(number, 1, 1.0, "x")])
            await keeping.flush_rows()

    try:
        asyncio.run(write())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(told) == 1 and "cannot be written" in told[0] and "the run continues" in told[0]
    assert not list((tmp_path / "rollouts").iterdir())


def test_rows_are_dropped_while_a_slow_disk_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_samples, "MOST_WAITING_BYTES", 1000)
    told: list[str] = []
    keeping = keeper(tmp_path, told)
    keeping.add_records([answer(number, 1, 1.0, "x" * 400) for number in range(5)])
    keeping.close()
    assert len(kept(tmp_path)) == 2
    assert (
        "faster than they can be written" in told[0] and told[1].startswith("3 samples are not in ") and len(told) == 2
    )


def closed_before_their_records(keeping: KeptSamples, number: int) -> None:
    """A step of so many samples is booked, and then their records come, and those of a second trainer."""
    records = [record_of(sample(at), token_ids=False) for at in range(number)]
    for record in records:
        keeping.note_closed(record["sample_id"], "trained", None, 1)
    keeping.add_records(records)
    keeping.add_records(records)
    keeping.close()


def test_a_step_of_as_many_samples_as_can_be_in_flight_is_kept_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_samples, "LATE", 8)
    told: list[str] = []
    closed_before_their_records(keeper(tmp_path, told, in_flight=50), 100)
    assert len({one["sample_id"] for one in kept(tmp_path)}) == len(kept(tmp_path)) == 100 and not told


def test_records_whose_state_is_forgotten_are_counted_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_samples, "LATE", 8)
    told: list[str] = []
    keeping = keeper(tmp_path, told)
    keeping.add_records(
        [record_of(sample(1), token_ids=False) | {"sample_id": "an answer of an evaluation that failed"}]
    )
    for number in range(20):
        keeping.note_closed(f"g{number}:0", "trained", None, 1)
    keeping.add_records([record_of(sample(), token_ids=False) | {"sample_id": f"g:{number}:0"} for number in range(3)])
    keeping.close()
    assert "so late" in told[0] and told[1].startswith("3 samples are not in ") and len(told) == 2


def test_records_that_wait_for_their_states_are_bounded_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_samples, "MOST_OPEN", 3)
    told: list[str] = []
    records = [record_of(sample(at), token_ids=False) for at in range(5)]
    open_ = {record["sample_id"] for record in records}
    keeping = keeper(tmp_path, told, open_)
    keeping.add_records(records)
    open_.clear()
    for record in records:
        keeping.note_closed(record["sample_id"], "trained", None, 1)
    keeping.close()
    assert len(kept(tmp_path)) == 3
    assert "more than 3 records wait" in told[0] and told[1].startswith("2 samples are not in ")


# Files


def test_the_oldest_files_of_training_make_room(tmp_path: Path) -> None:
    number = 1
    for step in range(1, 6):
        number = write_rollouts(tmp_path, [row(step, step=step), answer(step, step, 1.0, "x")], number)
    size = max(path.stat().st_size for path in (tmp_path / "rollouts").glob("train*"))
    assert bound_rollouts(tmp_path, 2 * size)
    assert [one["step"] for one in kept(tmp_path) if one["state"] == "trained"] == [4, 5]
    assert len([one for one in kept(tmp_path) if one["state"] == "held_out"]) == 5
    assert not bound_rollouts(tmp_path, 2 * size)


def test_a_resume_forgets_what_it_undoes(tmp_path: Path) -> None:
    write_rollouts(tmp_path, [row(1, step=1), row(2, step=2)], 1)
    write_rollouts(tmp_path, [row(3, step=3)], 2)
    rewind_rollouts(tmp_path, 1.5)
    assert [one["step"] for one in kept(tmp_path)] == [1] and len(list((tmp_path / "rollouts").iterdir())) == 1


def test_a_run_keeps_every_sample_once_over_a_resume(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    config = {"fails": 0.3, "evaluate": 4}
    first = play(run_dir, keep_samples="all", keep_token_ids=True, **config).raise_for_error()
    booked = dict(first.rows("SELECT sample_id, state FROM samples WHERE state IN ('trained', 'failed')"))
    found = [one for one in kept(run_dir) if one["state"] in ("trained", "failed")]
    assert {one["sample_id"]: one["state"] for one in found} == booked and len(found) == len(booked)
    assert (
        len([one for one in kept(run_dir) if one["state"] == "held_out"])
        == first.rows("SELECT COUNT(*) FROM evaluations")[0][0]
    )
    trained = [one for one in found if one["state"] == "trained"]
    steps = dict(first.rows("SELECT sample_id, step FROM samples WHERE state = 'trained'"))
    assert {one["sample_id"]: one["step"] for one in trained} == steps and all(one["token_ids"] for one in trained)
    for later in sorted((run_dir / "checkpoints").iterdir())[1:]:
        shutil.rmtree(later)
    again = play(run_dir, resume=True, keep_samples="all", **config).raise_for_error()
    booked = dict(again.rows("SELECT sample_id, state FROM samples WHERE state IN ('trained', 'failed')"))
    counted = Counter(one["sample_id"] for one in kept(run_dir) if one["state"] in ("trained", "failed"))
    assert counted == Counter(booked.keys())


def test_a_run_that_keeps_nothing_has_no_folder(tmp_path: Path) -> None:
    play(tmp_path / "run", steps=2, evaluate=4, keep_samples="off").raise_for_error()
    assert not (tmp_path / "run" / "rollouts").exists()


# Reading


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    rows = [row(10 * step + n, step=step, reward=float((7 * n + step) % 10)) for step in (1, 2, 3) for n in range(10)]
    write_rollouts(tmp_path, rows[:10], 1)
    write_rollouts(tmp_path, [*rows[10:], row(99, step=3, reward=None, state="failed", reason="reward_raised")], 2)
    write_rollouts(tmp_path, [answer(0, 0, 0.0, "no"), answer(1, 0, 1.0, "yes")], 3)
    write_rollouts(tmp_path, [answer(0, 3, 1.0, "yes"), answer(1, 3, 1.0, "yes")], 4)
    return tmp_path


def test_rows_are_found_by_step_reward_and_state(run_dir: Path) -> None:
    assert {one["step"] for one in find_rows(run_dir, SampleQuery(limit=100))} == {3}
    assert [one["step"] for one in find_rows(run_dir, SampleQuery(1, limit=3))] == [1, 1, 1]
    assert [one["reward"] for one in find_rows(run_dir, SampleQuery(order="best", limit=4))] == [9.0, 9.0, 9.0, 8.0]
    assert [one["reward"] for one in find_rows(run_dir, SampleQuery(2, order="worst", limit=2))] == [0.0, 1.0]
    (failed,) = find_rows(run_dir, SampleQuery(order="failed"))
    assert (failed["reason"], failed["reward"], failed["parts"]) == ("reward_raised", None, {"exact": 1.0})
    assert [one["response"] for one in find_rows(run_dir, SampleQuery(0, held_out=True))] == ["no", "yes"]
    found = find_sample(run_dir, "g:15:0")
    assert found is not None and found["step"] == 1 and find_sample(run_dir, "g:1") is None


def test_failed_samples_are_shown_newest_first_within_a_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    failed = [row(step, step=step, reward=None, state="failed", reason="reward_raised") for step in range(1, 10)]
    write_rollouts(tmp_path, failed[:6], 1)
    write_rollouts(tmp_path, failed[6:], 2)
    assert [one["step"] for one in find_rows(tmp_path, SampleQuery(order="failed", limit=5))] == [9, 8, 7, 6, 5]


def test_long_answers_are_compared_line_by_line_within_seconds() -> None:
    """`difflib.ndiff` takes more than a minute for a pair of a thousand lines."""
    before: Any = row(1, step=1, response="\n".join(f"this is line {n} of the first answer" for n in range(3000)))
    after = {**before, "response": before["response"].replace("line 7 ", "row 7 ") + "\nend"}
    other = {**before, "response": "\n".join(f"another text, its part {n}" for n in range(3000))}
    began_s = time.monotonic()
    changed = [text.plain for text in pair_text(before, after) if text.plain[:2] in ("- ", "+ ")]
    assert changed == ["- this is line 7 of the first answer", "+ this is row 7 of the first answer", "+ end"]
    assert sum(text.plain.startswith("- ") for text in pair_text(before, other)) == 3000
    assert time.monotonic() - began_s < 20


def test_answers_at_two_steps_are_compared_the_largest_change_first(run_dir: Path) -> None:
    assert [(a["response"], b["response"]) for a, b in find_pairs(run_dir, 3, 0, limit=2)] == [
        ("no", "yes"),
        ("yes", "yes"),
    ]
    with pytest.raises(ConfigError, match=r"no answers to the same prompts.*of the steps 0, 3"):
        find_pairs(run_dir, 2, 0, limit=2)


def test_the_command_prints_samples_and_differences(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["samples", str(run_dir), "--failed", "--plain"]) == 0
    assert "g:99:0  step 3  failed: reward_raised" in capsys.readouterr().out
    assert main(["samples", str(run_dir), "--diff", "0", "--limit", "1", "--plain"]) == 0
    out = capsys.readouterr().out
    assert "step 0: 0  ->  step 3: 1" in out and "- no" in out and "+ yes" in out
    assert main(["samples", str(run_dir), "--best", "--limit", "2", "--json"]) == 0
    assert [json.loads(line)["reward"] for line in capsys.readouterr().out.splitlines()] == [9.0, 9.0]


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["--step", "9"], "has no sample of step 9; it has samples of steps 1 to 3"),
        (["--best", "--worst"], "--best and --worst do not go together"),
        (["--limit", "0"], "--limit is 0"),
        (["--stpe", "3"], "did you mean --step"),
    ],
)
def test_mistakes_are_one_sentence(
    run_dir: Path, args: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["samples", str(run_dir), *args]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("options", [[], ["--best"], ["--failed"], ["--diff", "0"]])
def test_a_damaged_file_is_named_and_a_resume_puts_it_aside(
    run_dir: Path, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for path in (run_dir / "rollouts").iterdir():
        path.write_bytes(path.read_bytes()[:-20])
    assert main(["samples", str(run_dir), *options]) == 2
    told = capsys.readouterr().err
    assert "cannot be read" in told and "rollouts/" in told and len(told.splitlines()) == 1
    rewind_rollouts(run_dir, 1e9)
    assert rollout_files.rollout_files(run_dir) == [] and len(list((run_dir / "rollouts").glob("*.damaged"))) == 4


@pytest.mark.parametrize("asked", [["--best"], ["--step", "2"], ["--failed"], ["--diff", "1"]])
def test_the_command_does_without_pandas(asked: list[str], run_dir: Path) -> None:
    """pyarrow imports it where it may get columns of it, which takes a third of the command's time."""
    command = ["samples", str(run_dir), *asked]
    code = f"import sys; from flowrl.cli import main; main({command!r}); assert 'pandas' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_a_directory_without_samples_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["samples", str(tmp_path)]) == 2
    assert "is no run directory" in capsys.readouterr().err
    (tmp_path / "config.json").write_text("{}")
    assert main(["samples", str(tmp_path)]) == 2
    assert "has no samples" in capsys.readouterr().err


def opened(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps of the files whose columns are read from now on."""
    from flowrl.runtime.samples import rollout_files

    read: list[int] = []
    places = rollout_files._find_places

    def noted(file: Any, query: SampleQuery) -> Any:
        read.append(file.last)
        return places(file, query)

    monkeypatch.setattr(rollout_files, "_find_places", noted)
    return read


def test_few_files_are_opened_to_find_the_best_of_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(1, 31):
        write_rollouts(tmp_path, [row(n, step=number, reward=number + n / 10) for n in range(5)], number)
    read = opened(monkeypatch)
    assert [one["step"] for one in find_rows(tmp_path, SampleQuery(order="best", limit=5))] == [30] * 5
    assert len(read) <= 2


def test_of_equal_rewards_the_newer_come_first_though_an_older_file_has_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rollouts(tmp_path, [row(n, step=1, reward=1.0 + (n == 3)) for n in range(5)], 1)
    for number in range(2, 11):
        write_rollouts(tmp_path, [row(n, step=number, reward=float(n)) for n in range(2)], number)
    read = opened(monkeypatch)
    assert [one["step"] for one in find_rows(tmp_path, SampleQuery(order="best", limit=3))] == [1, 10, 9]
    assert read == [1, 10, 9]


def test_a_file_without_any_reward_is_not_opened_for_the_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_rollouts(tmp_path, [row(0, step=1, reward=1.0)], 1)
    write_rollouts(tmp_path, [row(n, step=2, reward=None) for n in range(2)], 2)
    read = opened(monkeypatch)
    assert [one["step"] for one in find_rows(tmp_path, SampleQuery(order="best", limit=3))] == [1]
    assert read == [1]
