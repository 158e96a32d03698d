"""Meanings: small typed trees that every language can put into words.

A meaning says who did what to whom, where, when and how; it knows nothing of word order, case or
articles. Concepts are the English words of `_concepts.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Tense = Literal["past", "present", "future"]
Gap = Literal["agent", "patient"]


@dataclass(frozen=True, slots=True)
class Thing:
    """A person, animal, object or place that a clause speaks of.

    Attributes:
        concept: A noun, a pronoun ("i", "they") or a name ("mira").
        plural: More than one.
        definite: Known to the hearer ("the"), or new ("a").
        number: A number word, for plural things only.
        properties: Adjectives, at most two.
        owner: Whom it belongs to; a thing with an owner is definite.
        relative: A clause about it, whose gap it fills ("the man who sold the horse").
        also: A second thing joined by "and".
    """

    concept: str
    plural: bool = False
    definite: bool = True
    number: str | None = None
    properties: tuple[str, ...] = ()
    owner: Thing | None = None
    relative: Clause | None = None
    also: Thing | None = None

    @property
    def several(self) -> bool:
        """Whether verbs treat it as plural: "the man and the boy were"."""
        return self.plural or self.also is not None


@dataclass(frozen=True, slots=True)
class Clause:
    """One event or state.

    Attributes:
        action: A verb, or "be" with `quality` or `place`.
        agent: Who does it; None only where `gap` is "agent".
        tense: When it happens.
        patient: To whom or what it is done.
        recipient: Who receives the patient.
        quality: What the agent is ("old"), with the action "be".
        relation: How the place is related to the event ("near"); given together with `place`.
        place: Where it happens.
        time: A time word that fits the tense.
        manner: How it is done.
        content: What is said, known or hoped.
        negated: It did not happen.
        question: Asked, not stated.
        gap: In a relative clause, the part that the described thing plays.
    """

    action: str
    agent: Thing | None
    tense: Tense = "past"
    patient: Thing | None = None
    recipient: Thing | None = None
    quality: str | None = None
    relation: str | None = None
    place: Thing | None = None
    time: str | None = None
    manner: str | None = None
    content: Clause | None = None
    negated: bool = False
    question: bool = False
    gap: Gap | None = None

    @property
    def transitive(self) -> bool:
        """Whether the action has a patient, spoken or filled by the gap."""
        return self.patient is not None or self.gap == "patient"


@dataclass(frozen=True, slots=True)
class Sentence:
    """A clause, or two clauses joined by a connective such as "but" or "because"."""

    main: Clause
    connective: str | None = None
    second: Clause | None = None
