"""Datasets by their name on the Hub: which files are meant, from a local server, and from a cache without one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants as constants
import pytest

from flowrl.errors import ConfigError
from flowrl.hub import forget_commits, pinned_commits
from flowrl.tasks import Task, load_demonstrations, load_preferences, load_rows
from flowrl.tasks.row_reading.row_files import choose_files, has_all_shards
from flowrl.tasks.row_reading.row_loading import all_rows
from tests.hub.hub_server import Hub, Repo, serving

CARD = """---
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train-*
  - split: test
    path: [main/test-*]
- config_name: socratic
  data_files: socratic/**/*.jsonl
---
# Word problems
"""


def lines(*rows: dict[str, object]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def problems(first: int, number: int) -> list[dict[str, object]]:
    return [{"question": f"{n}+1?", "answer": f"so\n#### {n + 1}"} for n in range(first, first + number)]


def parquet(rows: list[dict[str, object]]) -> bytes:
    import io

    import pyarrow
    import pyarrow.parquet

    out = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), out)
    return out.getvalue()


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    forget_commits()
    all_rows.cache_clear()
    yield tmp_path / "hub"
    forget_commits()
    all_rows.cache_clear()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    files = {
        "README.md": CARD.encode(),
        "main/train-00000-of-00002.parquet": parquet(problems(0, 30)),
        "main/train-00001-of-00002.parquet": parquet(problems(30, 10)),
        "main/test-00000-of-00001.parquet": parquet(problems(100, 16)),
        "socratic/a/b.jsonl": lines(*problems(200, 20)),
        "picture.png": b"no rows",
    }
    with serving({"acme/gsm": Repo(files, kind="dataset")}) as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield hub


def asked(task: str) -> list[str]:
    found = load_rows(Task(task), whole=True)
    return sorted((row.prompt for row in (*found.train, *found.held_out)), key=lambda text: int(text.split("+")[0]))


TRAIN = "acme/gsm:config=main,split=train,prompt=question,answer=answer,check=gsm8k"


def test_a_split_of_a_dataset_is_read_and_nothing_else_is_downloaded(hub: Hub, home: Path) -> None:
    assert asked(TRAIN) == [row["question"] for row in problems(0, 40)]
    commit = hub.repos["acme/gsm"].commit
    assert pinned_commits() == {"dataset acme/gsm@main": commit}
    got = {what.rpartition("/")[2] for what, _ in hub.asked if what.startswith("GET") and "/resolve/" in what}
    assert got == {"README.md", "train-00000-of-00002.parquet", "train-00001-of-00002.parquet"}
    assert asked("acme/gsm:config=main,split=test,prompt=question") == [row["question"] for row in problems(100, 16)]
    assert asked("acme/gsm:config=socratic,prompt=question")[0] == "200+1?"


def test_a_dataset_is_one_of_a_mixture_and_has_preferences_and_demonstrations(hub: Hub) -> None:
    assert len(asked("0.5*acme/gsm:config=main,prompt=question + 0.5*acme/gsm:config=socratic,prompt=question")) == 60
    assert len(load_demonstrations(Task(TRAIN), whole=True).train) > 20
    rows = [{"prompt": f"q{n}", "chosen": "a", "rejected": "b"} for n in range(20)]
    hub.repos["acme/pairs"] = Repo({"train.jsonl": lines(*rows)}, kind="dataset")
    assert len(load_preferences(Task("acme/pairs"), "pairs").train) > 10


def test_without_the_network_the_cache_answers(hub: Hub, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked(TRAIN)
    forget_commits()
    all_rows.cache_clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    before = len(hub.asked)
    assert len(asked(TRAIN)) == 40 and len(hub.asked) == before
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE is set, and only some of its files are in the cache"):
        asked("acme/gsm:config=main,split=test,prompt=question")
    next(home.glob("datasets--*/snapshots/*/main/train-00001*")).unlink()
    all_rows.cache_clear()
    with pytest.raises(ConfigError, match="only some of its files are in the cache"):
        asked(TRAIN)
    with pytest.raises(ConfigError, match="it is not in the cache"):
        asked("acme/other")


def test_what_is_missing_is_told_with_what_is_there(hub: Hub) -> None:
    refused = {
        "acme/gsm:prompt=question": "has the configurations main, socratic; choose one with the option config",
        "acme/gsm:config=mian": "has no configuration 'mian'; it has main, socratic",
        "acme/gsm:config=main,split=dev": "has no split 'dev'; it has train, test",
        "acme/gsm:config=main": r"no column 'prompt'; set prompt= to one of question, answer",
        "acme/gsm@v2:config=main": "acme/gsm has no revision 'v2'",
        "acme/none": "there is no dataset 'acme/none': it is neither a file or directory on this machine nor public",
        "./acme/gsm": "there is no task './acme/gsm'",
        "data/train.jsonl": r"there is no task 'data/train\.jsonl'",
    }
    for task, text in refused.items():
        with pytest.raises(ConfigError, match=text):
            asked(task)


def test_gated_and_lost_datasets_are_told(hub: Hub) -> None:
    hub.repos["acme/gated"] = Repo({"a.jsonl": b""}, kind="dataset", refused=403, error_code="GatedRepo")
    with pytest.raises(ConfigError, match=f"ask for access at {hub.url}/datasets/acme/gated, then log in"):
        asked("acme/gated")


NAMES = ["data/train-00000-of-00001.parquet", "data/validation-00000-of-00001.parquet", "README.md", "x.py"]


@pytest.mark.parametrize(
    ("names", "config", "split", "found"),
    [
        (NAMES, "", "train", NAMES[:1]),
        (NAMES, "", "validation", NAMES[1:2]),
        (["dev.jsonl", "train.jsonl"], "", "validation", ["dev.jsonl"]),
        (["rows.csv", "dataset_infos.json"], "", "train", ["rows.csv"]),
        (["en/train.jsonl", "de/train.jsonl"], "de", "train", ["de/train.jsonl"]),
        (["constraints.jsonl", "train_1.json"], "", "train", ["train_1.json"]),
    ],
)
def test_without_a_card_the_names_say_which_split(names: list[str], config: str, split: str, found: list[str]) -> None:
    assert choose_files("a/b", names, "# only text", config=config, split=split) == found


def test_folders_that_are_configurations_are_not_read_as_one() -> None:
    names = ["en/train.jsonl", "de/train.jsonl", "de/test.jsonl"]
    with pytest.raises(ConfigError, match="a/b has the configurations de, en; choose one with the option config"):
        choose_files("a/b", names, "", config="", split="train")
    assert choose_files("a/b", names, "", config="", split="test") == ["de/test.jsonl"]
    assert choose_files("a/b", ["train/a.csv", "training/b.csv"], "", config="", split="train") != []


def test_files_of_other_formats_are_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r"has no file of rows .* a/b@refs/convert/parquet"):
        choose_files("a/b", ["a.arrow", "load.py"], "", config="", split="train")
    card = "---\nconfigs:\n- config_name: default\n  data_files: '*.tar'\n---\n"
    with pytest.raises(ConfigError, match=r"x\.tar is of no format that flowrl reads"):
        choose_files("a/b", ["x.tar"], card, config="", split="train")
    with pytest.raises(ConfigError, match=r"the head of its README\.md is no YAML"):
        choose_files("a/b", ["x.tar"], "---\na: [\n---\n", config="", split="train")


def test_a_missing_part_of_numbered_files_is_noticed() -> None:
    assert has_all_shards(["a-00000-of-00002.parquet", "a-00001-of-00002.parquet", "b.jsonl"])
    assert not has_all_shards(["a-00000-of-00002.parquet", "b-00001-of-00002.parquet"])
    assert not has_all_shards([])


def test_an_option_for_the_hub_is_refused_for_a_file(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(lines({"prompt": "a", "answer": "b"}))
    with pytest.raises(ConfigError, match="config=main is for datasets of the Hub"):
        load_rows(Task(f"{tmp_path}/rows.jsonl:config=main"))


def test_an_agents_rows_are_read_in_another_process_and_their_commit_is_kept(hub: Hub) -> None:
    from flowrl.environments.task_questions import load_rows_apart

    assert len(load_rows_apart(Task(TRAIN)).train) > 20
    assert list(pinned_commits()) == ["dataset acme/gsm@main"]
