"""Word order: each branch puts hand-picked meanings into the order its grammar asks for."""

from __future__ import annotations

import pytest

from gradvac.lab.languages import Clause, Corpus, Sentence, Thing

GIVING = Sentence(
    Clause(
        "give",
        Thing("fisherman", properties=("old",)),
        "past",
        patient=Thing("boat", plural=True, definite=False, number="three", properties=("red",)),
        recipient=Thing("king", owner=Thing("widow")),
        relation="near",
        place=Thing("river"),
        time="yesterday",
        negated=True,
    )
)
# Two clauses, what is said, and a relative clause.
NESTED = Sentence(
    Clause("say", Thing("queen"), content=Clause("sleep", Thing("i"), "present")),
    "because",
    Clause(
        "see",
        Thing("wolf", relative=Clause("bite", None, patient=Thing("dog"), gap="agent")),
        patient=Thing("boat"),
    ),
)
ASKING = Sentence(
    Clause("be", Thing("house", owner=Thing("mira")), "present", quality="old", question=True)
)

EXPECTED = {
    # Coastal: SVO, adjective after, article before, time first; Marvene asks at the end.
    "qsm": (
        "yesterday definite fisherman old not give king definite widow three boat red "
        "near definite river",
        "definite queen say that sleep because definite wolf who bite definite dog see "
        "definite boat",
        "house mira be old question",
    ),
    # Inland: SOV, place before the verb, no word for "is"; Kelvish negates after the verb.
    "qsk": (
        "yesterday old fisherman king widow indefinite three red boat near river give not",
        "queen say that sleep because wolf who dog bite boat see",
        "question house mira old",
    ),
    # Steppe: SOV, postpositions, everything subordinate comes first; negated and asked by affix.
    "qtu": (
        "yesterday old fisherman widow king indefinite three red boat river near give",
        "dog bite who wolf boat see because queen sleep that say",
        "mira house old be",
    ),
    # Lake: local cases instead of postpositions.
    "qth": (
        "yesterday old fisherman widow king three red boat river give",
        "dog bite who wolf boat see because queen sleep that say",
        "mira house old question",
    ),
    # Delta: SVO, everything after the noun.
    "qnk": (
        "yesterday fisherman old definite give boat red three to king widow definite "
        "near river definite",
        "queen definite say that i sleep because wolf definite who bite dog definite see "
        "boat definite",
        "house mira be old question",
    ),
    # Hill: VSO, numbers before the noun.
    "qnz": (
        "give fisherman old indefinite three boat red to king of widow near river yesterday",
        "say queen that sleep i because see wolf who bite dog boat",
        "question be house of mira old",
    ),
    # Island: VSO, classifiers, tense after the verb.
    "qpp": (
        "yesterday not give past fisherman old definite three classifier_t boat red to king "
        "whose widow definite near river definite",
        "say past queen definite that sleep i because see past wolf definite who bite past "
        "dog definite boat definite",
        "house whose mira old question",
    ),
    # Shore: SOV, postpositions; Linawe puts "because" and "that" after their clauses.
    "qpl": (
        "yesterday fisherman old definite widow definite of king to three classifier_t boat red "
        "past give not river definite near",
        "wolf definite who dog definite past bite boat definite past see because queen definite "
        "i sleep that past say",
        "question mira of house old",
    ),
}


@pytest.mark.parametrize("code", EXPECTED)
def test_order_of_concepts(corpus: Corpus, code: str) -> None:
    spoken = tuple(
        " ".join(word.concept for word in corpus.words(meaning, code))
        for meaning in (GIVING, NESTED, ASKING)
    )
    assert spoken == EXPECTED[code]


def test_colour_stands_nearest_to_the_noun_on_either_side(corpus: Corpus) -> None:
    meaning = Sentence(Clause("sleep", Thing("fox", properties=("red", "old"))))
    for code, expected in (("qso", "definite fox red old sleep"), ("qtu", "old red fox sleep")):
        assert " ".join(word.concept for word in corpus.words(meaning, code)) == expected


def test_pivot_reads_like_english(corpus: Corpus) -> None:
    assert corpus.render(GIVING, "en") == (
        "the old fisherman did not give three red boats to the widow's king near the river "
        "yesterday"
    )
    assert corpus.render(NESTED, "en") == (
        "the queen said that i sleep because the wolf that bit the dog saw the boat"
    )
    assert corpus.render(ASKING, "en") == "is mira's house old"


@pytest.mark.parametrize(
    ("clause", "english"),
    [
        (Clause("be", Thing("i"), "present", quality="old", negated=True), "i am not old"),
        (Clause("be", Thing("they", plural=True), quality="old"), "they were old"),
        (Clause("carry", Thing("she"), "present", patient=Thing("he")), "she carries him"),
        (
            Clause("watch", Thing("boy", definite=False, also=Thing("girl")), "present"),
            "a boy and the girl watch",
        ),
        (
            Clause("see", Thing("you"), "present", patient=Thing("egg"), question=True),
            "do you see the egg",
        ),
        (
            Clause("eat", Thing("wolf", plural=True, definite=False), "future", negated=True),
            "wolves will not eat",
        ),
        (
            Clause(
                "sleep",
                Thing("fox", definite=False, properties=("red", "old")),
                relation="in_front",
                place=Thing("inn", owner=Thing("boy", plural=True)),
                time="last_year",
            ),
            "an old red fox slept in front of the boys' inn last year",
        ),
        (
            Clause(
                "fall",
                Thing(
                    "apple",
                    owner=Thing("we", plural=True),
                    relative=Clause("buy", Thing("child", plural=True), gap="patient"),
                ),
                "past",
                question=True,
                negated=True,
            ),
            "did our apple that the children bought not fall",
        ),
        (
            Clause(
                "show",
                Thing("man", plural=True),
                patient=Thing("knife", plural=True, number="two"),
                recipient=Thing("they", plural=True),
                manner="gladly",
            ),
            "the men showed the two knives to them gladly",
        ),
    ],
)
def test_pivot_forms(corpus: Corpus, clause: Clause, english: str) -> None:
    assert corpus.render(Sentence(clause), "en") == english
