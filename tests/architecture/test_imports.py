"""Packages import downwards, and the library imports nothing of the lab."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "gradvac"
FILES = sorted(SOURCE.rglob("*.py"))

# From the bottom up: a package imports only from lines above its own.
LAYERS = """
gram tasks utils
rules engine
alignment by_task
aligner
sampling analysis
integrations
lab.runs
lab.languages
lab.training
lab.recipes
lab.experiments
cli
""".strip().splitlines()
LAYER = {package: number for number, line in enumerate(LAYERS) for package in line.split()}


def package_of(module: str) -> str:
    """`lab.training` of `gradvac.lab.training.loop`, `rules` of `gradvac.rules`."""
    parts = module.split(".")[1:]
    return ".".join(parts[:2] if parts[:1] == ["lab"] else parts[:1])


def imports(path: Path) -> Iterator[str]:
    """Full names of what a file imports, at any depth of its code."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the package they come from"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def faults(path: Path, own: str) -> list[str]:
    """Imports of a file that do not go downwards."""
    wrong = []
    for name in imports(path):
        other = package_of(name) if name.startswith("gradvac.") else ""
        if not other or other == own:
            continue
        if other in LAYER:
            below = LAYER[other] < LAYER[own]
        else:  # `from gradvac import Aligner`
            below = LAYER[own] > LAYER["aligner"]
        if not below:
            wrong.append(f"{path.relative_to(SOURCE.parent)}: {own} may not import {name}")
    return wrong


def test_packages_import_downwards() -> None:
    wrong = []
    for path in FILES:
        module = ".".join(("gradvac", *path.relative_to(SOURCE).with_suffix("").parts))
        own = package_of(module.removesuffix(".__init__"))
        if own not in ("", "__init__", "__main__", "lab"):
            wrong += faults(path, own)
    assert wrong == []


def test_the_rule_can_fail(tmp_path: Path) -> None:
    file = SOURCE / "gram.py"
    assert faults(file, "gram") == []
    wrong = tmp_path / "src" / "wrong.py"
    wrong.parent.mkdir()
    wrong.write_text("def f():\n    from gradvac.lab.runs import RunFolder\n")
    assert list(imports(wrong)) == ["gradvac.lab.runs.RunFolder"]
    assert LAYER[package_of("gradvac.lab.runs.RunFolder")] > LAYER["analysis"]


def test_all_collectives_are_in_one_file() -> None:
    kinds = "all_|barrier|batch_|broadcast|gather|irecv|isend|new_group|recv|reduce|scatter|send"
    call = re.compile(rf"\bdist(?:ributed)?\.(?:{kinds})\w*|_functional_collectives")
    found = [path for path in FILES if call.search(path.read_text("utf-8"))]
    assert len(found) == 1, found
    assert "engine" in found[0].parts
