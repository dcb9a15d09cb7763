"""`flowrl check --cluster`: predicted memory against devices, machines and /dev/shm, and what would fit."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from flowrl import Graph, check
from flowrl.cli import main
from flowrl.commands.fit import find_fitting, option_text
from flowrl.errors import ConfigError
from flowrl.graph.analysis.check import Report
from flowrl.graph.load import load_file
from flowrl.graph.machine import GB, Cluster
from flowrl.graph.option_types import changed_config

SHAPES = Path(__file__).parent / "shapes"
SMALL, SEVEN, LARGE = (str(SHAPES / f"{name}.json") for name in ("qwen2.5-0.5b", "qwen2.5-7b", "llama-70b"))
BF16 = ("--dtype", "bfloat16", "--trainer.gpus", "1")


def graph(name: str, *options: str) -> Graph:
    file = load_file(name)
    return file.build(file.parse(options))


def report(cluster: str, *options: str, name: str = "grpo") -> Report:
    return check(graph(name, *options), Cluster.parse(cluster))


@pytest.mark.parametrize(
    ("text", "machines", "gpus", "card"),
    [
        ("2 x 8 x H100", 2, 8, 79.6),
        ("1x1x24GB", 1, 1, 24),
        ("1 x 8 x 80GB cpus=96 memory=1024", 1, 8, 80),
        ("2x cpus=32 gpus=8 gpu=A100 memory=256", 2, 8, 80),
        ("2x cpus=32 gpus=8 memory=256", 2, 8, 0),
        ("cpus=4", 1, 0, 0),
    ],
)
def test_clusters_are_written_by_cards_or_by_resources(text: str, machines: int, gpus: int, card: float) -> None:
    found = Cluster.parse(text).machines
    assert (len(found), found[0].gpus, found[0].gpu_bytes) == (machines, gpus, int(card * GB))
    if "memory=" in text:
        assert found[0].memory_bytes in (1024 * GB, 256 * GB)


def test_what_is_not_said_of_a_machine_is_assumed_in_proportion_to_its_gpus() -> None:
    (machine,) = Cluster.parse("1 x 8 x 80GB").machines
    assert (len(machine.cores), machine.memory_bytes, machine.shm_bytes) == (128, 1280 * GB, 640 * GB)
    (machine,) = Cluster.parse("1 x 8 x 80GB shm=1").machines
    assert machine.shm_bytes == GB
    here = Cluster.here().machines[0]
    assert here.shm_bytes == os.statvfs("/dev/shm").f_bavail * os.statvfs("/dev/shm").f_frsize


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("2 x 8 x H10", "did you mean H100?"),
        ("2 x 8 x XYZ", "known are T4"),
        ("8 x H100", "is not a valid cluster; write it like"),
        ("0 x 8 x H100", "is not a valid cluster"),
        ("1 x 8 x H100 cpus=many", "is not a valid cluster"),
        ("1 x 8 x H100 cpus=1 cpus=2", "is not a valid cluster"),
        ("gpus=8", "is not a valid cluster"),
        ("cpus=1.5", "is not a valid cluster"),
        ("1 x 8 x H100 disk=5", "is not a valid cluster"),
    ],
)
def test_what_is_no_cluster_is_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words.replace("?", r"\?")):
        Cluster.parse(text)


def test_every_device_says_who_is_there_when() -> None:
    turns = ("--time-share", "generator", "trainer")
    found = report("1 x 1 x 24GB", "--policy", SMALL, *BF16, *turns, "--zero.gradient-checkpointing")
    assert found.problems == ()
    (device,) = found.devices
    assert {resident.replica for resident in device.residents} == {"generator/0", "trainer/0"}
    generator, trainer = sorted(device.residents, key=lambda resident: resident.replica)
    assert device.peak_bytes == generator.always + trainer.always + max(generator.while_active, trainer.while_active)
    assert generator.always + generator.while_active == pytest.approx(0.92 * 24 * GB, rel=1e-6), (
        "vLLM takes its whole share, as the trainer is not there"
    )
    assert trainer.always < GB, "between its turns only its context is there"
    assert generator.always < 2 * GB, "between its turns neither weights nor cache, but its context and CUDA graphs"
    state = 18 * 494_032_768
    assert trainer.while_active > state, "weights, gradients and optimizer"
    assert trainer.footprint.num_bytes("away", place="host") >= state
    assert generator.footprint.num_bytes("away", place="host") == 2 * 494_032_768, "asleep, its weights are on the host"


def test_side_by_side_all_of_it_is_there_at_once() -> None:
    options = ("--policy", SMALL, *BF16, "--generator.gpus", "0.5", "--trainer.gpus", "0.5")
    found = report("1 x 1 x 80GB", *options, "--engine.gpu-memory-utilization", "0.3")
    (device,) = found.devices
    assert device.peak_bytes == sum(resident.always + resident.while_active for resident in device.residents)


@pytest.mark.parametrize(
    ("cluster", "options", "words"),
    [
        ("1 x 2 x 24GB", ("--policy", SEVEN, *BF16), "GPU 1 of machine 0 has 24.0 GiB"),
        (
            "1 x 8 x H100",
            ("--policy", LARGE, *BF16),
            "so 0.00 are left for the KV cache, and one sequence of 544 tokens",
        ),
        ("1 x 8 x H100", ("--policy", SEVEN, *BF16, "--generator.gpus", "3"), "but the model has 28 attention heads"),
        ("1 x 4 x H100", ("--policy", SEVEN, *BF16, "--trainer.replicas", "8"), "needs 9 GPUs"),
        (
            "1 x 1 x 80GB shm=1",
            ("--policy", SEVEN),
            "/dev/shm of machine 0 has 1.00 GiB, and published weights take up",
        ),
        ("cpus=8 memory=16", ("--policy", SEVEN), "machine 0 has 16.0 GiB of memory, and its processes need"),
    ],
)
def test_what_does_not_fit_is_refused(cluster: str, options: tuple[str, ...], words: str) -> None:
    found = report(cluster, *options, "--evaluate", "0")
    assert any(words in problem for problem in found.problems), found.problems


def test_more_ranks_and_parts_take_less_of_each_device() -> None:
    def most(*options: str) -> int:
        found = report("1 x 8 x H100", "--policy", SEVEN, *BF16, *options).devices
        return max(d.peak_bytes for d in found if d.residents[0].replica.startswith("trainer"))

    one, four = most("--trainer.replicas", "2"), most("--trainer.replicas", "4")
    assert one - four == pytest.approx((2 + 4 + 4 + 8) * 7_615_616_512 / 4, rel=0.01), "18 bytes a parameter, sharded"
    assert most("--trainer.replicas", "4", "--zero.offload", "optimizer") < four


def test_a_reference_that_fits_no_gpu_is_sharded_over_several() -> None:
    def terms(gpus: int) -> dict[str, int]:
        roles = ("--objective.kl-coef", "0.01", "--reference.gpus", str(gpus), "--trainer.replicas", "4")
        found = report("1 x 16 x 14GB", "--policy", SEVEN, *BF16, *roles, "--time-share")
        (mine,) = (one for one in found.residents if one.replica == "reference/0")
        assert len(mine.host.gpus) == gpus
        assert any("reference/0: weights 14.2" in problem for problem in found.problems) == (gpus == 1)
        return {term.name: term.num_bytes for term in mine.footprint.terms if term.place == "device"}

    whole, sharded = terms(1), terms(4)
    assert sharded["weights"] == -(-whole["weights"] // 4) and "gathered" not in whole
    assert sharded["gathered"] == 2 * 152064 * 3584, "the embedding is larger than what is gathered otherwise"


@pytest.mark.parametrize("role", ["reference", "teacher"])
def test_a_model_is_sharded_over_whole_gpus(role: str) -> None:
    options = ("grpo", "--objective.kl-coef", "0.01") if role == "reference" else ("distill",)
    found = report("1 x 8 x H100", *options[1:], f"--{role}.gpus", "1.5", name=options[0])
    assert any("sharded over whole GPUs, so use 1 or 2" in problem for problem in found.problems), found.problems


def test_a_policy_that_is_a_config_alone_is_checked_and_not_run(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--policy", SEVEN, *BF16, "--trainer.replicas", "4", "--zero.gradient-checkpointing")
    assert main(["check", "grpo", *options, "--cluster", "1 x 8 x H100"]) == 0
    out = capsys.readouterr().out
    assert "generator/0  1 GPU  14.19" in out and "device  has    most" in out
    assert main(["run", "grpo", "--policy", SEVEN, "--steps", "1"]) == 2
    assert "flowrl: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("cluster", "policy", "expected"),
    [
        ("1 x 2 x 80GB", SMALL, ""),
        ("1 x 8 x 80GB", SEVEN, "--dtype bfloat16 --zero.gradient-checkpointing --trainer.replicas 2"),
        ("1 x 1 x 24GB", SMALL, "--dtype bfloat16 --time-share generator trainer"),
    ],
)
def test_options_are_proposed_that_fit(cluster: str, policy: str, expected: str) -> None:
    file, where = load_file("grpo"), Cluster.parse(cluster)
    cfg = file.parse(["--policy", policy, "--trainer.gpus", "1"])
    found = find_fitting(file, cfg, where)
    assert found is not None and option_text(found).startswith(expected)
    assert check(file.build(changed_config(cfg, found)), where).ok
    again = file.parse(["--policy", policy, "--trainer.gpus", "1", *option_text(found).split()])
    assert again == changed_config(cfg, found), "as written on the command line"


def test_the_proposal_is_part_of_the_answer(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "grpo", "--policy", SEVEN, *BF16, "--cluster", "1 x 4 x 80GB"]) == 2
    said = capsys.readouterr().err
    assert "1 problem:" in said and "It fits with --zero.gradient-checkpointing --trainer.replicas 2" in said
    assert main(["check", "grpo", "--policy", LARGE, *BF16, "--cluster", "1 x 1 x 24GB"]) == 2
    assert "Nothing that was tried" in capsys.readouterr().err
