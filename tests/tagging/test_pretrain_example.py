"""examples/pretrain_encoder.py: text in, an encoder out that tagging can fine-tune."""

from __future__ import annotations

import gzip
import runpy
from pathlib import Path
from typing import Any

import pytest

from gradvac.lab.recipes.tagging.encoder import load_model, load_tokenizer

EXAMPLE = Path(__file__).parents[2] / "examples" / "pretrain_encoder.py"


@pytest.mark.parametrize("rule", ["sum", "gradvac"])
def test_an_encoder_from_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: str) -> None:
    monkeypatch.chdir(tmp_path)
    aa = "".join(f"the {n} stones lie in the river\n" for n in range(60))
    Path("text.aa.gz").write_bytes(gzip.compress(aa.encode()))
    Path("pairs.bb.tsv").write_text("".join(f"x\tdie {n} steine im fluss\n" for n in range(40)))
    Path("bb.conll").write_text("ein O\nfluss O\n\nam B-LOC\n")
    example: dict[str, Any] = runpy.run_path(str(EXAMPLE))
    text = ["text.{lang}.gz", "pairs.{lang}.tsv#2", "{lang}.conll"]
    small = ["--vocabulary=150", "--width=32", "--layers=1", "--longest=16", "--steps=40"]
    options = ["made", "--languages", "aa", "bb", "--text", *text, "--rule", rule, *small]
    losses = example["pretrain"](example["parse"](options))
    assert losses[-1] < 0.8 * losses[0]
    assert list(example["read"](text[2], "bb")) == ["ein fluss", "am"]
    assert list(example["read"](text[2], "aa")) == []
    tokenizer = load_tokenizer("made")
    assert tokenizer.unk_token_id not in tokenizer("the steine")["input_ids"]
    assert load_model("made", ["O", "B-X"], dropout=None) is not None


def test_the_constructed_languages_are_the_default() -> None:
    example: dict[str, Any] = runpy.run_path(str(EXAMPLE))
    given = example["parse"]([])
    assert (given.folder, given.languages[0]) == ("runs/encoder", "qsm")
    assert len(next(example["read"](given.text[0], "qsm")).split()) > 1
