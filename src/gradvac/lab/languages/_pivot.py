"""The pivot: plain lower-case English without punctuation.

Every word carries the concept it stands for, which makes the word alignment with any other language
known; the dictionary baseline is built on it.
"""

from __future__ import annotations

from typing import NamedTuple

from gradvac.lab.languages._concepts import NOUNS, PRONOUNS, RELATIONS, TIMES, VERBS, in_order
from gradvac.lab.languages._meaning import Clause, Sentence, Thing

PIVOT = "en"


class Word(NamedTuple):
    """A word of a sentence and the concept it stands for."""

    form: str
    concept: str


def say(sentence: Sentence) -> list[Word]:
    """Put a meaning into English words."""
    words = _clause(sentence.main)
    if sentence.second is not None and sentence.connective is not None:
        words.append(Word(sentence.connective, sentence.connective))
        words += _clause(sentence.second)
    return words


def _phrase(thing: Thing, *, subject: bool = False) -> list[Word]:
    concept = thing.concept
    if concept in PRONOUNS:
        return [Word(PRONOUNS[concept][0 if subject else 1], concept)]
    if concept not in NOUNS:
        return [Word(concept, concept)]
    words = [Word(thing.number, thing.number)] if thing.number else []
    words += [Word(word, word) for word in in_order(thing.properties)]
    words.append(Word(NOUNS[concept].plural if thing.plural else concept, concept))
    if thing.owner is not None:
        words = _possessive(thing.owner) + words
    elif thing.definite:
        words.insert(0, Word("the", "definite"))
    elif not thing.plural:
        words.insert(0, Word("an" if words[0].form[0] in "aeiou" else "a", "indefinite"))
    if thing.relative is not None:
        who = "who" if NOUNS[concept].kind == "p" else "that"
        words += [Word(who, "who"), *_clause(thing.relative, head=thing)]
    if thing.also is not None:
        words += [Word("and", "and"), *_phrase(thing.also)]
    return words


def _possessive(owner: Thing) -> list[Word]:
    if owner.concept in PRONOUNS:
        return [Word(PRONOUNS[owner.concept][2], owner.concept)]
    *rest, last = _phrase(owner)
    ending = "'" if owner.plural and last.form.endswith("s") else "'s"
    return [*rest, Word(last.form + ending, last.concept)]


def _clause(clause: Clause, *, head: Thing | None = None) -> list[Word]:
    """Put a clause into words: subject, verb, object, recipient, manner, place, time, content."""
    subject = clause.agent if clause.agent is not None else head
    assert subject is not None, "a clause without an agent needs a head"
    spoken = _phrase(subject, subject=True) if clause.agent is not None else []
    auxiliary, verb = _verb(clause, subject)
    if clause.question:
        words = [Word(form, "question") for form in auxiliary[:1]] + spoken
        auxiliary = auxiliary[1:]
    else:
        words = spoken
    concept = {"will": "future", "not": "not", "did": "past"}
    words += [Word(form, concept.get(form, clause.action)) for form in (*auxiliary, *verb)]
    if clause.quality is not None:
        words.append(Word(clause.quality, clause.quality))
    if clause.patient is not None:
        words += _phrase(clause.patient)
    if clause.recipient is not None:
        words += [Word("to", "to"), *_phrase(clause.recipient)]
    if clause.manner is not None:
        words.append(Word(clause.manner, clause.manner))
    if clause.place is not None and clause.relation is not None:
        words += [Word(form, clause.relation) for form in RELATIONS[clause.relation].split()]
        words += _phrase(clause.place)
    if clause.time is not None:
        words += [Word(form, clause.time) for form in TIMES[clause.time][0].split()]
    if clause.content is not None:
        words += [Word("that", "that"), *_clause(clause.content)]
    return words


def _verb(clause: Clause, subject: Thing) -> tuple[list[str], list[str]]:
    """Split the verb into auxiliaries, the first of which leads a question, and the rest."""
    third = not subject.several and subject.concept not in ("i", "you")
    negation = ["not"] if clause.negated else []
    if clause.tense == "future":
        return ["will", *negation], [clause.action]
    if clause.action == "be":
        if clause.tense == "past":
            form = "was" if third or subject.concept == "i" else "were"
        else:
            form = "is" if third else "am" if subject.concept == "i" else "are"
        return [form, *negation], []
    verb = VERBS[clause.action]
    if clause.negated or clause.question:
        auxiliary = "did" if clause.tense == "past" else "does" if third else "do"
        return [auxiliary, *negation], [clause.action]
    if clause.tense == "past":
        return [], [verb.past]
    return [], [verb.third if third else clause.action]
