"""Sounds and regular sound change.

Words are strings of one letter per sound. A change is written as historical linguists write it:

    k > č / _i        k becomes č before i
    p t k > b d g / V_V   each of the three, between vowels
    a > 0 / C_#       a is lost at the end of a word, after a consonant

`V` is any vowel, `C` any consonant, `[ie]` one of a set, `#` the edge of the word, `0` nothing. A
change applies to every word that meets its condition, without exception.

Scripts: regular, one-to-one spellings of the sounds.

The spellings follow the real scripts where they can and fill up with spare or historic letters
where they must. What matters is that no two sounds share a spelling, so a script never hides a
difference, and that languages of different scripts share no letters.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

VOWELS = "aeiouyäöü"
CONSONANTS = "pbtdkgqfvszšžxhcčmnñlrjw"
SOUNDS = VOWELS + CONSONANTS

# Vowel harmony: back vowels and their front partners.
FRONT = str.maketrans("aouy", "eöüi")
BACK = str.maketrans("eöüi", "aouy")

# What a speaker hears in place of a sound the own language lacks, nearest first.
_NEAREST = {
    "p": "bf", "b": "pv", "t": "d", "d": "t", "k": "gq", "g": "kx", "q": "k", "f": "pvh",
    "v": "wbf", "s": "šz", "z": "sž", "š": "sč", "ž": "zšs", "x": "hk", "h": "xk", "c": "čst",
    "č": "cšts", "m": "n", "n": "m", "ñ": "nm", "l": "r", "r": "l", "j": "ži", "w": "vu",
    "a": "eo", "e": "ai", "i": "ey", "o": "ua", "u": "oy", "y": "iu", "ä": "ea", "ö": "oe",
    "ü": "ui",
}  # fmt: skip

_RULE = re.compile(r"^(?P<old>[^>]+)>(?P<new>[^/]+)(?:/(?P<left>[^_]*)_(?P<right>.*))?$")


@dataclass(frozen=True)
class SoundChange:
    """One regular change, read from its usual notation.

    Args:
        text: The change, such as `"p t k > b d g / V_V"`.

    Raises:
        ValueError: The notation cannot be read.

    Examples:
        >>> SoundChange("k > č / _[ie]").apply("kaki")
        'kači'
    """

    text: str
    _pattern: re.Pattern[str] = field(init=False, repr=False, compare=False)
    _outcome: dict[str, str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        match = _RULE.match(self.text.replace(" / ", "/"))
        if match is None:
            raise ValueError(f"sound change {self.text!r}: write it as 'k > č / _i'")
        old = match["old"].split()
        new = ["" if sound == "0" else sound for sound in match["new"].split()]
        if len(old) != len(new):
            raise ValueError(
                f"sound change {self.text!r}: {len(old)} sounds before '>' but {len(new)} after it"
            )
        for sound in "".join(old + new):
            if sound not in SOUNDS:
                raise ValueError(
                    f"sound change {self.text!r}: {sound!r} is not a sound; use some of {SOUNDS}"
                )
        left, right = (_context(self.text, match[side] or "") for side in ("left", "right"))
        before = f"(?<={left})" if left else ""
        after = f"(?={right})" if right else ""
        # Longest first, so that "ai" is tried before "a".
        targets = "|".join(sorted(old, key=len, reverse=True))
        object.__setattr__(self, "_pattern", re.compile(f"{before}(?:{targets}){after}"))
        object.__setattr__(self, "_outcome", dict(zip(old, new, strict=True)))

    @property
    def outcomes(self) -> str:
        """The sounds that this change can bring into a language."""
        return "".join(self._outcome.values())

    def apply(self, word: str) -> str:
        """Change a word, whose edges count as `#`."""
        return self.apply_marked(f"#{word}#").strip("#")

    def apply_marked(self, word: str) -> str:
        """Change a string whose edges are marked already: `#` for a word's, `+` for a stem's."""
        return self._pattern.sub(lambda match: self._outcome[match[0]], word)


def _context(text: str, context: str) -> str:
    """Translate one side of a condition into a regular expression."""
    pattern = context.strip().replace("V", f"[{VOWELS}]").replace("C", f"[{CONSONANTS}]")
    bare = re.sub(r"\[[^\[\]]*\]", lambda match: match[0][1:-1], pattern)
    unknown = [letter for letter in bare if letter not in SOUNDS + "#"]
    if unknown:
        raise ValueError(
            f"sound change {text!r}: {unknown[0]!r} in the condition is not a sound; "
            f"use V, C, #, a set such as [ie], or some of {SOUNDS}"
        )
    return pattern


def evolve(word: str, changes: Iterable[SoundChange], *, edges: str = "##") -> str:
    """Apply changes in order.

    Args:
        word: The word, or a bare affix.
        changes: Sound changes, oldest first.
        edges: Left and right edge; "+#" is a suffix by itself, "#+" a prefix, whose inner edge is
            not the edge of a word and meets no condition.
    """
    marked = edges[0] + word + edges[1]
    for change in changes:
        marked = change.apply_marked(marked)
    return marked.strip("#+")


def adapt(word: str, inventory: str) -> str:
    """Replace the sounds that an inventory lacks by the nearest it has, as borrowers do."""
    return "".join(
        sound
        if sound in inventory
        else next((near for near in _NEAREST[sound] if near in inventory), sound)
        for sound in word
    )


def last_vowel(word: str) -> str:
    """The last vowel of a word, or "" if it has none."""
    return next((sound for sound in reversed(word) if sound in VOWELS), "")


# One letter for each sound, in the order of SOUNDS: vowels a e i o u y ä ö ü, then consonants.
_ALPHABETS = {
    "latin": SOUNDS,
    "cyrillic": "аеиоуыәөү" + "пбтдкгқфвсзшжхһцчмнңлрјў",
    "greek": "αειουηάωύ" + "πβτδκγϙφϝσζϸξχϩψϟμνϻλρϳϛ",
    "georgian": "აეიოუჲჱჵჳ" + "ფბთდქგყჶვსზშჟხჰცჩმნღლრჯწ",
    "armenian": "աեիուըէօև" + "պբտդկգքֆվսզշժխհցչմնղլրյփ",
}
# Devanagari writes a vowel after a consonant as a sign, and "a" not at all.
_LETTERS = dict(zip(VOWELS, "अएइओउईऐऔऊ", strict=True))
_SIGNS = dict(zip(VOWELS, ("", *"ेिोुीैौू"), strict=True))
_DEVANAGARI = dict(zip(CONSONANTS, "पबतदकगखफभसजशझघहछचमनञलरयव", strict=True))
_VIRAMA = "्"

SCRIPTS = (*_ALPHABETS, "devanagari")


def _devanagari(word: str) -> str:
    letters: list[str] = []
    after_consonant = False
    for sound in word:
        if after_consonant and sound not in VOWELS:
            letters.append(_VIRAMA)
        if sound in VOWELS:
            letters.append((_SIGNS if after_consonant else _LETTERS)[sound])
        else:
            letters.append(_DEVANAGARI.get(sound, sound))
        after_consonant = sound in CONSONANTS
    return "".join(letters) + (_VIRAMA if after_consonant else "")


def writer(script: str) -> Callable[[str], str]:
    """The function that writes a word's sounds in a script."""
    if script == "devanagari":
        return _devanagari
    table = str.maketrans(SOUNDS, _ALPHABETS[script])
    return lambda word: word.translate(table)
