"""The ladder's runner without its runs: commands, paired errors, the table, checksums of weights."""

from __future__ import annotations

import json
import sqlite3
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.training.gain import Gain, Preference, gain, paired, preference
from benchmarks.training.ladder import CASES, CHAIN, PAGE, RANDOM, Ladder
from benchmarks.training.ladder_cases import CaseFailed, LadderCase, Result, checkpoint, flowrl, result_of
from benchmarks.training.ladder_controls import checksum, scores
from benchmarks.training.ladder_table import BEGIN, END, markdown, write_table
from flowrl.graph.load import load_file
from flowrl.runtime.ledger.ledger_file import SCHEMA

ROOT = Path(__file__).parents[2]
GOOD = Gain(prompts=256, before=0.3, after=0.5, error=0.02)


def result(case: str = "grpo", seed: int = 0, **more: object) -> Result:
    fields = {"command": "flowrl run graphs/grpo.py", "gain": GOOD, "minutes": 1.5, "audit": True}
    return Result(case=case, seed=seed, **fields | more)  # type: ignore[arg-type]


def ledger(run_dir: Path, *rows: tuple[str, str, int, int], also: str = "") -> None:
    """(phase, prompt, member, correct), and answers to prompts of another task that are all right."""
    run_dir.mkdir(parents=True)
    with sqlite3.connect(run_dir / "ledger.sqlite") as db:
        db.executescript(SCHEMA)
        columns = [name for _, name, *_ in db.execute("PRAGMA table_info(evaluations)")]
        others = [(phase, f"{also}-{prompt}", member, 1, also) for phase, prompt, member, _ in rows if also]
        for phase, prompt, member, correct, task in [*((*row, "first") for row in rows), *others]:
            known = {"phase": phase, "prompt_id": prompt, "member": member, "correct": correct, "score": correct * 0.5}
            known["task"] = task
            values = [known.get(name, 0) for name in columns]
            db.execute(f"INSERT INTO evaluations VALUES ({', '.join('?' * len(values))})", values)
    db.close()


def test_the_error_is_that_of_the_paired_differences() -> None:
    found = paired({"a": 0.25, "b": 0.5, "c": 0.0}, {"a": 0.75, "b": 0.5, "c": 0.25})
    assert (found.before, found.after) == (0.25, 0.5)
    assert found.error == pytest.approx(np.std([0.5, 0.0, 0.25], ddof=1) / np.sqrt(3))
    assert paired({"a": 0.0}, {"a": 1.0}).error == float("inf")


def test_gains_are_read_from_the_ledger_prompt_by_prompt(tmp_path: Path) -> None:
    answers = [("before", "p", 0, 0), ("before", "p", 1, 1), ("before", "q", 0, 0), ("before", "q", 1, 0)]
    answers += [("after", "p", 0, 1), ("after", "p", 1, 1), ("after", "q", 0, 0), ("after", "q", 1, 1)]
    ledger(tmp_path / "run", *answers, also="other")
    found = gain(tmp_path / "run")
    assert (found.prompts, found.before, found.after, found.error) == (2, 0.25, 0.75, 0.0)
    assert scores(tmp_path / "run", "before")["p", 1] == 0.5
    ledger(tmp_path / "half", *answers[:4])
    with pytest.raises(ValueError, match="no evaluation of the same prompts before and after"):
        gain(tmp_path / "half")


def test_two_errors_and_closed_books_make_a_good_result() -> None:
    case = LadderCase("grpo", 5)
    assert case.passed(result()) and case.passed(result(audit=None))
    assert not case.passed(result(audit=False))
    assert case.passed(result(gain=None))
    assert replace(case, floor=0.5, margin=0.19).passed(result())
    assert not replace(case, floor=0.51).passed(result()) and not replace(case, margin=0.21).passed(result())
    assert not case.passed(result(gain=Gain(prompts=256, before=0.25, after=0.28125, error=0.015625)))
    assert case.passed(result(preference=Preference(0.9, -0.1, -3.0)))
    assert not case.passed(result(preference=Preference(0.5, 0.1, -3.0)))


def test_preferences_are_read_from_the_last_line(tmp_path: Path) -> None:
    last = {"step": 2, "held_out/preference_accuracy": 0.75}
    for kind in ("chosen", "desirable"):
        names = ("chosen", "rejected") if kind == "chosen" else ("desirable", "undesirable")
        found = {f"held_out/{names[0]}_reward": 0.1, f"held_out/{names[0]}_logprob_change": 0.5}
        found[f"held_out/{names[1]}_logprob_change"] = -2.0
        (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n' + json.dumps(last | found) + "\n")
        assert preference(tmp_path) == Preference(0.75, 0.5, -2.0)
        (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')  # its data ended before its steps
        (tmp_path / "evaluations.jsonl").write_text(json.dumps({"phase": "end"} | last | found) + "\n")
        assert preference(tmp_path) == Preference(0.75, 0.5, -2.0)
        (tmp_path / "evaluations.jsonl").unlink()
    for other in ("", '{"step": 1}\n', json.dumps(last | {"held_out/chosen_reward": 1.0}) + "\n"):
        (tmp_path / "metrics.jsonl").write_text(other)
        assert preference(tmp_path) is None, "a reward model has no logprobs to change"


def test_options_name_the_results_of_other_rungs(tmp_path: Path) -> None:
    case = LadderCase("ppo", 20, ("--policy", "{sft}", "--reward-model", "{reward_model}"))
    assert case.needs == ("sft", "reward_model")
    command = case.command({"sft": tmp_path / "a", "reward_model": tmp_path / "b"}, 2, tmp_path)
    assert command[:6] == [
        "run",
        "graphs/ppo.py",
        "--policy",
        str(tmp_path / "a"),
        "--reward-model",
        str(tmp_path / "b"),
    ]
    assert command[6:] == ["--evaluate", "256", "--evaluate-samples", "4", "--steps", "20", "--seed", "2"]
    known = dict.fromkeys(case.needs, tmp_path)
    assert "--evaluate" not in replace(case, start="tiny").command(known, 0, tmp_path)


def test_a_rung_may_write_a_file_for_those_above(tmp_path: Path) -> None:
    case = LadderCase("pairs", 20, ("--policy", "{sft}", "--pairs", "{out}"), writes="pairs.jsonl")
    assert case.needs == ("sft",)
    out = result_of(case, 0, tmp_path)
    assert out == tmp_path / "pairs-0-pairs.jsonl"
    assert case.command({"sft": tmp_path}, 0, tmp_path)[4:6] == ["--pairs", str(out)]
    assert "--evaluate" not in case.command({"sft": tmp_path}, 0, tmp_path)
    assert (
        markdown([case], [result("pairs", gain=None, audit=None)]).splitlines()[4].startswith("| pairs | – | – | – |")
    )


@pytest.mark.parametrize("cases", [CASES, CHAIN], ids=["table", "chain"])
def test_a_rung_starts_from_what_lies_below_it(cases: tuple[LadderCase, ...]) -> None:
    below = {RANDOM}
    for case in cases:
        assert set(case.needs) <= below and case.title not in below
        assert case.minutes <= 10 and (case.steps >= 1 or case.writes)
        below.add(case.title)


@pytest.mark.parametrize("case", (*CASES, *CHAIN), ids=lambda case: case.title)
def test_every_rung_is_a_graph_that_takes_its_options(case: LadderCase, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    command = case.command(dict.fromkeys(case.needs, tmp_path), 0, tmp_path)
    file = load_file(ROOT / command[1])
    own = command[2 : command.index("--steps" if case.steps else "--seed")]
    assert file.build(file.parse(own)).nodes


def test_results_are_kept_and_read_back(tmp_path: Path) -> None:
    case = LadderCase("grpo", 5, seeds=2)
    ladder = Ladder((case,), tmp_path)
    result(seed=1).write(ladder.record(case, 1))
    assert ladder.results() == [result(seed=1)]


def test_the_table_has_a_line_a_rung_with_the_gains_of_its_seeds() -> None:
    cases = [LadderCase("grpo", 5, seeds=2), LadderCase("dpo", 5), LadderCase("sft", 5)]
    found = [result(), result(seed=1, minutes=2.5, audit=False), result("sft", audit=None)]
    lines = markdown(cases, found).splitlines()
    assert lines[4] == (
        "| grpo | 0.300 | 0.500 | +0.200 ± 0.020, +0.200 ± 0.020 | 2.0 | failed | `flowrl run graphs/grpo.py` |"
    )
    assert lines[5].startswith("| sft |") and "| – |" in lines[5]
    assert len(lines) == 6, "a case without results has no line"


def test_the_table_takes_its_place_in_the_page(tmp_path: Path) -> None:
    page = tmp_path / "ladder.md"
    page.write_text(f"above\n{BEGIN}\nold\n{END}\nbelow\n")
    write_table(page, "new")
    assert page.read_text() == f"above\n{BEGIN}\nnew\n{END}\nbelow\n"
    page.write_text("no marks")
    with pytest.raises(ValueError, match="has no place for the table"):
        write_table(page, "new")
    assert page.read_text() == "no marks"


def test_the_page_has_the_place() -> None:
    text = PAGE.read_text()
    assert text.index(BEGIN) < text.index(END)


def test_a_run_that_fails_is_told_with_its_last_line(tmp_path: Path) -> None:
    with pytest.raises(
        CaseFailed, match=r"mine ended with status 2: flowrl: .*there is no option --no-such.*mine\.log"
    ):
        flowrl(["run", "graphs/sft.py", "--no-such", "1"], tmp_path / "mine", limit_s=60)
    with pytest.raises(CaseFailed, match="holds no checkpoint"):
        checkpoint(tmp_path)


def test_the_checksum_sees_every_weight(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    weights = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(5, np.float32)}
    for name, change in (("one", {}), ("same", {}), ("other", {"b": np.array([1, 1, 1, 1, 1.0001], np.float32)})):
        (tmp_path / name).mkdir()
        save_file(weights | change, tmp_path / name / "model.safetensors", metadata={"made": name})
    assert checksum(tmp_path / "one") == checksum(tmp_path / "same") != checksum(tmp_path / "other")
