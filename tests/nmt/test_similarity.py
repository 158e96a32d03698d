"""`measure_translation`: every checkpoint of a translation run, on lines that all tasks share."""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from gradvac.analysis import load_similarities
from gradvac.lab.recipes.common.similarity import summary
from gradvac.lab.recipes.nmt import NmtConfig, PreparedCorpus, prepare_corpus, train_translation
from gradvac.lab.recipes.nmt.batches import make_batch
from gradvac.lab.recipes.nmt.preparation import aligned_lines
from gradvac.lab.recipes.nmt.recipe import measure_translation
from gradvac.lab.recipes.nmt.stream import TaskData
from gradvac.lab.runs import RunFolder
from gradvac.lab.runs.manifest import write_manifest
from gradvac.lab.training import CheckpointError, Display, checkpoint

from ..shown import Shown
from .conftest import make_config

Build = Callable[..., NmtConfig]


@pytest.fixture(scope="module")
def trained(toy_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight steps of dropout and smoothing, with checkpoints of steps 4 and 8."""
    folder = tmp_path_factory.mktemp("trained")
    sections: dict[str, dict[str, Any]] = {
        "train": {"checkpoint_every": 4, "keep": 2},
        "model": {"size": "tiny", "dropout": 0.3, "label_smoothing": 0.1},
    }
    config = make_config(toy_folder, folder / "prepared", sections)
    train_translation(config, folder / "run", display=Shown())
    return folder / "run"


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy of the run, to be changed at will."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


def test_every_checkpoint_at_several_granularities(run: Path) -> None:
    measured = measure_translation(run, num_lines=20)
    assert [(one.granularity, one.lines) for one in measured[:3]] == [
        ("all_layer", "same"),
        ("all_layer", "different"),
        ("enc_dec", "same"),
    ]
    assert all(one.steps.tolist() == [4, 8] for one in measured)
    assert measured[0].tasks == ("en-xx", "en-yy")
    assert "encoder.layers.0" in measured[0].components
    assert measured[4].components == ("model",)
    saved, _ = load_similarities(run / "similarity.npz")
    np.testing.assert_array_equal(saved[0].values, measured[0].values)
    cells = io.StringIO()
    Console(file=cells, width=120).print(summary(measured))
    assert "decoder.layers.1" in cells.getvalue()


def test_against_one_batch_by_plain_autograd(run: Path) -> None:
    """All lines of a task at once, gradients by `backward`, without dropout and smoothing."""
    settings, prepared, model = _open(run)
    model.load_state_dict(checkpoint.weights(run, 8))
    lines = aligned_lines(prepared, "dev", ["en-xx", "en-yy"], 20)
    flat = []
    for task in ("en-xx", "en-yy"):
        sources, targets = prepared.task_tokens("dev", task)
        data = TaskData(task, sources, targets, prepared.vocabulary.tag(task[-2:]))
        model.zero_grad()
        model(make_batch(*data.gather(lines[task]), [0] * 20)).sum().backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        flat.append(torch.cat([g.flatten() for g in gradients]))
    expected = float(torch.cosine_similarity(flat[0], flat[1], dim=0))
    measured = measure_translation(
        run, num_lines=20, weights=["last"], granularities=["whole_model"]
    )
    assert measured[0].values[0, 0, 0, 1] == pytest.approx(expected, abs=1e-4)
    assert settings.model.dropout > 0


def test_both_engines(run: Path) -> None:
    slow = measure_translation(run, num_lines=20, weights=[8])
    (run / "similarity.npz").unlink()
    fast = measure_translation(run, num_lines=20, weights=[8], engine="one_backward")
    assert slow[0].values == pytest.approx(fast[0].values, abs=1e-4)


def test_measured_steps_are_skipped(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed after the first checkpoint, it goes on with the second."""
    whole = measure_translation(run, num_lines=20)
    (run / "similarity.npz").unlink()
    first = measure_translation(run, num_lines=20, weights=[4])
    assert first[0].steps.tolist() == [4]
    loaded = []
    load = checkpoint.Checkpoint.weights

    def counted(self: checkpoint.Checkpoint) -> dict[str, torch.Tensor]:
        loaded.append(self.step)
        return load(self)

    monkeypatch.setattr(checkpoint.Checkpoint, "weights", counted)
    rest = measure_translation(run, num_lines=20)
    assert loaded == [8]
    for one, other in zip(whole, rest, strict=True):
        np.testing.assert_array_equal(one.values, other.values)
        np.testing.assert_array_equal(one.across, other.across)


def test_best_weights_have_the_step_they_come_from(run: Path) -> None:
    assert measure_translation(run, num_lines=20, weights=["best"])[0].steps.tolist() == [8]


def test_measurements_that_differ_are_not_mixed(run: Path) -> None:
    measure_translation(run, num_lines=20, weights=[4])
    with pytest.raises(ValueError, match=r"lines = 20, .*30"):
        measure_translation(run, num_lines=30)
    with pytest.raises(ValueError, match=r"set = dev, .*test"):
        measure_translation(run, split="test", num_lines=20)


def test_lines_are_matched_by_their_english(toy_config: Build, toy_folder: Path) -> None:
    """One pair lacks a line and has another twice: the others stay aligned."""
    rows = (toy_folder / "dev.en-yy.tsv").read_text(encoding="utf-8").splitlines()
    changed = [rows[1], *rows[:10], *rows[11:]]
    (toy_folder / "uneven.en-yy.tsv").write_text("".join(f"{row}\n" for row in changed))
    (toy_folder / "uneven.en-xx.tsv").write_bytes((toy_folder / "dev.en-xx.tsv").read_bytes())
    config = toy_config(data={"extra": {"uneven": "uneven.{pair}.tsv"}})
    prepared = prepare_corpus(config.data)
    lines = aligned_lines(prepared, "uneven", ["en-xx", "yy-en"])
    first, second = (
        [prepared.text("uneven", pair)[0][n] for n in own]
        for pair, own in zip(("en-xx", "en-yy"), lines.values(), strict=True)
    )
    assert first == second
    assert len(first) == 59


def _open(run: Path) -> tuple[NmtConfig, PreparedCorpus, torch.nn.Module]:
    from gradvac.lab.training import config

    settings = config.load(NmtConfig, run / "config.toml")
    prepared = PreparedCorpus.open(settings.data)
    assert prepared is not None
    return settings, prepared, settings.model.build(len(prepared.vocabulary)).eval()


def test_bad_input(run: Path, toy_config: Build, tmp_path: Path, quiet: Display) -> None:
    with pytest.raises(ValueError, match=r"set: .*'newstest'"):
        measure_translation(run, split="newstest")
    with pytest.raises(ValueError, match=r"weights: .*last or a step.*'averaged'"):
        measure_translation(run, weights=["averaged"])
    with pytest.raises(CheckpointError, match=r"5; .*best, last, 4, 8"):
        measure_translation(run, weights=[5])
    with pytest.raises(ValueError, match=r"data\.prepared: "):
        measure_translation(run, overrides=[f"data.prepared={tmp_path / 'nowhere'}"])
    for path in (run / "checkpoints").glob("step-*"):
        (path / checkpoint.MODEL).write_bytes(b"")
    with pytest.raises(ValueError, match="no checkpoint"):
        measure_translation(run)
    alone = toy_config(data={"tasks": ["en-xx"]}, align={"rule": "sum"})
    train_translation(alone, tmp_path / "alone", display=quiet)
    with pytest.raises(ValueError, match="single task en-xx"):
        measure_translation(tmp_path / "alone")


def test_sets_that_are_not_aligned(toy_config: Build, toy_folder: Path, tmp_path: Path) -> None:
    rows = (toy_folder / "test.en-yy.tsv").read_bytes()
    (toy_folder / "mixed.en-yy.tsv").write_bytes(rows)
    (toy_folder / "mixed.en-xx.tsv").write_bytes((toy_folder / "dev.en-xx.tsv").read_bytes())
    config = toy_config(data={"extra": {"mixed": "mixed.{pair}.tsv"}})
    prepared = prepare_corpus(config.data)
    with pytest.raises(ValueError, match=r"'mixed' .*aligned .*0 lines"):
        aligned_lines(prepared, "mixed", ["en-xx", "en-yy"])


def test_two_at_once_do_not_lose_each_others_results(run: Path) -> None:
    with (
        RunFolder(run).lock_beside("similarity"),
        pytest.raises(ValueError, match="another process"),
    ):
        measure_translation(run, granularities=["enc_dec"])
    with RunFolder(run).lock():  # while the run is trained, it may be measured
        measure_translation(run, granularities=["enc_dec"])


def test_tokens_of_another_vocabulary_are_refused(run: Path, tmp_path: Path) -> None:
    path = RunFolder(run).vocabulary
    before = path.read_bytes()
    try:
        path.write_bytes(b"another")
        with pytest.raises(ValueError, match=r"vocabulary\.model .*7 bytes"):
            measure_translation(run)
        write_manifest(run, [path.name])
        with pytest.raises(ValueError, match="another vocabulary"):
            measure_translation(run)
    finally:
        path.write_bytes(before)
        write_manifest(run, [path.name])
