"""The page about the languages shows what the code gives.

Run this file as a program to write the generated blocks of `docs/languages.md` anew.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from gradvac.lab.languages import SPLITS, Clause, Corpus, Sentence, Thing, default_corpus
from gradvac.lab.languages.grammar import PARAMETERS
from gradvac.lab.languages.sounds import SCRIPTS

PAGE = Path(__file__).parents[2] / "docs" / "languages.md"
BLOCK = re.compile(r"<!-- generated: (\w+) -->\n\n(.*?)\n\n<!-- end -->", re.DOTALL)

FISHERMAN = Sentence(
    Clause(
        "see",
        Thing("fisherman", properties=("old",)),
        patient=Thing("boat", plural=True, definite=False, number="three", properties=("red",)),
        relation="near",
        place=Thing("river"),
        negated=True,
    )
)
GLOSSED = ("qso", "qtu", "qnk", "qpp")


def languages(corpus: Corpus) -> str:
    """Table of the default set."""
    rows = [
        "| code | name | family | branch | script | order | morphology | train | level |",
        "| --- | --- | --- | --- | --- | --- | --- | ---: | --- |",
    ]
    for code, language in corpus.languages.items():
        cells = (
            f"`{code}`",
            language.name,
            language.family,
            language.branch,
            language.script,
            language.grammar.order,
            language.grammar.morphology,
            f"{language.train:,}",
            language.resource_level,
        )
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def sentences(corpus: Corpus) -> str:
    """One meaning in all languages."""
    lines = [f"{code:4}{corpus.render(FISHERMAN, code)}" for code in ("en", *corpus.codes)]
    return "\n".join(("```text", *lines, "```"))


def glosses(corpus: Corpus) -> str:
    """One meaning word by word."""
    lines = ["```text"]
    for code in GLOSSED:
        words = corpus.words(FISHERMAN, code)
        lines.append(f"{corpus.languages[code].name}: {corpus.render(FISHERMAN, code)}")
        lines.append("    " + " ".join(f"{word.form}={word.concept}" for word in words))
    return "\n".join((*lines, "```"))


def cognates(corpus: Corpus) -> str:
    """Some words of one family, in sounds, with `*` before those of another origin."""
    codes = corpus.families["Sarvan"]
    lexicons = [corpus.generator.lexicon(code) for code in codes]
    rows = ["| concept | " + " | ".join(corpus.languages[code].name for code in codes) + " |"]
    rows.append("| --- " * (len(codes) + 1) + "|")
    for concept in ("wolf", "boat", "egg", "dog", "city", "tired", "follow", "queen"):
        first = lexicons[0].stems[concept].etymon
        cells = [
            lexicon.cite(concept) + ("" if lexicon.stems[concept].etymon == first else " *")
            for lexicon in lexicons
        ]
        rows.append(f"| {concept} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def distances(corpus: Corpus) -> str:
    """Mean of each measure within branches, within families and between families."""
    measured = corpus.distances()
    groups: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for (i, one), (j, other) in combinations(enumerate(corpus.languages.values()), 2):
        if one.family != other.family:
            groups["different families"].append((i, j))
        elif one.branch != other.branch:
            groups["same family, other branch"].append((i, j))
        else:
            groups["same branch"].append((i, j))
    rows = ["| languages | pairs | cognates | typology | distance |", "| --- " * 5 + "|"]
    for name, pairs in groups.items():
        values = [
            np.mean([matrix[pair] for pair in pairs])
            for matrix in (measured.cognates, measured.typology, measured.distance)
        ]
        shown = " | ".join(f"{value:.2f}" for value in values)
        rows.append(f"| {name} | {len(pairs)} | {shown} |")
    return "\n".join(rows)


MAKERS = {maker.__name__: maker for maker in (languages, sentences, glosses, cognates, distances)}


def test_generated_blocks_are_what_the_code_gives(corpus: Corpus) -> None:
    blocks = dict(BLOCK.findall(PAGE.read_text(encoding="utf-8")))
    assert set(blocks) == set(MAKERS)
    for name, block in blocks.items():
        assert block == MAKERS[name](corpus), f"{name}: run {Path(__file__).name} to write it anew"


def test_example_family_on_the_page_loads_and_speaks(load_text: Callable[[str], Corpus]) -> None:
    (text,) = re.findall(r"```toml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    corpus = load_text(text)
    assert list(corpus.families) == ["Velmic"]
    assert len(corpus.pairs("qfa", "train")) == 2000
    share = corpus.distances().cognates[0, 1]
    assert 0.5 < share < 0.95


@pytest.mark.parametrize("name", [*PARAMETERS, *SCRIPTS, *SPLITS])
def test_page_explains_every_parameter_script_and_split(name: str) -> None:
    assert f"`{name}`" in PAGE.read_text(encoding="utf-8")


if __name__ == "__main__":
    default = default_corpus()
    page = PAGE.read_text(encoding="utf-8")
    page = BLOCK.sub(
        lambda match: (
            f"<!-- generated: {match[1]} -->\n\n{MAKERS[match[1]](default)}\n\n<!-- end -->"
        ),
        page,
    )
    PAGE.write_text(page, encoding="utf-8")
