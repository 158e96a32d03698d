"""TorchJD's weightings in our rules, and our rules against TorchJD's."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torchjd import aggregation as torchjd

from gradvac import PCGrad, TorchJD

from .steps import bound, gram_of, step, weights_of


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: torchjd.UPGradWeighting(), id="UPGrad"),
        pytest.param(lambda: torchjd.CAGradWeighting(c=0.5), id="CAGrad"),
        pytest.param(lambda: torchjd.IMTLGWeighting(), id="IMTL-G"),
        pytest.param(lambda: torchjd.AlignedMTLWeighting(), id="Aligned-MTL"),
        pytest.param(lambda: torchjd.MeanWeighting(), id="Mean"),
    ],
)
def test_any_gramian_weighting_runs(make: Callable[[], nn.Module]) -> None:
    rule, gradients = bound(TorchJD(make()), 4, 2), draw(2, 4, 9)
    found = step(rule, gram_of(gradients)).weights
    for k in range(2):
        expected = make()(gradients[k] @ gradients[k].T)
        torch.testing.assert_close(found[k], expected)


@pytest.mark.parametrize(
    "given",
    [
        torchjd.Mean(),
        torchjd.TrimmedMean(1),
        torchjd.MoDoWeighting(),
        "MoDo",
        3,
    ],
    ids=["gramian aggregator", "aggregator", "weighting of matrices", "its name", "number"],
)
def test_what_is_no_gramian_weighting_is_refused(given: object) -> None:
    with pytest.raises(ValueError, match=r"weighting: .*Gramian"):
        TorchJD(given)


def test_two_tasks_of_pcgrad() -> None:
    """With two tasks there is one order only."""
    for seed in range(20):
        gradients = draw(2, 3, seed=seed)
        expected = torchjd.PCGradWeighting()(gradients @ gradients.T)
        torch.testing.assert_close(weights_of(PCGrad(), gradients), expected)


def test_pcgrad_in_a_given_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """TorchJD visits in the order of torch.randperm; without it, in task order."""
    monkeypatch.setattr(torch, "randperm", torch.arange)
    for seed in range(20):
        gradients = draw(6, 4, seed=seed)
        expected = torchjd.PCGradWeighting()(gradients @ gradients.T)
        torch.testing.assert_close(weights_of(PCGrad(order="fixed"), gradients), expected)


def test_stateful_weightings_have_a_state_per_component() -> None:
    weighting = torchjd.GradVacWeighting(beta=0.5)
    rule, alone = bound(TorchJD(weighting), 2, 2), torchjd.GradVacWeighting(beta=0.5)
    for seed in range(6):
        gradients = draw(2, 2, 5, seed=seed)
        found = step(rule, gram_of(gradients)).weights
        torch.testing.assert_close(found[1], alone(gradients[1] @ gradients[1].T))


def make_stateful() -> dict[str, nn.Module]:
    return {
        "gradvac": torchjd.GradVacWeighting(beta=0.5),
        "pcd": torchjd.PCDWeighting(),
        "a weighting around another": torchjd.CRMOGMWeighting(torchjd.MGDAWeighting()),
    }


@pytest.mark.parametrize("name", list(make_stateful()))
def test_state_of_a_weighting_is_saved(name: str, tmp_path: Path) -> None:
    """Two tasks, since TorchJD draws the order of more from torch's global generator."""
    one, other = (bound(TorchJD(make_stateful()[name]), 2, 2) for _ in range(2))
    fresh = bound(TorchJD(make_stateful()[name]), 2, 2)
    for seed in range(5):
        step(one, gram_of(draw(2, 2, 5, seed=seed)))
    torch.save(one.state_dict(), tmp_path / "state.pt")
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    remembered = False
    for seed in range(5, 10):
        gram = gram_of(draw(2, 2, 5, seed=seed))
        expected = step(one, gram).weights
        assert torch.equal(step(other, gram).weights, expected)
        remembered |= not torch.equal(step(fresh, gram).weights, expected)
    assert remembered


@pytest.mark.parametrize("name", list(make_stateful()))
def test_overflow_leaves_the_state_of_a_weighting_untouched(name: str) -> None:
    one, other = (bound(TorchJD(make_stateful()[name]), 2, 2) for _ in range(2))
    for seed in range(5):
        gram = gram_of(draw(2, 2, 5, seed=seed))
        assert torch.equal(step(one, gram).weights, step(other, gram).weights)
        spoiled = gram.clone()
        spoiled[1, 0, 0] = torch.inf
        step(one, spoiled)


def test_rows_belong_to_tasks_in_any_order() -> None:
    """A batch may bring its tasks in another order every step, a resumed run list them anew."""
    one, other = TorchJD(torchjd.PCDWeighting()), TorchJD(torchjd.PCDWeighting())
    one.bind(["a", "b"], ["0"])
    other.bind(["b", "a"], ["0"])
    lengths = torch.tensor([[1.0], [10.0]])
    for seed in range(3):
        step(one, gram_of(draw(2, 5, seed=seed) * lengths))
    other.load_state_dict(one.state_dict())
    for seed in range(3, 9):
        gradients = draw(2, 5, seed=seed) * lengths
        expected = step(one, gram_of(gradients)).weights
        if seed % 2:
            found = step(other, gram_of(gradients), present=[1, 0]).weights
        else:
            found = step(other, gram_of(gradients.flip(0)), present=[0, 1]).weights.flip(1)
        assert torch.equal(found, expected)
