"""`measure` against gradients taken one by one, and on cases whose answer is known."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradvac.analysis import Similarities, measure, statistics

TASKS = ("fr", "hi", "tr")


class Model(nn.Module):
    """An encoder, a decoder with two layers, and a head that only "tr" uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Linear(5, 4)
        self.decoder = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.head = nn.Linear(4, 2)
        self.double()

    def forward(self, x: Tensor, *, head: bool = False) -> Tensor:
        x = torch.tanh(self.encoder(x))
        for layer in self.decoder:
            x = torch.tanh(layer(x))
        return self.head(x) if head else x


def loss(model: Model, task: str, number: int) -> Tensor:
    draw = torch.Generator().manual_seed(100 * TASKS.index(task) + number)
    x = torch.randn(6, 5, generator=draw, dtype=torch.float64)
    return model(x, head=task == "tr").square().sum() + model(x).sum()


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture
def batches(model: Model) -> dict[str, list[Callable[[], Tensor]]]:
    """Five batches of every task: three are of half A, two of half B."""
    return {task: [partial(loss, model, task, n) for n in range(5)] for task in TASKS}


def gradient(model: Model, losses: list[Tensor], names: list[str]) -> np.ndarray:
    """The gradient of summed losses by plain autograd, flat."""
    parameters = dict(model.named_parameters())
    model.zero_grad()
    torch.stack(losses).sum().backward()
    chosen = [parameters[name] for name in names]
    flat = [torch.zeros_like(p) if p.grad is None else p.grad for p in chosen]
    model.zero_grad()
    return torch.cat([one.reshape(-1) for one in flat]).numpy()


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


COMPONENTS = {
    "all_layer": {
        "encoder": ["encoder.weight", "encoder.bias"],
        "decoder.0": ["decoder.0.weight", "decoder.0.bias"],
        "decoder.1": ["decoder.1.weight", "decoder.1.bias"],
        "head": ["head.weight", "head.bias"],
    },
    "enc_dec": {
        "encoder": ["encoder.weight", "encoder.bias"],
        "decoder": [f"decoder.{n}.{p}" for n in (0, 1) for p in ("weight", "bias")],
        "shared": ["head.weight", "head.bias"],
    },
}


def test_against_gradients_taken_one_by_one(
    model: Model, batches: dict[str, list[Callable[[], Tensor]]]
) -> None:
    measured = measure(model, batches, ["all_layer", "enc_dec"], step=7)
    assert [(one.granularity, one.lines) for one in measured.parts] == [
        ("all_layer", "same"),
        ("all_layer", "different"),
        ("enc_dec", "same"),
        ("enc_dec", "different"),
    ]
    for same, different in zip(measured.same.values(), measured.different.values(), strict=True):
        assert same.tasks == TASKS
        assert same.steps.tolist() == [7]
        expected = COMPONENTS[same.granularity]
        assert set(same.components) == set(expected)
        for k, component in enumerate(same.components):
            names = expected[component]
            whole, first, second = (
                [gradient(model, [run() for run in batches[t][part]], names) for t in TASKS]
                for part in (slice(None), slice(0, None, 2), slice(1, None, 2))
            )
            for i in range(3):
                for j in range(3):
                    value = same.values[0, k, i, j]
                    if component in ("head", "shared") and (i, j) != (2, 2):
                        assert np.isnan(value)  # a task that never uses the head
                        continue
                    assert value == pytest.approx(cosine(whole[i], whole[j]), abs=1e-6)
                    across = (cosine(first[i], second[j]) + cosine(second[i], first[j])) / 2
                    assert different.values[0, k, i, j] == pytest.approx(across, abs=1e-6)
            assert same.reliability is not None
            if component not in ("head", "shared"):
                own = [cosine(a, b) for a, b in zip(first, second, strict=True)]
                np.testing.assert_allclose(same.reliability[0, k], own, atol=1e-6)


def test_grad_and_mode_stay(model: Model, batches: dict[str, list[Callable[[], Tensor]]]) -> None:
    model.train()
    model.encoder.weight.grad = torch.ones_like(model.encoder.weight)
    measure(model, batches)
    assert model.training
    assert torch.equal(model.encoder.weight.grad, torch.ones_like(model.encoder.weight))
    assert model.encoder.bias.grad is None


def rows_of(model: Model, number: int) -> tuple[Tensor, list[str]]:
    draw = torch.Generator().manual_seed(number)
    x = torch.randn(9, 5, generator=draw, dtype=torch.float64)
    return model(x, head=True).square().sum(1), ["hi", "fr", "tr"] * 3


@pytest.mark.parametrize("storage", [{}, {"offload": True}])
def test_one_backward_equals_per_task(model: Model, storage: dict[str, bool]) -> None:
    batches = [partial(rows_of, model, n) for n in range(4)]
    slow = measure(model, batches, tasks=TASKS)
    fast = measure(model, batches, tasks=TASKS, engine="one_backward", **storage)
    for one, other in zip(slow.parts, fast.parts, strict=True):
        np.testing.assert_allclose(one.values, other.values, atol=1e-6)
        np.testing.assert_allclose(one.reliability, other.reliability, atol=1e-6)
    single = {
        task: [lambda n=n, t=t: rows_of(model, n)[0][t::3].sum() for n in range(4)]
        for t, task in enumerate(("hi", "fr", "tr"))
    }
    by_task = measure(model, single, tasks=TASKS)
    np.testing.assert_allclose(by_task.parts[0].values, slow.parts[0].values, atol=1e-6)
    assert type(model.encoder) is nn.Linear
    assert all(p.grad is None for p in model.parameters())


def test_a_part_that_no_gradient_came_through_at_first(model: Model) -> None:
    """What one_backward learned of such a graph holds no longer once one does."""

    def rows(number: int) -> tuple[Tensor, list[str]]:
        losses, tasks = rows_of(model, number)
        gate = torch.full_like(losses, float(number >= 3))
        x = torch.ones(9, 5, dtype=torch.float64)
        return losses + gate * model.decoder[1](torch.tanh(model.encoder(x))).sum(1), tasks

    batches = [partial(rows, number) for number in range(4)]
    slow = measure(model, batches, tasks=TASKS)
    fast = measure(model, batches, tasks=TASKS, engine="one_backward")
    for one, other in zip(slow.parts, fast.parts, strict=True):
        np.testing.assert_allclose(one.values, other.values, atol=1e-6)


def test_one_backward_refuses_rows_that_influence_each_other(model: Model) -> None:
    def coupled(number: int) -> tuple[Tensor, list[str]]:
        losses, tasks = rows_of(model, number)
        return losses * losses.roll(1), tasks

    with pytest.raises(ValueError, match=r"engine: .*influence each other.*per_task"):
        measure(model, [partial(coupled, n) for n in (0, 1)], tasks=TASKS, engine="one_backward")


def measure_signal_and_noise(signals: Tensor, noises: Tensor) -> tuple[Similarities, ...]:
    """A model with one vector, in which the gradient of batch n of task i is given: [T, N, P]."""
    given = signals[:, None] + noises
    model = nn.Linear(signals.shape[1], 1, bias=False).double()
    batches = {
        task: [lambda g=g: F.linear(g[None], model.weight).sum() for g in given[t]]
        for t, task in enumerate(TASKS[: len(signals)])
    }
    return measure(model, batches).parts


def test_reliability_and_corrected_cosine_with_exact_noise() -> None:
    """Signals at 60 degrees; every half has noise of its own, orthogonal to everything, as long
    as the signal. So cos(halves of one task) = 1/2, whole gradients are reliable by 2/3.
    """
    signals, noises = torch.zeros(2, 8, dtype=torch.float64), torch.zeros(2, 2, 8).double()
    signals[0, 0] = 1.0
    signals[1, 0], signals[1, 1] = 0.5, 0.75**0.5
    for t in range(2):
        for n in range(2):
            noises[t, n, 2 + 2 * t + n] = 1.0
    same, different = measure_signal_and_noise(signals, noises)
    assert same.reliability is not None
    np.testing.assert_allclose(same.reliability[0, 0], [0.5, 0.5], atol=1e-6)
    assert same.values[0, 0, 0, 1] == pytest.approx(0.5 * 2 / 3, abs=1e-6)
    assert different.values[0, 0, 0, 1] == pytest.approx(0.5 * 0.5, abs=1e-6)
    assert different.half_norms is not None
    np.testing.assert_allclose(different.half_norms[0, 0], 2**0.5, atol=1e-6)
    found = statistics.corrected(different)
    assert found is not None
    expected = [[1.0, 0.5], [0.5, 1.0]]  # the signals' own cosines
    np.testing.assert_allclose(found.values, expected, atol=1e-6)
    assert found.mean == pytest.approx(0.5, abs=1e-6)
    assert found.mean_reach == pytest.approx(0, abs=1e-6)  # both measurements are the same
    influence = statistics.measured_influence(different)
    assert influence is not None
    np.testing.assert_allclose(influence.values, expected, atol=1e-6)  # free of the noise's length


def test_corrected_cosine_does_not_depend_on_the_amount_of_data() -> None:
    """Raw cosines grow with the number of batches, as in real training; corrected ones do not."""
    draw = torch.Generator().manual_seed(0)
    size = 40_000
    common = torch.randn(size, generator=draw, dtype=torch.float64)
    signals = torch.stack(
        [common + torch.randn(size, generator=draw, dtype=torch.float64) for _ in range(2)]
    )
    raw, corrected = [], []
    for num in (4, 16, 64):
        noises = 6.0 * torch.randn(2, num, size, generator=draw, dtype=torch.float64)
        same, different = measure_signal_and_noise(signals, noises)
        raw.append(same.values[0, 0, 0, 1])
        for one in (same, different):
            assert one.reliability is not None
            reliable = one.reliability[0, 0].prod() ** 0.5
            reliable = 2 * reliable / (1 + reliable) if one is same else reliable
            corrected.append(one.values[0, 0, 0, 1] / reliable)
    assert raw[0] < 0.1 < 0.3 < raw[2]
    truth = float(torch.cosine_similarity(signals[0], signals[1], dim=0))
    np.testing.assert_allclose(corrected, truth, atol=0.12)


def test_shared_noise_counts_on_the_same_lines_only() -> None:
    """Orthogonal tasks whose lines have noise in common."""
    signals, noises = torch.zeros(2, 4, dtype=torch.float64), torch.zeros(2, 2, 4).double()
    signals[0, 0] = signals[1, 1] = 1.0
    noises[:, 0, 2] = noises[:, 1, 3] = 1.0
    same, different = measure_signal_and_noise(signals, noises)
    assert same.values[0, 0, 0, 1] == pytest.approx(1 / 3, abs=1e-6)
    assert different.values[0, 0, 0, 1] == pytest.approx(0.0, abs=1e-6)


def test_halves_that_disagree_have_no_corrected_cosine() -> None:
    signals = torch.tensor([[1.0, 0.0], [0.2, 0.1]], dtype=torch.float64)
    noises = torch.tensor([[[0.0, 0.0]] * 2, [[-1.0, 0.0], [1.0, 0.0]]], dtype=torch.float64)
    _, different = measure_signal_and_noise(signals, noises)
    found = statistics.corrected(different)
    assert found is not None
    assert found.reliability[1] < 0
    assert np.isnan(found.values[0, 1])
    assert np.isnan(found.mean)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: {"fr": b["fr"]}, "between tasks; got 1"),
        (lambda b: b | {"hi": b["hi"][:1]}, "'hi' .*at least two"),
        (lambda _: [], "tasks: "),
        (lambda b: b | {"hi": iter(b["hi"])}, "'hi': .*list .*list_iterator"),
        (lambda b: b | {"hi": b["hi"][0]}, "'hi': .*list of functions"),
    ],
)
def test_bad_batches(
    model: Model,
    batches: dict[str, list[Callable[[], Tensor]]],
    change: Callable[[object], object],
    message: str,
) -> None:
    with pytest.raises(ValueError, match=message):
        measure(model, change(batches))  # type: ignore[arg-type]


def test_names_that_come_twice(
    model: Model, batches: dict[str, list[Callable[[], Tensor]]]
) -> None:
    """Said before any batch is run."""

    def never() -> tuple[Tensor, list[str]]:
        raise AssertionError("work was done")

    idle: Any = {task: [never, never] for task in TASKS}
    with pytest.raises(ValueError, match=r"tasks: 'fr' .*once"):
        measure(model, idle, tasks=["fr", *TASKS])
    with pytest.raises(ValueError, match=r"tasks: 'a' .*2 times"):
        measure(model, [never, never], tasks=["a", "a", "b"])
    twins = [lambda name: name, lambda name: name[0]]
    for granularity in (twins, ["all_layer", "all_layer"], [partial(str), partial(str)]):
        with pytest.raises(ValueError, match=r"granularity: .*2 times; .*def"):
            measure(model, idle, granularity)


def test_batches_of_rows_from_a_generator(model: Model) -> None:
    rows: Any = (partial(rows_of, model, n) for n in range(4))
    with pytest.raises(ValueError, match=r"batches: .*generator; .*list\(\.\.\.\)"):
        measure(model, rows, tasks=TASKS)


def test_bad_arguments(model: Model, batches: dict[str, list[Callable[[], Tensor]]]) -> None:
    with pytest.raises(ValueError, match=r"engine: .*one_backward"):
        measure(model, batches, engine="fast")
    with pytest.raises(ValueError, match=r"granularity: .*all_layer"):
        measure(model, batches, "per_layer")
    with pytest.raises(ValueError, match=r"granularity: .*empty"):
        measure(model, batches, [])
    with pytest.raises(ValueError, match="tasks: are"):
        measure(model, batches, tasks=["fr", "de"])
    with pytest.raises(ValueError, match=r"losses: .*'fr' .*scalar"):
        measure(model, batches | {"fr": [lambda: torch.ones(3, requires_grad=True)] * 2})
