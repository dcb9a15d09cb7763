"""The run directory: its lock, and what resume asks of it."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from flowrl.commands import quickstart
from flowrl.commands.quickstart import QuickstartOptions
from flowrl.errors import ConfigError, FlowrlError
from flowrl.runtime.audit import audit
from flowrl.runtime.checkpoints import checkpoint, rundir
from flowrl.runtime.checkpoints.rundir import Best, RunDir
from flowrl.runtime.driver.driver import Outcome
from flowrl.runtime.driver.launch import Launch, Result


def finished(path: Path, state: str = "state") -> None:
    """A checkpoint with nothing but a model and a state."""
    path.mkdir(parents=True)
    (path / "model.safetensors").write_text("the weights")
    (path / "state.msgpack").write_text(state)
    checkpoint.write_manifest(path, {}, threading.Event())


def test_a_directory_belongs_to_one_run(tmp_path: Path) -> None:
    first = RunDir(tmp_path / "run")
    first.claim(resume=False)
    with pytest.raises(ConfigError, match="is in use by the run of process"):
        RunDir(tmp_path / "run").claim(resume=False)
    first.release()
    RunDir(tmp_path / "run").claim(resume=False)


def test_runs_that_start_in_one_second_have_a_directory_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(RunDir, "name_fresh", staticmethod(lambda name: Path("runs") / f"{name}-now"))
    found = [RunDir.claimed_fresh("grpo") for _ in range(3)]
    assert [one.path.name for one in found] == ["grpo-now", "grpo-now-2", "grpo-now-3"]
    for one in found:
        one.release()
    assert list((tmp_path / "runs").iterdir()) == [], "nothing was written in them"


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOLCK])
def test_a_file_system_without_locks_is_one_sentence(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*args: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(rundir.fcntl, "flock", failing)
    with pytest.raises(ConfigError, match=f"cannot be locked .{os.strerror(code)}.; name a directory on a file system"):
        RunDir.open_claimed(tmp_path / "run")


@pytest.mark.parametrize(("content", "why"), [("{", "Expecting property name"), ("[]", "a list where")])
def test_a_damaged_description_of_the_run_is_one_sentence(content: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    directory = RunDir(tmp_path)
    for read in (directory.hub_commits, lambda: directory.changed_config({})):
        with pytest.raises(ConfigError, match=rf"^--resume: .*/config.json is damaged \({why}.*\); restore it from a"):
            read()
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"config.json is damaged .it has no config."):
        directory.changed_config({})


def test_a_file_that_cannot_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    """What was left kept the directory, which is removed if the run never started, from being removed."""
    directory = RunDir.open_claimed(tmp_path / "run")
    (tmp_path / "run" / ".config.json.tmp").symlink_to("/dev/full")
    with pytest.raises(FlowrlError, match="No space left on device"):
        directory.write_json("config.json", {"config": {}})
    directory.release()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / ".best.json.tmp").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        Best(3, 0.5, "checkpoints/step_000003").write(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_quickstart_has_a_directory_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two that start in one second: the second was refused, for the first had the directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(RunDir, "name_fresh", staticmethod(lambda name: Path("runs") / f"{name}-now"))
    taken: list[RunDir] = []

    def claimed(launch: Launch) -> Result:
        taken.append(launch._claim_directory())
        return Result(taken[-1].path, Outcome(0, {}, False, 0.0), None)

    monkeypatch.setattr(Launch, "run", claimed)
    monkeypatch.setattr(quickstart, "print_records", lambda run_dir, evaluations, *, control: print(run_dir) or 0)
    assert [quickstart.train_quickstart(QuickstartOptions(steps=3)) for _ in range(2)] == [0, 0]
    assert capsys.readouterr().out.split() == ["runs/quickstart-now", "runs/quickstart-now-2"]
    for one in taken:
        one.release()


@pytest.mark.parametrize("evaluations", [{}, {"before": {"exact_match": 0.5, "num_answers": 4}}])
@pytest.mark.parametrize("lines", ["", '{"step": 1, "time_s": 1.0, "num_samples": 4, "staleness_max": 1}\n'])
def test_a_quickstart_that_was_interrupted_is_reported(
    evaluations: dict[str, dict[str, float]],
    lines: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(audit, "audit", lambda run_dir: SimpleNamespace(ok=True, figures={"bound": 1}))
    (tmp_path / "metrics.jsonl").write_text(lines)
    assert quickstart.print_records(tmp_path, evaluations, control=False) == 0
    told = capsys.readouterr().out
    assert "interrupted before its last evaluation" in told and told.endswith("audit: ok\n")
    assert ("max staleness        1 (bound 1)" in told) == bool(lines)


def test_a_finished_run_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "ledger.sqlite").touch()
    with pytest.raises(ConfigError, match="continue it with --resume"):
        RunDir(tmp_path).claim(resume=False)


def test_resume_needs_a_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no run"):
        RunDir(tmp_path / "nothing").claim(resume=True)


def test_checkpoints_alone_keep_a_fresh_run_out(tmp_path: Path) -> None:
    finished(tmp_path / "checkpoints" / "step_000004")
    with pytest.raises(ConfigError, match="continue it with --resume"):
        RunDir(tmp_path).claim(resume=False)


def test_resume_needs_a_finished_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    directory = RunDir(tmp_path)
    directory.claim(resume=True)
    with pytest.raises(ConfigError, match="no finished checkpoint"):
        directory.newest_checkpoint()


def test_the_newest_whole_checkpoint_is_taken(tmp_path: Path) -> None:
    directory = RunDir(tmp_path)
    directory.claim(resume=False)
    for step in (2, 10, 12, 14):
        finished(directory.checkpoints / f"step_{step:06d}")
    (directory.checkpoints / "step_000012" / "manifest.json").unlink()
    (directory.checkpoints / "step_000014" / "model.safetensors").write_text("cut")
    assert directory.newest_checkpoint() == (10, directory.checkpoints / "step_000010")
    assert directory.damaged == [
        "step_000014: model.safetensors has 3 bytes, but 11 were written",
        "step_000012: it has no manifest.json, so it was never finished",
    ]


def test_no_whole_checkpoint_left(tmp_path: Path) -> None:
    directory = RunDir(tmp_path)
    directory.claim(resume=False)
    for step in (2, 10):
        finished(directory.checkpoints / f"step_{step:06d}")
        (directory.checkpoints / f"step_{step:06d}" / "state.msgpack").unlink()
    with pytest.raises(ConfigError, match=r"(?s)undamaged checkpoint left.*step_000010: state.msgpack is missing.*2"):
        directory.newest_checkpoint()


def test_a_checkpoint_that_stands_aside_is_put_back_before_it_is_looked_for(tmp_path: Path) -> None:
    """A run was killed between the two renames by which a second writing of step 4 takes the place of the first."""
    (tmp_path / "config.json").write_text("{}")
    for name in (".step_000004.old", ".step_000004.tmp"):
        finished(tmp_path / "checkpoints" / name, name)
    directory = RunDir(tmp_path)
    directory.claim(resume=True)
    assert directory.newest_checkpoint() == (4, directory.checkpoints / "step_000004")
    assert [path.name for path in directory.checkpoints.iterdir()] == ["step_000004"]
    assert (directory.checkpoints / "step_000004" / "state.msgpack").read_text() == ".step_000004.old"
    directory.release()


def test_resume_tells_which_options_changed(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"config": {"lr": 0.1, "task": {"name": "arithmetic", "seeds": [1, 2]}}}')
    now = {"lr": 0.1, "task": {"name": "other", "seeds": (1, 2)}, "new": True}
    assert RunDir(tmp_path).changed_config(now) == ["new: True, was None", "task.name: 'other', was 'arithmetic'"]
