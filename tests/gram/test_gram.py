"""Geometry read off Gram matrices, against the same geometry on explicit vectors."""

# K components, T tasks, P parameters

import pytest
import torch
from torch import Tensor

from gradvac import gram as geometry

SCALES = [1e-100, 1e-15, 1.0, 1e15, 1e100]


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("scale", SCALES)
def test_norms_and_cosines_of_vectors(scale: float) -> None:
    gradients = draw(3, 4, 7) * scale
    gram = gradients @ gradients.mT
    torch.testing.assert_close(geometry.norms(gram), gradients.norm(dim=-1))
    expected = torch.nn.functional.cosine_similarity(
        gradients[:, :, None] / scale, gradients[:, None] / scale, dim=-1
    )
    torch.testing.assert_close(geometry.cosine(gram), expected)


@pytest.mark.parametrize("scale", SCALES)
def test_products_of_combinations(scale: float) -> None:
    gradients, left, right = draw(3, 4, 7) * scale, draw(3, 4, seed=1), draw(3, 4, seed=2)
    gram = gradients @ gradients.mT
    one, other = (left[:, None] @ gradients)[:, 0], (right[:, None] @ gradients)[:, 0]
    found = geometry.product(gram, left, right)
    torch.testing.assert_close(found / scale**2, (one * other).sum(-1) / scale**2)
    torch.testing.assert_close(geometry.length(gram, left), one.norm(dim=-1))


@pytest.mark.parametrize("scale", SCALES)
def test_what_a_combination_does_to_the_sum(scale: float) -> None:
    gradients, weights = draw(5, 3, 9) * scale, draw(5, 3, seed=1)
    gram = gradients @ gradients.mT
    update, plain = (weights[:, None] @ gradients)[:, 0] / scale, gradients.sum(1) / scale
    cosine = torch.nn.functional.cosine_similarity(update, plain, dim=-1)
    torch.testing.assert_close(geometry.update_cosine(gram, weights), cosine)
    ratio = update.norm(dim=-1) / plain.norm(dim=-1)
    torch.testing.assert_close(geometry.update_ratio(gram, weights), ratio)


def test_zero_gradients_have_no_direction() -> None:
    gradients = draw(4, 6)
    gradients[1] = 0.0
    gram = gradients @ gradients.mT
    similarity = geometry.cosine(gram)
    assert torch.equal(similarity[1], torch.zeros(4, dtype=torch.float64))
    assert torch.equal(similarity[:, 1], torch.zeros(4, dtype=torch.float64))
    assert geometry.norms(gram)[1] == 0

    nothing, ones = torch.zeros(4, 4, dtype=torch.float64), torch.ones(4, dtype=torch.float64)
    assert geometry.update_cosine(nothing, ones) == 0
    assert geometry.update_ratio(nothing, ones) == 0
    assert geometry.update_cosine(gram, 0 * ones) == 0
    assert geometry.update_ratio(gram, 0 * ones) == 0


def test_rounding_leaves_no_nan_and_no_cosine_above_one() -> None:
    gram = torch.tensor([[1.0, 1.0 + 1e-12], [1.0 + 1e-12, 1.0]], dtype=torch.float64)
    assert geometry.cosine(gram).max() == 1.0
    gram = torch.tensor([[-1e-18, 0.0], [0.0, 1.0]], dtype=torch.float64)
    assert geometry.norms(gram).tolist() == [0.0, 1.0]
    cancelled = torch.tensor([[1.0, -1.0 - 1e-12], [-1.0 - 1e-12, 1.0]], dtype=torch.float64)
    assert geometry.length(cancelled, torch.ones(2, dtype=torch.float64)) == 0


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_non_finite_components_are_found_and_touch_no_other(value: float) -> None:
    gradients = draw(3, 4, 7)
    gram = gradients @ gradients.mT
    spoiled = gram.clone()
    spoiled[1, 2, 3] = value
    assert geometry.is_finite(spoiled).tolist() == [True, False, True]
    for function in (geometry.norms, geometry.cosine):
        assert torch.equal(function(spoiled)[[0, 2]], function(gram)[[0, 2]])


def test_any_leading_dimensions() -> None:
    gradients, weights = draw(2, 3, 4, 5), draw(2, 3, 4, seed=1)
    gram = gradients @ gradients.mT
    assert geometry.norms(gram).shape == (2, 3, 4)
    assert geometry.cosine(gram).shape == (2, 3, 4, 4)
    assert geometry.update_cosine(gram, weights).shape == (2, 3)
    assert geometry.is_finite(gram).shape == (2, 3)
    torch.testing.assert_close(geometry.cosine(gram)[1, 2], geometry.cosine(gram[1, 2]))
