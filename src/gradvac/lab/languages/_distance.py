"""Distances between languages, known by construction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gradvac.lab.languages._concepts import CONTENT
from gradvac.lab.languages._grammar import Grammar, typological_distance
from gradvac.lab.languages._lexicon import Lexicon


@dataclass(frozen=True, eq=False)
class Distances:
    """How near the languages of a corpus are to each other.

    Attributes:
        codes: Codes of the languages, in the order of rows and columns.
        cognates: Share of the concepts whose words go back to the same etymon, [L, L].
        typology: Share of the grammar parameters that differ, [L, L].
        distance: Mean of `1 - cognates` and `typology`: 0 is the same language, [L, L].
    """

    codes: tuple[str, ...]
    cognates: NDArray[np.float64]
    typology: NDArray[np.float64]
    distance: NDArray[np.float64]

    def between(self, one: str, other: str) -> float:
        """The distance between two languages, by code."""
        return float(self.distance[self.codes.index(one), self.codes.index(other)])


def measure_distances(
    codes: Sequence[str], lexicons: Mapping[str, Lexicon], grammars: Mapping[str, Grammar]
) -> Distances:
    """Measure all distances from realised lexicons and grammars."""
    etyma = np.array([[lexicons[code].stems[word].etymon for word in CONTENT] for code in codes])
    cognates = (etyma[:, None, :] == etyma[None, :, :]).mean(axis=2)  # [L, L]
    typology = np.array(
        [[typological_distance(grammars[a], grammars[b]) for b in codes] for a in codes]
    )
    distance = (1 - cognates + typology) / 2
    for matrix in (cognates, typology, distance):
        matrix.flags.writeable = False
    return Distances(tuple(codes), cognates, typology, distance)
