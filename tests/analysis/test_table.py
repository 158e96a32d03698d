"""Similarities as tables: columns, data frames, files, notebooks."""

import csv
from pathlib import Path

import numpy as np
import pytest
import torch
from pyarrow import parquet

from gradvac import Aligner
from gradvac.analysis import Similarities, write_table
from gradvac.analysis.table import pair_columns

from .made_runs import make_run


def small() -> Similarities:
    values = np.full((2, 1, 3, 3), 0.5, np.float32)
    values[1, 0, 2, :] = values[1, 0, :, 2] = np.nan
    values[0, 0, 0, 1] = values[0, 0, 1, 0] = -0.25
    reliability = np.array([[[0.25, 1.0, -0.1]]] * 2, np.float32)
    return Similarities(("a", "b", "<c>"), ("x",), np.array([10, 20]), values, reliability)


def test_every_known_pair_is_a_row() -> None:
    found = pair_columns(small())
    assert found["step"].tolist() == [10, 10, 10, 20]
    assert list(zip(found["task"], found["other"], strict=True))[:2] == [("a", "b"), ("a", "<c>")]
    assert found["cosine"].tolist() == [-0.25, 0.5, 0.5, 0.5]
    np.testing.assert_allclose(found["reliability"], [0.5, np.nan, np.nan, 0.5])


def test_a_frame_has_the_same_columns() -> None:
    frame = small().to_frame()
    assert list(frame.columns) == ["step", "component", "task", "other", "cosine", "reliability"]
    assert len(frame) == 4


@pytest.mark.parametrize("ending", [".csv", ".parquet"])
def test_files_hold_all_sources(tmp_path: Path, ending: str) -> None:
    run = make_run(codes=("fr", "es", "de"), num_layers=1, num_steps=2)
    path = tmp_path / "new" / f"table{ending}"
    num = write_table(path, [run])
    if ending == ".csv":
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
    else:
        rows = parquet.read_table(path).to_pylist()
    assert len(rows) == num
    assert {row["source"] for row in rows} == {
        "aligned set, same lines, all layer",
        "aligned set, different lines, all layer",
        "batches of training",
    }
    assert run.record is not None
    recorded = [row for row in rows if row["source"] == "batches of training"]
    assert float(recorded[0]["cosine"]) == pytest.approx(
        run.record.similarity[0, 0, 1, 0], rel=1e-5
    )
    with pytest.raises(ValueError, match=r"path.*\.csv"):
        write_table(tmp_path / "table.xlsx", [run])


def test_what_a_notebook_shows() -> None:
    shown = small()._repr_html_()
    assert "&lt;c&gt;" in shown
    assert "-0.25" not in shown  # the mean of two steps
    assert "0.12" in shown


def test_a_step_says_which_pairs_are_in_conflict() -> None:
    model = torch.nn.Linear(2, 1, bias=False)
    aligner = Aligner(model, ["up", "down", "side"])
    inputs = torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0]])
    losses = model(inputs)[:, 0] * torch.tensor([1.0, -1.0, 1.0])
    alignment = aligner.backward(losses, ["up", "down", "side"])
    first = alignment.pairs()[0]
    assert (first.task, first.other, first.conflict) == ("up", "down", 1.0)
    assert first.similarity == pytest.approx(-0.995, abs=1e-3)
    assert [pair.similarity for pair in alignment.pairs()] == sorted(
        pair.similarity for pair in alignment.pairs()
    )
    assert "up and down: -1.00, in conflict in 100% of components" in alignment.summary()
    assert "<table>" in alignment._repr_html_()
