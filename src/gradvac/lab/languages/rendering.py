"""The pivot: plain lower-case English without punctuation.

Every word carries the concept it stands for.

Rendering: a constructed language puts a meaning into words.

The counterpart of `in_english` for all constructed languages; what it does at each point is decided
by the language's grammar.

Parts of speech of the constructed languages: known, because every word has its concept.
"""

from __future__ import annotations

from typing import NamedTuple

from gradvac.lab.languages.grammar import Grammar
from gradvac.lab.languages.meanings import (
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
    Clause,
    Sentence,
    Thing,
    in_order,
)
from gradvac.lab.languages.words import Inflection


class Word(NamedTuple):
    """A word of a sentence and the concept it stands for."""

    form: str
    concept: str


def in_english(sentence: Sentence) -> list[Word]:
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


class Speaker:
    """Speaks one constructed language."""

    def __init__(self, grammar: Grammar, inflection: Inflection) -> None:
        self.grammar = grammar
        self.inflection = inflection

    def render(self, sentence: Sentence) -> list[Word]:
        """Put a meaning into words."""
        words = self._clause(sentence.main)
        if sentence.second is None or sentence.connective is None:
            return words
        second, connective = self._clause(sentence.second), self._function(sentence.connective)
        if sentence.connective in SUBORDINATING and self.grammar.subordinator == "after":
            return [*second, connective, *words]
        return [*words, connective, *second]

    def _function(self, concept: str) -> Word:
        return Word(self.inflection.word(concept, ()), concept)

    def _clause(self, clause: Clause, *, head: Thing | None = None) -> list[Word]:
        """Put a clause into words; `head` is the thing that fills the gap of a relative clause."""
        grammar = self.grammar
        subject = clause.agent if clause.agent is not None else head
        assert subject is not None, "a clause without an agent needs a head"
        verb = self._verb(clause, subject)
        ergative = grammar.case == "ergative" and clause.transitive
        spoken: list[Word] = []
        if clause.agent is not None and not self._dropped(clause.agent, verb):
            spoken = self._phrase(clause.agent, "ergative" if ergative else "nominative")
        objects = self._objects(clause, subject)
        place = []
        if clause.place is not None and clause.relation is not None:
            place = self._place(clause.relation, clause.place)
        manner = [self._function(clause.manner)] if clause.manner else []
        early = grammar.order.index("O") < grammar.order.index("V")
        verb = manner + verb if early else verb + manner
        if grammar.place == "preverbal":
            verb = place + verb
        parts = {"S": spoken, "O": objects, "V": verb}
        words = [word for part in grammar.order for word in parts[part]]
        if grammar.place == "last":
            words += place
        if clause.time is not None:
            time = self._function(clause.time)
            words = [time, *words] if grammar.time == "first" else [*words, time]
        if clause.content is not None and grammar.subordinator == "before":
            words += [self._function("that"), *self._clause(clause.content)]
        if clause.question and grammar.question != "affix":
            mark = self._function("question")
            words = [mark, *words] if grammar.question == "first" else [*words, mark]
        return words

    def _dropped(self, agent: Thing, verb: list[Word]) -> bool:
        """Whether a pronoun is left to the verb, which cannot tell "he" from "she"."""
        return (
            bool(verb)
            and self.grammar.pronouns == "dropped"
            and (agent.concept in ("i", "you", "we", "they"))
        )

    def _verb(self, clause: Clause, subject: Thing) -> list[Word]:
        """Put the action into words, with the particles around it."""
        grammar = self.grammar
        negative = clause.negated and grammar.negation == "affix"
        asking = clause.question and grammar.question == "affix"
        words: list[Word] = []
        silent = clause.action == "be" and clause.tense == "present" and grammar.copula == "silent"
        if not silent or negative or asking:
            form = self.inflection.verb(
                clause.action,
                tense=clause.tense,
                person=self.inflection.person(subject),
                negated=negative,
                question=asking,
            )
            words = [Word(form, clause.action)]
            if clause.tense != "present" and grammar.tense != "affix":
                tense = self._function(clause.tense)
                words = [tense, *words] if grammar.tense == "before" else [*words, tense]
        if clause.negated and not negative:
            negation = self._function("not")
            words = [negation, *words] if grammar.negation == "before" else [*words, negation]
        return words

    def _objects(self, clause: Clause, subject: Thing) -> list[Word]:
        """Put patient and recipient, quality, or what is said, into words."""
        grammar = self.grammar
        if clause.quality is not None:
            form = self.inflection.modifier(
                clause.quality,
                gender=self.inflection.gender(subject.concept),
                plural=subject.several,
                case="nominative",
            )
            return [Word(form, clause.quality)]
        if clause.content is not None and grammar.subordinator == "after":
            return [*self._clause(clause.content), self._function("that")]
        words: list[Word] = []
        if clause.patient is not None:
            accusative = grammar.case == "accusative"
            words = self._phrase(clause.patient, "accusative" if accusative else "nominative")
        if clause.recipient is not None:
            if grammar.case == "none":
                recipient = self._beside("to", self._phrase(clause.recipient, "nominative"))
            else:
                recipient = self._phrase(clause.recipient, "dative")
            words = recipient + words if grammar.recipient == "before" else words + recipient
        return words

    def _place(self, relation: str, place: Thing) -> list[Word]:
        if self.grammar.adposition == "affix":
            return self._phrase(place, relation)
        case = "nominative" if self.grammar.case == "none" else "locative"
        return self._beside(relation, self._phrase(place, case))

    def _beside(self, concept: str, phrase: list[Word]) -> list[Word]:
        """Put an adposition to a phrase; in languages with local cases too it comes after."""
        mark = self._function(concept)
        return [mark, *phrase] if self.grammar.adposition == "before" else [*phrase, mark]

    def _phrase(self, thing: Thing, case: str) -> list[Word]:
        """Put a thing into words: noun, adjectives, number, article, owner, relative, "and"."""
        grammar, concept = self.grammar, thing.concept
        if concept in PRONOUNS or concept in NAMES:
            # A pronoun tells its number by itself.
            return [Word(self.inflection.noun(concept, case=case), concept)]
        plural = thing.plural and not (thing.number is not None and grammar.counted == "singular")
        gender = self.inflection.gender(concept)
        owned = thing.owner is not None
        suffixed = thing.definite and not owned and grammar.article == "suffix"
        marked = owned and grammar.possession == "owned"
        noun = self.inflection.noun(
            concept, plural=plural, case=case, definite=suffixed, owned=marked
        )
        words = [Word(noun, concept)]
        if plural and grammar.plural == "word":
            words = [self._function("plural"), *words]
        if thing.properties:
            adjectives = [
                Word(self.inflection.modifier(p, gender=gender, plural=plural, case=case), p)
                for p in in_order(thing.properties)
            ]
            before = grammar.adjective == "before"
            words = [*adjectives, *words] if before else [*words, *reversed(adjectives)]
        if thing.number is not None:
            count = [self._function(thing.number)]
            if grammar.classifiers:
                count.append(self._function(CLASSIFIERS[NOUNS[concept].kind]))
            words = [*count, *words] if grammar.numeral == "before" else [*words, *count]
        if not owned:
            words = self._article(thing, words, gender, plural, case)
        if thing.owner is not None:
            owner = self._owner(thing.owner)
            words = [*owner, *words] if grammar.genitive == "before" else [*words, *owner]
        if thing.relative is not None:
            clause, who = self._clause(thing.relative, head=thing), self._function("who")
            before = grammar.relative == "before"
            words = [*clause, who, *words] if before else [*words, who, *clause]
        if thing.also is not None:
            words = [*words, self._function("and"), *self._phrase(thing.also, case)]
        return words

    def _article(
        self, thing: Thing, words: list[Word], gender: int, plural: bool, case: str
    ) -> list[Word]:
        """Put an article to a phrase where the grammar asks for one."""
        position = self.grammar.article
        if thing.definite and position in ("before", "after"):
            concept = "definite"
        elif not thing.definite and position == "indefinite":
            concept, position = "indefinite", "before"
        else:
            return words
        form = self.inflection.modifier(concept, gender=gender, plural=plural, case=case)
        article = Word(form, concept)
        return [article, *words] if position == "before" else [*words, article]

    def _owner(self, owner: Thing) -> list[Word]:
        """Put an owner into words: in the genitive, with "of", or bare beside an owned noun."""
        grammar = self.grammar
        if grammar.possession == "owned" and grammar.morphology != "isolating":
            return self._phrase(owner, "nominative")
        if grammar.possession == "owned":
            # No affixes: a possessive word stands between the owner and the owned.
            mark, phrase = self._function("whose"), self._phrase(owner, "nominative")
            return [*phrase, mark] if grammar.genitive == "before" else [mark, *phrase]
        if grammar.case == "none":
            return self._beside("of", self._phrase(owner, "nominative"))
        return self._phrase(owner, "genitive")


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
