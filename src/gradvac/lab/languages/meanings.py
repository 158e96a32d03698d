"""Meanings: small typed trees that every language can put into words.

A meaning says who did what to whom, where, when and how; it knows nothing of word order, case or
articles. Concepts are the English words of the tables below.

Deterministic drawing: the same key gives the same draws on every machine and Python version.

Only `random.Random.random` is used, because it is the one method whose sequence the standard
library promises to keep for a string seed; `choice`, `sample` and `shuffle` may change.

The concepts that sentences are about, with their English words.

Each table is a string with one entry a word, most frequent first. Suffixes after `:` give what the
rules at the end of this file cannot guess.

- nouns: `wolf:wolves`; a `*` marks a person who is female.
- actions: `see:saw/pa>patfl`: past tense, kinds of agent, kinds of patient. No `>`: no patient.
- properties: `red:4/atf`: rank in English order (opinion 1, size 2, age 3, colour 4), and kinds of
  noun.

Kinds are p(erson), a(nimal), t(hing), f(ood) and l(ocation).

Sampling of meanings: an endless stream of plausible sentences.

Nouns, actions and properties are drawn by rank, so that a small sample misses rare words, as real
text does. A fixed share of the combinations (action with patient, noun with property) is
*reserved*: ordinary sentences never contain one, sentences of the `novel` split always do. A model
can therefore be asked for combinations of which it has seen the parts but never the whole.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Literal, NamedTuple, TypeVar

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


Item = TypeVar("Item")


class Draw:
    """A stream of random decisions, fixed by its key.

    Args:
        *key: Names and numbers that say what is drawn, such as `(seed, "roots", "sarvan")`.
            Streams with different keys are independent.
    """

    def __init__(self, *key: str | int) -> None:
        self._next = random.Random("/".join(str(part) for part in key)).random

    def below(self, limit: int) -> int:
        """Draw an integer from 0 to `limit - 1`."""
        return int(self._next() * limit)

    def chance(self, probability: float) -> bool:
        """Draw True with the given probability."""
        return self._next() < probability

    def one(self, items: Sequence[Item]) -> Item:
        """Draw one item, all equally likely."""
        return items[int(self._next() * len(items))]


class Weighted(Generic[Item]):
    """Items to draw from with integer weights.

    Weights are integers so that the running totals are exact everywhere.
    """

    def __init__(self, items: Sequence[Item], weights: Sequence[int]) -> None:
        self.items = tuple(items)
        self.totals: list[int] = []
        total = 0
        for weight in weights:
            total += weight
            self.totals.append(total)

    def draw(self, draw: Draw) -> Item:
        """Draw one item with probability proportional to its weight."""
        return self.items[bisect_right(self.totals, draw.below(self.totals[-1]))]


def rank_weight(rank: int) -> int:
    """Weigh an item by its rank, as words are in text: the first is common, the last is rare."""
    return 6000 // (rank + 6)


def by_rank(items: Sequence[Item]) -> Weighted[Item]:
    """Weigh items by their rank."""
    return Weighted(items, [rank_weight(rank) for rank in range(len(items))])


class Noun(NamedTuple):
    """A noun: English singular and plural, kind, and whether it names a female person."""

    concept: str
    plural: str
    kind: str
    feminine: bool


class Action(NamedTuple):
    """A verb: English forms, and the kinds of nouns it goes with (no patients: intransitive)."""

    concept: str
    third: str
    past: str
    agents: str
    patients: str


class Property(NamedTuple):
    """An adjective: its rank in English order and the kinds of nouns it can describe."""

    concept: str
    rank: int
    kinds: str


PEOPLE = """man:men woman:women* child:children friend mother* father teacher boy girl* brother
sister* doctor farmer neighbour king soldier fisherman:fishermen daughter* son queen* merchant
hunter guest baker shepherd grandmother* grandfather driver singer thief:thieves smith student
sailor widow* judge stranger carpenter miller nurse* painter"""

ANIMALS = """dog horse cat bird cow goat wolf:wolves bear chicken fox:foxes donkey lion snake rabbit
mouse:mice duck goose:geese eagle frog camel pig"""

THINGS = """book boat letter knife:knives table chair door box:boxes cup hat coat lamp key basket
rope ring stone bell bag bottle coin wheel mirror blanket shoe ladder hammer drum cart carpet candle
needle shirt pot spoon sword clock picture window bucket axe flute crown saddle"""

FOODS = """apple egg cake potato:potatoes onion loaf:loaves pear nut cherry:cherries pumpkin melon
cabbage sausage plum bean"""

LOCATIONS = """house river village city:cities forest market mountain bridge school garden field
road church:churches lake tree hill wall mill castle island tower barn valley station harbour inn
temple cave shop"""

ACTIONS = """see:saw/pa>patfl buy:bought/p>atf find:found/p>patf love/p>patfl know:knew/p>pl
sell:sold/p>atf sleep:slept/pa help/p>pa eat:ate/pa>f carry/p>atf hear:heard/pa>pa walk/pa
make:made/p>tf follow/pa>pa work/p run:ran/pa wash/p>patf break:broke/p>t visit/p>pl lose:lost/p>at
call/p>pa sing:sang/p wait/pa watch/pa>pal remember/p>patl need/p>patf paint/p>patl meet:met/p>p
laugh/p steal:stole/p>atf hide:hid/p>atf catch:caught/pa>af forget:forgot/p>ptl cook/p>f dance/p
polish/p>t draw:drew/p>patfl hold:held/p>atf build:built/p>t fall:fell/pa rest/pa fear/pa>pa
throw:threw/p>tf leave:left/p>pl burn/p>tl repair/p>t arrive/pa lift/p>atf touch/pa>patf hunt/p>a
choose:chose/p>atf protect/p>pal push/pa>pat swim:swam/pa cry/p smile/p play/pa feed:fed/p>pa
count/p>atf admire/p>patl shout/p tremble/pa return/pa greet/p>p bite:bit/a>paf give:gave/p>atf
show:showed/p>atfl send:sent/p>atf bring:brought/p>atf offer/p>atf lend:lent/p>at promise/p>atf
say:said/p think:thought/p believe/p hope/p"""

# Actions with a recipient, and actions that take a clause ("said that ...").
GIVING = ("give", "show", "send", "bring", "sell", "offer", "lend", "promise")
SAYING = ("say", "know", "think", "hear", "believe", "hope", "remember", "forget")
# Actions that sound wrong without what they give or say.
INCOMPLETE = (*GIVING, "say", "think", "believe", "hope")

PROPERTIES = """old:3/patfl big:2/patfl small:2/patfl good:1/patf young:3/pa new:3/tl red:4/atf
white:4/atfl black:4/atf beautiful:1/patl strong:1/pa poor:1/p happy:1/pa green:4/tfl tired:1/pa
heavy:2/atf rich:1/p blue:4/t clean:1/tl hungry:1/pa sad:1/pa dirty:1/patl strange:1/patfl
empty:1/tl clever:1/pa angry:1/pa brave:1/pa quiet:1/pal brown:4/at cheap:1/tf sick:1/pa tall:2/p
long:2/t fresh:1/f famous:1/pl sweet:1/f yellow:4/tf round:2/tf lonely:1/pal wild:1/al proud:1/p
warm:1/tfl cold:1/tfl dark:1/tl broken:1/t sharp:1/t"""

NUMBERS = ("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "twelve")
MANNERS = ("quickly", "slowly", "quietly", "again", "alone", "carefully", "gladly", "secretly")
RELATIONS = {
    "in": "in",
    "near": "near",
    "behind": "behind",
    "under": "under",
    "beside": "beside",
    "in_front": "in front of",
    "far_from": "far from",
}
# Time words and the tenses they can stand with.
TIMES = {
    "yesterday": ("yesterday", ("past",)),
    "today": ("today", ("past", "present", "future")),
    "now": ("now", ("present",)),
    "tomorrow": ("tomorrow", ("future",)),
    "every_day": ("every day", ("present",)),
    "last_year": ("last year", ("past",)),
    "at_night": ("at night", ("past", "present", "future")),
    "soon": ("soon", ("future",)),
    "long_ago": ("long ago", ("past",)),
    "in_winter": ("in winter", ("past", "present", "future")),
    "next_year": ("next year", ("future",)),
}
# Connectives: coordinating ones stand between clauses, subordinating ones belong to the second.
COORDINATING = ("and", "but")
SUBORDINATING = ("because", "when", "although")
# Subject, object and possessive form.
PRONOUNS = {
    "i": ("i", "me", "my"),
    "you": ("you", "you", "your"),
    "he": ("he", "him", "his"),
    "she": ("she", "her", "her"),
    "we": ("we", "us", "our"),
    "they": ("they", "them", "their"),
}
# Names are the same everywhere; True marks a woman's name.
NAMES = {
    "tomas": False,
    "lena": True,
    "anton": False,
    "mira": True,
    "bruno": False,
    "dara": True,
    "emil": False,
    "nina": True,
    "pavlo": False,
    "olva": True,
    "rudi": False,
    "sera": True,
}


def add_s(word: str) -> str:
    """Spell the English -s form of a noun or verb."""
    if word.endswith(("s", "sh", "ch", "x", "z", "o")):
        return word + "es"
    if word.endswith("y") and word[-2] not in "aeiou":
        return word[:-1] + "ies"
    return word + "s"


def add_ed(word: str) -> str:
    """Spell the English -ed form of a regular verb."""
    if word.endswith("e"):
        return word + "d"
    if word.endswith("y") and word[-2] not in "aeiou":
        return word[:-1] + "ied"
    return word + "ed"


def _nouns(table: str, kind: str) -> dict[str, Noun]:
    nouns = {}
    for entry in table.split():
        concept, _, plural = entry.rstrip("*").partition(":")
        nouns[concept] = Noun(concept, plural or add_s(concept), kind, entry.endswith("*"))
    return nouns


def _actions(table: str) -> dict[str, Action]:
    actions = {}
    for entry in table.split():
        forms, _, kinds = entry.partition("/")
        concept, _, past = forms.partition(":")
        agents, _, patients = kinds.partition(">")
        actions[concept] = Action(
            concept, add_s(concept), past or add_ed(concept), agents, patients
        )
    return actions


def _properties(table: str) -> dict[str, Property]:
    properties = {}
    for entry in table.split():
        concept, _, rest = entry.partition(":")
        rank, _, kinds = rest.partition("/")
        properties[concept] = Property(concept, int(rank), kinds)
    return properties


NOUNS = {
    **_nouns(PEOPLE, "p"),
    **_nouns(ANIMALS, "a"),
    **_nouns(THINGS, "t"),
    **_nouns(FOODS, "f"),
    **_nouns(LOCATIONS, "l"),
}
VERBS = _actions(ACTIONS)
ADJECTIVES = _properties(PROPERTIES)


def in_order(properties: tuple[str, ...]) -> tuple[str, ...]:
    """Sort properties from the outermost to the one next to the noun: "strange big old red"."""
    return tuple(sorted(properties, key=lambda word: ADJECTIVES[word].rank))


# Everything a language has a word for and by which two languages' lexicons are compared, in order.
CONTENT: tuple[str, ...] = (
    *NOUNS,
    *VERBS,
    *ADJECTIVES,
    *NUMBERS,
    *MANNERS,
    *RELATIONS,
    *TIMES,
    *PRONOUNS,
)
# Grammatical words; a language uses those its grammar calls for.
CLASSIFIERS = {kind: f"classifier_{kind}" for kind in "patfl"}
FUNCTION: tuple[str, ...] = (
    "definite",
    "indefinite",
    "plural",
    "past",
    "future",
    "not",
    "question",
    "be",
    "of",
    "to",
    "whose",
    "who",
    "that",
    *COORDINATING,
    *SUBORDINATING,
    *CLASSIFIERS.values(),
)


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
