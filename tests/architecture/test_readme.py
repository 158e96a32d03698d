"""What the README and the examples promise exists and runs."""

import re
from pathlib import Path

import pytest

from ..drivers import run_driver

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
# Longer ones, which tests/tagging and tests/recipes run.
PROGRAMS = {"pretrain_encoder.py": 125, "vision_recipe.py": 150}
EXAMPLES = sorted(p for p in (ROOT / "examples").glob("*.py") if p.name not in PROGRAMS)


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    named = set(re.findall(r"\bmake ([a-z]+)", README))
    assert {"demo", "test"} <= named
    for target in named:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"no target {target}"


def test_readme_code_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {"__name__": "readme"})


def test_examples_are_short() -> None:
    paths = (ROOT / "examples").glob("*.py")
    lengths = {path.name: len(path.read_text("utf-8").splitlines()) for path in paths}
    assert {name: n for name, n in lengths.items() if n > PROGRAMS.get(name, 60)} == {}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_run(path: Path) -> None:
    assert run_driver(path).stdout.strip(), "show something"
