"""Inflection: from a concept and its grammatical features to a written word.

Affixes are put to the stem in the ancestor's sounds, and the sound changes then run over the whole
word. Regular change thus makes irregular-looking paradigms, and related languages have related
endings, as in real families.
"""

from __future__ import annotations

from collections.abc import Sequence

from gradvac.lab.languages._concepts import NAMES, NOUNS
from gradvac.lab.languages._grammar import Grammar
from gradvac.lab.languages._lexicon import CASES, Lexicon
from gradvac.lab.languages._meaning import Tense, Thing
from gradvac.lab.languages._scripts import writer
from gradvac.lab.languages._sounds import BACK, FRONT, VOWELS, evolve, last_vowel

_PERSONS = {"i": "1sg", "you": "2", "he": "3sg", "she": "3sg", "we": "1pl", "they": "3pl"}


class Inflection:
    """Makes the word forms of one language; forms are made once and kept.

    Args:
        grammar: What the language marks, and how.
        lexicon: Its stems and affixes.
        script: Script to write in.
    """

    def __init__(self, grammar: Grammar, lexicon: Lexicon, script: str) -> None:
        self.grammar = grammar
        self.lexicon = lexicon
        self._write = writer(script)
        self._words: dict[tuple[str, tuple[str, ...], bool], str] = {}
        self._affixes: dict[tuple[str, int], str] = {}
        self._vowels = frozenset(VOWELS)

    def gender(self, concept: str) -> int:
        """The gender of a noun, name or pronoun."""
        genders = self.grammar.genders
        if genders == 1:
            return 0
        noun = NOUNS.get(concept)
        if noun is not None and noun.kind != "p":
            return self.lexicon.genders[concept] % genders
        # People: one class of their own where verbs agree in gender, else by natural gender.
        feminine = concept == "she" or NAMES.get(concept, False) or bool(noun and noun.feminine)
        return int(feminine and self.grammar.agreement != "gender")

    def person(self, subject: Thing) -> str:
        """What a verb agrees with: a person, or a gender and number."""
        agreement = self.grammar.agreement
        if agreement == "none":
            return ""
        plural = subject.several
        if agreement == "gender" and subject.concept not in ("i", "you", "we"):
            return f"g{self.gender(subject.concept)}{'pl' if plural else 'sg'}"
        return _PERSONS.get(subject.concept) or ("3pl" if plural else "3sg")

    def noun(
        self,
        concept: str,
        *,
        plural: bool = False,
        case: str = "nominative",
        definite: bool = False,
        owned: bool = False,
    ) -> str:
        """Inflect a noun, name or pronoun.

        Args:
            concept: What to inflect.
            plural: Whether to mark plural.
            case: A case, or a relation such as "near" where relations are local cases.
            definite: Whether to add a definite suffix.
            owned: Whether to add the mark of an owned thing.
        """
        grammar = self.grammar
        if grammar.morphology == "isolating":
            affixes: tuple[str, ...] = ()
        else:
            marked = plural and grammar.plural == "affix"
            affixes = self._nominal(self.gender(concept), marked, case)
            if owned:
                affixes = (*affixes, "owned")
            if definite:
                affixes = (*affixes, "definite")
        doubled = plural and grammar.plural == "reduplication"
        return self.word(concept, affixes, doubled=doubled)

    def modifier(self, concept: str, *, gender: int, plural: bool, case: str) -> str:
        """Inflect an adjective or an article, which follows its noun where there is concord."""
        grammar = self.grammar
        if not grammar.concord:
            return self.word(concept, ())
        return self.word(concept, self._nominal(gender, plural and grammar.plural == "affix", case))

    def verb(
        self, concept: str, *, tense: Tense, person: str, negated: bool, question: bool
    ) -> str:
        """Inflect a verb.

        Args:
            concept: The action.
            tense: Its tense.
            person: What it agrees with, from `person`.
            negated: Whether to add the affix of negation.
            question: Whether to add the affix of a question.
        """
        if self.grammar.morphology == "isolating":
            return self.word(concept, ())
        affixes = ["not"] if negated else []
        if self.grammar.morphology == "fusional" and person:
            affixes.append(f"{tense}.{person}")
        else:
            affixes += [tense, person] if person else [tense]
        if question:
            affixes.append("question")
        return self.word(concept, tuple(affixes))

    def _nominal(self, gender: int, plural: bool, case: str) -> tuple[str, ...]:
        """The affixes for gender, number and case."""
        grammar = self.grammar
        marker = f"g{gender}{'pl' if plural else 'sg'}"
        if grammar.morphology == "fusional":
            # A local case is put to the locative ending.
            return (f"{marker}.{case}",) if case in CASES else (f"{marker}.locative", case)
        affixes: tuple[str, ...] = ()
        if grammar.genders > 1:
            affixes = (marker,)
        elif plural:
            affixes = ("plural",)
        return affixes if case == "nominative" else (*affixes, case)

    def word(self, concept: str, affixes: tuple[str, ...], *, doubled: bool = False) -> str:
        """Write a stem with affixes, listed from the stem outwards."""
        key = (concept, affixes, doubled)
        form = self._words.get(key)
        if form is None:
            sounds = self._sounds(concept, affixes)
            form = self._write(f"{sounds}-{sounds}" if doubled else sounds)
            self._words[key] = form
        return form

    def _sounds(self, concept: str, affixes: Sequence[str]) -> str:
        """Join a stem and its affixes and run the sound changes that came afterwards."""
        stem = self.lexicon.stems[concept]
        sounds = stem.shape
        for name in affixes:
            affix = self._affix(name, stem.stage)
            if self.grammar.harmony:
                vowel = last_vowel(stem.shape)
                affix = affix.translate(FRONT if vowel in "eiäöü" else BACK)
            if self.grammar.affixes == "prefix":
                sounds = self._join(affix, sounds)
            else:
                sounds = self._join(sounds, affix)
        return evolve(sounds, self.lexicon.changes(stem.stage))

    def _affix(self, name: str, stage: int) -> str:
        """An affix as it sounded when stems of a stage came in."""
        key = (name, stage)
        if key not in self._affixes:
            edges = "#+" if self.grammar.affixes == "prefix" else "+#"
            shape = self.lexicon.affixes[name].shape
            self._affixes[key] = evolve(shape, self.lexicon.changes(0, stage), edges=edges)
        return self._affixes[key]

    def _join(self, left: str, right: str) -> str:
        """Join two parts; where vowels meet, the first is lost or a glide comes between."""
        if left and right and left[-1] in self._vowels and right[0] in self._vowels:
            # Strung affixes must stay apart, or those that differ in a vowel would fall together.
            if self.grammar.morphology == "agglutinating":
                return f"{left}j{right}"
            return left[:-1] + right
        return left + right
