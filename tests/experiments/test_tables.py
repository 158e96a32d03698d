"""The tables of the results pages: from the published numbers, and from runs packed into a file."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from types import ModuleType

import pytest

from gradvac.lab.experiments import compare_runs, to_markdown

from ..drivers import load_module
from .conftest import ROOT
from .made_runs import make_run

FOLDER = ROOT / "docs" / "results"


@pytest.fixture(scope="module")
def results() -> ModuleType:
    return load_module(FOLDER / "write_results.py")


CHANGES = [  # a number of a file, and where its page shows it
    ("published", "[-0.09, -0.3, 0.12]", "[9, 8, 10]", "table1", "+9.00 (+8.00 to +10.00)"),
    ("published", '"altered": 0.27', '"altered": 0.99', "figure3", "| 1.019 | 99% |"),
    ("transfer", "[[[8.194", "[[[80.194", "transfer", "| be | 3.2 | 42."),
    ("equal_compute", '"hi":[15.1', '"hi":[1015.1', "equal_compute", "| hi | 264.7"),
    ("finish_alone", '"mr-en":[31.8', '"mr-en":[931.8', "finish_alone", "| auto | 59.90 |"),
]


def test_pages_have_what_the_published_numbers_say(results: ModuleType, tmp_path: Path) -> None:
    """Tables between the marks are those of `write_results.py`; a changed number is noticed."""
    for name, text in results.pages(FOLDER).items():
        assert (FOLDER / name).read_text("utf-8") == text, f"run write_results.py: {name}"
        (tmp_path / name).write_text(text)
    for path in FOLDER.glob("*.json"):
        shutil.copy(path, tmp_path)
    for file, old, new, _, _ in CHANGES:
        path = tmp_path / f"{file}.json"
        path.write_text(path.read_text("utf-8").replace(old, new))
    changed = results.pages(tmp_path)
    for _, _, _, page, shown in CHANGES:
        assert shown in changed[f"{page}.md"]
        assert shown not in (tmp_path / f"{page}.md").read_text("utf-8")


def test_pages_without_marks_are_refused(results: ModuleType) -> None:
    with pytest.raises(ValueError, match="a page lacks"):
        results.fill("", {"paper": "new"})


def test_words_of_published_differences(results: ModuleType) -> None:
    row = {"difference": [0.4, 0.1, 0.7]}
    assert results.verdict(row) == "suggestive: better"
    assert results.verdict(row | {"outlived_correction": True}) == "suggestive: better"
    both = {"outlived_correction": True, "primary": True}
    assert results.verdict({"difference": [-0.4, -0.7, -0.1]} | both) == "clear: worse"
    assert results.verdict({"difference": [0.1, -0.7, 0.3]} | both) == "not shown: at most 0.70"
    assert results.verdict({"difference": [0.1]}) == "cannot tell"


def test_packed_runs_give_the_same_tables(tmp_path: Path) -> None:
    raw = load_module(FOLDER / "raw_scores.py")
    runs = tmp_path / "runs"
    for seed in range(3):
        make_run(runs / "joint" / f"seed-{seed}", seed=seed)
        make_run(runs / "gradvac" / f"seed-{seed}", seed=seed, rule="gradvac", quality=0.65)
    question = {"method": "gradvac", "baseline": "joint", "on": "low"}
    (runs / "sweep.json").write_text(json.dumps({"primary": [question]}))
    (runs / "joint" / "seed-0" / "weights.pt").write_text("large")
    raw.main(["pack", str(runs), "--out", str(tmp_path / "kept.json.gz")])
    raw.main(["unpack", str(tmp_path / "kept.json.gz"), str(tmp_path / "again")])
    first, second = (to_markdown(compare_runs([path])) for path in (runs, tmp_path / "again"))
    assert first.replace(str(runs), "") == second.replace(str(tmp_path / "again"), "")
    assert "gradvac against joint, low" in second
    assert not (tmp_path / "again" / "joint" / "seed-0" / "weights.pt").exists()
    make_run(tmp_path / "other" / "joint" / "seed-0", quality=0.1)
    with pytest.raises(ValueError, match="pack the two folders apart"):
        raw.pack([runs, tmp_path / "other"])


def test_published_scores_give_the_numbers_of_the_page(tmp_path: Path) -> None:
    raw = load_module(FOLDER / "raw_scores.py")
    raw.main(["unpack", str(FOLDER / "table1.json.gz"), str(tmp_path)])
    shown = to_markdown(compare_runs([tmp_path / "joint", tmp_path / "gradvac"]))
    answer = re.search(r"gradvac against joint, all \| (\d+ \| \S+ \(\S+ to \S+\)) \|", shown)
    assert answer is not None
    said = f"GradVac by layer against joint training (primary) | {answer[1]} |"
    assert said in (FOLDER / "table1.md").read_text("utf-8")
