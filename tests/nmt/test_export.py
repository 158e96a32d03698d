"""Exported models translate as ours do: loaded by the libraries they are for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ctranslate2
import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from gradvac.lab.recipes.nmt import Translator, Vocabulary, export_run

# Lengths are rewarded differently elsewhere; without reward the searches are the same.
PLAIN = ["decoding.length_penalty=0.0", "decoding.beams=3"]


@pytest.fixture(scope="module")
def lines(toy_run: Path) -> list[str]:
    text = (toy_run.parent / "prepared" / "text" / "test.en-xx.en").read_text(encoding="utf-8")
    # The second half is nothing the model has learned: it must guess, and guess alike.
    known = text.splitlines()[:30]
    return known + [f"{line[7::-1]} zü" for line in known]


@pytest.fixture(scope="module")
def huggingface(toy_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_run(toy_run, tmp_path_factory.mktemp("export") / "hf")


def test_hugging_face_translates_alike(toy_run: Path, huggingface: Path, lines: list[str]) -> None:
    ours = Translator.from_run(toy_run, overrides=PLAIN).translate(lines, "yy")
    model: Any = AutoModelForSeq2SeqLM.from_pretrained(huggingface)
    tokenizer: Any = AutoTokenizer.from_pretrained(huggingface)
    assert model.generation_config.num_beams == 2  # the run's
    sources = tokenizer([f"<2yy> {line}" for line in lines], return_tensors="pt", padding=True)
    with torch.no_grad():
        said = model.generate(**sources, num_beams=3, length_penalty=0.0)
    assert tokenizer.batch_decode(said, skip_special_tokens=True) == ours


def test_the_tokenizer_cuts_as_sentencepiece_does(toy_run: Path, huggingface: Path) -> None:
    vocabulary = Vocabulary.load(toy_run / "vocabulary.model")
    tokenizer: Any = AutoTokenizer.from_pretrained(huggingface)
    lines = [
        "ba de",
        "  two  blanks ",
        "tab\tß",
        "e\u0301 ﬁ ①",
        "한국어 中文",
        "x\u00a0y\u200b",
        "👩‍👧",
    ]
    for line in lines:
        (pieces,) = vocabulary.encode([line])
        assert tokenizer(f"<2xx> {line}").input_ids == [vocabulary.tag("xx"), *pieces, 2]
        assert tokenizer.decode(pieces, skip_special_tokens=True) == vocabulary.decode(pieces)


def test_ctranslate2_translates_alike(toy_run: Path, tmp_path: Path, lines: list[str]) -> None:
    ours = Translator.from_run(toy_run, overrides=PLAIN).translate(lines, "xx")
    folder = export_run(toy_run, tmp_path / "ct2", to="ctranslate2")
    vocabulary = Vocabulary.load(folder / "vocabulary.model")
    tokens = vocabulary.pieces()
    translator = ctranslate2.Translator(str(folder), device="cpu", intra_threads=1)
    sources = [
        ["<2xx>", *(tokens[number] for number in line), "</s>"] for line in vocabulary.encode(lines)
    ]
    found = translator.translate_batch(
        sources,
        beam_size=3,
        length_penalty=0.0,
        max_decoding_length=60,
        suppress_sequences=[[tokens[number]] for number in vocabulary.unspeakable],
    )
    numbers = {token: number for number, token in enumerate(tokens)}
    theirs = [vocabulary.decode([numbers[t] for t in own.hypotheses[0]]) for own in found]
    assert theirs == ours


def test_what_cannot_be_exported_is_refused(toy_run: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(ValueError, match=r"full .*not empty"):
        export_run(toy_run, tmp_path / "full")
    with pytest.raises(ValueError, match=r"to: .*huggingface, ctranslate2.*'onnx'"):
        export_run(toy_run, tmp_path / "new", to="onnx")
    with pytest.raises(ValueError, match=r"quantization: .*ctranslate2"):
        export_run(toy_run, tmp_path / "new", quantization="int8")
    assert not (tmp_path / "new").exists()
