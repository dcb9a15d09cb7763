"""`flowrl gpu-check`: processes with limits, results that are gone on with, and the stages themselves on a CPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flowrl.cli import main
from flowrl.commands.gpu_check import gpu_check as command
from flowrl.commands.gpu_check.bench import Bench, StageFailed
from flowrl.commands.gpu_check.fp8_stage import METHODS
from flowrl.commands.gpu_check.gpu_check import GpuCheckOptions, examine_machine, gpu_check
from flowrl.commands.gpu_check.stage_list import LONGEST_S, STAGES, CheckStage
from flowrl.errors import ConfigError
from flowrl.machine.orphans import has_ended
from flowrl.nodes.engine_options import CHANNEL, FP8, LEAST_CAPABILITY
from flowrl.runtime.checkpoints.rundir import lock_directory
from tests import warm
from tests.rigs.run_process import ROOT


def stage(name: str, **more: Any) -> CheckStage:
    return CheckStage(name, f"what {name} shows", f"tests.gpu.gpu_check_stages:{name}", **more)


@pytest.fixture(autouse=True)
def from_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # stage processes import the stages of the tests


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One run over stages that end in all ways."""
    out = tmp_path_factory.mktemp("check")
    stages = [
        stage("fine"),
        stage("wrong"),
        stage("broken"),
        stage("killed"),
        stage("endless", limit_s=4.0),
        stage("absent", packages=("no_such_package", "json")),
        stage("large", on_cpu=False),
    ]
    before = os.getcwd()
    os.chdir(ROOT)
    try:
        status = gpu_check(GpuCheckOptions(out=out, device="cpu"), stages)
    finally:
        os.chdir(before)
    results = json.loads((out / "results.json").read_text())["stages"]
    return {"status": status, "out": out, "stages": stages, "results": results}


def test_every_stage_runs_whatever_became_of_the_others(found: dict[str, Any]) -> None:
    outcomes = {name: result["outcome"] for name, result in found["results"].items()}
    assert outcomes == {
        "fine": "ok",
        "wrong": "failed",
        "broken": "failed",
        "killed": "failed",
        "endless": "timed out",
        "absent": "skipped",
        "large": "skipped",
    }
    assert found["status"] == 1


def test_what_went_wrong_is_told(found: dict[str, Any]) -> None:
    told = {name: result["told"] for name, result in found["results"].items()}
    assert told["wrong"] == "one is not two"
    assert "a line before" in told["broken"] and "ValueError: something else" in told["broken"]
    assert told["killed"].startswith("status -9") and "the last words" in told["killed"]
    assert told["endless"].startswith("no result within 4 s") and "waiting" in told["endless"]
    assert told["absent"] == "no_such_package is not installed"
    assert told["large"] == "it needs a GPU"


def test_a_stage_that_is_out_of_time_leaves_no_process_behind(found: dict[str, Any]) -> None:
    child = int((found["out"] / "endless" / "child").read_text())
    status = Path(f"/proc/{child}/status")
    assert not status.exists() or "State:\tZ" in status.read_text()


INTERRUPTED = """
import signal
import sys
from pathlib import Path
from flowrl.commands.gpu_check.gpu_check import GpuCheckOptions, gpu_check
from flowrl.commands.gpu_check.stage_list import CheckStage
STAGE = CheckStage("e", "", "tests.gpu.gpu_check_stages:endless")
signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background of a shell ignore it
gpu_check(GpuCheckOptions(out=Path(sys.argv[1]), device="cpu"), [STAGE])
"""


@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_command_that_is_ended_leaves_no_stage_running(tmp_path: Path, by: signal.Signals) -> None:
    told, stage_told = tmp_path / "e" / "child", tmp_path / "e" / "log.txt"
    with subprocess.Popen([sys.executable, "-c", INTERRUPTED, tmp_path]) as command:
        ends_s = time.monotonic() + 60
        while not (stage_told.is_file() and "waiting" in stage_told.read_text()):
            assert command.poll() is None and time.monotonic() < ends_s
            time.sleep(0.02)  # nothing tells when a stage has written to its log
        child = int(told.read_text())
        pids = [child, int(Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[1])]
        ends = [os.pidfd_open(pid) for pid in pids]
        command.send_signal(by)
        try:
            assert [has_ended(end, 10) for end in ends] == [True, True], "the stage's process, and what it has started"
        finally:
            command.kill()
            for end in ends:
                os.close(end)


def test_figures_of_unfinished_stages_are_kept(found: dict[str, Any]) -> None:
    assert found["results"]["wrong"]["figures"] == {"found": "1"}
    assert found["results"]["endless"]["figures"] == {"half": "done"}


def test_the_table_has_a_row_for_each_stage(found: dict[str, Any]) -> None:
    lines = (found["out"] / "table.md").read_text().splitlines()
    assert lines[0].startswith("no GPU; flowrl-engine ") and lines[2] == "| stage | result | found | seconds |"
    rows = {line.split(" | ")[0].removeprefix("| "): line for line in lines[4:]}
    assert list(rows) == [one.name for one in found["stages"]]
    assert "| ok | answer: 4/2 |" in rows["fine"], "a bar would end the cell"
    assert "| failed | one is not two; found: 1 |" in rows["wrong"]
    assert all(line.count(" | ") == 3 for line in lines[4:])


def test_a_finished_stage_is_not_repeated_unless_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stages = [stage("fine"), stage("absent", packages=("no_such_package",))]

    def runs(**options: Any) -> int:
        assert gpu_check(GpuCheckOptions(out=tmp_path, device="cpu", **options), stages) == 0
        return len((tmp_path / "count").read_text())

    assert [runs(), runs(), runs(again=True), runs(only=("absent",), again=True)] == [1, 1, 2, 2]
    out = capsys.readouterr().out
    assert "fine: ok, found before" in out and "absent: ok" not in out
    known = json.loads((tmp_path / "results.json").read_text())
    known["machine"]["versions"]["torch"] = "1.0"
    (tmp_path / "results.json").write_text(json.dumps(known))
    assert runs() == 3 and "is about another machine or other packages" in capsys.readouterr().out


def test_a_directory_belongs_to_one_gpu_check(tmp_path: Path) -> None:
    """A second one emptied the directories of the first one's stages."""
    options = GpuCheckOptions(out=tmp_path / "new", device="cpu")
    with lock_directory(options.out, option="--out", holder="flowrl gpu-check"):
        in_use = rf"--out .*new is in use by flowrl gpu-check of process {os.getpid()}; wait for it to end, or name"
        with pytest.raises(ConfigError, match=in_use):
            gpu_check(options, [])
    assert gpu_check(options, []) == 0
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file cannot be written: File exists; name another"):
        gpu_check(GpuCheckOptions(out=tmp_path / "file", device="cpu"), [])


def test_results_of_something_else_are_refused(tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text('{"stages": [1]}')
    with pytest.raises(ConfigError, match="is not a file of gpu-check's results; give another directory with --out"):
        gpu_check(GpuCheckOptions(out=tmp_path, device="cpu"), [])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_command_says_so(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["gpu-check", "--out", str(tmp_path / "new")]) == 2
    assert "finds no GPU on this machine" in capsys.readouterr().err and not (tmp_path / "new").exists()
    assert main(["gpu-check", "--device", "cpu", "--only", "trees", "seeds"]) == 2
    assert "has no stage 'seeds'; there are gradients, sequence-parallel" in capsys.readouterr().err


def test_the_list_names_every_stage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gpu-check", "--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [one.name for one in STAGES]


def test_a_machine_is_known_by_its_gpus_and_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    properties = SimpleNamespace(name="H200", total_memory=140 << 30, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(command, "_driver_version", lambda: "580.1")
    machine = examine_machine("auto")
    assert machine.gpus == ("H200 140 GiB",) * 2 and machine.describe_machine.startswith(
        "2 × H200 140 GiB, driver 580.1; flowrl-engine "
    )
    only = command.run_stage(stage("fine", least_gpus=3), machine, Path("unused"))
    assert (only.outcome, only.told) == ("skipped", "it needs 3 GPUs")
    newer = command.run_stage(stage("fine", least_capability=10.0), machine, Path("unused"))
    assert (newer.outcome, newer.told) == ("skipped", "it needs compute capability 10.0, and there is 9.0")


def test_each_rank_gets_a_gpu_of_those_that_are_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench("cuda", 2, Path())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b")
    assert bench.sights(2) == ["GPU-a", "GPU-b"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert bench.sights(2) == ["0", "1"] and Bench("cpu", 0, Path()).sights(2) == ["", ""]
    assert [Bench("cuda", n, Path()).num_ranks for n in (1, 2, 8)] == [1, 2, 2] and Bench(
        "cpu", 0, Path()
    ).num_ranks == 2


def test_stages_keep_to_eight_minutes_and_exist() -> None:
    from importlib import import_module

    assert len({one.name for one in STAGES}) == len(STAGES) and LONGEST_S < 480
    for one in STAGES:
        module, _, name = one.target.partition(":")
        assert callable(getattr(import_module(module), name)) and one.limit_s <= LONGEST_S


def test_the_stage_about_fp8_has_the_methods_and_gpus_of_engines() -> None:
    (found,) = (one for one in STAGES if one.name == "fp8")
    assert found.least_capability == LEAST_CAPABILITY
    assert set(METHODS) == set(FP8.values()) and METHODS[0] == CHANNEL, "a CPU examines the first alone"


# The stages themselves, on a CPU


@contextmanager
def unchanged_torch() -> Iterator[None]:
    deterministic, threads = torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(deterministic)
        torch.set_num_threads(threads)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with unchanged_torch():
        yield Bench("cpu", 0, tmp_path)


@pytest.mark.parametrize("name", ["lora", "trees", "packing", "precision"])
def test_a_stage_about_passes_holds_on_a_cpu(name: str, bench: Bench) -> None:
    from flowrl.commands.gpu_check import pass_stages, training_stages

    getattr(training_stages if name == "lora" else pass_stages, name)(bench)
    assert bench.figures


def test_a_stage_notices_gradients_of_another_function(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    from flowrl.commands.gpu_check import pass_stages

    laid_out = pass_stages.lay_out

    def shifted(tokens: Any, masks: Any, **options: Any) -> Any:
        wrong = options["layout"] == "packed"
        return laid_out([ids[::-1].copy() if wrong else ids for ids in tokens], masks, **options)

    monkeypatch.setattr(pass_stages, "lay_out", shifted)
    with pytest.raises(StageFailed, match="logprobs differ from those of rows"):
        pass_stages.packing(bench)


def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM packs on streams of a GPU: without one there is nothing to wait for."""
    from contextlib import nullcontext

    from vllm.distributed.weight_transfer import packed_tensor

    stream = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(packed_tensor, "_get_streams", lambda index, count: [stream] * count)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


def test_vllms_packing_takes_buckets_apart_as_they_were_put_in(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    from flowrl.commands.gpu_check import weight_stages

    on_a_cpu(monkeypatch)
    weight_stages.nccl_packing(bench)
    assert int(bench.figures["broadcasts"]) > 3

    def spoilt(group: Any, tensor: torch.Tensor, src: int, stream: object = None) -> None:
        tensor.copy_(group._left.pop())

    monkeypatch.setattr(weight_stages.RepeatingGroup, "broadcast", spoilt)
    with pytest.raises((StageFailed, RuntimeError)):
        weight_stages.nccl_packing(Bench("cpu", 0, bench.directory / "again"))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("tensor_parallel", 5),
        pytest.param("sequence_parallel", 6, marks=pytest.mark.matrix),
        pytest.param("sharded_scoring", 4, marks=pytest.mark.matrix),
    ],
)
def test_a_stage_about_ranks_that_share_a_model_holds_on_a_cpu(
    name: str, found: int, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flowrl.commands.gpu_check import bench as start
    from flowrl.commands.gpu_check import shared_stages

    monkeypatch.setattr(start, "sys", SimpleNamespace(executable=warm.python()))
    getattr(shared_stages, name)(bench)
    exact = [float(figure) for reported, figure in bench.figures.items() if "bfloat16" not in reported]
    assert len(exact) == found and max(exact) < 1e-5, bench.figures


def test_a_stage_notices_a_norm_that_is_not_the_models(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    from flowrl.commands.gpu_check import shared_stages

    def ranks(_: Bench, target: str, *names: str) -> None:
        norms = {name: (2.0 if "trees" in name else 1.0, 1.0) for name in names}
        torch.save(
            {"figures": {}, "gradients": dict.fromkeys(names, 0.0), "norms": norms}, bench.directory / "found.pt"
        )

    monkeypatch.setattr(Bench, "ranks", ranks)
    with pytest.raises(StageFailed, match="stage 2, trees: the norm of the gradient is 2, not 1"):
        shared_stages.tensor_parallel(bench)


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.timeout(300)
def test_stages_with_ranks_and_runs_hold_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gangs of two, real DeepSpeed, and a run under Ray with GPUs that are only said to be there."""
    monkeypatch.setattr(command, "sys", SimpleNamespace(executable=warm.python()))
    status = main(["gpu-check", "--device", "cpu", "--out", str(tmp_path), "--only", "gradients", "devices", "lease"])
    results = json.loads((tmp_path / "results.json").read_text())["stages"]
    assert status == 0 and {result["outcome"] for result in results.values()} == {"ok"}, results
    assert results["gradients"]["figures"]["ranks"] == "2"
    assert results["devices"]["figures"]["reader-0"] == "planned [0, 1], sees 4,5"
    assert results["lease"]["figures"]["checkpoints"] == "2"


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_rank_that_fails_ends_the_others(tmp_path: Path) -> None:
    assert gpu_check(GpuCheckOptions(out=tmp_path, device="cpu"), [stage("in_failing_ranks", limit_s=60.0)]) == 1
    results = json.loads((tmp_path / "results.json").read_text())["stages"]
    told = results["in_failing_ranks"]["told"]
    assert told.startswith("rank 1 of 2 failed:") and "rank 1 has no memory left" in told
