"""Morphology: case, number, tense, gender and agreement show in the words."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gradvac.lab.languages import Clause, Corpus, Sentence, Thing, default_corpus, part_of_speech
from gradvac.lab.languages.grammar import Grammar
from gradvac.lab.languages.meanings import RELATIONS, Tense
from gradvac.lab.languages.sounds import BACK, SoundChange
from gradvac.lab.languages.words import (
    _FUSED,
    _SEPARATE,
    CASES,
    CLASSES,
    PERSONS,
    TENSES,
    Inflection,
    Lexicon,
    Stem,
    lexicon_of,
)


def forms(corpus: Corpus, code: str, clause: Clause) -> dict[str, str]:
    """Map each concept of a clause to its form."""
    return {word.concept: word.form for word in corpus.words(Sentence(clause), code)}


def see(agent: Thing, patient: Thing, tense: Tense = "past") -> Clause:
    return Clause("see", agent, tense, patient=patient)


def test_accusative_marks_the_object_only(corpus: Corpus) -> None:
    for code in ("qso", "qsd", "qtu", "qth"):
        as_subject = forms(corpus, code, see(Thing("dog"), Thing("cat")))
        as_object = forms(corpus, code, see(Thing("cat"), Thing("dog")))
        alone = forms(corpus, code, Clause("sleep", Thing("dog")))
        assert as_subject["dog"] == alone["dog"] != as_object["dog"], code


def test_ergative_marks_the_subject_of_a_transitive_verb_only(corpus: Corpus) -> None:
    as_subject = forms(corpus, "qtm", see(Thing("dog"), Thing("cat")))
    as_object = forms(corpus, "qtm", see(Thing("cat"), Thing("dog")))
    alone = forms(corpus, "qtm", Clause("sleep", Thing("dog")))
    assert as_object["dog"] == alone["dog"] != as_subject["dog"]
    gap = Clause("see", Thing("dog"), gap="patient")
    relative = forms(corpus, "qtm", Clause("sleep", Thing("cat", relative=gap)))
    assert relative["dog"] == as_subject["dog"]  # transitive although its patient is a gap


def test_cases_of_recipient_owner_and_place_differ(corpus: Corpus) -> None:
    for code in ("qso", "qsk", "qth"):
        clause = Clause("give", Thing("king"), patient=Thing("book"), recipient=Thing("man"))
        dative = forms(corpus, code, clause)["man"]
        genitive = forms(corpus, code, Clause("fall", Thing("book", owner=Thing("man")), "past"))[
            "man"
        ]
        nominative = forms(corpus, code, Clause("sleep", Thing("man")))["man"]
        assert len({dative, genitive, nominative}) == 3, code


def test_local_cases_tell_the_relation(corpus: Corpus) -> None:
    places = {
        relation: forms(
            corpus, "qth", Clause("sleep", Thing("man"), relation=relation, place=Thing("house"))
        )
        for relation in ("in", "near", "under", "far_from")
    }
    assert all(relation not in words for relation, words in places.items())
    assert len({words["house"] for words in places.values()}) == 4


@pytest.mark.parametrize("code", ["qso", "qsd", "qtu", "qth", "qnk", "qnz", "qpp"])
def test_plural_is_marked(corpus: Corpus, code: str) -> None:
    one = forms(corpus, code, Clause("sleep", Thing("goat")))["goat"]
    many = forms(corpus, code, Clause("sleep", Thing("goat", plural=True)))["goat"]
    assert one != many


def test_plural_by_word_and_by_reduplication(corpus: Corpus) -> None:
    many = Clause("sleep", Thing("goat", plural=True))
    words = forms(corpus, "qpp", many)["goat"]
    first, second = words.split("-")
    assert first == second == forms(corpus, "qpp", Clause("sleep", Thing("goat")))["goat"]
    assert "plural" in forms(corpus, "qpo", many)


def test_counted_nouns_follow_the_grammar(corpus: Corpus) -> None:
    three = Clause("sleep", Thing("goat", plural=True, number="three"))
    many, one = Clause("sleep", Thing("goat", plural=True)), Clause("sleep", Thing("goat"))
    for code, like in (("qso", many), ("qtu", one), ("qtb", many), ("qnk", many), ("qpp", one)):
        assert forms(corpus, code, three)["goat"] == forms(corpus, code, like)["goat"], code


@pytest.mark.parametrize("code", ["qso", "qsk", "qtu", "qtm", "qnk", "qnt"])
def test_verbs_show_tense_and_subject(corpus: Corpus, code: str) -> None:
    tenses: tuple[Tense, ...] = ("past", "present", "future")
    subjects = [
        Thing("i"),
        Thing("you"),
        Thing("we", plural=True),
        Thing("child"),
        Thing("child", plural=True),
    ]
    shown = {
        forms(corpus, code, Clause("walk", subject, tense))["walk"]
        for tense in tenses
        for subject in subjects
    }
    assert len(shown) == 15


def test_isolating_words_never_change(corpus: Corpus) -> None:
    for code in ("qpo", "qpl"):
        seen: dict[str, set[str]] = {}
        for meaning in corpus.meanings("dev"):
            for word in corpus.words(meaning, code):
                seen.setdefault(word.concept, set()).add(word.form)
        assert {len(variants) for variants in seen.values()} == {1}


def test_adjectives_and_articles_agree_with_their_noun(corpus: Corpus) -> None:
    """In Ostrel the ending of article and adjective is that of the noun's gender."""
    genders = {
        noun: forms(corpus, "qso", Clause("sleep", Thing(noun, properties=("old",))))
        for noun in ("man", "woman", "king", "queen")
    }
    assert genders["man"]["old"] == genders["king"]["old"] != genders["woman"]["old"]
    assert genders["woman"]["old"] == genders["queen"]["old"]
    assert genders["man"]["definite"] == genders["king"]["definite"]
    assert genders["man"]["definite"] != genders["woman"]["definite"]
    predicate = forms(corpus, "qso", Clause("be", Thing("woman"), quality="old"))
    assert predicate["old"] == genders["woman"]["old"]


def test_verbs_of_prefixing_languages_agree_in_gender(corpus: Corpus) -> None:
    lexicon = corpus.generator.lexicon("qnk")
    boat = lexicon.genders["boat"] % 4
    same, other = (
        next(
            n
            for n in ("dog", "cat", "horse", "bird", "cow", "goat", "bear", "fox", "lion")
            if (lexicon.genders[n] % 4 == boat) == wanted
        )
        for wanted in (True, False)
    )
    verbs = [
        forms(corpus, "qnk", Clause("fall", Thing(noun)))["fall"] for noun in ("boat", same, other)
    ]
    assert verbs[0] == verbs[1] != verbs[2]


def test_dropped_pronouns_are_told_by_the_verb(corpus: Corpus) -> None:
    for pronoun in ("i", "you"):
        assert pronoun not in forms(corpus, "qso", Clause("walk", Thing(pronoun)))
        assert pronoun in forms(corpus, "qtb", Clause("walk", Thing(pronoun)))
    assert "she" in forms(corpus, "qso", Clause("walk", Thing("she")))
    # Where "is" is silent nothing would tell, so the pronoun stays.
    assert "i" in forms(corpus, "qsd", Clause("be", Thing("i"), "present", quality="old"))


def test_silent_copula_is_spoken_when_it_carries_something(corpus: Corpus) -> None:
    old = {"quality": "old"}
    assert "be" not in forms(corpus, "qth", Clause("be", Thing("man"), "present", **old))
    assert "be" in forms(corpus, "qth", Clause("be", Thing("man"), "past", **old))
    assert "be" in forms(corpus, "qth", Clause("be", Thing("man"), "present", **old, negated=True))


def test_negation_by_affix_changes_the_verb(corpus: Corpus) -> None:
    plain = forms(corpus, "qtu", Clause("walk", Thing("man")))
    negated = forms(corpus, "qtu", Clause("walk", Thing("man"), negated=True))
    assert "not" not in negated
    assert plain["walk"] != negated["walk"]


def test_harmony_gives_an_affix_two_shapes(corpus: Corpus) -> None:
    """Barsek's past third person has back vowels after back stems and front ones after front."""
    back, front = set("аоуы"), set("еиөүә")
    endings = set()
    for verb in ("walk", "sleep", "run", "work", "sing", "wait", "laugh", "dance"):
        stem = corpus.generator.lexicon("qtb").stems[verb]
        form = forms(corpus, "qtb", Clause(verb, Thing("man")))[verb]
        ending = {letter for letter in form[-4:] if letter in back | front}
        assert ending <= back or ending <= front, (stem, form)
        endings.add(ending <= back)
    assert endings == {True, False}


def test_harmony_never_makes_two_persons_alike(corpus: Corpus) -> None:
    """Affixes that differ only in front and back vowels would fall together."""
    for seed in range(15):
        affixes = lexicon_of(replace(corpus.tree, seed=seed), "qth").affixes
        for group in (PERSONS + TENSES + CLASSES, CASES[1:] + tuple(RELATIONS)):
            sounds = [affixes[name].shape.translate(BACK) for name in group]
            assert len(set(sounds)) == len(sounds), seed


def test_young_stems_take_affixes_that_went_through_the_old_changes() -> None:
    """The inner edge of an affix is no edge of a word: j > ž / #_ leaves the suffix -ja alone."""
    lexicon = Lexicon(
        stems={"goat": Stem("jap", 0, "goat"), "mira": Stem("mira", 2, "mira")},
        affixes={"plural": Stem("jap", 0, "plural")},
        stages=((SoundChange("j > ž / #_"), SoundChange("p > f / _#")), ()),
        genders={"goat": 0},
    )
    grammar = Grammar(morphology="agglutinating", tense="affix", plural="affix")
    inflection = Inflection(grammar, lexicon, "latin")
    assert inflection.word("goat", ("plural",)) == "žapjaf"
    assert inflection.word("mira", ("plural",)) == "mirajaf"


def test_definiteness_is_told_in_every_language(corpus: Corpus) -> None:
    for code in corpus.codes:
        texts = {
            corpus.render(Sentence(see(Thing("man"), Thing("dog", definite=definite))), code)
            for definite in (True, False)
        }
        assert len(texts) == 2, code


def test_affixes_have_names_of_their_own() -> None:
    """A person and a gender of the same name would share an affix."""
    for group in _SEPARATE + _FUSED:
        assert len(set(group)) == len(group)


def test_every_word_has_a_part_of_speech() -> None:
    corpus = default_corpus().select(["qso", "qpp"]).resize({"qso": 50, "qpp": 50})
    for code in corpus.codes:
        for split in ("train", "dev"):
            spoken = corpus.spoken(code, split)
            lines = [line for _, line in corpus.pairs(code, split)]
            assert [" ".join(word.form for word in words) for words in spoken] == lines
            parts = {part_of_speech(word.concept) for words in spoken for word in words}
            assert {"NOUN", "VERB", "ADJ", "PROPN", "ADP"} <= parts
