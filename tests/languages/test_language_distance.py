"""Distances: known by construction, and ordered as the tree is."""

from __future__ import annotations

import unicodedata
from itertools import combinations

import numpy as np
import pytest

from gradvac.lab.languages import Corpus
from gradvac.lab.languages.grammar import PARAMETERS, Grammar, typological_distance
from gradvac.lab.languages.meanings import CONTENT
from gradvac.lab.languages.sounds import SCRIPTS, SOUNDS, writer


def relation(corpus: Corpus, one: str, other: str) -> str:
    a, b = corpus.languages[one], corpus.languages[other]
    if a.family != b.family:
        return "between"
    return "branch" if a.branch == b.branch else "family"


def by_relation(corpus: Corpus, matrix: np.ndarray) -> dict[str, list[float]]:
    values: dict[str, list[float]] = {"branch": [], "family": [], "between": []}
    for (i, one), (j, other) in combinations(enumerate(corpus.codes), 2):
        values[relation(corpus, one, other)].append(matrix[i, j])
    return values


def test_matrices_are_symmetric_with_zero_diagonal(corpus: Corpus) -> None:
    distances = corpus.distances()
    assert distances.codes == corpus.codes
    for matrix in (distances.distance, distances.typology, 1 - distances.cognates):
        assert matrix.shape == (16, 16)
        assert np.array_equal(matrix, matrix.T)
        assert not matrix.diagonal().any()
        off_diagonal = matrix[~np.eye(16, dtype=bool)]
        assert (off_diagonal > 0).all()
        assert (off_diagonal <= 1).all()


def test_cognates_fall_from_branch_to_family_to_strangers(corpus: Corpus) -> None:
    shares = by_relation(corpus, corpus.distances().cognates)
    assert min(shares["branch"]) > max(shares["family"])
    assert min(shares["family"]) > max(shares["between"]) + 0.2
    assert 0.7 < np.mean(shares["branch"]) < 0.95
    assert 0.4 < np.mean(shares["family"]) < 0.7
    assert np.mean(shares["between"]) < 0.05


def test_distance_rises_from_branch_to_family_to_strangers(corpus: Corpus) -> None:
    values = by_relation(corpus, corpus.distances().distance)
    assert max(values["branch"]) < min(values["family"])
    assert max(values["family"]) < min(values["between"])


def test_cognate_share_is_that_of_the_realised_lexicons(corpus: Corpus) -> None:
    one, other = (corpus.generator.lexicon(code).stems for code in ("qso", "qsd"))
    shared = sum(one[concept].etymon == other[concept].etymon for concept in CONTENT)
    distances = corpus.distances()
    i, j = distances.codes.index("qso"), distances.codes.index("qsd")
    assert distances.cognates[i, j] == pytest.approx(shared / len(CONTENT))
    combined = (1 - distances.cognates[i, j] + distances.typology[i, j]) / 2
    assert distances.distance[i, j] == pytest.approx(combined)


def test_borrowing_makes_strangers_share_words(corpus: Corpus) -> None:
    distances = corpus.distances()
    index = distances.codes.index
    assert distances.cognates[index("qsk"), index("qtu")] > 0.02  # Kelvish borrows from Ulkarin
    assert distances.cognates[index("qso"), index("qtu")] == 0
    kelvish, ulkarin = (corpus.generator.lexicon(code) for code in ("qsk", "qtu"))
    borrowed = [c for c in CONTENT if kelvish.stems[c].etymon == ulkarin.stems[c].etymon]
    assert any(kelvish.cite(c) == ulkarin.cite(c) for c in borrowed)


def test_typological_distance_counts_differing_parameters() -> None:
    one, other = Grammar(), Grammar(order="SOV", genitive="after")
    assert typological_distance(one, other) == pytest.approx(2 / len(PARAMETERS))
    assert typological_distance(one, one) == 0


def test_related_languages_look_related(corpus: Corpus) -> None:
    """Surface forms: siblings share many written words, strangers of the same script hardly any."""
    words = {code: set(" ".join(lines).split()) for code, lines in corpus.aligned("dev").items()}

    def overlap(one: str, other: str) -> float:
        return len(words[one] & words[other]) / min(len(words[one]), len(words[other]))

    assert overlap("qso", "qsm") > 3 * overlap("qso", "qnk")  # all three in Latin
    assert overlap("qtu", "qtb") > 3 * overlap("qtu", "qsd")  # all three in Cyrillic
    assert overlap("qso", "qsd") == 0  # one family in two scripts


def test_families_and_resource_levels_are_crossed(corpus: Corpus) -> None:
    assert len(corpus.codes) == 16
    assert [len(codes) for codes in corpus.families.values()] == [4, 4, 4, 4]
    for codes in corpus.families.values():
        levels = [corpus.languages[code].resource_level for code in codes]
        assert sorted(levels) == ["extremely_low", "high", "low", "medium"]
        assert len({corpus.languages[code].branch for code in codes}) == 2
    assert corpus.resize({"qso": 400}).languages["qso"].resource_level == "extremely_low"
    assert all("qaa" <= code <= "qtz" for code in corpus.codes)


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_are_one_to_one_and_normalised(script: str) -> None:
    write = writer(script)
    words = [a + b + c for a in SOUNDS for b in SOUNDS for c in SOUNDS[:12]] + list(SOUNDS)
    written = {write(word) for word in words}
    assert len(written) == len(words)
    assert all(unicodedata.normalize("NFC", word) == word for word in written)
    assert write("ta-ta") == f"{write('ta')}-{write('ta')}"


def test_scripts_share_no_letters() -> None:
    letters = [set("".join(map(writer(script), SOUNDS))) for script in SCRIPTS]
    for one, other in combinations(letters, 2):
        assert not one & other


def test_devanagari_writes_vowels_as_signs() -> None:
    assert writer("devanagari")("kitam") == "कितम्"
    assert writer("devanagari")("alka") == "अल्क"
