"""A run folder: plain files, and a clear word where there is nothing to show."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from gradvac import Aligner, Sum
from gradvac.analysis import Recorder, Similarities, load_run, save_similarities
from gradvac.lab.runs import TaskScores, write_scores


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
    save_similarities(tmp_path / "similarity.npz", [measured], '{"set": "dev"}')
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "train/loss": 2.5}\n{"step": 2, "tr')
    (tmp_path / "config.toml").write_text("[train]\n")
    (tmp_path / "signature.json").write_text('{"rule": "sum"}')
    (tmp_path / "scores").mkdir()
    for name in ("dev.best", "test.last", "test.best"):
        scores = TaskScores("F1", {"en-fr": 1.0}, note=name)
        write_scores(tmp_path / "scores" / f"{name}.json", [scores])
    run = load_run(tmp_path, families={"en-fr": "Romance"}, most_records=2)
    assert run.name == tmp_path.name
    assert run.record is not None
    assert run.record.steps.tolist() == [1, 3]
    assert run.measured[0].steps.tolist() == [7]
    assert run.about == '{"set": "dev"}'
    assert run.metrics == [{"step": 1, "train/loss": 2.5}]
    assert run.scores is not None
    assert run.scores == TaskScores("F1", {"en-fr": 1.0}, note="test.best")
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
    assert run.about == ""


def test_nothing_to_show(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"neither record\.bin nor similarity\.npz"):
        load_run(tmp_path)
    (tmp_path / "record.bin").touch()  # a run that has just begun
    with pytest.raises(ValueError, match=r"record\.bin .*no step .*Recorder"):
        load_run(tmp_path)
    with pytest.raises(ValueError, match="not a folder"):
        load_run(tmp_path / "missing")


def test_numbers_that_are_not_finite(tmp_path: Path) -> None:
    """As `json.dumps` writes them in loops of others."""
    record(tmp_path, ["a", "b"])
    lines = [{"step": 1, "loss": math.nan, "norm": math.inf}, {"step": 2, "loss": -math.inf}]
    text = "".join(json.dumps(line) + "\n" for line in lines) + '\n{"step": 3, "loss": 1e999}\n'
    (tmp_path / "metrics.jsonl").write_text(text)
    assert load_run(tmp_path).metrics == [
        {"step": 1, "loss": None, "norm": None},
        {"step": 2, "loss": None},
        {"step": 3, "loss": None},
    ]


def test_a_name_that_is_still_being_written(tmp_path: Path) -> None:
    record(tmp_path, ["a", "b"])
    line = '{"step": 1, "loss": 2.0, "fran\u00e7ais\u2028": 1}\n'.encode()
    (tmp_path / "metrics.jsonl").write_bytes(line + line[: line.index(b"\xc3") + 1])
    (entry,) = load_run(tmp_path).metrics
    assert entry["loss"] == 2.0


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("metrics.jsonl", b'{"step": 1}\nhello\n', r"l, line 2: .*fix or remove"),
        ("metrics.jsonl", b'\n{"loss": 1}\n', r"l, line 2: .*no step: .*fix"),
        ("metrics.jsonl", b'{"step": NaN}\n', r"l, line 1: .*no step"),
        ("metrics.jsonl", b"[1, 2]\n", r"l, line 1: .*object"),
        ("metrics.jsonl", b'{"step": 1, "\xff": 2}\n', r"l, line 1: .*'utf-8"),
        ("scores/test.best.json", b"", r"test\.best\.json: .*score again"),
        ("scores/test.best.json", b"[]", r"best\.json: .*no scores"),
        ("signature.json", b'{"rule": ', r"signature\.json: .*remove"),
        ("config.toml", b"name = '\xff'", r"config\.toml: .*UTF-8"),
    ],
)
def test_damaged_files(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    record(tmp_path, ["a", "b"])
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_run(tmp_path)


@pytest.mark.parametrize("content", [b"gradvac1 cut off", b"%PDF-1.7"])
def test_a_record_that_cannot_be_read(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "record.bin").write_bytes(content)
    message = r"record\.bin: .*not a record.*remove it"
    with pytest.raises(ValueError, match=message):
        load_run(tmp_path)
    values = np.ones((1, 1, 2, 2), dtype=np.float32)
    measured = Similarities(("a", "b"), ("model",), np.array([7]), values)
    save_similarities(tmp_path / "similarity.npz", [measured])
    with pytest.warns(UserWarning, match=message + r".*similarity\.npz alone"):
        run = load_run(tmp_path)
    assert run.record is None
    assert run.tasks == ("a", "b")
