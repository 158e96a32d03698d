"""Family trees in TOML: a few lines make a language, and errors name the key and the fix."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from gradvac.lab.languages import Corpus, load_corpus

SMALL = """
seed = 3
splits = { dev = 5, test = 5, eval = 5, novel = 5 }
[families.demo]
consonants = "p t k s m n l r"
vowels = "a i u e"
order = "SOV"
[families.demo.branches.one]
sounds = ["p > f"]
script = "greek"
[families.demo.branches.one.languages.qaa]
train = 20
adjective = "after"
"""


def test_a_few_lines_make_a_language(load_text: Callable[[str], Corpus]) -> None:
    corpus = load_text(SMALL)
    language = corpus.languages["qaa"]
    assert (language.family, language.branch, language.name) == ("Demo", "one", "qaa")
    assert (language.script, language.train) == ("greek", 20)
    assert (language.grammar.order, language.grammar.adjective) == ("SOV", "after")
    assert len(corpus.pairs("qaa", "train")) == 20
    assert "π" not in " ".join(corpus.aligned("test")["qaa"])  # p became f everywhere
    assert "φ" in " ".join(corpus.aligned("test")["qaa"])


def test_inner_tables_override_outer_ones(load_text: Callable[[str], Corpus]) -> None:
    text = SMALL.replace('script = "greek"', 'script = "greek"\norder = "VSO"')
    corpus = load_text(text + '[families.demo.branches.one.languages.qab]\norder = "SVO"\n')
    assert corpus.languages["qaa"].grammar.order == "VSO"
    assert corpus.languages["qab"].grammar.order == "SVO"


HERE = "families.demo.branches.one"


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("seed = 3", "sed = 3", "unknown key 'sed'; did you mean 'seed'?"),
        ("order =", "ordr =", "families.demo: unknown key 'ordr'; did you mean 'order'?"),
        ("sounds =", "sound =", f"{HERE}: unknown key 'sound'; did you mean 'sounds'?"),
        ("train =", "trian =", f"{HERE}.languages.qaa: unknown key 'trian'; did you mean 'train'"),
        ("dev = 5", "zz = 5", "splits: unknown key 'zz'; use one of dev, test, eval, novel"),
        ('"SOV"', '"SVVO"', "families.demo.order: got 'SVVO'; did you mean 'SVO'?"),
        ('"SOV"', '"SOV"\ngenders = true', "families.demo.genders: got True; use one of 1, 2"),
        ('"greek"', '"greec"', f"{HERE}.script: got 'greec'; did you mean 'greek'?"),
        ("train = 20", "train = -1", "languages.qaa.train: must be a whole number from 0 up"),
        ("train = 20", 'train = "20"', "languages.qaa.train: must be a whole number from 0 up"),
        ("train = 20", "replace = 2", "languages.qaa.replace: must be a share from 0 to 1, got 2"),
        ('["p > f"]', '"p > f"', f"{HERE}.sounds: must be a list of strings"),
        ("p > f", "p > f g", f"{HERE}.sounds: sound change 'p > f g': 1 sounds before"),
        ('"p t k s m n l r"', '"p 7"', "families.demo.consonants: '7' is none; give at least two"),
        ('"a i u e"', '"a"', "families.demo.vowels: got 'a'; give at least two of aeiou"),
        ("train = 20", "borrow = { qab = 0.1 }", "borrow of qaa: no other language 'qab'"),
        (".qaa]", ".en]", "code 'en' must be two or three small letters"),
        (".qaa]", ".Q1]", "code 'Q1' must be two or three small letters"),
        (
            '"SOV"',
            '"SOV"\ncase = "accusative"',
            "families.demo: case = 'accusative' needs affixes, but morphology = 'isolating'",
        ),
        (
            '"SOV"',
            '"SOV"\nmorphology = "fusional"',
            "families.demo: tense = 'before' is for morphology = 'isolating'",
        ),
        ('"SOV"', '"SOV"\npronouns = "dropped"', "families.demo: pronouns = 'dropped' would leave"),
        ('"SOV"', '"SOV"\nroots = ["XV"]', "families.demo.roots: 'XV' must be made of C and V"),
        ("[families.demo]", "[families.demo]\nname = 3", "families.demo.name: must be a string"),
        (
            "seed = 3",
            "resource_levels = { low = 9000 }",
            "resource_levels: must fall from high to low",
        ),
        ("seed = 3", "seed = ", "not valid TOML"),
    ],
)
def test_errors_name_the_key_and_the_fix(
    load_text: Callable[[str], Corpus], old: str, new: str, complaint: str
) -> None:
    assert old in SMALL
    with pytest.raises(ValueError, match=r"families\.toml") as error:
        load_text(SMALL.replace(old, new, 1))
    assert complaint in str(error.value)


def test_a_tree_without_families_or_languages_is_refused(
    load_text: Callable[[str], Corpus],
) -> None:
    with pytest.raises(ValueError, match=r"families: .*at least one"):
        load_text("seed = 1")
    with pytest.raises(ValueError, match=r"families.demo: .*no language"):
        load_text(SMALL[: SMALL.index("[families.demo.branches.one.languages")])


def test_two_families_of_one_name_are_refused(load_text: Callable[[str], Corpus]) -> None:
    other = SMALL[SMALL.index("[families") :].replace("demo", "copy").replace("qaa", "qab")
    assert load_text(SMALL + other).families == {"Demo": ("qaa",), "Copy": ("qab",)}
    named = other.replace("[families.copy]", '[families.copy]\nname = "Demo"')
    with pytest.raises(ValueError, match=r"families.copy.name: 'Demo'"):
        load_text(SMALL + named)


def test_too_few_sounds_for_the_words_are_refused(load_text: Callable[[str], Corpus]) -> None:
    text = SMALL.replace('"p t k s m n l r"', '"p t"').replace('"SOV"', '"SOV"\nroots = ["CV"]')
    with pytest.raises(ValueError, match=r"demo: .*sounds .*too few"):
        load_text(text).pairs("qaa", "train")


def test_seed_can_be_replaced(tmp_path: Path) -> None:
    path = tmp_path / "small.toml"
    path.write_text(SMALL, encoding="utf-8")
    same, other = load_corpus(path, seed=3), load_corpus(path, seed=4)
    assert same.aligned("dev") == load_corpus(path).aligned("dev")
    assert other.aligned("dev") != same.aligned("dev")
