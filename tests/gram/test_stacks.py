"""Gram matrices and combinations of stacked task gradients, however wide and however they lie."""

import pytest
import torch

from gradvac.engine.kernels import combine, gram

WIDTHS = [0, 1, 1000, 1 << 15, (1 << 15) + 1, 5 << 13, 100_003]  # with and without a remainder


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("is_turned", [False, True])
def test_gram_and_combination(width: int, dtype: torch.dtype, is_turned: bool) -> None:
    gradients = torch.randn(width, 5).to(dtype).t() if is_turned else torch.randn(5, width)
    gradients = gradients.to(dtype)
    wide, weights = gradients.double(), torch.rand(5, dtype=torch.float64)
    torch.testing.assert_close(gram(gradients), wide @ wide.t(), rtol=1e-12, atol=1e-9)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    combined = combine(weights, gradients).double()
    torch.testing.assert_close(combined, weights @ wide, rtol=tolerance, atol=tolerance)


def test_opposite_gradients_cancel_to_the_last_digits() -> None:
    """By which the sweep tells a gradient that cancelled from one that did not."""
    first = torch.randn(100_003)
    products = gram(torch.stack([first, -3 * first]))
    left = 9 * products[0, 0] + 6 * products[0, 1] + products[1, 1]  # |3 first + second|^2
    assert float(left.abs()) < 1e-12 * float(products[1, 1])
