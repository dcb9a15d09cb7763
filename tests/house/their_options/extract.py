"""Reads the options of OpenRLHF and TRL out of their wheels, without installing or importing them.

    pip download --no-deps openrlhf -d wheels && python -m tests.house.their_options.extract wheels/openrlhf-*.whl
    pip download --no-deps trl -d wheels && python -m tests.house.their_options.extract wheels/trl-*.whl

Writes openrlhf.json and trl.json beside itself: package, version, date, and for every option the programs (OpenRLHF) or
configurations (TRL) that have it. tests/house/test_options_table.py compares them with docs/options.md.
"""

from __future__ import annotations

import ast
import datetime
import json
import sys
import zipfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
CONFIGS = {
    "trl/trainer/grpo_config.py": "GRPOConfig",
    "trl/trainer/rloo_config.py": "RLOOConfig",
    "trl/trainer/dpo_config.py": "DPOConfig",
    "trl/trainer/kto_config.py": "KTOConfig",
    "trl/trainer/sft_config.py": "SFTConfig",
    "trl/trainer/reward_config.py": "RewardConfig",
    "trl/trainer/distillation_config.py": "DistillationConfig",
    "trl/experimental/gkd/gkd_config.py": "GKDConfig",
    "trl/experimental/online_dpo/online_dpo_config.py": "OnlineDPOConfig",
    "trl/trainer/model_config.py": "ModelConfig",
}
"""TRL's file -> the class whose fields are its options. Those of transformers' TrainingArguments are not TRL's."""


def openrlhf_options(wheel: zipfile.ZipFile) -> dict[str, list[str]]:
    """Option -> the programs of `openrlhf.cli` that declare it, by their argparse calls."""
    found: dict[str, list[str]] = defaultdict(list)
    for name in sorted(wheel.namelist()):
        if "/openrlhf/cli/" in f"/{name}" and name.endswith(".py"):
            for option in declared_arguments(ast.parse(wheel.read(name))):
                found[option].append(Path(name).stem)
    return dict(sorted(found.items()))


def declared_arguments(node: ast.AST, known: Mapping[str, str] | None = None) -> Iterator[str]:
    """The long names that a file gives to `add_argument`; in a loop over texts, those of every turn (`known`).

    Raises ValueError for a name that another expression makes: an option is never left out.
    """
    known = known or {}
    if isinstance(node, ast.For) and isinstance(node.target, ast.Name) and isinstance(node.iter, ast.Tuple | ast.List):
        for value in node.iter.elts:
            for part in node.body:
                yield from declared_arguments(part, {**known, node.target.id: str(ast.literal_eval(value))})
        return
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
        names = [text_of(part, known) for part in node.args]
        yield from (name for name in names if name.startswith("--"))
    for child in ast.iter_child_nodes(node):
        yield from declared_arguments(child, known)


def text_of(node: ast.AST, known: Mapping[str, str]) -> str:
    """A constant text, or an f-string of names in `known`."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part, known) for part in node.values)
    if isinstance(node, ast.FormattedValue) and isinstance(node.value, ast.Name) and node.value.id in known:
        return known[node.value.id]
    raise ValueError(f"an option is named by {ast.unparse(node)}, which is not read here")


def trl_options(wheel: zipfile.ZipFile) -> dict[str, list[str]]:
    """Field -> the configurations that declare it, their bases in TRL included."""
    classes: dict[str, tuple[list[str], list[str]]] = {}
    for name in wheel.namelist():
        if name.startswith("trl/") and name.endswith("_config.py"):
            classes |= {f"{name}:{one}": bodies for one, bodies in config_classes(ast.parse(wheel.read(name))).items()}
    found: dict[str, list[str]] = defaultdict(list)
    for file, kind in CONFIGS.items():
        for field in fields_of(f"{file}:{kind}", classes):
            if kind not in found[field]:
                found[field].append(kind)
    return dict(sorted(found.items()))


def config_classes(tree: ast.Module) -> Mapping[str, tuple[list[str], list[str]]]:
    """Class -> (its bases, the fields that it declares)."""
    return {
        one.name: (
            [ast.unparse(base) for base in one.bases],
            [
                part.target.id
                for part in one.body
                if isinstance(part, ast.AnnAssign)
                and isinstance(part.target, ast.Name)
                and "ClassVar" not in ast.unparse(part.annotation)
            ],
        )
        for one in tree.body
        if isinstance(one, ast.ClassDef)
    }


def fields_of(place: str, classes: Mapping[str, tuple[list[str], list[str]]]) -> list[str]:
    """The fields of a class at "FILE:NAME" and of its bases in TRL, stable ones preferred."""
    bases, fields = classes[place]
    for base in bases:
        homes = sorted((other for other in classes if other.endswith(f":{base}") and other != place), key=len)
        fields = [*fields, *(fields_of(homes[0], classes) if homes else ())]
    return list(dict.fromkeys(field for field in fields if not field.startswith("_")))


def extracted(path: Path) -> dict[str, Any]:
    """What is written for the wheel at `path`."""
    package, version = path.name.split("-")[:2]
    with zipfile.ZipFile(path) as wheel:
        options = {"openrlhf": openrlhf_options, "trl": trl_options}[package](wheel)
    read = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    return {"package": package, "version": version, "source": path.name, "read": read, "options": options}


def main(paths: list[str]) -> int:
    """Write one file for each wheel."""
    for path in map(Path, paths):
        found = extracted(path)
        text = json.dumps(found, indent=1)
        (HERE / f"{found['package']}.json").write_text(text + "\n", encoding="utf-8")
        print(f"{path.name}: {len(found['options'])} options")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
