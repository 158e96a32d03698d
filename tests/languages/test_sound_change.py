"""Sound change is regular: no word that meets a condition escapes."""

from __future__ import annotations

import pytest

from gradvac.lab.languages import Clause, Corpus, Sentence, Thing
from gradvac.lab.languages.meanings import CONTENT
from gradvac.lab.languages.sounds import CONSONANTS, VOWELS, SoundChange, adapt, evolve


@pytest.mark.parametrize(
    ("change", "word", "outcome"),
    [
        ("k > č / _[ie]", "kakike", "kačiče"),
        ("p t k > b d g / V_V", "tapatak", "tabadak"),
        ("a > 0 / C_#", "atata", "atat"),
        ("b > v / #_", "baba", "vaba"),
        ("z > ž", "zazo", "žažo"),
        ("ai a > e o", "laila", "lelo"),
        ("o > u / _C#", "lolom", "lolum"),
        ("r > l / VC_", "atrara", "atlara"),
    ],
)
def test_notation(change: str, word: str, outcome: str) -> None:
    assert SoundChange(change).apply(word) == outcome


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ("k", "write it as 'k > č / _i'"),
        ("p t > b", "2 sounds before '>' but 1 after it"),
        ("k > 7", "'7' is not a sound"),
        ("k > g / _%", "'%' in the condition is not a sound"),
    ],
)
def test_wrong_notation_is_explained(change: str, complaint: str) -> None:
    with pytest.raises(ValueError, match="sound change") as error:
        SoundChange(change)
    assert complaint in str(error.value)
    assert repr(change) in str(error.value)


def test_inner_edge_of_an_affix_is_not_the_edge_of_a_word() -> None:
    final = [SoundChange("a > o / _#"), SoundChange("t > d / V_V"), SoundChange("k > g / #_")]
    assert evolve("kata", final) == "gado"
    assert evolve("kata", final, edges="+#") == "kado"
    assert evolve("kata", final, edges="#+") == "gada"


def test_borrowers_use_the_nearest_sound_they_have() -> None:
    assert adapt("fužö", "pvbsaou") == "puso"


def naive(text: str, word: str) -> str:
    """Apply a change letter by letter, without regular expressions."""
    change, _, condition = text.partition("/")
    old, new = (side.split() for side in change.split(">"))
    left, right = (condition.strip() or "_").split("_")
    word = f"#{word}#"
    result = ""
    for position, sound in enumerate(word):
        hit = (
            sound in old
            and _meets(left, word[:position], -1)
            and _meets(right, word[position + 1 :], 1)
        )
        outcome = new[old.index(sound)] if hit else sound
        result += outcome.replace("0", "")
    return result.strip("#")


def _meets(condition: str, context: str, direction: int) -> bool:
    slots: list[str] = []
    while condition:
        end = condition.index("]") + 1 if condition[0] == "[" else 1
        slot, condition = condition[:end].strip("[]"), condition[end:]
        slots.append({"V": VOWELS, "C": CONSONANTS}.get(slot, slot))
    near = context[::direction][: len(slots)]
    if direction < 0:
        slots.reverse()
    return len(near) == len(slots) and all(
        sound in slot for sound, slot in zip(near, slots, strict=True)
    )


def test_every_inherited_word_obeys_every_change(corpus: Corpus) -> None:
    """Against a second implementation, over all inherited words of all languages."""
    changed = 0
    for code in corpus.codes:
        lexicon = corpus.generator.lexicon(code)
        rules = [change.text for stage in lexicon.stages for change in stage]
        for concept in CONTENT:
            stem = lexicon.stems[concept]
            if stem.stage == 0:
                expected = stem.shape
                for rule in rules:
                    expected = naive(rule, expected)
                assert lexicon.cite(concept) == expected, (code, concept)
                changed += expected != stem.shape
    assert changed > 1000


def test_every_change_of_the_default_set_happens(corpus: Corpus) -> None:
    for code in corpus.codes:
        lexicon = corpus.generator.lexicon(code)
        words = [lexicon.stems[c].shape for c in CONTENT if lexicon.stems[c].stage == 0]
        for change in lexicon.changes(0):
            after = [change.apply(word) for word in words]
            assert after != words, (code, change.text)
            words = after


def test_palatalisation_has_no_exception_in_the_coastal_branch(corpus: Corpus) -> None:
    """Where the ancestor had k or g before i or e, Ostrel has č or ž, and nowhere k or g."""
    lexicon = corpus.generator.lexicon("qso")
    inland = corpus.generator.lexicon("qsd")
    examples = 0
    for concept in CONTENT:
        stem = lexicon.stems[concept]
        if stem.stage == 0:
            form = lexicon.cite(concept)
            assert not any(pair in form for pair in ("ki", "ke", "gi", "ge")), (concept, form)
            if any(pair in stem.shape for pair in ("ki", "ke", "gi", "ge")):
                assert "č" in form or "ž" in form
                if inland.stems[concept].etymon == stem.etymon:
                    examples += 1
                    assert "k" in inland.cite(concept) or "g" in inland.cite(concept)
    assert examples > 5


def test_changes_run_over_whole_words_so_stems_alternate(corpus: Corpus) -> None:
    """A stem in k or g has č or ž before some endings of the same paradigm."""
    alternating = 0
    for noun in ("book", "boat", "stone", "key", "lamp", "ring", "rope", "cup", "hat", "box"):
        shown = set()
        for plural in (False, True):
            for role in ("agent", "patient"):
                thing = Thing(noun, plural=plural)
                clause = (
                    Clause("see", Thing("man"), patient=thing)
                    if role == "patient"
                    else Clause("fall", thing)
                )
                for word in corpus.words(Sentence(clause), "qso"):
                    if word.concept == noun:
                        shown.add(word.form)
        stems = {"".join(letter for letter in form if letter in "kgčž") for form in shown}
        alternating += len(stems) > 1
    assert alternating >= 1


def test_words_of_a_language_are_all_different(corpus: Corpus) -> None:
    for code in corpus.codes:
        lexicon = corpus.generator.lexicon(code)
        cited = [lexicon.cite(concept) for concept in CONTENT]
        assert len(set(cited)) == len(cited)
        assert "" not in cited
