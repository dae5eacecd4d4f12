"""The house rules that a machine can check."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "dflash_trt"
PLUGINS = ROOT / "plugins"
MODULES = sorted(path for path in [*PACKAGE.rglob("*.py"), *PLUGINS.rglob("*.py")] if path.name != "__init__.py")
FLOORS = [
    "errors",
    "plugins",
    "checkpoint",
    "quantization",
    "ops",
    "models",
    "engine",
    "inspection",
    "runtime",
    "conversion",
    "serving",
    "benchmarking",
    "examples",
    "cli",
]
"""Lowest first: a module imports from its own floor and from those below."""


def name_of(path: Path) -> str:
    root = PACKAGE if path.is_relative_to(PACKAGE) else ROOT
    return str(path.relative_to(root).with_suffix(""))


def floor_of(module: str) -> int:
    return FLOORS.index(module.split("/")[0])


def imports_of(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        assert not (isinstance(node, ast.ImportFrom) and node.level), f"{path} imports relatively"
        if isinstance(node, ast.ImportFrom) and node.module == "dflash_trt":
            yield from (alias.name for alias in node.names if alias.name != "__version__")
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("dflash_trt."):
            yield node.module.removeprefix("dflash_trt.").replace(".", "/")
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.startswith("dflash_trt.")]
            yield from (name.removeprefix("dflash_trt.").replace(".", "/") for name in names)


def test_examples_import_nothing_above_them() -> None:
    for path in (ROOT / "examples").glob("*.py"):
        assert all(floor_of(name) <= FLOORS.index("examples") for name in imports_of(path))


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_dependencies_point_down(path: Path) -> None:
    above = [name for name in imports_of(path) if floor_of(name) > floor_of(name_of(path))]
    assert not above, f"{name_of(path)} imports {above} from a floor above it"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_architecture_has_a_sentence_for_every_module(path: Path) -> None:
    assert f"`{name_of(path)}.py`" in (ROOT / "docs/architecture.md").read_text()


def test_architecture_names_no_module_that_is_gone() -> None:
    lines = (ROOT / "docs/architecture.md").read_text().splitlines()
    named = {line.split("`")[1] for line in lines if line.startswith("- `") and ".py`" in line}
    assert named == {f"{name_of(path)}.py" for path in MODULES}


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_every_module_and_public_name_is_documented(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree), f"{name_of(path)} does not say what it is for"
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            assert ast.get_docstring(node), f"{name_of(path)}: {node.name} has no docstring"
