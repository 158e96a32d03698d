"""Rendering: a constructed language puts a meaning into words.

The counterpart of `_pivot.py` for all constructed languages; what it does at each point is decided
by the language's grammar.
"""

from __future__ import annotations

from gradvac.lab.languages._concepts import (
    CLASSIFIERS,
    NAMES,
    NOUNS,
    PRONOUNS,
    SUBORDINATING,
    in_order,
)
from gradvac.lab.languages._grammar import Grammar
from gradvac.lab.languages._inflection import Inflection
from gradvac.lab.languages._meaning import Clause, Sentence, Thing
from gradvac.lab.languages._pivot import Word


class Speaker:
    """Speaks one constructed language.

    Args:
        grammar: The language's grammar.
        inflection: Its word forms.
    """

    def __init__(self, grammar: Grammar, inflection: Inflection) -> None:
        self.grammar = grammar
        self.inflection = inflection

    def say(self, sentence: Sentence) -> list[Word]:
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
