"""The same seed gives the same text, whatever else is in the corpus."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable

from gradvac.lab.languages import SPLITS, Corpus, default_corpus
from gradvac.lab.languages.corpus import DEFAULT_PATH

# Changes with every change to the default set or to the generator: say so in the changelog.
GOLDEN = "a92831246734cd0fb79a9a4b19b5b0f1e51fe6fcddc7ac480e318c2d83d60bf3"

EXTRA_LANGUAGE = """
[families.sarvan.branches.coastal.languages.qsx]
name = "Extra"
train = 50
replace = 0.3
"""
EXTRA_FAMILY = """
[families.aaa]
consonants = "p t k m n l"
vowels = "a i u"
[families.aaa.branches.one.languages.qaa]
train = 50
"""


def digest(corpus: Corpus) -> str:
    """Hash all aligned splits and the first training pairs of every language."""
    total = hashlib.sha256()
    for split in SPLITS:
        for code, lines in corpus.aligned(split).items():
            total.update("\n".join((split, code, *lines)).encode())
    for code in corpus.codes:
        for pair in corpus.resize({code: 200}).pairs(code, "train"):
            total.update("\t".join(pair).encode())
    return total.hexdigest()


def test_default_corpus_is_golden(corpus: Corpus) -> None:
    assert digest(corpus) == GOLDEN


def test_hash_randomisation_changes_nothing_and_torch_is_not_needed(corpus: Corpus) -> None:
    """Python's own hashes differ between processes; no set or hash may leak into the text."""
    program = (
        "import sys; from gradvac.lab.languages import default_corpus; corpus = default_corpus();"
        "print(*corpus.aligned('dev')['qtm'][:50], sep='\\n');"
        "print(corpus.distances().distance.sum(), 'torch' in sys.modules)"
    )
    other = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    output = subprocess.run(
        [sys.executable, "-X", "utf8", "-c", program],
        env={**os.environ, "PYTHONHASHSEED": other},
        capture_output=True,
        check=True,
        encoding="utf-8",
    ).stdout
    expected = "\n".join(corpus.aligned("dev")["qtm"][:50])
    assert output == f"{expected}\n{corpus.distances().distance.sum()} False\n"


def test_another_seed_gives_other_words_and_sentences_but_the_same_grammar(corpus: Corpus) -> None:
    other = default_corpus(seed=1)
    assert other.languages == corpus.languages
    ours, theirs = corpus.aligned("dev"), other.aligned("dev")
    assert not set(ours["en"][:100]) & set(theirs["en"][:100])
    shared = set(" ".join(ours["qnk"]).split()) & set(" ".join(theirs["qnk"]).split())
    names = {word for word in shared if any(name in word for name in ("lena", "mira", "nina"))}
    assert len(shared) - len(names) < 200  # of about 2,000 forms; short ones coincide


def test_size_of_a_language_changes_no_other_and_only_cuts_its_own(corpus: Corpus) -> None:
    fresh = default_corpus().resize({"qso": 30, "qsm": 0, "qtm": 450})
    assert fresh.pairs("qso", "train") == corpus.resize({"qso": 60}).pairs("qso", "train")[:30]
    assert fresh.pairs("qsm", "train") == []
    assert fresh.pairs("qtm", "train")[:400] == corpus.pairs("qtm", "train")
    assert fresh.pairs("qnm", "train") == corpus.pairs("qnm", "train")


def test_added_languages_and_families_change_nothing(
    corpus: Corpus, load_text: Callable[[str], Corpus]
) -> None:
    default_text = DEFAULT_PATH.read_text(encoding="utf-8")
    grown = load_text(default_text + EXTRA_LANGUAGE + EXTRA_FAMILY)
    assert set(grown.codes) - set(corpus.codes) == {"qsx", "qaa"}
    codes = ("qso", "qsm", "qsd", "qtm", "qnt", "qpp")
    assert grown.select(codes).aligned("dev") == corpus.select(codes).aligned("dev")
    for code in codes:
        size = {code: 100}
        ours, theirs = (each.resize(size).pairs(code, "train") for each in (corpus, grown))
        assert ours == theirs


def test_selection_keeps_text_and_borrowed_words(corpus: Corpus) -> None:
    alone = default_corpus().select(["qsk"])  # its donor qtu is not selected
    assert alone.codes == ("qsk",)
    assert alone.aligned("dev")["qsk"] == corpus.aligned("dev")["qsk"]
    assert list(alone.aligned("dev")) == ["en", "qsk"]
