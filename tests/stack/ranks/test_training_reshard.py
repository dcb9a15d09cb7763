"""A trainer's state that two ranks have saved, loaded by one and by three, at other ZeRO stages: bitwise the same."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flowrl.errors import ConfigError
from flowrl.training.engine import training_state
from flowrl.training.engine.gang import Gang
from flowrl.training.engine.requirements import SHARDS, TAG, resume_problems
from flowrl.training.settings import ZeroSettings
from tests.house.further_cases import chosen
from tests.stack.ranks import reshard_rank
from tests.stack.ranks.ranks import run_ranks
from tests.training.training_cases import make_model


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    directory = tmp_path_factory.mktemp("reshard")
    make_model(directory / "model", tied=True)
    names = chosen(request, ["full", "half", "adapter", "bare"])
    run_ranks("tests.stack.ranks.reshard_rank", directory, *names, "from", size=2)
    run_ranks("tests.stack.ranks.reshard_rank", directory, "from", *names, size=1)
    stage = {"full": "full", "half": "half:3", "adapter": "adapter"}
    run_ranks(
        "tests.stack.ranks.reshard_rank", directory, "from", *(stage[name] for name in names if name in stage), size=3
    )
    return directory


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("size", [1, 3], ids=["one rank", "three ranks"])
@pytest.mark.parametrize("name", ["full", "half", "adapter"])
def test_another_number_of_ranks_has_the_same_state(states: Path, name: str, size: int) -> None:
    saved, found = torch.load(states / f"{name}.pt"), torch.load(states / f"{name}-{size}.pt")
    assert saved.keys() == found.keys() and ("average" in saved) == (name == "full")
    for kind, values in saved.items():
        same(kind, values, found[kind])
    assert any(value.abs().max() > 0 for value in saved["exp_avg"].values())


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_without_the_optimizer_the_weights_alone_come_back(states: Path) -> None:
    saved, found = torch.load(states / "bare.pt"), torch.load(states / "bare-1.pt")
    same("master", saved["master"], found["master"])
    same("weights", saved["weights"], found["weights"])
    assert any(value.abs().max() > 0 for value in saved["exp_avg"].values())
    assert not any(value.any() for value in found["exp_avg"].values()) and found["step"]["all"].tolist() == [0]
    sizes = {name: (states / f"{name}-state" / TAG / SHARDS.format(rank=0)).stat().st_size for name in ("bare", "full")}
    assert sizes["bare"] < 0.4 * sizes["full"]


def same(kind: str, values: dict[str, Any], others: dict[str, Any]) -> None:
    assert values.keys() == others.keys()
    for name, value in values.items():
        assert torch.equal(value, others[name]), f"{kind} of {name}"


SIZES = {"embed": 10, "norm": 3, "head": 7, "bias": 1}


class Parameter:
    """As ZeRO-3 marks one."""

    def __init__(self, name: str, size: int) -> None:
        self.name, self.ds_numel = name, size


def flat_of(whole: dict[str, torch.Tensor], names: tuple[str, ...], rank: int, ranks: int) -> torch.Tensor:
    """This rank's part of every parameter, padded, one after the other."""
    flats = []
    for name in names:
        size = -(-SIZES[name] // ranks)
        padded = torch.full((size * ranks,), -1.0)
        padded[: SIZES[name]] = whole[name]
        flats.append(padded[rank * size : (rank + 1) * size])
    return torch.cat(flats).clone()


def engine_of(rank: int, ranks: int, whole: dict[str, dict[str, torch.Tensor]], groups: Any) -> Any:
    """A rank of ZeRO-3, as far as `training_state` sees it, with a state of `whole`: kind -> parameter -> values."""
    parameters = {name: Parameter(name, size) for name, size in SIZES.items()}
    positions = {}
    for number, names in enumerate(groups):
        offset = 0
        for name in names:
            positions[name] = [number, offset, -(-SIZES[name] // ranks)]
            offset += positions[name][2]
    masters = [flat_of(whole["master"], names, rank, ranks) for names in groups]
    state = {
        flat: {"exp_avg": flat_of(whole["exp_avg"], names, rank, ranks), "step": torch.tensor(whole["step"]["all"])}
        for flat, names in zip(masters, groups, strict=True)
    }
    optimizer = SimpleNamespace(
        grad_position=positions,
        get_param_id=lambda parameter: parameter.name,
        fp16_groups=[[parameters[name] for name in names] for names in groups],
        fp32_partitioned_groups_flat=masters,
        optimizer=SimpleNamespace(state=state),
        _partition_all_parameters=lambda: None,
        _reassign_or_swap_out_partitioned_parameters=lambda number: None,
        _post_step=lambda timers: None,
    )
    return SimpleNamespace(optimizer=optimizer, module=SimpleNamespace(named_parameters=lambda: [*parameters.items()]))


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 3), (4, 3), (3, 3)])
def test_parts_are_found_whatever_the_ranks_and_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: int, after: int
) -> None:
    draw = torch.Generator().manual_seed(0)
    kinds = ("master", "exp_avg")
    whole: dict[str, Any] = {k: {n: torch.randn(s, generator=draw) for n, s in SIZES.items()} for k in kinds}
    average = {name: values + 1 for name, values in whole["master"].items()}
    was, now = (("embed", "norm"), ("head", "bias")), (("norm",), ("bias", "head", "embed"))
    for rank in range(before):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        averages = [flat_of(average, names, rank, before) for names in was]
        training_state.save_shards(
            engine_of(rank, before, {**whole, "step": {"all": 7.0}}, was), tmp_path, rank, averages, optimizer=True
        )
    empty: dict[str, Any] = {k: {n: torch.zeros(s) for n, s in SIZES.items()} for k in kinds}
    for rank in range(after):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        engine = engine_of(rank, after, {**empty, "step": {"all": 1.0}}, now)
        averages = [torch.zeros_like(flat) for flat in training_state.flat_masters(engine)]
        training_state.load_shards(engine, tmp_path, averages, optimizer=True)
        for number, flat in enumerate(training_state.flat_masters(engine)):
            state = engine.optimizer.optimizer.state[flat]
            assert float(state["step"]) == 7.0 or not training_state.list_shard_parts(engine)
            found = {"master": flat, "exp_avg": state["exp_avg"], "average": averages[number]}
            for kind, values in {**whole, "average": average}.items():
                expected = flat_of(values, now[number], rank, after)
                real = expected != -1.0
                assert torch.equal(found[kind][real], expected[real]), (kind, rank, number)


def test_a_checkpoint_without_a_rank_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    whole: dict[str, Any] = {k: {n: torch.ones(s) for n, s in SIZES.items()} for k in ("master", "exp_avg")}
    whole["step"] = {"all": 1.0}
    groups = (tuple(SIZES),)
    training_state.save_shards(engine_of(0, 2, whole, groups), tmp_path, 0, [], optimizer=True)
    with pytest.raises(ConfigError, match="has 5 of 10 elements of 'embed'"):
        training_state.load_shards(engine_of(0, 1, whole, groups), tmp_path, [], optimizer=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["full", "half", "adapter"])
def test_one_rank_below_stage_3_loads_what_it_saved(tmp_path: Path, name: str) -> None:
    """A real engine, whose optimizer has no state before its first step."""
    make_model(tmp_path / "model", tied=True)
    gang = Gang.meet_ranks(0, 1, "", torch.device("cpu"))
    torch.manual_seed(0)
    saved = reshard_rank.opened(name, gang, tmp_path / "model")
    reshard_rank.trained(saved, gang)
    expected = reshard_rank.state_of(saved)
    saved.export_model(tmp_path / "saved")
    saved.save_state(tmp_path / "state")
    loaded = reshard_rank.opened(name, gang, tmp_path / ("model" if name == "adapter" else "saved"))
    loaded.load_state(tmp_path / "state")
    found = reshard_rank.state_of(loaded)
    for kind, values in expected.items():
        same(kind, values, found[kind])
    for engine in (saved, loaded):
        reshard_rank.trained(engine, gang)
    after, again = reshard_rank.state_of(saved), reshard_rank.state_of(loaded)
    for kind, values in after.items():
        same(kind, values, again[kind])


def test_what_cannot_be_loaded_is_refused_in_a_sentence(tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / SHARDS.format(rank=rank)).touch()
    assert [resume_problems(tmp_path, ZeroSettings(), ranks) for ranks in (1, 2, 5)] == [[], [], []]
    (problem,) = resume_problems(tmp_path, ZeroSettings(optimizer="muon"), 2)
    assert "written with adamw or sgd" in problem and "this run has optimizer muon" in problem
    (problem,) = resume_problems(tmp_path, ZeroSettings(stage=0), 2)
    assert "ZeRO stage 0" in problem
