"""A run folder: plain files, and a clear word where there is nothing to show."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from gradvac import Aligner, Sum
from gradvac.analysis import Recorder, Similarities, load_run, save_similarities


def record(path: Path, tasks: list[str], num: int = 3) -> None:
    model = torch.nn.Linear(2, 1)
    aligner = Aligner(model, tasks, Sum())
    with Recorder(path / "record.bin", every=1, tasks=tasks) as recorder:
        for step in range(1, num + 1):
            losses = model(torch.randn(2 * len(tasks), 2))[:, 0]
            recorder(step, aligner.backward(losses, tasks * 2))


def test_everything_there_is(tmp_path: Path) -> None:
    record(tmp_path, ["en-fr", "en-hi"])
    values = np.ones((1, 1, 2, 2), dtype=np.float32)
    measured = Similarities(("en-fr", "en-hi"), ("model",), np.array([7]), values)
    save_similarities(tmp_path / "similarity.npz", [measured])
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "train/loss": 2.5}\n{"step": 2, "tr')
    (tmp_path / "config.toml").write_text("[train]\n")
    (tmp_path / "signature.json").write_text('{"rule": "sum"}')
    (tmp_path / "scores").mkdir()
    for name in ("dev.best", "test.last", "test.best"):
        scores = {"split": name, "by_task": {"en-fr": {"bleu": 1.0}}}
        (tmp_path / "scores" / f"{name}.json").write_text(json.dumps(scores))
    run = load_run(tmp_path, families={"en-fr": "Romance"}, most_records=2)
    assert run.name == tmp_path.name
    assert run.record is not None
    assert run.record.steps.tolist() == [1, 3]
    assert run.measured[0].steps.tolist() == [7]
    assert run.metrics == [{"step": 1, "train/loss": 2.5}]
    assert run.scores is not None
    assert run.scores["split"] == "test.best"
    assert run.settings == "[train]\n"
    assert run.signature == {"rule": "sum"}
    assert run.families == {"en-fr": "Romance", "en-hi": ""}
    assert run.tasks == ("en-fr", "en-hi")


def test_only_a_record(tmp_path: Path) -> None:
    record(tmp_path, ["a", "b"])
    run = load_run(tmp_path)
    assert run.tasks == ("a", "b")
    assert run.measured == ()
    assert run.scores is None
    assert run.metrics == []
    assert run.signature == {}


def test_nothing_to_show(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"neither record\.bin nor similarity\.npz; train with"):
        load_run(tmp_path)
    (tmp_path / "record.bin").touch()  # a run that has just begun
    with pytest.raises(ValueError, match="neither"):
        load_run(tmp_path)
    with pytest.raises(ValueError, match="is no folder"):
        load_run(tmp_path / "missing")
