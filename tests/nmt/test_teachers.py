"""Teachers: who teaches whom, what is learned from them, and exact continuation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gradvac import Aligner
from gradvac.lab.recipes.nmt import (
    Batch,
    NmtConfig,
    Transformer,
    TranslationWorkload,
    open_corpus,
    train_translation,
)
from gradvac.lab.recipes.nmt.teachers import Teachers
from gradvac.lab.training import BatchSlice, Display, checkpoint

Build = Callable[..., NmtConfig]
TASKS = ("a", "b", "c")


def test_the_best_weights_of_a_task_teach_it_once_it_is_worse(
    tiny_model: Callable[..., Transformer], random_batch: Callable[..., Batch]
) -> None:
    model, batch = tiny_model(label_smoothing=0.0), random_batch(packed=True)
    first, second = tiny_model(seed=1), tiny_model(seed=2)
    teachers = Teachers(model, TASKS, 0.25)
    assert teachers.soft_labels(batch) is None
    teachers.see({"a": 3.0, "b": 3.0, "c": 3.0}, first)
    assert teachers.soft_labels(batch) is None
    teachers.see({"a": 4.0, "b": 2.0, "c": 2.0}, second)
    soft = teachers.soft_labels(batch)
    assert soft is not None
    of_a = batch.tasks[batch.sentence_of_label] == 0
    assert torch.equal(soft.shares, torch.where(of_a, 0.25, 0.0))
    assert torch.allclose(soft.predicted[of_a], first.eval().logits(batch).softmax(-1)[of_a])
    teachers.see({"a": 5.0, "b": 3.0, "c": 1.0}, model)  # two different teachers
    soft = teachers.soft_labels(batch)
    assert soft is not None
    of_b = batch.tasks[batch.sentence_of_label] == 1
    assert torch.allclose(soft.predicted[of_b], second.eval().logits(batch).softmax(-1)[of_b])
    expected = torch.zeros(len(batch), dtype=torch.float64)
    logs = model.eval().logits(batch).log_softmax(-1)
    for n, (label, sentence) in enumerate(
        zip(batch.labels.tolist(), batch.sentence_of_label.tolist(), strict=True)
    ):
        share = float(soft.shares[n])
        taught = -(soft.predicted[n] * logs[n]).sum()
        expected[sentence] += (1 - share) * -logs[n, label] + share * taught
    assert torch.allclose(model(batch, soft), expected)
    kept = teachers.state_dict()
    other = Teachers(model, TASKS, 0.25)
    other.load_state_dict(kept)
    again = other.soft_labels(batch)
    assert again is not None
    assert torch.equal(again.predicted, soft.predicted)


def test_chunks_change_nothing(
    tiny_model: Callable[..., Transformer], random_batch: Callable[..., Batch]
) -> None:
    batch = random_batch(packed=True)
    whole, cut = tiny_model(), tiny_model(logits_per_chunk=350)
    teachers = Teachers(whole, TASKS, 0.5)
    teachers.see({"a": 1.0, "b": 1.0, "c": 1.0}, tiny_model(seed=1))
    teachers.see({"a": 2.0, "b": 2.0, "c": 0.5}, whole)
    losses = [model(batch, teachers.soft_labels(batch)) for model in (whole, cut)]
    assert torch.allclose(*losses)
    for value in losses:
        value.sum().backward()
    assert torch.allclose(whole.embedding.weight.grad, cut.embedding.weight.grad)


@pytest.mark.usefixtures("is_prepared")
@pytest.mark.parametrize("rule", ["none", "gradvac"])
def test_runs_continue_exactly(
    toy_config: Build,
    tmp_path: Path,
    quiet: Display,
    monkeypatch: pytest.MonkeyPatch,
    rule: str,
) -> None:
    real = TranslationWorkload._dev_loss
    # What the model learns looks like a loss, so that the first weights stay the best.
    monkeypatch.setattr(TranslationWorkload, "_dev_loss", lambda *args: -real(*args))
    train: dict[str, Any] = {"max_steps": 6, "validate_every": 2, "checkpoint_every": 3}

    def config(weight: float, **more: int) -> NmtConfig:
        taught = {"teacher_weight": weight}
        return toy_config(align={"rule": rule}, validation=taught, train=train | more)

    train_translation(config(0.5), tmp_path / "whole", display=quiet)
    train_translation(config(0.5, pause_at=5), tmp_path / "parts", display=quiet)
    train_translation(config(0.5), tmp_path / "parts", display=quiet)
    train_translation(config(0.0), tmp_path / "alone", display=quiet)
    whole, parts, alone = (
        checkpoint.weights(tmp_path / name, "last") for name in ("whole", "parts", "alone")
    )
    assert all(torch.equal(value, parts[name]) for name, value in whole.items())
    assert not all(torch.equal(value, alone[name]) for name, value in whole.items())


@pytest.mark.usefixtures("is_prepared")
def test_what_cannot_be_taught_is_refused(toy_config: Build) -> None:
    taught = {"teacher_weight": 0.5}
    with pytest.raises(ValueError, match=r"teacher_weight needs .*validate_every"):
        toy_config(validation=taught, train={"validate_every": 0})
    with pytest.raises(ValueError, match=r"teacher_weight: .* recorded; set"):
        toy_config(validation=taught, train={"cuda_graph": True})
    config = toy_config(validation=taught)
    recipe = TranslationWorkload(config, open_corpus(config.data))
    with pytest.raises(ValueError, match="teacher_weight: is for one process"):
        recipe.batches(BatchSlice(0, 2))


def test_engines_agree_about_what_is_taught(
    tiny_model: Callable[..., Transformer], random_batch: Callable[..., Batch]
) -> None:
    batch, gradients = random_batch(packed=True), []
    for engine in ("per_task", "one_backward"):
        model = tiny_model()
        teachers = Teachers(model, TASKS, 0.5)
        teachers.see({"a": 1.0, "b": 1.0, "c": 1.0}, tiny_model(seed=1))
        teachers.see({"a": 2.0, "b": 2.0, "c": 0.5}, model)
        aligner = Aligner(model, tasks=TASKS, rule="gradvac", engine=engine)
        aligner.backward(model(batch, teachers.soft_labels(batch)), batch.tasks)
        gradients.append([parameter.grad for parameter in model.parameters()])
        assert aligner.engine == engine
    assert all(torch.allclose(*pair, atol=1e-10) for pair in zip(*gradients, strict=True))
