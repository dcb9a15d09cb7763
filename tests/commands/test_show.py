"""Episodes that a run keeps, and `flowrl show`."""

from __future__ import annotations

import io
import json
import resource
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from flowrl.agents import TokenSequence
from flowrl.cli import main
from flowrl.models.tokens.characters import character_tokenizer
from flowrl.models.tokens.vocabulary import TokenPieces
from flowrl.nodes.episodes.episode_reports import fed_roles, spans_of
from flowrl.runtime.samples import kept_episodes
from flowrl.runtime.samples.kept_episodes import KeptEpisodes, is_chosen, read_kept, rewind_kept
from flowrl.runtime.show import attempt_text, show_sample_or_list
from flowrl.runtime.telemetry.standard_streams import escape_controls
from tests.runtime.runs.test_runtime_episodes import play

NOT_CHOSEN = [name for number in range(2000) if not is_chosen(name := f"g:{number}")]
CHOSEN = next(name for number in range(2000) if is_chosen(name := f"g:{number}"))


def record(sample_id: str = "g:0", ended_s: float = 1.0, **fields: Any) -> dict[str, Any]:
    given: dict[str, Any] = {
        "sample_id": sample_id,
        "attempt": 0,
        "ended_s": ended_s,
        "seconds": 2.0,
        "environment": "played",
        "turns": 2,
        "reward": 0.5,
        "cut": "",
        "cause": "",
        "text": "",
        "metrics": {"steps": 2.0},
        "seat_rewards": [],
        "rewards": [[3, 0.0], [6, 0.5]],
        "sequences": [
            {
                "pieces": ["<q>", "1+1", "a", "b\n", "<t>", "2", "\x1b[2J"],
                "spans": [[2, -1], [1, 3], [1, 4], [1, -1], [2, 4]],
                "roles": [["system", "user"], ["tool"]],
                "seat": None,
            }
        ],
    }
    return given | fields


def keep(run_dir: Path, *records: dict[str, Any], number: int = 4, warn: Any = pytest.fail) -> None:
    kept = KeptEpisodes(run_dir, number, warn)
    for one in records:
        kept.add_attempt(one["sample_id"], json.dumps(one).encode(), failed=bool(one["cause"]))
    kept.close()


def kept_ids(run_dir: Path) -> list[str]:
    return [one["sample_id"] for one in read_kept(run_dir)]


# What is kept


def test_the_last_ones_the_failed_ones_and_one_in_a_hundred_are_kept(tmp_path: Path) -> None:
    failed, others = NOT_CHOSEN[0], NOT_CHOSEN[1:21]
    first = [record(failed, 0.1, cause="env_died"), record(CHOSEN, 0.2)]
    keep(tmp_path, *first, *(record(name, 1.0 + n) for n, name in enumerate(others)))
    found = kept_ids(tmp_path)
    assert found[:2] == [failed, CHOSEN] and found[-4:] == others[-4:]
    assert 4 <= len(found) - 2 <= 8, "twice the number at most"
    assert 5 <= sum(map(is_chosen, (f"p:{number}" for number in range(1000)))) <= 20


def test_the_files_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_episodes, "MOST_BYTES", 4000)
    keep(tmp_path, *(record(f"g:{n}", n, cause="env_died", text="x" * 500) for n in range(50)), number=1000)
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "episodes").iterdir()}
    assert len(sizes) == 4 and all(0 < size <= 4000 for size in sizes.values())
    assert kept_ids(tmp_path)[-1] == "g:49"


def test_a_smaller_number_of_a_resumed_run_holds_for_the_file_that_is_there(tmp_path: Path) -> None:
    keep(tmp_path, *(record(name, n) for n, name in enumerate(NOT_CHOSEN[:10])), number=20)
    keep(tmp_path, *(record(name, n) for n, name in enumerate(NOT_CHOSEN[10:16], start=10)), number=3)
    assert kept_ids(tmp_path) == NOT_CHOSEN[10:16]


def test_zero_keeps_nothing(tmp_path: Path) -> None:
    keep(tmp_path, record(cause="env_died"), number=0)
    assert not (tmp_path / "episodes").exists()


def test_a_killed_process_leaves_whole_lines(tmp_path: Path) -> None:
    keep(tmp_path, record("g:1", 1), record("g:2", 2))
    path = tmp_path / "episodes" / "recent.jsonl"
    path.write_bytes(path.read_bytes()[:-30])
    assert kept_ids(tmp_path) == ["g:1"]
    keep(tmp_path, record("g:3", 3))
    assert kept_ids(tmp_path) == ["g:1", "g:3"] and len(path.read_text().splitlines()) == 2


def test_a_full_disk_is_told_once_and_what_comes_after_is_kept(tmp_path: Path) -> None:
    told: list[str] = []
    kept = KeptEpisodes(tmp_path, 4, told.append)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(json.dumps(record())) + 100, hard))
    try:
        for number in range(3):
            kept.add_attempt(f"g:{number}", json.dumps(record(f"g:{number}", number)).encode(), failed=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(told) == 1 and "cannot be written" in told[0]
    kept.add_attempt("g:7", json.dumps(record("g:7", 7)).encode(), failed=False)
    kept.close()
    assert kept_ids(tmp_path) == ["g:0", "g:7"]


def test_a_resume_forgets_what_it_undoes(tmp_path: Path) -> None:
    keep(tmp_path, *(record(f"g:{n}", n, cause="env_died") for n in range(4)))
    rewind_kept(tmp_path, 1.5)
    assert kept_ids(tmp_path) == ["g:0", "g:1"]


# Records of a run


def test_a_run_keeps_every_attempt_and_a_resume_no_attempt_twice(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    first = play(run_dir, fails=0.3, keep_episodes=1000).raise_for_error()
    attempts = Counter(one["sample_id"] for one in read_kept(run_dir))
    booked = dict(first.rows("SELECT sample_id, attempts FROM episodes"))
    assert booked and {name: attempts[name] for name in booked} == booked
    void = first.rows("SELECT sample_id, attempt, cause FROM attempts WHERE cause LIKE 'env_%'")
    failed = [(one["sample_id"], one["attempt"], one["cause"]) for one in read_kept(run_dir) if one["cause"]]
    assert sorted(failed) == sorted(void)
    assert any("a bug of the environment" in one["text"] for one in read_kept(run_dir))
    for later in sorted((run_dir / "checkpoints").iterdir())[1:]:
        shutil.rmtree(later)
    again = play(run_dir, fails=0.3, resume=True, keep_episodes=1000).raise_for_error()
    new = dict(again.rows("SELECT sample_id, attempts FROM episodes WHERE incarnation = 1"))
    attempts = Counter(one["sample_id"] for one in read_kept(run_dir))
    old = dict(again.rows("SELECT sample_id, attempts FROM episodes WHERE incarnation = 0"))
    assert new and {name: attempts[name] for name in old} == old
    finished = Counter(one["sample_id"] for one in read_kept(run_dir) if not one["cause"])
    assert max(finished.values()) == 1


def test_the_texts_of_tokens_join_to_the_text_and_origins_follow_the_mask() -> None:
    tokenizer = character_tokenizer()
    ids = tokenizer("12 + 3=15<|end|>")["input_ids"]
    assert "".join(TokenPieces(tokenizer).text_pieces(ids)) == "12 + 3=15<|end|>"
    mask = np.array([False, False, True, True, True, False])
    versions = np.array([-1, -1, 3, 3, 4, -1], np.int32)
    sequence = TokenSequence(np.arange(6, dtype=np.int32), mask, np.zeros(6, np.float32), versions)
    assert spans_of(sequence) == [(2, -1), (2, 3), (1, 4), (1, -1)]


class Bytes:
    """A tokenizer of UTF-8 bytes, whose decoder strips a space at the beginning, as SentencePiece's does."""

    def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode())}

    def decode(self, ids: list[int], **options: Any) -> str:
        return bytes(ids).decode(errors="replace").removeprefix(" ")


def test_a_character_of_several_tokens_belongs_to_the_last_of_them() -> None:
    pieces = TokenPieces(Bytes())
    assert pieces.text_pieces(list(" aé€".encode())) == [" ", "a", "", "é", "", "", "€"]
    assert "".join(pieces.text_pieces(list("a€".encode())[:-1])) == "a\ufffd"


def test_roles_of_what_was_fed() -> None:
    said = [{"role": role} for role in ("system", "user", "assistant", "tool", "tool", "assistant", "user")]
    assert fed_roles(said) == [["system", "user"], ["tool", "tool"]]


# What is shown


def printed(run_dir: Path, sample_id: str | None = None, *, terminal: bool = False) -> str:
    out = io.StringIO()
    colours = "standard" if terminal else None
    show_sample_or_list(run_dir, sample_id, Console(file=out, width=120, force_terminal=terminal, color_system=colours))
    return out.getvalue()


def test_an_attempt_is_printed_by_turns_with_marks_versions_and_rewards() -> None:
    lines = [line.plain for line in attempt_text(record())]
    assert lines == [
        "attempt 0  ended, reward 0.5  (2 turns, 2.0 s)",
        "turn 1  system, user  2 tokens",
        "| <q>1+1",
        "turn 1  policy  2 tokens  v3, v4  reward 0",
        "> a⟨v4⟩b",
        "> ",
        "turn 2  tool  1 tokens",
        "| <t>",
        "turn 2  policy  2 tokens  v4  reward 0.5",
        "> 2\\x1b[2J",
        "metrics  steps 2",
    ]


def test_seats_are_named_and_each_turn_has_the_reward_of_its_own_seat() -> None:
    one = {"pieces": ["5", "1"], "spans": [[1, -1], [1, 0]], "roles": [["user"]]}
    kept = record(
        sequences=[{**one, "seat": 0}, {**one, "seat": 1}],
        seat_rewards=[[0, 0.0], [1, 1.0]],
        rewards=[[1, 0.0], [3, 1.0]],
        metrics={},
    )
    assert [line.plain for line in attempt_text(kept)][1:] == [
        "sequence 1  seat 0  reward 0",
        "turn 1  user  1 tokens",
        "| 5",
        "turn 1  policy  1 tokens  v0  reward 0",
        "> 1",
        "sequence 2  seat 1  reward 1",
        "turn 1  user  1 tokens",
        "| 5",
        "turn 1  policy  1 tokens  v0  reward 1",
        "> 1",
    ]


def test_turns_rewards_and_roles_count_through_all_sequences() -> None:
    """The second context is written anew; the third reply goes on after the second."""
    sequences = [
        {"pieces": ["<q>", "1", "a"], "spans": [[2, -1], [1, 3]]},
        {"pieces": ["<q>", "1", "<t>", "b", "<u>", "c", "d"], "spans": [[3, -1], [1, 3], [1, -1], [2, 4]]},
    ]
    roles, rewards = [["system", "user"], ["tool"], ["user"]], [[2, 0.25], [6, 0.5], [9, 1.0]]
    of_one_seat = [{**sequence, "roles": roles, "seat": None} for sequence in sequences]
    one = record(sequences=of_one_seat, rewards=rewards, metrics={}, turns=3)
    assert [line.plain for line in attempt_text(one) if not line.plain.startswith(("> ", "| "))][1:] == [
        "sequence 1",
        "turn 1  system, user  2 tokens",
        "turn 1  policy  1 tokens  v3  reward 0.25",
        "sequence 2",
        "turn 2  context, tool  3 tokens",
        "turn 2  policy  1 tokens  v3  reward 0.5",
        "turn 3  user  1 tokens",
        "turn 3  policy  2 tokens  v4  reward 1",
    ]


def test_rewritten_contexts_of_a_run_show_every_turn_and_reward_once(tmp_path: Path) -> None:
    play(tmp_path / "run", steps=2, history="template", most=8).raise_for_error()
    several = [one for one in read_kept(tmp_path / "run") if len(one["sequences"]) > 1]
    assert several
    for one in several:
        policy = [line.plain.split() for line in attempt_text(one) if "  policy  " in line.plain]
        assert [int(words[1]) for words in policy] == list(range(1, one["turns"] + 1))
        assert [float(words[-1]) for words in policy] == [reward for _, reward in one["rewards"]]


def test_text_of_a_policy_cannot_move_the_cursor() -> None:
    assert escape_controls("a\x1b[2J\r\u202eb\n\tü🙂") == "a\\x1b[2J\\r\\u202eb\n\tü🙂"


def test_a_run_is_listed_and_an_episode_is_shown_with_its_void_attempts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    ran = play(run_dir, fails=0.4, retries=1, keep_episodes=1000).raise_for_error()
    lines = printed(run_dir).splitlines()
    assert lines[0].split()[:2] == ["sample", "state"] and len(lines) == 1 + len(
        ran.rows("SELECT DISTINCT sample_id FROM episodes UNION SELECT sample_id FROM attempts")
    )
    (sample_id, cause), *_ = ran.rows(
        "SELECT sample_id, a.cause FROM attempts a JOIN samples USING (sample_id) WHERE state = 'trained'"
        " AND a.cause LIKE 'env_%'"
    )
    assert main(["show", str(run_dir), sample_id, "--plain"]) == 0
    text = capsys.readouterr().out
    for part in ("state      trained in step", f"void       attempt 0: {cause}", f"attempt 0  failed: {cause}"):
        assert part in text
    assert "attempt 1  ended, reward" in text and "\n> " in text and "\x1b" not in text
    assert "\x1b[3" in printed(run_dir, sample_id, terminal=True)
    shutil.rmtree(run_dir / "episodes")
    assert f"{sample_id}  step" in printed(run_dir, sample_id), "it is kept among the samples, too"
    shutil.rmtree(run_dir / "rollouts")
    assert "Its text is not kept" in printed(run_dir, sample_id)


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ([], "needs a run directory"),
        (["nowhere"], "there is no run directory nowhere"),
        (["{}"], "has no ledger.sqlite"),
        (["{}", "a", "b"], "needs a run directory"),
    ],
)
def test_a_mistake_is_one_sentence(
    args: list[str], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", *(arg.format(tmp_path) for arg in args)]) == 2
    assert text in capsys.readouterr().err


def test_an_unknown_sample_gets_a_near_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = tmp_path / "run"
    play(run_dir, steps=1).raise_for_error()
    known = read_kept(run_dir)[0]["sample_id"]
    assert main(["show", str(run_dir), f"{known}x"]) == 2
    assert f"did you mean {known}" in capsys.readouterr().err
