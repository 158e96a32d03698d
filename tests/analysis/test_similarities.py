"""The data class, and its file."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradvac.analysis import Similarities, concatenate, load_similarities, save_similarities
from gradvac.analysis.similarities import mean_where_known


def make(steps: list[int], seed: int = 0, **changes: Any) -> Similarities:
    draw = np.random.default_rng(seed)
    shape = (len(steps), 2, 3, 3)
    fields: dict[str, Any] = {
        "tasks": ("fr", "hi", "tr"),
        "components": ("encoder.0", "decoder.0"),
        "steps": np.array(steps),
        "values": draw.random(shape, dtype=np.float32),
        "reliability": draw.random(shape[:3], dtype=np.float32),
        "across": draw.random(shape, dtype=np.float32),
        "half_norms": draw.random((*shape[:2], 2, 3), dtype=np.float32),
    }
    return Similarities(**fields | changes)


def test_select_by_name_in_the_order_given() -> None:
    found = make([10, 20, 30])
    chosen = found.select(tasks=["tr", "fr"], components=["decoder.0"], steps=[30, 10])
    assert chosen.tasks == ("tr", "fr")
    assert chosen.values.shape == (2, 1, 2, 2)
    assert chosen.values[0, 0, 0, 1] == found.values[2, 1, 2, 0]
    assert chosen.reliability is not None
    assert found.reliability is not None
    assert chosen.reliability[1, 0, 1] == found.reliability[0, 1, 0]
    assert chosen.across is not None
    assert found.across is not None
    assert chosen.across[0, 0, 1, 0] == found.across[2, 1, 0, 2]
    assert chosen.half_norms is not None
    assert found.half_norms is not None
    assert chosen.half_norms[1, 0, 1].tolist() == found.half_norms[0, 1, 1, [2, 0]].tolist()
    with pytest.raises(ValueError, match=r"tasks: .*'de'; .*fr, hi, tr"):
        found.select(tasks=["de"])
    with pytest.raises(ValueError, match=r"steps: .*15"):
        found.select(steps=[15])


def test_a_mean_leaves_out_what_is_unknown() -> None:
    found = make([1, 2])
    found.values[0, 0, 0, 1] = np.nan
    found.values[:, 1, 2, 2] = np.nan
    mean = mean_where_known(found.values, axis=0)
    assert mean[0, 0, 1] == found.values[1, 0, 0, 1]
    assert np.isnan(mean[1, 2, 2])
    assert mean[0, 1, 1] == pytest.approx(found.values[:, 0, 1, 1].mean())


def test_shapes_are_checked() -> None:
    with pytest.raises(ValueError, match=r"values: .*\(1, 2, 3, 3\)"):
        make([1], values=np.zeros((1, 2, 3, 2), dtype=np.float32))
    with pytest.raises(ValueError, match="lines: "):
        make([1], lines="other")


def test_concatenate_sorts_steps_and_lets_the_later_win() -> None:
    first, second = make([30, 10]), make([20, 30], seed=1)
    found = concatenate([first, second])
    assert found.steps.tolist() == [10, 20, 30]
    np.testing.assert_array_equal(found.values[2], second.values[1])
    np.testing.assert_array_equal(found.values[0], first.values[1])
    with pytest.raises(ValueError, match="tasks: "):
        concatenate([first, make([1], tasks=("fr", "hi", "de"))])


def test_file_round_trip_with_numpy_alone(tmp_path: Path) -> None:
    path = tmp_path / "similarity.npz"
    given = [
        make([1, 2]),
        make([1, 2], seed=1, lines="different", reliability=None, across=None),
        make([1, 2], seed=2, granularity="model.part", components=("a", "b")),
    ]
    save_similarities(path, given, "dev")
    found, about = load_similarities(path)
    assert about == "dev"
    assert {(one.granularity, one.lines) for one in found} == {
        ("all_layer", "same"),
        ("all_layer", "different"),
        ("model.part", "same"),
    }
    for one, other in zip(given, found, strict=True):
        assert (one.tasks, one.components) == (other.tasks, other.components)
        np.testing.assert_array_equal(one.values, other.values)
        for name in ("reliability", "across", "half_norms"):
            kept, back = getattr(one, name), getattr(other, name)
            assert (kept is None) == (back is None)
            assert kept is None or np.array_equal(kept, back)
    with np.load(path) as file:
        np.testing.assert_array_equal(file["all_layer.same.values"], given[0].values)
        assert file["tasks"].tolist() == ["fr", "hi", "tr"]
    assert [p.name for p in tmp_path.iterdir()] == ["similarity.npz"]


def test_truncated_and_foreign_files(tmp_path: Path) -> None:
    path = tmp_path / "similarity.npz"
    save_similarities(path, [make([1])])
    whole = path.read_bytes()
    for content in (whole[: len(whole) // 2], b"", b"hello", whole[:-8]):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="damaged"):
            load_similarities(path)
    np.savez(path, other=np.ones(3))
    with pytest.raises(ValueError, match="no similarities"):
        load_similarities(path)


def test_random_damage_is_found(tmp_path: Path) -> None:
    """Any flipped byte and any cut: a clear word, or the same similarities."""
    path = tmp_path / "similarity.npz"
    save_similarities(path, [make([1, 2]), make([1, 2], seed=1, lines="different")], "dev")
    whole, (given, about) = path.read_bytes(), load_similarities(path)
    draw = random.Random(0)
    flips = [(draw.randrange(len(whole)), draw.randint(1, 255)) for _ in range(300)]
    flips += [(at, 1) for at in range(whole.index(b"PK\x01\x02"), len(whole))]  # the directory
    damaged = [whole[:at] + bytes([whole[at] ^ by]) + whole[at + 1 :] for at, by in flips]
    damaged += [whole[: draw.randrange(len(whole))] for _ in range(50)]
    found = 0
    for content in damaged:
        path.write_bytes(content)
        try:
            loaded = load_similarities(path)
        except ValueError as error:
            assert str(error).startswith(f"{path}: holds no similarities, or is damaged")  # noqa: PT017
            found += 1
            continue
        assert loaded[1] == about
        for one, other in zip(given, loaded[0], strict=True):
            np.testing.assert_equal(vars(one), vars(other))
    assert found > 200  # the rest hit dates and such


def test_an_array_under_that_name(tmp_path: Path) -> None:
    path = tmp_path / "similarity.npz"
    with path.open("wb") as file:
        np.save(file, np.ones(3))
    with pytest.raises(ValueError, match="remove it and measure again"):
        load_similarities(path)
    with pytest.raises(FileNotFoundError):
        load_similarities(tmp_path / "missing.npz")


def test_similarities_of_equal_name_are_refused(tmp_path: Path) -> None:
    twins = [make([1], granularity="<lambda>"), make([1], seed=1, granularity="<lambda>")]
    message = "measured: '<lambda>, same lines' .*names"
    with pytest.raises(ValueError, match=message):
        save_similarities(tmp_path / "x.npz", twins)
    assert not list(tmp_path.iterdir())


def test_only_like_similarities_share_a_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="same tasks and steps"):
        save_similarities(tmp_path / "x.npz", [make([1]), make([2], lines="different")])
