"""Gram matrices and combinations of stacked task gradients, however wide and however they lie."""

import pytest
import torch
from torch import Tensor

from gradvac.engine.kernels import combine, gram, inner_products, stacks

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


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [3, 8, 70])
def test_inner_products(dtype: torch.dtype, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "_COLUMNS", 16)
    left, right = torch.randn(5, width).to(dtype), torch.randn(width, 4).to(dtype).t()
    found = inner_products(left, right)
    torch.testing.assert_close(found, left.double() @ right.double().t(), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("num", [1, 256, 1100, 1500])
def test_inner_products_of_rows_with_those_after_them(num: int) -> None:
    """Every pair once: what is below the diagonal is what is above it."""
    rows = torch.randn(1500, 9)
    expected = rows[:num].double() @ rows.double().t()
    torch.testing.assert_close(inner_products(rows[:num], rows), expected, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inner_products_of_halves(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where products of 16 bits are summed in float32 and rows must be aligned."""

    def mm(left: Tensor, right: Tensor, out_dtype: torch.dtype) -> Tensor:
        assert {left.dtype, right.dtype} == {torch.bfloat16}
        assert not any(stride % 8 for stride in (left.stride(0), right.stride(1)))
        return left.to(out_dtype) @ right.to(out_dtype)

    left, right = torch.randn(5, 203).to(dtype), torch.randn(4, 300).to(dtype)[:, :203]
    expected = left.double() @ right.double().t()
    monkeypatch.setattr(torch, "mm", mm)
    found = stacks._multiply(*stacks._as_halves(left, right))
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=5e-4)
