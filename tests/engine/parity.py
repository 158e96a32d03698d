"""One model, two engines: what one_backward does is compared with what per_task does."""

# K components, T tasks

import copy
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from gradvac import Aligner, Alignment
from gradvac.rules import Rule

from .zoo import Case, make

TASKS = ["b", "a", "c"]
UNSORTED, SORTED, ONE_ABSENT = [2, 0, 1, 0, 2, 2], [0, 0, 1, 1, 1, 2], [1, 2, 2, 1, 1, 2]

# By these, whose gradient is whose always shows.
WEIGHTS = {"b": -2.0, "a": 3.5, "c": 1.0}

made = cache(make)  # models are copied before they are used


def attach(model: nn.Module, rule: Rule | None = None, **options: Any) -> Aligner:
    """A one_backward aligner; that some modules have no fast path is no news here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*no fast path")
        return Aligner(model, TASKS, rule, **{"engine": "one_backward", **options})


class Twins:
    """The same model twice, under per_task and under one_backward.

    Args:
        case: The model, its losses and inputs.
        rule: Makes the rule, once for each.
        tolerance: Relative, of everything that is compared.
        granularity: Of both.
        options: Of the one_backward aligner.
    """

    def __init__(
        self,
        case: Case,
        rule: Callable[[], Rule],
        *,
        tolerance: float = 1e-9,
        granularity: Any = "all_layer",
        **options: Any,
    ) -> None:
        self.case, self.tolerance = case, tolerance
        self.reference, self.model = copy.deepcopy(case.model), copy.deepcopy(case.model)
        self.per_task = Aligner(self.reference, TASKS, rule(), granularity, "per_task")
        self.aligner = attach(self.model, rule(), granularity=granularity, **options)

    def step(self, tasks: Sequence[int]) -> None:
        """One step of both, compared; then the parameters move, each model by its own `.grad`."""
        of_rows = torch.tensor(tasks)
        losses = [self.case.losses(m, of_rows, *self.case.inputs) for m in self.models]
        torch.testing.assert_close(losses[1], losses[0], rtol=self.tolerance, atol=self.tolerance)
        expected = self.per_task.backward(losses[0], of_rows)
        found = self.aligner.backward(losses[1], of_rows)
        assert expected is not None
        assert found is not None
        assert_same_gradients(self.model, self.reference, self.tolerance)
        assert_same_alignment(found, expected, self.tolerance)
        for parameter in (p for m in self.models for p in m.parameters()):
            if parameter.grad is not None:
                parameter.data.sub_(0.05 * parameter.grad)

    @property
    def models(self) -> tuple[nn.Module, nn.Module]:
        return self.reference, self.model


def assert_same_gradients(found: nn.Module, expected: nn.Module, tolerance: float) -> None:
    """Compare `.grad`; a parameter is held to its own scale, or 1 % of the model's."""
    gradients = [p.grad.to_dense() for p in expected.parameters() if p.grad is not None]
    scale = 0.01 * torch.stack([g.norm() for g in gradients]).norm()
    own = dict(found.named_parameters())
    for name, parameter in expected.named_parameters():
        mine = own[name].grad
        assert (mine is None) == (parameter.grad is None), name
        if mine is not None and parameter.grad is not None:
            mine, theirs = mine.to_dense(), parameter.grad.to_dense()
            error = float((mine - theirs).norm() / (theirs.norm() + scale))
            assert error <= tolerance, f"{name}: relative error {error:.1e}"


def assert_same_alignment(found: Alignment, expected: Alignment, tolerance: float) -> None:
    """Compare what the rules saw and said, where there is more to see than rounding."""
    assert (found.tasks, found.components) == (expected.tasks, expected.components)
    least = 1e-5 * expected.norms.max()
    noise = ((expected.norms > 0) & (expected.norms < least)).any(-1)  # [K]

    def compare(name: str) -> None:
        mine, theirs = getattr(found, name)[~noise], getattr(expected, name)[~noise]
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance, msg=_say(name))

    compare("weights")
    compare("similarity")


def _say(name: str) -> Callable[[str], str]:
    return lambda message: f"{name}: {message}"


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """Copies of `.grad` by name."""
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def plain_backward(losses: Tensor) -> None:
    """What training without an aligner does."""
    torch.autograd.backward([losses.sum()])
