"""Who may import whom (docs/architecture.md), read from the source with `ast`. Nothing is imported."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src"
PACKAGE = SRC / "sunfleck"
FILES = sorted(PACKAGE.rglob("*.py"))

# Package -> what of sunfleck it may import (longest match wins; itself is always allowed).
ALLOWED: dict[str, tuple[str, ...]] = {
    "core": (),
    "policy": ("core",),
    "cluster": ("core", "executor.base", "executor.launch.wire"),
    "executor": ("core",),
    "observers": ("core",),
    "sim": ("core", "policy.scaling", "policy.base", "cluster.base", "executor.base", "engine"),
    "engine": ("core", "cluster.base", "executor.base", "policy.base"),
    "config": ("core",),
    "demo": ("core", "sim", "elastic"),
    "elastic": ("executor.elastic",),
}
FREE = {"app", "api", "cli", "__init__", "__main__", "service"}
"""Where everything comes together."""

STDLIB_VALUES = {
    "__future__", "abc", "bisect", "collections", "contextlib", "dataclasses", "enum", "functools", "heapq",
    "itertools", "math", "operator", "statistics", "typing", "msgspec",
}  # fmt: skip
NEVER_IN_POLICY = {"time", "os", "random", "socket", "subprocess", "threading", "asyncio", "logging"}
TORCH = {"executor/elastic/"}
"""The only places that may import torch (and the demo's training scripts, which are users)."""


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__") or "__init__"


def imports(path: Path, top_level_only: bool = False) -> set[str]:
    """Absolute dotted names that a file imports; `from x import y` counts as both x and x.y."""
    tree = ast.parse(path.read_text())
    nodes = tree.body if top_level_only else list(ast.walk(tree))
    package = ["sunfleck", *path.relative_to(PACKAGE).parts[:-1]]
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            name = ".".join([*base, *([node.module] if node.module else [])])
            found |= {name, *(f"{name}.{alias.name}" for alias in node.names)}
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_only_allowed_packages_are_imported(path):
    name = module_name(path)
    top = name.split(".")[0]
    if top in FREE:
        return
    assert top in ALLOWED, f"{name} is in no layer: add it to docs/architecture.md and to this table"
    allowed = (*(f"sunfleck.{a}" for a in ALLOWED[top]), f"sunfleck.{top}")
    for imported in imports(path):
        if not imported.startswith("sunfleck.") or imported.startswith("sunfleck.__"):
            continue
        # `from sunfleck.core import model` yields sunfleck.core too: a prefix of something allowed is no import of it.
        fine = any(imported == a or imported.startswith(a + ".") or a.startswith(imported + ".") for a in allowed)
        assert fine, f"{name} imports {imported}; {top} may import only {', '.join(ALLOWED[top]) or 'nothing of ours'}"


@pytest.mark.parametrize("path", sorted((PACKAGE / "core").rglob("*.py")), ids=lambda p: p.name)
def test_core_knows_no_outside_world(path):
    outside = {name for name in imports(path) if not name.startswith("sunfleck")}
    outside = {name for name in outside if name.split(".")[0] not in STDLIB_VALUES}
    assert not outside, f"{path.name} is PURE but imports {sorted(outside)}"


@pytest.mark.parametrize("path", sorted((PACKAGE / "policy").rglob("*.py")), ids=lambda p: p.name)
def test_policy_has_no_clock_and_no_chance(path):
    bad = {name for name in imports(path) if name.split(".")[0] in NEVER_IN_POLICY}
    assert not bad, f"{path.name} imports {sorted(bad)}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_torch_stays_in_the_trainer(path):
    where = str(path.relative_to(PACKAGE))
    if where.startswith("demo/") or where == "policy/milp.py" or any(where.startswith(prefix) for prefix in TORCH):
        return
    heavy = {"torch", "tensorflow", "sklearn", "matplotlib", "highspy", "optuna"}
    top = {name.split(".")[0] for name in imports(path, top_level_only=True)}
    assert not top & heavy, f"{where} imports {sorted(top & heavy)} at its top level"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_pure_files_say_so_and_are_short(path):
    text = path.read_text()
    where = path.relative_to(PACKAGE)
    if where.parts[0] in ("core", "policy"):
        assert re.match(r'"""PURE\.', text), f"{where}: the docstring must begin with PURE."
    assert text.count("\n") <= 450, f"{where} has grown past one purpose"


def test_import_is_light():
    code = (
        "import sys, time; t = time.perf_counter(); import sunfleck; dt = time.perf_counter() - t\n"
        "heavy = {'torch', 'zmq', 'numpy', 'highspy', 'rich', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "print(dt)"
    )
    runs = [
        float(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=SRC).stdout)
        for _ in range(3)
    ]
    assert min(runs) < 0.1
