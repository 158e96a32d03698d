"""What the README and the examples promise exists and runs."""

import contextlib
import io
import json
import re
from pathlib import Path

import pytest

from ..drivers import run_driver

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
# Longer ones, which tests/tagging and tests/recipes run.
PROGRAMS = {"pretrain_encoder.py": 140, "vision_recipe.py": 150}
EXAMPLES = sorted(p for p in (ROOT / "examples").glob("*.py") if p.name not in PROGRAMS)


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    named = set(re.findall(r"\bmake ([a-z]+)", README))
    assert {"demo", "test"} <= named
    for target in named:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"no target {target}"


def test_readme_code_runs() -> None:
    """And prints what stands below it."""
    blocks = re.findall(r"```python\n(.*?)```\n\n```\n(.*?)```", README, re.DOTALL)
    assert len(blocks) == README.count("```python") > 0
    for block, shown in blocks:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(block, "README.md", "exec"), {"__name__": "readme"})
        assert printed.getvalue() == shown


def test_examples_are_short() -> None:
    paths = (ROOT / "examples").glob("*.py")
    lengths = {path.name: len(path.read_text("utf-8").splitlines()) for path in paths}
    assert {name: n for name, n in lengths.items() if n > PROGRAMS.get(name, 60)} == {}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_run(path: Path) -> None:
    if "torchrun" in path.read_text("utf-8"):
        said = run_driver("tests.architecture.as_torchrun", path)
    else:
        said = run_driver(path)
    assert said.stdout.strip(), "show something"


def test_the_notebook_runs_and_shows_what_it_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers may differ a little from machine to machine, words do not.

    The report's sentences have tests of their own.
    """
    monkeypatch.chdir(tmp_path)
    notebook = json.loads((ROOT / "examples" / "which_tasks_conflict.ipynb").read_text("utf-8"))
    names: dict[str, object] = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile("".join(cell["source"]), "notebook", "exec"), names)
            shown = "".join(line for output in cell["outputs"] for line in output["text"])
            if "summarise_runs" not in "".join(cell["source"]):
                assert without_digits(printed.getvalue()) == without_digits(shown)
    assert (tmp_path / "report.html").is_file()


def without_digits(text: str) -> str:
    return re.sub(r"[-+]?[\d.]+", "#", re.sub(" +", " ", text))
