"""Real text: read, clean and cut, where it is at hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from gradvac.lab.recipes.nmt import NmtConfig, prepare_corpus, read_pairs
from gradvac.lab.training import config

CONFIGS = Path(__file__).parents[2] / "configs" / "nmt"


def test_tatoeba_is_prepared_by_its_config(real_data: Path, tmp_path: Path) -> None:
    settings = config.load(
        NmtConfig,
        CONFIGS / "tatoeba.toml",
        [
            f"data.root={real_data}",
            f"data.prepared={tmp_path}",
            'data.languages=["hi", "tr"]',
            "data.vocabulary.size=2000",
            "data.vocabulary.threads=1",
            "data.max_tokens=500",
        ],
    )
    prepared = prepare_corpus(settings.data)
    assert prepared.sizes["train"] == {"en-hi": 3000, "en-tr": 3000}
    assert prepared.sizes["test"] == {"en-hi": 862, "en-tr": 995}
    reports = prepared.reports()
    assert reports["train en-hi"].num_read == 7633
    assert reports["train en-tr"].num_read == 17_329
    assert "held out" not in reports["train en-tr"].dropped  # what the data set promises
    first, second = prepared.text("dev", "en-hi")
    tokens = prepared.tokens("dev", "en-hi")[1]
    sentences = [tokens.gather(np.array([n])).tokens for n in range(50)]
    back = [prepared.vocabulary.decode(sentence.tolist()) for sentence in sentences]
    assert sum(a == b for a, b in zip(back, second[:50], strict=True)) >= 48  # NFKC changes few
    assert len(first) == 417


def test_bible_and_firefox_are_read(real_data: Path) -> None:
    verses = list(read_pairs("mt/bible_full/dev.{lang}.gz", "en", "sw", root=real_data))
    assert len(verses) == 1235
    strings = list(read_pairs("mt/firefox/dev.tsv.gz", "en", "sw", root=real_data))
    assert sum(isinstance(pair, tuple) and all(pair) for pair in strings) == 118
    assert len(strings) == 500
