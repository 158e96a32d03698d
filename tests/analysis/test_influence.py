"""Influence, against what real steps do to real losses."""

# T tasks

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from gradvac import Aligner, GradVac
from gradvac.analysis import Record, Recorder, read_record, statistics
from gradvac.analysis.report.sentences import describe_influence, describe_progress

from . import structure

TASKS = ["fr", "hi", "tr"]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)
    ).double()


def batches() -> tuple[torch.Tensor, torch.Tensor, list[str]]:
    draw = torch.Generator().manual_seed(1)
    inputs = torch.randn(24, 6, generator=draw, dtype=torch.float64)
    wanted = torch.randn(24, 1, generator=draw, dtype=torch.float64)
    wanted[8:16] = -wanted[:8]  # hi wants the opposite of fr, on the same inputs
    inputs[8:16] = inputs[:8]
    return inputs, wanted, [task for task in TASKS for _ in range(8)]


def losses_of(model: nn.Module) -> torch.Tensor:
    """Loss of every task, `[T]`."""
    inputs, wanted, _ = batches()
    return (model(inputs) - wanted).square().reshape(3, 8).sum(1) / 8


def test_predicted_changes_are_those_of_a_small_step(tmp_path: Path) -> None:
    """Every cell: a step along w_j g_j alone changes the loss of i by -lr times the prediction."""
    model = network()
    inputs, wanted, tasks = batches()
    rule = GradVac(target=0.6, order="fixed")
    aligner = Aligner(model, TASKS, rule, engine="per_task")
    with Recorder(tmp_path / "record.bin", every=1) as recorder:
        rows = (model(inputs) - wanted).square()[:, 0] / 8
        recorder(1, aligner.backward(rows, tasks))
    influence = statistics.recorded_influence(read_record(tmp_path))
    assert influence.tasks == tuple(TASKS)
    assert influence.values[0, 1] < 0  # opposites
    before, rate = losses_of(model).detach(), 1e-5

    def fall(gradients: list[torch.Tensor]) -> np.ndarray:
        moved = network()
        with torch.no_grad():
            for parameter, gradient in zip(moved.parameters(), gradients, strict=True):
                parameter -= rate * gradient
        return ((before - losses_of(moved)) / rate).detach().numpy()

    whole = fall([p.grad for p in model.parameters() if p.grad is not None])
    scale = np.abs(influence.values).max()
    np.testing.assert_allclose(influence.totals, whole, atol=2e-3 * scale)
    # Cell by cell: the plain sum has weights 1, so that each task's step is its own gradient.
    plain = statistics.recorded_influence(_plain(tmp_path / "plain.bin"))
    for j in range(3):
        alone = torch.autograd.grad(losses_of(model)[j], list(model.parameters()))
        np.testing.assert_allclose(plain.values[:, j], fall(list(alone)), atol=2e-3 * scale)


def _plain(path: Path) -> Record:
    from gradvac import Sum

    model = network()
    inputs, wanted, tasks = batches()
    aligner = Aligner(model, TASKS, Sum(), engine="per_task")
    with Recorder(path, every=1) as recorder:
        recorder(1, aligner.backward((model(inputs) - wanted).square()[:, 0] / 8, tasks))
    return read_record(path)


def test_absent_tasks_push_nobody() -> None:
    draw = np.random.default_rng(0)
    record = structure.record_of(("a", "b", "c"), structure.gradients(draw, num_tasks=3))
    record.norms[4:, :, 2] = np.nan
    record.weights[4:, :, 2] = np.nan
    record.similarity[4:, :, 2] = record.similarity[4:, :, :, 2] = np.nan
    products = np.stack(
        [statistics.recorded_products(record, k) for k in range(len(record.components))], 1
    )
    assert np.isnan(products[4:, :, 2]).all()
    assert (products[4:, :, 0, 2] == 0).all()
    influence = statistics.recorded_influence(record)
    assert influence.values[0, 2] == pytest.approx(products[:4, :, 0, 2].sum() / 8, rel=1e-5)
    assert influence.values[2, 0] == pytest.approx(products[:4, :, 2, 0].sum() / 4, rel=1e-5)
    np.testing.assert_allclose(influence.shares.sum(axis=1), 1, atol=1e-5)


def test_halves_are_unbiased_where_one_batch_is_not() -> None:
    """Equal tasks share their progress equally; a batch that counts itself says otherwise."""
    own_halves, own_batch = [], []
    for seed in range(20):
        draw = np.random.default_rng(seed)
        true = np.ones((1, len(structure.COMPONENTS), 4, structure.SIZE)) / structure.SIZE**0.5
        a, b = (structure.noisy(draw, true, 0.3) for _ in range(2))
        measured = statistics.measured_influence(structure.halves_of(tuple("abcd"), a, b)[1])
        assert measured is not None
        assert measured.unbiased
        own_halves.append(measured.shares.diagonal().mean())
        recorded = statistics.recorded_influence(structure.record_of(tuple("abcd"), a))
        assert not recorded.unbiased
        own_batch.append(recorded.shares.diagonal().mean())
    assert np.mean(own_halves) == pytest.approx(0.25, abs=0.01)
    assert np.mean(own_batch) > 0.4


def test_one_sentence_per_task() -> None:
    values = np.array([[6.0, 3.0, 1.0], [2.0, 8.0, -2.0], [-3.0, 0.0, 1.0]])
    certain = np.zeros((3, 3))
    influence = statistics.Influence(
        ("en-hi", "en-mr", "en-fr"), values, certain, values.sum(axis=1), certain[0], {}, True
    )
    names = {"en-hi": "Hindi", "en-mr": "Marathi"}
    hindi, marathi, french = (s.text for s in describe_progress(influence, names))
    assert hindi == (
        "Hindi (en-hi) gets 60% of its predicted progress from its own data, 30% from Marathi and "
        "10% from en-fr."
    )
    assert marathi.endswith(
        "100% of its predicted progress from its own data and 25% from Hindi; "
        "held back by en-fr (-25%)."
    )
    assert french == "No shares are given where progress is not clear: en-fr."
    said = [sentence.text for sentence in describe_influence(influence)]
    assert "Losses that other tasks are predicted to raise: mr (by fr) and fr (by hi)." in said
    assert "Predicted to get worse by the whole update: fr." in said
    assert (
        "Of 6 pairs of a task and another, 3 are clearly predicted to help and 2 to harm" in said[0]
    )
    opposed = replace(influence, values=values * [1, 1, 4], totals=np.array([13.0, 2.0, -1.0]))
    assert describe_progress(opposed)[1].text == (
        "Help and harm nearly cancel, so that no shares are given: en-mr."
    )
    unsure = replace(influence, p_values=certain + 1, total_p_values=certain[0] + 1)
    maybe = replace(unsure, total_p_values=certain[0])
    assert "en-fr (-25%, can be chance)" in describe_progress(maybe)[1].text
    # Shares of a progress that may be none are no news, however large.
    assert [s.text for s in describe_progress(unsure)] == [
        "No shares are given where progress is not clear: en-hi, en-mr and en-fr."
    ]
    assert not any(s.claims for s in describe_influence(unsure))
