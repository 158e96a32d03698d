"""Parts of speech of the constructed languages: known, because every word has its concept."""

from __future__ import annotations

from gradvac.lab.languages._concepts import (
    ADJECTIVES,
    CLASSIFIERS,
    COORDINATING,
    MANNERS,
    NAMES,
    NOUNS,
    NUMBERS,
    PRONOUNS,
    RELATIONS,
    SUBORDINATING,
    TIMES,
    VERBS,
)

_PARTS = {
    **dict.fromkeys((*NOUNS, *CLASSIFIERS.values()), "NOUN"),
    **dict.fromkeys(NAMES, "PROPN"),
    **dict.fromkeys(VERBS, "VERB"),
    **dict.fromkeys(ADJECTIVES, "ADJ"),
    **dict.fromkeys(NUMBERS, "NUM"),
    **dict.fromkeys((*MANNERS, *TIMES), "ADV"),
    **dict.fromkeys((*RELATIONS, "of", "to"), "ADP"),
    **dict.fromkeys((*PRONOUNS, "who"), "PRON"),
    **dict.fromkeys(("definite", "indefinite"), "DET"),
    **dict.fromkeys(("past", "future", "be"), "AUX"),
    **dict.fromkeys(("plural", "not", "question", "whose"), "PART"),
    **dict.fromkeys(COORDINATING, "CCONJ"),
    **dict.fromkeys((*SUBORDINATING, "that"), "SCONJ"),
}


def part_of_speech(concept: str) -> str:
    """The universal part of speech of the words for a concept, such as "NOUN"."""
    return _PARTS[concept]
