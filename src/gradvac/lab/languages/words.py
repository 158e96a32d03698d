"""Lexicons: how words descend, change, are replaced and are borrowed.

A family's ancestor has one root for each concept. A branch replaces some roots and changes sounds;
a language does the same again, and borrows. A stem remembers its *etymon*: two words are cognate
when they go back to the same one, however different they have become.

Inflection: from a concept and its grammatical features to a written word.

Affixes are put to the stem in the ancestor's sounds, and the sound changes then run over the whole
word. Regular change thus makes irregular-looking paradigms, and related languages have related
endings, as in real families.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from gradvac.lab.languages.families import Lineage, Phonology, Tree
from gradvac.lab.languages.grammar import Grammar
from gradvac.lab.languages.meanings import (
    CONTENT,
    FUNCTION,
    NAMES,
    NOUNS,
    NUMBERS,
    PRONOUNS,
    RELATIONS,
    Draw,
    Tense,
    Thing,
)
from gradvac.lab.languages.sounds import (
    BACK,
    FRONT,
    VOWELS,
    SoundChange,
    adapt,
    evolve,
    last_vowel,
    writer,
)

CASES = ("nominative", "accusative", "ergative", "genitive", "dative", "locative")
PERSONS = ("1sg", "2", "3sg", "1pl", "3pl")
TENSES = ("past", "present", "future")
# A gender and number in one, "g0sg" to "g3pl": what adjectives and some verbs agree with.
CLASSES = tuple(f"g{gender}{number}" for gender in range(4) for number in ("sg", "pl"))

# Groups of affixes that must sound different from each other.
_SEPARATE = (
    ("plural", "owned", "definite", *CASES[1:], *RELATIONS),
    (*TENSES, "not", "question", *PERSONS, *CLASSES),
)
_FUSED = (
    *(tuple(f"g{g}{n}.{case}" for n in ("sg", "pl") for case in CASES) for g in range(4)),
    tuple(f"{tense}.{who}" for tense in TENSES for who in PERSONS + CLASSES),
)

_MAX_ATTEMPTS = 1000
_CONCEPTS = CONTENT + FUNCTION
# Grammatical words and the commonest words are short.
_SHORT = frozenset((*FUNCTION, *PRONOUNS, *RELATIONS))
# Words for these are hardly ever borrowed.
_NATIVE = frozenset((*FUNCTION, *PRONOUNS, *RELATIONS, *NUMBERS))


@dataclass(frozen=True)
class Stem:
    """A stem as it sounded when it entered the language.

    Attributes:
        shape: Its sounds at that time.
        stage: The first stage whose sound changes it goes through: 0 for what is as old as the
            branch, 1 for what the language coined, 2 for names and borrowings, which change no
            more.
        etymon: What it goes back to; cognates share it.
    """

    shape: str
    stage: int
    etymon: str


@dataclass(frozen=True)
class Lexicon:
    """The stems and affixes of one language."""

    stems: Mapping[str, Stem]  # concept to stem
    affixes: Mapping[str, Stem]  # name of an affix to the affix
    stages: tuple[tuple[SoundChange, ...], ...]  # sound changes of the branch and of the language
    genders: Mapping[str, int]  # concept to a number from which the gender is taken

    def changes(self, start: int, stop: int = 2) -> Iterator[SoundChange]:
        """The sound changes of the stages from `start` up to `stop`."""
        for changes in self.stages[start:stop]:
            yield from changes

    def cite(self, concept: str) -> str:
        """The bare stem of a concept in the language's present sounds."""
        stem = self.stems[concept]
        return evolve(stem.shape, self.changes(stem.stage))


def lexicon_of(tree: Tree, code: str) -> Lexicon:
    """Derive a language's lexicon from the tree."""
    lineage = tree.lineages[code]
    native = _native(tree.seed, lineage)
    stems = dict(native.stems)
    inventory = lineage.phonology.consonants + lineage.phonology.vowels
    inventory += "".join(change.outcomes for change in native.changes(0))
    used = {native.cite(concept) for concept in _CONCEPTS}
    for donor, share in lineage.borrow.items():
        # The donor's native words: with its own borrowings, borrowing could run in a circle.
        source = _native(tree.seed, tree.lineages[donor])
        draw = Draw(tree.seed, "borrow", code, donor)
        for concept in CONTENT:
            if draw.chance(share) and concept not in _NATIVE:
                shape = adapt(source.cite(concept), inventory)
                if shape not in used:
                    used.add(shape)
                    stems[concept] = Stem(shape, 2, source.stems[concept].etymon)
    for name in NAMES:
        stems[name] = Stem(adapt(name, inventory), 2, name)
    return Lexicon(stems, native.affixes, native.stages, native.genders)


def _native(seed: int, lineage: Lineage) -> Lexicon:
    """Follow the ancestor's lexicon through the branch and the language, without borrowing."""
    branch, own = lineage.stages
    stages = (branch.sounds, own.sounds)
    prefixing = lineage.proto.affixes == "prefix"
    words = _Vocabulary(seed, stages, lambda name, draw: _coin_word(name, draw, lineage))
    words.renew(_CONCEPTS, key=lineage.family, upto=0, replace=0)
    words.renew(_CONCEPTS, key=branch.key, upto=1, replace=branch.replace)
    words.renew(_CONCEPTS, key=own.key, upto=2, replace=own.replace)
    affixes = _Vocabulary(
        seed,
        stages,
        lambda name, draw: _coin_affix(name, draw, lineage),
        edges="#+" if prefixing else "+#",
        harmony=lineage.proto.harmony,
    )
    for group in _SEPARATE + _FUSED:
        affixes.renew(group, key=f"{lineage.family}.{group[0]}", upto=0, replace=0)
        # Affixes live longer than words.
        affixes.renew(group, key=f"{branch.key}.{group[0]}", upto=1, replace=branch.replace / 2)
    draw = Draw(seed, "gender", lineage.family)
    genders = {concept: draw.below(12) for concept in (*_CONCEPTS, *NAMES)}
    return Lexicon(words.stems, affixes.stems, stages, genders)


class _Vocabulary:
    """Stems that are renewed from stage to stage.

    Args:
        seed: Seed of the corpus.
        stages: Sound changes of the stages.
        coin: Makes up the sounds of a new stem.
        edges: Edges of a stem, as `evolve` takes them.
        harmony: Whether front and back vowels do not count as a difference.
    """

    def __init__(
        self,
        seed: int,
        stages: tuple[tuple[SoundChange, ...], ...],
        coin: Callable[[str, Draw], str],
        edges: str = "##",
        harmony: bool = False,
    ) -> None:
        self.seed = seed
        self.stages = stages
        self.coin = coin
        self.edges = edges
        self.harmony = harmony
        self.stems: dict[str, Stem] = {}

    def renew(self, names: Sequence[str], *, key: str, upto: int, replace: float) -> None:
        """Replace a share of the stems, and those that sound change has made alike.

        Args:
            names: Stems that must sound different from each other.
            key: Names the stage; seeds the draws and marks new etyma.
            upto: Number of stages whose sound changes are over at the end of this one.
            replace: Share of the existing stems to replace; missing ones are always made.
        """
        draw = Draw(self.seed, "replace", key)
        lost = [name for name in names if name not in self.stems or draw.chance(replace)]
        kept = set(names) - set(lost)
        used: set[str] = {""}
        for name in names:
            if name in kept:
                sounds = self._sound(self.stems[name], upto)
                if sounds in used:
                    lost.append(name)
                used.add(sounds)
        for name in lost:
            for attempt in range(_MAX_ATTEMPTS):
                shape = self.coin(name, Draw(self.seed, "coin", key, name, attempt))
                stem = Stem(shape, max(upto - 1, 0), f"{key}:{name}")
                sounds = self._sound(stem, upto)
                if sounds not in used:
                    break
            else:
                raise ValueError(
                    f"{key}: the sounds allow too few different words; give the family more "
                    "consonants, vowels or longer roots"
                )
            used.add(sounds)
            self.stems[name] = stem

    def _sound(self, stem: Stem, upto: int) -> str:
        changes = (change for stage in self.stages[stem.stage : upto] for change in stage)
        shape = stem.shape.translate(BACK) if self.harmony else stem.shape
        return evolve(shape, changes, edges=self.edges)


def _coin_word(concept: str, draw: Draw, lineage: Lineage) -> str:
    templates = ("CV", "CVC", "VC") if concept in _SHORT else lineage.phonology.roots
    return _fill(draw.one(templates), draw, lineage.phonology, lineage.proto)


def _coin_affix(name: str, draw: Draw, lineage: Lineage) -> str:
    if lineage.proto.affixes == "prefix":
        templates: tuple[str, ...] = ("CV", "CV", "VC", "CVC")
    elif "." in name:
        templates = ("V", "VC", "VC", "VCV")
    else:
        templates = ("CV", "VC", "CVC")
    return _fill(draw.one(templates), draw, lineage.phonology, lineage.proto)


def _fill(template: str, draw: Draw, phonology: Phonology, proto: Grammar) -> str:
    """Fill a template such as "CVC" with sounds; with harmony, vowels are all front or all back."""
    sounds = "".join(
        draw.one(phonology.consonants if slot == "C" else phonology.vowels) for slot in template
    )
    if proto.harmony:
        harmonic = sounds.translate(FRONT if draw.chance(0.5) else BACK)
        if set(harmonic) <= set(phonology.consonants + phonology.vowels):
            return harmonic
    return sounds


_PERSONS = {"i": "1sg", "you": "2", "he": "3sg", "she": "3sg", "we": "1pl", "they": "3pl"}


class Inflection:
    """Makes the word forms of one language; forms are made once and kept."""

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
        """Inflect a verb."""
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
