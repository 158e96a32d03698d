"""Sampling of meanings: an endless stream of plausible sentences.

Nouns, actions and properties are drawn by rank, so that a small sample misses rare words, as real
text does. A fixed share of the combinations (action with patient, noun with property) is
*reserved*: ordinary sentences never contain one, sentences of the `novel` split always do. A model
can therefore be asked for combinations of which it has seen the parts but never the whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from gradvac.lab.languages._concepts import (
    ADJECTIVES,
    COORDINATING,
    GIVING,
    INCOMPLETE,
    MANNERS,
    NAMES,
    NOUNS,
    NUMBERS,
    PRONOUNS,
    RELATIONS,
    SAYING,
    SUBORDINATING,
    TIMES,
    VERBS,
)
from gradvac.lab.languages._draw import Draw, Weighted, by_rank, rank_weight
from gradvac.lab.languages._meaning import Clause, Gap, Sentence, Tense, Thing

RESERVED_SHARE = 0.12

_TENSES: Weighted[Tense] = Weighted(("past", "present", "future"), (50, 28, 22))
_FRAMES = Weighted(("does", "acts_on", "gives", "says", "is"), (19, 43, 14, 10, 14))
_SHORT_FRAMES = Weighted(("does", "acts_on", "is"), (30, 50, 20))
_GAPS: Weighted[Gap] = Weighted(("agent", "patient"), (65, 35))
_TIMES = {
    tense: by_rank([word for word, (_, tenses) in TIMES.items() if tense in tenses])
    for tense in ("past", "present", "future")
}
_RELATIONS, _NUMBERS, _MANNERS = by_rank(tuple(RELATIONS)), by_rank(NUMBERS), by_rank(MANNERS)
_PRONOUNS, _NAMES = by_rank(tuple(PRONOUNS)), by_rank(tuple(NAMES))
_VERBS = {
    "does": by_rank([v for v in VERBS.values() if not v.patients and v.concept not in INCOMPLETE]),
    "acts_on": by_rank([v for v in VERBS.values() if v.patients and v.concept not in INCOMPLETE]),
    "gives": by_rank([VERBS[concept] for concept in GIVING]),
    "says": by_rank([VERBS[concept] for concept in SAYING]),
}
_PLACE_CHANCE = {"does": 0.8, "acts_on": 0.25, "gives": 0.1}


class Combinations:
    """What goes with what, and which combinations are reserved for the `novel` split.

    Args:
        seed: Seed of the corpus; it decides which combinations are reserved.

    Attributes:
        nouns: Kinds ("pa") to the nouns of these kinds.
        allowed: Action to its patients, noun to its properties, without the reserved ones.
        reserved: The same for the reserved ones; an action or noun without any is absent.
    """

    def __init__(self, seed: int) -> None:
        draw = Draw(seed, "reserved")
        self.nouns = {kinds: Weighted(*_nouns_of(kinds)) for kinds in ("p", "a", "pa", "l")}
        self.allowed: dict[str, Weighted[str]] = {}
        self.reserved: dict[str, Weighted[str]] = {}
        for verb in VERBS.values():
            if verb.patients:
                self._split(draw, verb.concept, *_nouns_of(verb.patients))
        for noun in NOUNS.values():
            fitting = [a.concept for a in ADJECTIVES.values() if noun.kind in a.kinds]
            self._split(draw, noun.concept, fitting, [rank_weight(r) for r in range(len(fitting))])

    def _split(self, draw: Draw, key: str, items: Sequence[str], weights: Sequence[int]) -> None:
        kept: tuple[list[str], list[int]] = ([], [])
        held: tuple[list[str], list[int]] = ([], [])
        for item, weight in zip(items, weights, strict=True):
            side = held if draw.chance(RESERVED_SHARE) else kept
            side[0].append(item)
            side[1].append(weight)
        self.allowed[key] = Weighted(*kept)
        if held[0]:
            self.reserved[key] = Weighted(*held)


def _nouns_of(kinds: str) -> tuple[list[str], list[int]]:
    """The nouns of some kinds with their weights; people are spoken of most."""
    items: list[str] = []
    weights: list[int] = []
    for kind in kinds:
        of_kind = [noun.concept for noun in NOUNS.values() if noun.kind == kind]
        items += of_kind
        weights += [rank_weight(r) * (2 if kind == "p" else 1) for r in range(len(of_kind))]
    return items, weights


def meanings(
    combinations: Combinations, *key: str | int, novel: bool = False
) -> Iterator[Sentence]:
    """Sentences without end, fixed by the key.

    Args:
        combinations: What goes with what.
        *key: Key of the random stream.
        novel: Yield only sentences with at least one reserved combination.
    """
    sampler = _Sampler(combinations, Draw(*key), novel)
    while True:
        sampler.reserved_used = False
        sentence = sampler.sentence()
        if sampler.reserved_used == novel:
            yield sentence


class _Sampler:
    """Builds one sentence after another from one random stream."""

    def __init__(self, combinations: Combinations, draw: Draw, novel: bool) -> None:
        self.combinations = combinations
        self.draw = draw
        self.novel = novel
        self.reserved_used = False

    def sentence(self) -> Sentence:
        draw = self.draw
        if draw.chance(0.14):
            connective = draw.one(COORDINATING + SUBORDINATING)
            return Sentence(self.clause(short=True), connective, self.clause(short=True))
        return Sentence(self.clause(question=draw.chance(0.1)))

    def clause(self, *, short: bool = False, question: bool = False) -> Clause:
        draw = self.draw
        frame = (_SHORT_FRAMES if short or question else _FRAMES).draw(draw)
        tense = _TENSES.draw(draw)
        time = _TIMES[tense].draw(draw) if draw.chance(0.15 if short else 0.3) else None
        negated = draw.chance(0.16)
        if frame == "is":
            return self._state(tense, time, negated, question, short)
        verb = _VERBS[frame].draw(draw)
        agent = self.someone(verb.agents, rich=not short, relative=not short)
        patient = recipient = place = relation = content = None
        if frame in ("acts_on", "gives"):
            noun = self._pair(verb.concept)
            patient = self.thing(noun, rich=not short, relative=frame == "acts_on")
        if frame == "gives":
            recipient = self.someone("p", rich=False)
        if frame == "says":
            content = self.clause(short=True)
        elif draw.chance(_PLACE_CHANCE[frame] / (1 + short)):
            relation, place = _RELATIONS.draw(draw), self._location()
        return Clause(
            verb.concept,
            agent,
            tense,
            patient=patient,
            recipient=recipient,
            relation=relation,
            place=place,
            time=time,
            manner=_MANNERS.draw(draw) if content is None and draw.chance(0.13) else None,
            content=content,
            negated=negated,
            question=question,
        )

    def _state(
        self, tense: Tense, time: str | None, negated: bool, question: bool, short: bool
    ) -> Clause:
        """Build "the house was old" or "the house was near the river"."""
        draw = self.draw
        if draw.chance(0.4):
            kinds = draw.one(("p", "a"))
            agent = self.someone(kinds, rich=not short, relative=not short)
            relation, place = _RELATIONS.draw(draw), self._location()
            return Clause(
                "be",
                agent,
                tense,
                relation=relation,
                place=place,
                time=time,
                negated=negated,
                question=question,
            )
        noun = self.combinations.nouns[draw.one(("p", "a", "l"))].draw(draw)
        agent, quality = self.thing(noun, rich=False), self._pair(noun)
        if quality in agent.properties:  # "the old man was old"
            agent = replace(agent, properties=())
        return Clause(
            "be", agent, tense, quality=quality, time=time, negated=negated, question=question
        )

    def someone(self, kinds: str, *, rich: bool, relative: bool = False) -> Thing:
        """Draw a pronoun, a name or a noun of some kinds."""
        draw = self.draw
        if "p" in kinds:
            if draw.chance(0.18):
                concept = _PRONOUNS.draw(draw)
                return Thing(concept, plural=concept in ("we", "they"))
            if draw.chance(0.13):
                return Thing(_NAMES.draw(draw))
        thing = self.thing(self.combinations.nouns[kinds].draw(draw), rich=rich, relative=relative)
        if rich and thing.relative is None and draw.chance(0.06):
            other = self.combinations.nouns[kinds].draw(draw)
            if other != thing.concept:
                return replace(thing, also=self.thing(other, rich=False))
        return thing

    def thing(self, noun: str, *, rich: bool, relative: bool = False) -> Thing:
        """Draw how a noun is spoken of; `rich` allows properties, numbers and owners to be many."""
        draw = self.draw
        plural = draw.chance(0.27)
        number = _NUMBERS.draw(draw) if plural and draw.chance(0.4) else None
        properties: tuple[str, ...] = ()
        if draw.chance(0.42 if rich else 0.2):
            properties = (self._pair(noun),)
            if rich and draw.chance(0.12):
                second = self._pair(noun)
                if second not in properties:
                    properties = (*properties, second)
        owner = self._owner() if draw.chance(0.16 if rich else 0.08) else None
        definite = owner is not None or draw.chance(0.62)
        clause = self._relative(noun) if relative and draw.chance(0.11) else None
        return Thing(noun, plural, definite, number, properties, owner, clause)

    def _owner(self) -> Thing:
        draw = self.draw
        if draw.chance(0.4):
            concept = _PRONOUNS.draw(draw)
            return Thing(concept, plural=concept in ("we", "they"))
        if draw.chance(0.25):
            return Thing(_NAMES.draw(draw))
        noun = self.combinations.nouns["p"].draw(draw)
        properties = (self._pair(noun),) if draw.chance(0.25) else ()
        return Thing(noun, plural=draw.chance(0.2), properties=properties)

    def _relative(self, noun: str) -> Clause | None:
        """Draw a short clause with a gap for the noun, or None where the action does not fit."""
        draw = self.draw
        tense = _TENSES.draw(draw)
        if _GAPS.draw(draw) == "patient":
            verb = _VERBS["acts_on"].draw(draw)
            # No reserved combination may slip in here.
            if noun not in self.combinations.allowed[verb.concept].items:
                return None
            return Clause(verb.concept, self.someone(verb.agents, rich=False), tense, gap="patient")
        verb = _VERBS["does" if draw.chance(0.35) else "acts_on"].draw(draw)
        if NOUNS[noun].kind not in verb.agents:
            return None
        if verb.patients:
            patient = self.thing(self._pair(verb.concept), rich=False)
            return Clause(verb.concept, None, tense, patient=patient, gap="agent")
        relation, place = _RELATIONS.draw(draw), self._location()
        return Clause(verb.concept, None, tense, relation=relation, place=place, gap="agent")

    def _location(self) -> Thing:
        noun = self.combinations.nouns["l"].draw(self.draw)
        properties = (self._pair(noun),) if self.draw.chance(0.18) else ()
        return Thing(noun, definite=self.draw.chance(0.75), properties=properties)

    def _pair(self, key: str) -> str:
        """Draw a patient for an action or a property for a noun."""
        if self.novel and self.draw.chance(0.5) and key in self.combinations.reserved:
            self.reserved_used = True
            return self.combinations.reserved[key].draw(self.draw)
        return self.combinations.allowed[key].draw(self.draw)
