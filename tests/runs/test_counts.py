"""Scores from counts by sentence: those of sacreBLEU and of the tagging recipe, on any drawing."""

from __future__ import annotations

import io
import random
import zipfile
from pathlib import Path

import numpy as np
import pytest
from sacrebleu.metrics.bleu import BLEU

from gradvac.lab.recipes.nmt.score import count_ngrams
from gradvac.lab.recipes.tagging.metrics import count_all, score_tags
from gradvac.lab.runs.counts import (
    SentenceCounts,
    bleu,
    f1,
    percentage,
    read_counts,
    write_counts,
)

WORDS = ["a", "b", "c", "d", "e"]


def lines(seed: int, num: int, *, longest: int) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(0, longest))) for _ in range(num)]


@pytest.mark.parametrize("longest", [1, 2, 3, 12])
def test_bleu_is_that_of_sacrebleu(longest: int) -> None:
    """On short sentences too, where longer n-grams have no match, or do not exist."""
    ours, references = lines(0, 40, longest=longest), lines(1, 40, longest=longest + 1)
    counts = count_ngrams(ours, references, "fr")
    for seed in range(20):
        chosen = np.random.default_rng(seed).integers(0, 40, 3 + seed)
        picked = [[own[i] for i in chosen] for own in (ours, references)]
        expected = BLEU().corpus_score(picked[0], [picked[1]]).score
        assert float(bleu(counts[chosen].sum(0).astype(float))) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("kind", ["ner", "pos"])
def test_tagging_scores_are_those_of_the_recipe(kind: str) -> None:
    labels = ["O", "B-PER", "I-PER", "I-LOC"] if kind == "ner" else ["NOUN", "VERB", "SYM"]
    draw = random.Random(3)
    gold = [draw.choices(labels, k=draw.randint(1, 8)) for _ in range(30)]
    guess = [[draw.choice([tag, *labels]) for tag in tags] for tags in gold]
    counts = count_all(gold, guess, kind)  # type: ignore[arg-type]
    for seed in range(10):
        chosen = np.random.default_rng(seed).integers(0, 30, 12)
        own = score_tags([gold[i] for i in chosen], [guess[i] for i in chosen], kind)  # type: ignore[arg-type]
        sums = {name: values[chosen].sum(0).astype(float) for name, values in counts.items()}
        assert float(f1(sums["F1"])) == pytest.approx(own.f1)
        assert float(percentage(sums["accuracy"])) == pytest.approx(own.accuracy)
        if kind == "ner":
            assert float(f1(sums["strict F1"])) == pytest.approx(own.strict_f1)


def test_counts_survive_the_disk_and_damage_is_told(tmp_path: Path) -> None:
    path = tmp_path / "test.best.npz"
    assert read_counts(path) == {}
    made = SentenceCounts("F1", "f1", {"de": np.array([[1, 2, 3], [0, 0, 1]])}, {"de": "x"})
    write_counts(path, [made])
    again = read_counts(path)["F1"]
    assert np.array_equal(again.by_task["de"], made.by_task["de"])
    assert (again.formula, again.sentences) == ("f1", {"de": "x"})
    assert again.score("de") == pytest.approx(200 * 1 / 6)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match="damaged"):
        read_counts(path)
    write_counts(path, [SentenceCounts("F1", "f2", {}, {})])
    with pytest.raises(ValueError, match="formula 'f2'"):
        read_counts(path)


def test_counts_do_not_expand_without_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither what packs well nor what only claims a size takes memory, or ends in a traceback."""
    monkeypatch.setattr("gradvac.lab.runs.counts._MOST_BYTES", 1 << 20)  # zeros take time to pack
    path = tmp_path / "test.best.npz"
    write_counts(path, [SentenceCounts("F1", "f1", {"de": np.zeros((1, 3))}, {"de": "x"})])
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    claim = io.BytesIO()
    header = {"descr": "<f8", "fortran_order": False, "shape": (2**45,)}
    np.lib.format.write_array_header_1_0(claim, header)
    for content, why in ((claim.getvalue(), ""), (bytes(1 << 20), "would take ")):
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, own in entries.items():
                archive.writestr(name, own if name == "about.npy" else content)
        with pytest.raises(ValueError, match=f"{why}.*score the run again"):
            read_counts(path)
