"""A step in a log: numbers by task and pair; pixels, coloured by sign, tasks in their places."""

import numpy as np
import pytest
import torch

from gradvac import Alignment
from gradvac.analysis import heat_maps, step_values

GREY, WHITE = [160, 160, 160], [250, 250, 250]
BLUE, ORANGE = [33, 102, 172], [179, 88, 6]


def alignment(grams: list[list[list[float]]], tasks: str, components: list[str]) -> Alignment:
    gram = torch.tensor(grams, dtype=torch.float64)
    nothing = torch.full_like(gram, torch.nan)
    return Alignment(
        tuple(tasks),
        tuple(components),
        torch.ones(gram.shape[:2], dtype=gram.dtype),
        nothing,
        nothing > 0,
        gram,
        torch.ones(len(tasks)),
    )


def cells(pixels: np.ndarray) -> list[list[list[int]]]:
    """The colour of every cell, which is all of one colour."""
    size = len(pixels) // 16
    blocks = pixels.reshape(size, 16, size, 16, 3)
    assert (blocks == blocks[:, :1, :, :1]).all()
    return blocks[:, 0, :, 0].tolist()


def test_sides_signs_and_absent_tasks() -> None:
    encoder = [[[4.0, 1.0], [1.0, 1.0]], [[1.0, 0.0], [0.0, 1.0]]]  # cosines 0.5 and 0
    decoder = [[[1.0, -0.2], [-0.2, 1.0]]]
    names = ["encoder.0", "encoder.1", "decoder.0"]
    found = heat_maps(alignment([*encoder, *decoder], "ac", names), list("abc"))
    assert list(found) == ["similarity/encoder", "similarity/decoder"]
    top, bottom = cells(found["similarity/encoder"]), cells(found["similarity/decoder"])
    assert top == [[GREY, GREY, BLUE], [GREY] * 3, [BLUE, GREY, GREY]]
    assert bottom[0] == [GREY, GREY, ORANGE]


def test_a_model_without_sides() -> None:
    nothing = heat_maps(alignment([[[1.0, 0.0], [0.0, 1.0]]], "ab", ["layers.0"]), ["a", "b"])
    assert cells(nothing["similarity"]) == [[GREY, WHITE], [WHITE, GREY]]
    alone = heat_maps(alignment([[[1.0]]], "a", ["layers.0"]), ["a"])
    assert cells(alone["similarity"]) == [[GREY]]


def test_colours_end_at_the_largest_cosine() -> None:
    gram = [[[1.0, 0.2, 0.1], [0.2, 1.0, 0.0], [0.1, 0.0, 1.0]]]
    row = cells(heat_maps(alignment(gram, "abc", ["x"]), list("abc"))["similarity"])[0]
    assert row[1] == BLUE
    np.testing.assert_allclose(row[2], np.mean([WHITE, BLUE], axis=0), atol=1)


def test_values_of_a_step_by_task_and_pair() -> None:
    grams = [[[4.0, 1.0], [1.0, 1.0]], [[1.0, -0.5], [-0.5, 1.0]], [[1.0, 0.0], [0.0, 0.0]]]
    found = step_values(alignment(grams, "ab", ["x", "y", "z"]))  # b has no gradient in z
    assert found["similarity/a~b"] == found["similarity"] == pytest.approx(0.0)
    assert found["conflicts"] == pytest.approx(0.5)
    assert (found["loss/b"], found["norm/a"]) == (1.0, pytest.approx(6**0.5))
    many = torch.eye(12, dtype=torch.float64)
    many[3, 7] = many[7, 3] = -0.25
    found = step_values(alignment([many.tolist()], "abcdefghijkl", ["x"]))
    assert found["lowest/d"] == found["lowest/h"] == pytest.approx(-0.25)
    assert found["lowest/a"] == 0
    assert not any("~" in name for name in found)
