"""Distillation on data and by the generalized JSD: against its formula, against a plain loop, and through the nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from flowrl import Cluster, Machine, check
from flowrl.errors import ConfigError
from flowrl.graph.load import load_file
from flowrl.graph.machine import GB
from flowrl.messages import Sample, Trainable
from flowrl.models import Policy
from flowrl.nodes import Trainer
from flowrl.nodes.scoring.teacher import scored_by_teacher
from flowrl.nodes.sources.given_answers import GivenAnswers
from flowrl.tasks import Task, load_rows
from flowrl.testing import prompt, run_graph, run_node, sample
from flowrl.training.batch_stats import BatchStats
from flowrl.training.learner import BatchSums
from flowrl.training.loss.objective import LossInputs, Totals, loss_masks
from flowrl.training.loss.policy_objective import PolicyObjective
from flowrl.training.loss.token_objectives import GeneralizedJSD, ReverseKL
from flowrl.training.micro_batches import make_micro_batch
from flowrl.training.model.logprobs import Taught, chunked_logprobs
from flowrl.training.model.policy_model import load_output_layer, load_policy_model
from flowrl.training.model.row_layout import lay_out
from flowrl.training.scoring_models import judgements_of
from tests.models.tiny_policy import make_policy

BETAS = (0.0, 0.1, 0.5, 0.9, 1.0)


def plain_jsd(student: torch.Tensor, teacher: torch.Tensor, beta: float) -> torch.Tensor:
    """The definition, term by term, with autograd: logits [N, V] -> [N]."""
    p, q = student.log_softmax(-1), teacher.log_softmax(-1)
    if beta == 0.0:
        return F.kl_div(p, q, reduction="none", log_target=True).sum(-1)
    if beta == 1.0:
        return F.kl_div(q, p, reduction="none", log_target=True).sum(-1)
    mixture = (beta * q.exp() + (1 - beta) * p.exp()).log()
    of_teacher = F.kl_div(mixture, q, reduction="none", log_target=True)
    of_student = F.kl_div(mixture, p, reduction="none", log_target=True)
    return (beta * of_teacher + (1 - beta) * of_student).sum(-1)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("logits_bytes", [1, 1 << 20], ids=["one place a chunk", "one chunk"])
def test_value_and_gradient_are_those_of_the_definition(beta: float, logits_bytes: int) -> None:
    generator = torch.Generator().manual_seed(2)
    shapes = ((5, 4), (7, 4), (5, 6), (7, 6), (7,))
    hidden, weight, *theirs = [torch.randn(*s, generator=generator, dtype=torch.float64) for s in shapes]
    hidden.requires_grad_()
    weight.requires_grad_()
    upstream = torch.linspace(-1.0, 2.0, 5, dtype=torch.float64)
    teacher = Taught(theirs[0], theirs[1], theirs[2], beta=beta)
    expected = plain_jsd(hidden @ weight.T / 2.0, (theirs[0] @ theirs[1].T + theirs[2]) / 2.0, beta)
    gradient = torch.autograd.grad((upstream * expected).sum(), (hidden, weight))

    _, relative = chunked_logprobs(
        hidden,
        weight,
        None,
        torch.zeros(5, dtype=torch.long),
        temperature=2.0,
        entropy_gradient=True,
        taught=teacher,
        logits_bytes=logits_bytes,
    )
    torch.testing.assert_close(-relative, expected.detach(), atol=1e-12, rtol=1e-9)
    found = torch.autograd.grad((upstream * -relative).sum(), (hidden, weight))
    torch.testing.assert_close(found, gradient, atol=1e-12, rtol=1e-9)


def test_the_forward_kl_is_the_cross_entropy_with_the_teacher() -> None:
    student, teacher = torch.randn(2, 3, 7, generator=torch.Generator().manual_seed(0)).unbind()
    cross = -(teacher.softmax(-1) * student.log_softmax(-1)).sum(-1)
    entropy = -(teacher.softmax(-1) * teacher.log_softmax(-1)).sum(-1)
    torch.testing.assert_close(plain_jsd(student, teacher, 0.0), cross - entropy)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of TRL, about its own dependencies
@pytest.mark.parametrize("beta", BETAS)
def test_the_divergence_is_that_of_trls_self_distillation(beta: float) -> None:
    """Of SDFTTrainer and SDPOTrainer with `distillation_mode="full_logits"`."""
    from trl.experimental.sdft.loss_utils import compute_full_logit_self_distillation_loss

    generator = torch.Generator().manual_seed(3)
    hidden, weight, theirs = (
        torch.randn(*s, generator=generator, dtype=torch.float64) for s in ((5, 4), (7, 4), (5, 7))
    )
    taught = Taught(theirs, torch.eye(7, dtype=torch.float64), torch.zeros(7, dtype=torch.float64), beta=beta)
    targets = torch.zeros(5, dtype=torch.long)
    _, relative = chunked_logprobs(hidden, weight, None, targets, entropy_gradient=True, taught=taught)
    found = compute_full_logit_self_distillation_loss(hidden @ weight.T, theirs, distillation_alpha=beta)
    torch.testing.assert_close(-relative, found, atol=1e-7, rtol=1e-7)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_a_step_on_given_answers_is_that_of_a_plain_loop(tmp_path: Path, beta: float) -> None:
    """Gradients of all parameters, through teacher, samples, rows and loss, against logits and autograd."""
    student = make_policy(tmp_path / "student", tied=True, seed=1)
    student.get_input_embeddings().padding_idx = None  # the samples have that id as a token like others
    teacher = make_policy(tmp_path / "teacher", tied=False, seed=2)
    given = [sample(0, response=3), sample(1, response=6)]
    asked = [(one.token_ids, one.policy_mask) for one in given]
    judged = judgements_of(load_policy_model(tmp_path / "teacher").eval(), asked, False, 1.0)
    rated = [
        Trainable.of(scored_by_teacher(one, *judgement), np.zeros(len(one.token_ids)))
        for one, judgement in zip(given, judged, strict=True)
    ]
    model = load_policy_model(tmp_path / "student", layout="rows").eval()
    layer = load_output_layer(
        tmp_path / "teacher", vocab_size=100, dtype="float32", device=torch.device("cpu"), beta=beta
    )
    rows = layer.add_teacher(
        lay_out([s.token_ids for s in given], [s.policy_mask for s in given], layout="padded"), rated
    )
    hidden = model(rows, with_hidden=True)[2]
    head = model.causal_lm.get_output_embeddings()
    _, relative = head(hidden, rows.targets_N, 1.0, entropy_gradient=True, taught=rows.taught)
    (-relative).mean().backward()

    total = torch.zeros(())
    for one in given:
        ids = torch.from_numpy(one.token_ids.astype(np.int64))[None]
        places = np.flatnonzero(one.policy_mask) - 1
        with torch.no_grad():
            theirs = teacher(ids).logits[0, places]
        total = total + plain_jsd(student(ids).logits[0, places], theirs, beta).sum()
    (total / 9).backward()
    torch.testing.assert_close((-relative).mean(), total.detach() / 9, atol=1e-5, rtol=1e-5)
    expected = {name: parameter.grad for name, parameter in student.named_parameters()}
    for name, parameter in model.causal_lm.named_parameters():
        difference = (parameter.grad - expected[name]).norm() / expected[name].norm()
        assert float(difference) < 1e-4, name


def test_the_objective_reports_its_divergence() -> None:
    mask = torch.tensor([[True, True], [True, False]])
    empty = torch.zeros(2, 0)
    relative = -torch.tensor([[1.0, 2.0], [6.0, 99.0]])
    none = torch.zeros(0, 2, dtype=torch.long)
    seen = LossInputs(empty, relative, empty, mask, {}, Totals(3, 2), empty, torch.zeros(2), none)
    loss, stats = GeneralizedJSD(beta=0.3).loss(seen)
    assert float(loss) == float(stats["jsd"]) == pytest.approx(3.0)
    assert GeneralizedJSD().stats == ("jsd",) and ReverseKL().stats == ("reverse_kl",) and ReverseKL().beta == 1.0
    with pytest.raises(ConfigError, match=r"beta is 1\.5; it has to be from 0 to 1"):
        GeneralizedJSD(beta=1.5)
    (problem,) = Trainer(Policy("tiny"), objective=GeneralizedJSD()).check(None)
    assert "a teacher= go together" in problem


# Answers of the data

TASK = Task("arithmetic:max_value=3")


def asked(groups: int = 12, size: int = 2) -> list[Any]:
    rows = load_rows(TASK).train[:groups]
    return [
        prompt(member, group=f"prompts:0:{row.prompt_id}", prompt_id=row.prompt_id, group_size=size)
        for row in rows
        for member in range(size)
    ]


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLOWRL_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    found = tmp_path_factory.mktemp("policy")
    make_policy(found, tied=True)
    return str(found)


def test_a_share_of_the_groups_has_the_datas_answer(path: str) -> None:
    node = GivenAnswers(TASK, Policy(path), share=0.5)
    record = run_node(node, {"prompts": asked()}, seed=3, timeout_s=60)
    given, others = record.sent("rollouts"), record.sent("others")
    assert 0 < len(given) < 12 and len(others) == 2 * (12 - len(given))
    assert {one.member for one in given} == {0}
    assert {one.reason for one in record.lost} == {"answer_given"} and len(record.lost) == len(given)
    answers = {row.prompt_id: row.answer for row in load_rows(TASK).train}
    for one in given:
        assert one.response_text == answers[one.prompt_id]
        assert set(one.versions) == {-1} and not one.behavior_logprobs.any()
        assert 0 < one.prompt_tokens == int(np.flatnonzero(one.policy_mask)[0])
    again = run_node(GivenAnswers(TASK, Policy(path), share=0.5), {"prompts": asked()}, seed=3, timeout_s=60)
    assert [one.sample_id for one in again.sent("rollouts")] == [one.sample_id for one in given]
    assert record.metrics["answers_given"] == len(given)


def test_long_answers_are_dropped_and_counted(path: str) -> None:
    record = run_node(GivenAnswers(TASK, Policy(path), share=1.0, max_tokens=3), {"prompts": asked(2, 1)}, timeout_s=60)
    assert not record.sent("rollouts") and {one.reason for one in record.lost} == {"too_long"}


def test_answers_that_are_all_too_long_end_the_run(path: str) -> None:
    """Two epochs have more groups than there are rows."""
    prompts = [
        prompt(0, group=f"prompts:{epoch}:{row.prompt_id}", prompt_id=row.prompt_id, group_size=1)
        for epoch in range(2)
        for row in load_rows(TASK).train
    ]
    node = GivenAnswers(TASK, Policy(path), share=1.0, max_tokens=3)
    with pytest.raises(
        ConfigError, match=r"all \d+ conversations of .* are longer than max_answer_tokens = 3; raise it"
    ):
        run_node(node, {"prompts": prompts}, timeout_s=60)


def test_a_long_prompt_of_an_answer_can_be_cut_or_refused(path: str) -> None:
    whole = run_node(GivenAnswers(TASK, Policy(path), share=1.0), {"prompts": asked(2, 1)}, timeout_s=60)
    lengths = {one.prompt_id: one.token_ids for one in whole.sent("rollouts")}
    most = min(map(len, lengths.values())) - 1
    node = GivenAnswers(TASK, Policy(path), share=1.0, max_tokens=most, too_long="truncate")
    for one in run_node(node, {"prompts": asked(2, 1)}, timeout_s=60).sent("rollouts"):
        assert one.token_ids.tolist() == lengths[one.prompt_id][-most:].tolist()
        assert one.prompt_tokens == int(np.flatnonzero(one.policy_mask)[0]) > 0
    refusing = GivenAnswers(TASK, Policy(path), share=1.0, max_tokens=most, too_long="error")
    with pytest.raises(ConfigError, match=r"are longer than max_answer_tokens = \d+, the longest has \d+; raise it"):
        refusing.preflight()


def of_data(member: int) -> Trainable:
    one = sample(member, response=4)
    data = sample(member, response=4, versions=np.full(one.token_ids.size, -1, np.int32))
    return Trainable.of(scored_by_teacher(data, np.zeros(one.token_ids.size, np.float32)), np.zeros(one.token_ids.size))


def test_answers_of_the_data_have_no_age() -> None:
    rolled: Sample = sample(1, response=4)
    versions = np.where(rolled.policy_mask, 5, -1).astype(np.int32)
    own = Trainable.of(
        scored_by_teacher(sample(1, response=4, versions=versions), np.zeros(rolled.token_ids.size, np.float32)),
        np.zeros(rolled.token_ids.size),
    )
    both = [of_data(0), own]
    masks = loss_masks(both, 1, 7)
    assert [int(mask.sum()) for mask in masks] == [4, 0], "by age only what a policy has sampled is masked"
    masks = loss_masks(both, 2, 7)
    metrics = BatchStats.collect_stats(both, masks, 7).make_metrics()
    assert (metrics["staleness_max"], metrics["staleness_mean"], metrics["tokens_trained"]) == (2, 2.0, 8)
    assert BatchStats.collect_stats(both[:1], masks[:1], 7).make_metrics()["staleness_max"] is None
    cpu = torch.device("cpu")
    piece = make_micro_batch(both, masks, PolicyObjective(), version=7, layout="padded", device=cpu)
    sums = BatchSums()
    sums.add_gaps(piece, torch.zeros_like(piece.behavior_BT))
    assert dict(sums.tokens_by_age) == {2: 4}, "answers of the data have no behavior logprobs to differ from"


@pytest.mark.parametrize("on_limit", ["wait", "mask"])
def test_a_run_books_both_kinds_and_goes_on_after_a_resume(path: str, tmp_path: Path, on_limit: str) -> None:
    file, config = (
        Path(__file__).parents[1] / "nodes" / "graphs_curriculum" / "given.py",
        {"policy": path, "on_limit": on_limit},
    )
    for steps in (3, 6):
        ran = run_graph(file, tmp_path / "run", config, steps=steps, save_every=1, resume=steps > 3)
    assert ran.audit().ok and len(ran.metrics()) == 6
    states = ran.states()
    assert states["filtered: answer_given"] > 2 and states["trained"] > 6
    given = "SELECT COUNT(*) FROM samples WHERE generator LIKE 'answers/%' AND state = 'trained'"
    assert ran.rows(f"{given} AND oldest_trained_version IS NULL") == ran.rows(given) != [(0,)]


# The graph

CLUSTER = Cluster((Machine(cores=(0, 1, 2, 3), memory_bytes=16 * GB),))


def graph(*options: str) -> Any:
    file = load_file("distill")
    return file.build(file.parse([word for option in options for word in option.split()]))


def test_the_graph_has_the_parts_that_its_options_ask_for() -> None:
    assert "answers" not in graph("--beta 0.5").nodes
    mixed = graph("--beta 0.5 --lmbda 0.25")
    assert mixed.nodes["answers"].share == 0.75 and mixed.nodes["trainer"].objective == GeneralizedJSD(beta=0.5)
    cut = graph("--beta 0.5 --lmbda 0.25 --too-long truncate --max-answer-tokens 99").nodes["answers"]
    assert (cut.too_long, cut.max_tokens) == ("truncate", 99)
    offline = graph("--beta 0 --lmbda 0 --evaluate 0")
    assert "generator" not in offline.nodes and offline.nodes["prompts"].repeat == 1
    assert graph("--exact --lmbda 0").nodes["trainer"].objective == ReverseKL()
    for g in (mixed, offline, graph("--beta 0 --lmbda 0")):
        assert check(g, CLUSTER).problems == ()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ("--beta 2", "--beta is 2.0; it has to be from 0 to 1"),
        ("--lmbda -1 --exact", "--lmbda is -1.0; it has to be from 0 to 1"),
        ("--lmbda 0.5", "which needs --beta or --exact"),
        ("--beta 1 --exact", "--exact is the same as --beta 1"),
        ("--beta 1 --lmbda 0.5 --shown {answer}", "--shown is for answers that the student samples"),
        ("--beta 0.5 --objective.kind gspo", "leave --objective out"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        graph(options)
