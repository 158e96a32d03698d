"""The concepts that sentences are about, with their English words.

Each table is a string with one entry a word, most frequent first. Suffixes after `:` give what the
rules at the end of this file cannot guess.

- nouns: `wolf:wolves`; a `*` marks a person who is female.
- actions: `see:saw/pa>patfl`: past tense, kinds of agent, kinds of patient. No `>`: no patient.
- properties: `red:4/atf`: rank in English order (opinion 1, size 2, age 3, colour 4), and kinds of
  noun.

Kinds are p(erson), a(nimal), t(hing), f(ood) and l(ocation).
"""

from __future__ import annotations

from typing import NamedTuple


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
