"""Sequence parallelism: ranks that share a micro-batch by its positions train as if each had its own.

Two ranks are among the cases of `tests.stack.ranks.test_training_gang`; here are four, objectives, and the cutting
itself.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flowrl import Cluster, ConfigError, Graph, Machine, check
from flowrl.graph.load import load_file
from flowrl.nodes import Trainer
from flowrl.runtime.driver.resources import LOOPBACK
from flowrl.training.engine.gang import Gang
from flowrl.training.layouts import WINDOWED, Placing, sequence_problems
from flowrl.training.loss.objective import trained_mask
from flowrl.training.memory import ModelShape, TrainerModel, exchanged_bytes, layer_bytes
from flowrl.training.model.policy_model import DTYPES, PolicyModel, load_policy_model
from flowrl.training.model.row_layout import RowLayout, RowSlice, lay_out, num_sliced, require_slices, slice_rows
from flowrl.training.model.sequence_attention import SequenceGroup, make_exchanging
from flowrl.training.settings import Dtype, LoRA, SequenceKind, ZeroSettings
from tests.house.further_cases import chosen
from tests.stack.ranks.ranks import run_ranks
from tests.stack.ranks.sequence_rank import OBJECTIVES, batch_of
from tests.stack.ranks.test_training_gang import named, plain_steps, worst
from tests.training.test_memory_formulas import configuration
from tests.training.test_training_varlen import plain
from tests.training.thread_ranks import LENGTHS, Threads, laid_out
from tests.training.training_cases import FOUR, FOUR_DIVIDED, Case, make_model, make_windowed

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")


def slices(rows: RowLayout, size: int, kind: SequenceKind = "ulysses") -> list[RowSlice]:
    return [slice_rows(rows, SequenceGroup(None, rank, size, kind)) for rank in range(size)]


def columns(size: int, kind: SequenceKind, own: int) -> list[int]:
    """The positions of all ranks, one after the other."""
    if kind == "ulysses":
        return list(range(size * own))
    run = own // 2
    starts = [start for rank in range(size) for start in (rank, 2 * size - 1 - rank)]
    return [column for start in starts for column in range(start * run, (start + 1) * run)]


KINDS: tuple[SequenceKind, ...] = ("ulysses", "ring")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("layout", ["padded", "packed", "tree"])
def test_slices_are_equal_parts_of_the_padded_rows(layout: Placing, size: int, kind: SequenceKind) -> None:
    rows = laid_out(layout)
    height, length = rows.input_ids_RL.shape
    parts = [part.rows for part in slices(rows, size, kind)]
    own = parts[0].input_ids_RL.shape[1]
    assert {part.input_ids_RL.shape for part in parts} == {(height, own)}
    computed = num_sliced(rows, SequenceGroup(None, 0, size, kind))
    assert sum(part.num_computed for part in parts) == computed >= rows.num_computed
    order = torch.tensor(columns(size, kind, own)).argsort()
    tokens = torch.cat([part.input_ids_RL for part in parts], dim=1)[:, order]
    assert torch.equal(tokens[:, :length], rows.input_ids_RL) and not tokens[:, length:].any()
    positions = torch.cat([part.position_ids_RL.expand(height, -1) for part in parts], dim=1)[:, order][:, :length]
    expected = torch.arange(length).expand(height, -1) if rows.position_ids_RL is None else rows.position_ids_RL
    assert torch.equal(positions, expected), "positions go on where the slice before has ended"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("layout", ["padded", "packed", "tree"])
def test_a_policy_token_belongs_to_the_slice_that_predicts_it(layout: Placing, size: int, kind: SequenceKind) -> None:
    rows = laid_out(layout)
    found = []
    for rank, part in enumerate(slices(rows, size, kind)):
        own = part.rows.input_ids_RL.shape[1]
        count = len(part.mine_M)
        column_R = torch.tensor(columns(size, kind, own))
        row, column = part.rows.places_N[:count] // own, column_R[part.rows.places_N[:count] % own + rank * own]
        found += zip(part.mine_M.tolist(), row.tolist(), column.tolist(), part.rows.targets_N.tolist(), strict=False)
    length = rows.input_ids_RL.shape[1]
    policy = zip(rows.places_N.tolist(), rows.targets_N.tolist(), strict=True)
    expected = [(n, place // length, place % length, target) for n, (place, target) in enumerate(policy)]
    assert sorted(found) == expected, "every policy token once, with its own target"


def test_a_slice_without_a_policy_token_computes_one_that_counts_for_nothing() -> None:
    rows = lay_out([np.arange(6, dtype=np.int32)], [np.arange(6) == 5])
    first, last = slices(rows, 2)
    assert (len(first.mine_M), len(first.rows.places_N), len(last.mine_M)) == (0, 1, 1)


def test_places_that_pad_a_tree_see_themselves_alone() -> None:
    rows = laid_out("tree")
    assert rows.tree is not None
    size = len(rows.tree.forest)
    padded = rows.tree.with_padding(2)
    mask = padded.mask_11LL[0, 0]
    assert torch.equal(mask[:size, :size], rows.tree.mask_11LL[0, 0])
    assert torch.equal(mask[size:], torch.eye(size + 2, dtype=torch.bool)[size:]) and not mask[:size, size:].any()
    assert rows.tree.with_padding(0) is rows.tree and rows.tree.with_padding(2) is padded


def test_a_packed_row_is_masked_by_its_sequences() -> None:
    exchange = slices(laid_out("packed"), 2)[0].rows.exchange
    assert exchange is not None
    whole, near = (exchange.sight.mask_11LL(width) for width in (None, 2))
    assert whole is not None and near is not None
    ends = np.cumsum([0, *(n - 1 for n in LENGTHS)]).tolist()
    for mask, width in ((whole[0, 0], 99), (near[0, 0], 2)):
        for start, end in pairwise(ends):
            inside = torch.ones(end - start, end - start, dtype=torch.bool).tril().triu(1 - width)
            assert torch.equal(mask[start:end, start:end], inside)
            assert not mask[start:end, :start].any() and not mask[end:, start:end].any()


def test_what_ranks_share_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Gang, "gather_objects", lambda gang, item: [item, item, item + 1, item + 1])
    assert Gang(1, 4, CPU, SequenceGroup(None, 1, 2)).gather_parts(5) == [5, 6]
    assert Gang(1, 4, CPU).gather_parts(5) == [5, 5, 6, 6]


# Attention, by ranks that are threads


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("attention", "layout"),
    [("sdpa", "padded"), ("sdpa", "packed"), ("sdpa", "tree"), ("varlen", "packed")],
)
def test_ranks_with_slices_give_what_one_gives(
    attention: Any, layout: Placing, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With fewer heads of keys (2) than ranks, too. The kernel of varlen is replaced by a plain one."""
    make_model(tmp_path, tied=True)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", plain)
    model = load_policy_model(tmp_path, attention=attention, layout="auto" if layout == "tree" else "rows")
    with torch.no_grad():
        expected = model(laid_out(layout))[0]
    make_exchanging(model.network.config._attn_implementation)
    for found in Threads(size, monkeypatch).logprobs(model, laid_out(layout)):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        assert torch.equal(model(laid_out(layout))[0], expected), "without the keyword nothing changes"


@pytest.mark.parametrize(
    ("kind", "attention", "layout"),
    [
        *((kind, "sdpa", "padded") for kind in sorted(WINDOWED)),
        ("gemma3_text", "sdpa", "packed"),
        ("gemma2", "sdpa", "packed"),
        ("mistral", "varlen", "packed"),
        ("olmo3", "eager", "padded"),
    ],
)
def test_windows_and_soft_caps_are_seen_from_slices(
    kind: str, attention: Any, layout: Placing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each type that is let pass, with windows shorter than most sequences; soft caps need eager attention."""
    make_windowed(tmp_path, kind)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", plain)
    assert not list(sequence_problems(2, ZeroSettings(), json.loads((tmp_path / "config.json").read_text())))
    with torch.no_grad():
        expected = load_policy_model(tmp_path, attention="eager", layout="rows")(laid_out("padded"))[0]
    model = load_policy_model(tmp_path, attention=attention, layout="rows")
    make_exchanging(model.network.config._attn_implementation)
    for found in Threads(2, monkeypatch).logprobs(model, laid_out(layout)):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_layer_that_looks_at_its_neighbours_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model(tmp_path, tied=True)
    model = load_policy_model(tmp_path, attention="sdpa", layout="rows")
    make_exchanging("sdpa")
    threads = Threads(2, monkeypatch)
    about: dict[str, Any] = {"layout": "padded", "name": "M", "vocab_size": 40, "dtype": "float32", "device": CPU}

    def sliced(rows: RowLayout) -> Tensor:
        return threads.logprobs(model, rows)[0]

    require_slices(lambda rows: model(rows)[0], sliced, **about)
    embed = model.network.get_input_embeddings()
    embed.register_forward_hook(lambda module, given, found: found + found.roll(1, dims=1))
    with pytest.raises(ConfigError, match="positions are divided among ranks: they differ by"):
        require_slices(lambda rows: model(rows)[0], sliced, **about)


# What is refused, and what follows from the size


def graph(name: str, *given: str) -> Graph:
    file = load_file(name)
    return file.build(file.parse(given))


SHARED = ("--trainer.replicas", "4", "--trainer.sequence-parallel-size", "2")
CLUSTER = Cluster((Machine(tuple(range(32)), gpus=16),))


@pytest.mark.parametrize("name", ["grpo", "sft", "dpo", "ppo", "reward_model", "distill", "kto"])
def test_every_graph_with_a_trainer_can_share(name: str) -> None:
    made = graph(name, *SHARED)
    assert check(made, CLUSTER).problems == ()
    trainers = [node for node in made.nodes.values() if isinstance(node, Trainer)]
    assert trainers and {node.sequence_parallel_size for node in trainers} == {2}
    assert {node.facts().ranks_per_part for node in trainers} == {2}
    assert "each 2 ranks share their micro-batches" in "".join(trainers[0].notes())


def test_the_critics_trainer_can_share_in_groups_of_its_own() -> None:
    own = ("--critic-trainer.sequence-parallel-size", "1", "--critic-trainer.replicas", "3")
    trainer: Any = graph("ppo", *SHARED, *own).nodes["critic_trainer"]
    assert trainer.sequence_parallel_size == 1
    (problem,) = check(graph("ppo", *SHARED, "--critic-trainer.replicas", "3"), CLUSTER).problems
    assert "critic_trainer has 3 ranks, which cannot be divided into groups of 2" in problem


def test_a_batch_needs_a_sequence_for_each_group_of_ranks() -> None:
    small = ("--groups-per-step", "1", "--group-size", "2")
    assert check(graph("grpo", *SHARED, *small), CLUSTER).problems == ()
    (problem,) = check(graph("grpo", "--trainer.replicas", "8", *SHARED[2:], *small), CLUSTER).problems
    assert "a batch has 2 sequences (1 groups × 2), but trainer has 8 ranks in groups of 2" in problem


@pytest.mark.parametrize(
    ("config", "heads", "words"),
    [
        ({"num_attention_heads": 6}, None, "has 6 attention heads, which the ranks have to share equally; choose"),
        ({"text_config": {"num_attention_heads": 10}}, None, "choose one of 1, 2, 5, 10"),
        ({}, 7, "choose one of 1, 7"),
        ({"model_type": "gpt_oss", "layer_types": ["sliding_attention"]}, None, "gpt_oss has layers with sliding"),
        ({"model_type": "qwen2_moe", "sliding_window": 64}, None, "has sliding-window attention; a rank would not"),
        ({"model_type": "mistral", "layer_types": ["chunked_attention"]}, None, "mistral has layers with chunked"),
        ({"model_type": "mistral", "sliding_window": 64}, None, ""),
        ({"model_type": "bloom"}, None, "bloom has ALiBi"),
        ({"model_type": "mamba"}, None, "recurrent layers"),
        ({"num_attention_heads": 8, "num_key_value_heads": 1}, None, ""),
    ],
)
def test_models_that_cannot_be_sliced_are_refused(config: dict[str, Any], heads: int | None, words: str) -> None:
    found = list(sequence_problems(4, ZeroSettings(), config, heads))
    assert [words in problem for problem in found] == ([True] if words else [])
    assert not list(sequence_problems(1, ZeroSettings(), config, heads))


@pytest.mark.parametrize(("size", "kind"), [(1, "ulysses"), (2, "ulysses"), (4, "ulysses"), (2, "ring"), (4, "ring")])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_layer_keeps_exactly_what_the_formula_says(
    size: int, kind: SequenceKind, dtype: Dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM

    threads, (few, many) = (
        Threads(size, monkeypatch, kind),
        [configuration("Qwen2", num_hidden_layers=n) for n in (1, 3)],
    )
    make_exchanging("sdpa")
    rows = lay_out([np.arange(65, dtype=np.int32)] * 4, [np.ones(65, np.bool_)] * 4)

    def kept(config: Any) -> list[int]:
        model = PolicyModel(AutoModelForCausalLM.from_config(config, dtype=DTYPES[dtype], attn_implementation="sdpa"))
        weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

        def work(group: SequenceGroup) -> int:
            found: dict[int, Tensor] = {}

            def keep(tensor: Tensor) -> Tensor:
                found[tensor.untyped_storage().data_ptr()] = tensor
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                own = slice_rows(rows, group).rows if size > 1 else rows
                model.network.base_model(**own.model_input)
            return sum(t.untyped_storage().size() for address, t in found.items() if address not in weights)

        return threads(work)

    shape, element = ModelShape.of_config(few.to_dict(), ""), DTYPES[dtype].itemsize
    expected = 256 // size * (layer_bytes(shape, element) + exchanged_bytes(shape, element, size, kind))
    assert [(b - a) / 2 for a, b in zip(kept(few), kept(many), strict=True)] == [expected] * size


def test_activations_are_divided_by_the_ranks_that_share_them() -> None:
    shape = ModelShape(512, 4, 8, 2, 64, 1024, 1000)
    alone, *shared = (
        TrainerModel(shape, ZeroSettings(), LoRA(), ranks=8, sliced=size).activation_bytes(80_000)
        for size in (1, 2, 4, 8)
    )
    for size, found in zip((2, 4, 8), shared, strict=True):
        assert alone / size < found < 1.35 * alone / size
    assert exchanged_bytes(shape, 4, 2) == 4 * 512, "the result on its way back"
    assert exchanged_bytes(shape, 4, 4) == 4 * (512 + 2 * 128), "keys and values twice"


# Real ranks


@pytest.mark.parametrize("parts", [1, 2])
def test_parts_without_a_token_in_the_loss_and_ranks_without_a_policy_token_are_among_the_cases(parts: int) -> None:
    found = []
    for part in batch_of(OBJECTIVES["gspo"]).split(parts):
        for indices in part.micro_batches:
            samples = [part.samples[i] for i in indices]
            masked = all(not trained_mask(sample).any() for sample in samples)
            rows = lay_out([s.token_ids for s in samples], [s.policy_mask for s in samples]) if samples else None
            least = 1 if rows is None else min(len(one.mine_M) for one in slices(rows, 2))
            found.append((bool(samples) and masked, least == 0, not samples))
    masked_whole, without_policy, padding = (any(kind) for kind in zip(*found, strict=True))
    assert masked_whole and without_policy and padding == (parts == 2)


@pytest.fixture(scope="module")
def four_dir(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """Where four ranks left what they found."""
    directory = tmp_path_factory.mktemp("four")
    make_model(directory / "tied", tied=True)
    make_model(directory / "untied", tied=False)
    make_windowed(directory / "windowed", "gemma2")
    make_model(directory / "scored", tied=False)
    config = directory / "scored" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"pad_token_id": 0, "eos_token_id": 1}))
    names = chosen(request, [*(case.name for case in (*FOUR, *FOUR_DIVIDED)), *OBJECTIVES])
    run_ranks("tests.stack.ranks.sequence_rank", directory, *names, size=4, env=LOOPBACK)
    return directory


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", **named([*FOUR, *FOUR_DIVIDED]))
def test_gradients_of_four_ranks_equal_the_plain_loop(case: Case, four_dir: Path) -> None:
    found = torch.load(four_dir / f"{case.name}.pt")
    gradients, weights = plain_steps(case, four_dir)
    assert len(found["gradients"]) == len(gradients)
    for ours, theirs in zip(found["gradients"], gradients, strict=True):
        size = max(float(g.abs().max()) for g in theirs.values())
        assert size > 1e-3 and worst(ours, theirs) <= 1e-5 * max(1.0, size)
    assert worst(found["weights"], weights) <= 1e-5
    if case.clip:
        told = [update["grad_norm"] for update in json.loads((four_dir / f"{case.name}.json").read_text())["updates"]]
        norms = [float(torch.stack([g.norm() for g in one.values()]).norm()) for one in gradients]
        assert told == pytest.approx(norms, rel=1e-5) and min(norms) > case.clip


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_gives_the_same_gradient_and_metrics(name: str, four_dir: Path) -> None:
    alone, *shared = torch.load(four_dir / f"{name}.pt")
    sizes = {name: float(g.abs().max()) for name, g in alone["gradients"].items()}
    assert max(sizes.values()) > 1e-3
    if OBJECTIVES[name].lora.rank:
        assert min(sizes.values()) > 0 and all(".lora_" in one for one in sizes), "both matrices of every layer"
    for found in shared:
        assert worst(found["gradients"], alone["gradients"]) <= 1e-5
        assert found["passes"] == alone["passes"]
        assert {n: v for n, v in found["stats"].items() if v is not None} == pytest.approx(
            {n: v for n, v in alone["stats"].items() if v is not None}, rel=1e-4, abs=1e-5
        )
