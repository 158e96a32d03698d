"""URIEL's distances: those of the package `urielplus`, where it knows enough."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradvac.lab.languages import real, uriel_distances
from gradvac.lab.languages.real import LONG_CODES, URIEL_KINDS

CODES = ["de", "da", "es", "it", "cs", "hr", "he", "sw", "sn", "nd", "tdx", "ha"]


def apart(codes: str, kind: str) -> np.ndarray:
    return uriel_distances(codes.split(), kind)


def test_without_the_package_the_fix_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", {}.get)
    with pytest.raises(ValueError, match=r"urielplus.*pip install"):
        apart("de es", "featural")


def test_unknown_kinds_are_answered_with_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"'syntatic'.*'syntactic'"):
        apart("de es", "syntatic")


def test_every_short_code_has_a_long_one() -> None:
    assert {code for code in real.LANGUAGES if len(code) == 2} <= set(LONG_CODES)
    assert len(set(LONG_CODES.values())) == len(LONG_CODES) == 183


@pytest.mark.parametrize("kind", URIEL_KINDS)
def test_distances_are_distances(kind: str) -> None:
    found = uriel_distances(CODES, kind)
    np.testing.assert_allclose(found, found.T, atol=1e-12)
    assert (np.diag(found) == 0).all()
    known = found[~np.isnan(found)]
    assert known.size > len(CODES)
    assert known.min() >= 0
    assert known.max() <= 1


def test_relatives_and_neighbours_are_near() -> None:
    for kind in ("featural", "genetic"):
        shona, northern_ndebele, german = apart("sn nd de", kind)[0]
        assert shona < northern_ndebele < german
    for kind in ("syntactic", "genetic", "geographic"):
        _, danish, swahili = apart("de da sw", kind)[0]
        assert danish < swahili
    assert apart("cs hr ha", "genetic")[0, 2] == 1


def test_what_is_not_known_is_not_guessed() -> None:
    assert np.isnan(apart("tdx de", "featural")[0, 1])
    assert np.isnan(apart("da hr", "featural")[0, 1])  # 12 features are known of both
    assert np.isnan(apart("eu nb", "genetic")[0, 1])  # of no recorded family
    assert np.isnan(apart("nosuch de", "geographic")[0, 1])
    assert np.array_equal(apart("deu spa", "script"), apart("de es", "script"))


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The package's own class; it finds its files, and writes, in a temporary folder."""
    spec = importlib.util.find_spec("urielplus")
    assert spec is not None
    assert spec.submodule_search_locations
    shutil.copytree(Path(spec.submodule_search_locations[0]) / "database", tmp_path / "database")
    monkeypatch.setattr("logging.basicConfig", dict)  # called on import
    module = importlib.import_module("urielplus.urielplus")
    monkeypatch.setattr(module, "__file__", str(tmp_path / "urielplus.py"))
    return module.URIELPlus()


def test_where_enough_is_known_the_package_says_the_same(package: Any) -> None:
    for kind in URIEL_KINDS:
        ours = uriel_distances(CODES, kind)
        for one, other in ((0, 2), (2, 7), (7, 11)):  # de es, es sw, sw ha
            pair = [LONG_CODES[CODES[place]] for place in (one, other)]
            assert ours[one, other] == pytest.approx(package.new_distance(kind, pair), abs=6e-4)
