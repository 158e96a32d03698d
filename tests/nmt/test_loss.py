"""The loss in few passes against torch's own."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gradvac.lab.recipes.nmt.loss import plain_cross_entropy


def both(
    kind: torch.dtype, smoothing: float
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Losses and gradients of logits, ours and torch's, for start gradients of any size."""
    torch.manual_seed(0)
    values = 3 * torch.randn(7, 50, dtype=torch.float64)
    labels = torch.tensor([0, 3, 49, 3, 7, 7, 0])
    starts = torch.randn(7, dtype=torch.float64)
    found = []
    for work in (plain_cross_entropy, torch_cross_entropy):
        logits = values.to(kind, copy=True).requires_grad_()
        losses = work(logits, labels, smoothing)
        (losses * starts.to(losses.dtype)).sum().backward()
        assert logits.grad is not None
        found.append((losses.detach(), logits.grad))
    return found[0], found[1]


def torch_cross_entropy(logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    return F.cross_entropy(logits, labels, reduction="none", label_smoothing=smoothing)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.9])
def test_loss_and_gradient_are_torchs(smoothing: float) -> None:
    ours, theirs = both(torch.float64, smoothing)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)
    ours, theirs = both(torch.float32, smoothing)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_bf16_logits_give_losses_in_float32(smoothing: float) -> None:
    (losses, gradient), _ = both(torch.bfloat16, smoothing)
    exact = both(torch.float64, smoothing)[1]
    assert losses.dtype == torch.float32
    assert gradient.dtype == torch.bfloat16
    torch.testing.assert_close(losses.double(), exact[0], rtol=0.02, atol=0.05)
    assert (gradient.double() - exact[1]).norm() < 0.02 * exact[1].norm()


class Epochs(TorchDispatchMode):
    """Counts operations that leave as many values as there are logits."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size, self.found = size, Counter[str]()

    def __torch_dispatch__(self, work: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = work(*args, **(kwargs or {}))
        name = work.overloadpacket.__name__
        if isinstance(result, Tensor) and result.numel() == self._size:
            # Two of these only look otherwise, and one adds a number to every row.
            self.found[name] += name not in ("detach", "expand", "scatter_add_")
        return result


def test_few_passes_over_the_logits() -> None:
    """The logarithms, their gradient, to which that of the labels is added, and the logits'."""
    counts = []
    for work in (plain_cross_entropy, torch_cross_entropy):
        logits = torch.randn(9, 40, requires_grad=True)
        with Epochs(9 * 40) as passes:
            work(logits, torch.arange(9), 0.1).sum().backward()
        counts.append(sum(passes.found.values()))
    assert counts == [3, 4]
