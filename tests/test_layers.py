"""Imports run downward only, and never between two modules of one layer. The package's own `__init__` is below them all."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "src" / "dflash_mini_lab"
LAYERS: tuple[tuple[str, ...], ...] = (
    ("prefetched_ir",),
    ("types", "settings", "files", "bootstrap_install", "prefetched_linear", "programs"),
    ("scores", "paths", "trees", "artifacts", "catalog", "norms", "packed_linear", "rotary", "numpy_ops", "crossings", "tensors")
    + ("calls", "benchmark_file", "prompts", "bootstrap", "bootstrap_gpu"),
    ("compiled",),
    ("targets", "drafters", "methods"),
    ("decoding", "measurement"),
    ("exactness",),
    ("calibration", "tuning", "training", "report"),
    ("benchmark", "evaluation"),
    ("cli",),
)
"""Lowest first. A sub-package is one unit: its own files may import each other."""
LEVEL = {unit: level for level, units in enumerate(LAYERS) for unit in units}


def imported(node: ast.AST, path: Path) -> list[str]:
    """The dotted names that one statement of the file `path` imports, relative ones spelt out."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    here = ("dflash_mini_lab", *path.relative_to(PACKAGE).parts[:-1])
    base = ".".join((*here[: len(here) + 1 - node.level], *filter(None, [node.module]))) if node.level else str(node.module)
    return [f"{base}.{alias.name}" for alias in node.names]


def violations(path: Path, source: str) -> list[str]:
    """One line for each import in `source` that does not run downward. Imports inside functions count too."""
    unit = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    found = []
    for node in ast.walk(ast.parse(source)):
        for other in {name.split(".")[1] for name in imported(node, path) if name.startswith("dflash_mini_lab.")}:
            if other.startswith("__") or other == unit:
                continue
            if unit not in LEVEL or other not in LEVEL:
                found.append(f"{path.name}: {unit} or {other} is in no layer: add it to LAYERS")
            elif LEVEL[other] >= LEVEL[unit]:
                found.append(f"{path.name}: {unit} (layer {LEVEL[unit]}) imports {other} (layer {LEVEL[other]})")
    return found


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_imports_run_downward_only(path: Path) -> None:
    assert violations(path, path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("unit", "line"),
    [
        ("scores.py", "from dflash_mini_lab.cli import main"),
        ("scores.py", "from dflash_mini_lab import paths"),
        ("decoding.py", "def f():\n    import dflash_mini_lab.measurement.clock"),
        ("methods/m01.py", "from dflash_mini_lab.targets.lean import LeanDecoder"),
        ("types.py", "from .settings import Settings"),
        ("report/view.py", "from ..benchmark import session"),
        ("scores.py", "from dflash_mini_lab.nobody_knows import it"),
    ],
)
def test_the_check_sees_an_upward_or_sideways_import(unit: str, line: str) -> None:
    assert len(violations(PACKAGE / unit, line)) == 1


def test_the_bootstrap_needs_the_standard_library_only() -> None:
    for name in ("bootstrap.py", "bootstrap_install.py", "bootstrap_gpu.py"):
        for node in ast.walk(ast.parse((PACKAGE / name).read_text(encoding="utf-8"))):
            for module in imported(node, PACKAGE / name):
                own = module.startswith("dflash_mini_lab.bootstrap_install.")
                assert own or module.split(".")[0] in sys.stdlib_module_names, f"{name} imports {module}"
