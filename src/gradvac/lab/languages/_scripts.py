"""Scripts: regular, one-to-one spellings of the sounds.

The spellings follow the real scripts where they can and fill up with spare or historic letters
where they must. What matters is that no two sounds share a spelling, so a script never hides a
difference, and that languages of different scripts share no letters.
"""

from __future__ import annotations

from collections.abc import Callable

from gradvac.lab.languages._sounds import CONSONANTS, SOUNDS, VOWELS

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
    """The function that writes a word's sounds in a script.

    Args:
        script: One of `SCRIPTS`.
    """
    if script == "devanagari":
        return _devanagari
    table = str.maketrans(SOUNDS, _ALPHABETS[script])
    return lambda word: word.translate(table)
