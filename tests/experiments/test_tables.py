"""The tables of the results pages: from the published numbers, and from runs packed into a file."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from gradvac.analysis.record import Record
from gradvac.lab.experiments import compare_runs, to_markdown

from ..drivers import load_module
from .conftest import ROOT
from .made_runs import make_run

FOLDER = ROOT / "docs" / "results"


@pytest.fixture(scope="module")
def results() -> ModuleType:
    return load_module(FOLDER / "write_results.py")


CHANGES = [  # a number of a file, and where its page shows it
    ("published", "[ -0.06, -0.23, 0.11 ]", "[9, 8, 10]", "table1", "+9.00 (+8.00 to +10.00)"),
    ("published", '"altered": 0.2487', '"altered": 0.99', "figure3", "| 1.017 | 99% |"),
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
    runs = tmp_path / "sweep"
    for seed in range(3):
        make_run(runs / "joint" / f"seed-{seed}", seed=seed)
        make_run(runs / "gradvac" / f"seed-{seed}", seed=seed, rule="gradvac", quality=0.65)
    question = {"method": "gradvac", "baseline": "joint", "on": "low"}
    (runs / "sweep.json").write_text(json.dumps({"primary": [question], "base": "/a/path"}))
    (runs / "joint" / "seed-0" / "weights.pt").write_text("large")
    raw.main(["pack", str(runs), "--out", str(tmp_path / "kept.tar.xz")])
    raw.main(["unpack", str(tmp_path / "kept.tar.xz"), str(tmp_path / "again")])
    again = tmp_path / "again" / "sweep"
    first, second = (to_markdown(compare_runs([path])) for path in (runs, again))
    assert first.replace(str(runs), "") == second.replace(str(again), "")
    assert "gradvac against joint, low" in second
    assert json.loads((again / "sweep.json").read_text()) == {"primary": [question]}
    assert not (again / "joint" / "seed-0" / "weights.pt").exists()
    with pytest.raises(ValueError, match="two have one name"):
        raw.pack([runs, again], tmp_path / "kept.tar.xz")


def test_kept_runs_give_the_published_numbers(tmp_path: Path) -> None:
    """A part of what `compute.py` computes in a minute."""
    compute = load_module(FOLDER / "compute.py")
    published = json.loads(compute.PUBLISHED.read_text("utf-8"))
    compute.unpack(compute.ARCHIVE, tmp_path)
    methods = compute._methods(tmp_path, *compute._FOUR)
    answers = compute._answers(compute.claims.PAPER[1:3], methods)
    assert answers.rows == published["claims"]["paper"][1:3]
    for name, own in compute._scores(answers.comparisons).items():
        assert own == published["methods"][name]
    assert compute._again(tmp_path) == published["again"]
    assert compute._early(tmp_path) == published["early"]
    own = compute._summaries(tmp_path)["gradvac"]
    assert compute.updates.means(own, "update") == published["updates"]["gradvac"]
    kinds = {"tiny": compute._kinds(tmp_path)["tiny"]}
    tiny = [row for row in published["cosines"] if row["runs"] == "tiny"]
    assert list(compute._cosines(kinds)) == tiny


def test_summary_of_a_record() -> None:
    """Two tasks, one component: GradVac's numbers where they can be worked out by hand."""
    updates = load_module(FOLDER / "updates.py")
    num = 9
    steps = np.arange(1, num + 1)
    even = (steps % 2 == 0)[:, None]
    cosines = np.where(even, 0.1, 0.3).astype(np.float32)
    ratio = np.where(even, 1.2, 1.0).astype(np.float32)
    similarity = np.ones((num, 1, 2, 2), dtype=np.float32)
    similarity[:, :, 0, 1] = similarity[:, :, 1, 0] = cosines
    record = Record(
        steps=steps,
        tasks=("a", "b"),
        components=("model",),
        rule="gradvac",
        similarity=similarity,
        target=np.full_like(similarity, 0.3),
        active=np.tile(np.array([[False, True], [False, False]]), (num, 1, 1, 1)),
        weights=np.tile(np.array([1.5, 1.0], dtype=np.float32), (num, 1, 1)),
        norms=np.ones((num, 1, 2), dtype=np.float32),
        update_cosine=np.full((num, 1), 0.9, dtype=np.float32),
        update_ratio=ratio,
        vaccinated=("a",),
    )
    found = updates.summary(record)
    assert found["update"] == pytest.approx(
        {
            "cosine": 0.9,
            "length": ratio.mean(),
            "altered": 1.0,
            "similarity": cosines.mean(),
            "target": 0.3,
            "weight": 1.5,
            "weight_of_others": 1.0,
            "weights_vary": 0.0,
        },
        abs=1e-4,
    )
    later = steps > num / 4
    sums = np.sqrt(2 + 2 * cosines[later])  # of two vectors of length 1
    lengths = {
        "ratio": ratio[later].mean(),
        "varies": ratio[later].std() / ratio[later].mean(),
        "follows": -1.0,
        "sums_vary": sums.std() / sums.mean(),
        "updates_vary": (sums * ratio[later]).std() / (sums * ratio[later]).mean(),
    }
    assert found["lengths"] == pytest.approx(lengths, abs=1e-4)
    last = cosines[steps > num * 2 / 3]
    assert found["cosines"] == [[pytest.approx(last.mean(), abs=1e-4)]]
    assert found["variance"] == pytest.approx(last.var(ddof=1), abs=1e-4)
