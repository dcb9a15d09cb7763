"""The names of DeepSpeed's settings, read from its source: importing deepspeed takes seconds.

DeepSpeed ignores an unknown name at the top level, and fails with a traceback at an unknown name of ZeRO's. If
DeepSpeed is not installed, no names are known, and every name is accepted.
"""

from __future__ import annotations

import ast
import difflib
import functools
import importlib.util
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ZERO = "zero_optimization"
READ = ("config.py", "constants.py")
"""Names of the files, in all folders of DeepSpeed, whose string constants include the names of settings."""
OURS = {
    "train_batch_size": "--groups-per-step and --group-size",
    "gradient_clipping": "--zero.clip-grad-norm",
    "optimizer": "--zero.optimizer",
    "scheduler": "--schedule.decay",
    "fp16": "--dtype",
    "tensor_parallel": "--trainer.tensor-parallel-size",
}
"""Setting that a run decides itself -> the run's option for it."""


def setting_problems(settings: Mapping[str, Any]) -> list[str]:
    """What is wrong with the names of `--zero.deepspeed`, as complete sentences."""
    return [*_problems(settings)]


def _problems(settings: Mapping[str, Any]) -> Iterator[str]:
    known, of_zero = known_settings()
    for name, value in settings.items():
        if name in OURS:
            yield f"--zero.deepspeed sets {name!r}, which a run decides itself; leave it out, and see {OURS[name]}"
        elif known and name not in known:
            yield f"--zero.deepspeed names {name!r}, which is no setting of DeepSpeed; {_hint(name, known)}"
        elif name == ZERO and not isinstance(value, Mapping):
            yield f"--zero.deepspeed sets {ZERO} to {value!r}; name one of its settings, as {ZERO}.overlap_comm=true"
        elif name == ZERO and of_zero:
            for inner in sorted(value.keys() - of_zero):
                yield f"--zero.deepspeed names '{ZERO}.{inner}', which is no setting of ZeRO; {_hint(inner, of_zero)}"


def _hint(name: str, known: frozenset[str]) -> str:
    near = difflib.get_close_matches(name, known, 1)
    return f"did you mean {near[0]}?" if near else "its documentation lists them"


@functools.cache
def known_settings() -> tuple[frozenset[str], frozenset[str]]:
    """(names at the top level, names of zero_optimization); the first set also has some names of deeper levels."""
    spec = importlib.util.find_spec("deepspeed")
    if spec is None or not spec.submodule_search_locations:
        return frozenset(), frozenset()
    home = Path(next(iter(spec.submodule_search_locations)))
    files = [path for name in READ for path in home.rglob(name)]
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in files}
    texts = {node.value for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    names = {text for text in texts if isinstance(text, str) and re.fullmatch(r"[a-z][a-z0-9_]+", text)}
    return frozenset(names), frozenset(_zero_fields(trees.get(home / "runtime/zero/config.py")))


def _zero_fields(tree: ast.Module | None) -> Iterator[str]:
    """The fields of DeepSpeedZeroConfig and their aliases."""
    classes = [node for node in (tree.body if tree else ()) if isinstance(node, ast.ClassDef)]
    for one in classes:
        for field in one.body if one.name == "DeepSpeedZeroConfig" else ():
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                yield field.target.id
                for keyword in field.value.keywords if isinstance(field.value, ast.Call) else ():
                    if keyword.arg == "alias" and isinstance(keyword.value, ast.Constant):
                        yield str(keyword.value.value)
