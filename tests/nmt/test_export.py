"""Exported models translate as ours do: loaded by the libraries they are for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ctranslate2
import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from gradvac.lab.recipes.nmt import (
    SIZES,
    Ragged,
    Transformer,
    Translator,
    Vocabulary,
    export,
    export_run,
    make_batch,
)
from gradvac.lab.recipes.nmt.ct2 import convert
from gradvac.lab.recipes.nmt.export import make_pegasus
from gradvac.lab.recipes.nmt.settings import DecodingConfig

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


@pytest.mark.parametrize("error", [OSError(28, "disk full"), SafetensorError("I/O: disk full")])
def test_a_full_disk_names_the_folder_and_leaves_nothing(
    toy_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(export, "convert", fail)
    with pytest.raises(ValueError, match=r"folder: .*made .*disk full.*make room"):
        export_run(toy_run, tmp_path / "made", to="ctranslate2")
    assert list(tmp_path.iterdir()) == []


ENGINE = ["decoding.engine=ctranslate2"]


@pytest.mark.parametrize("search", [[], PLAIN, ["decoding.beams=1"], ["decoding.beams=5"]])
def test_the_other_engine_translates_alike(
    toy_run: Path, lines: list[str], search: list[str]
) -> None:
    """Also with our length penalty, which is another one than its own: but for close guesses."""
    ours = Translator.from_run(toy_run, overrides=search)
    theirs = Translator.from_run(toy_run, overrides=[*search, *ENGINE])
    pairs = zip(*(one.translate([*lines, ""], "yy") for one in (ours, theirs)), strict=True)
    same = [one == other for one, other in pairs]
    assert all(same[:30])  # what it has learned, and
    assert sum(same) >= len(same) - (2 if ours.settings.length_penalty else 0)  # what it guesses
    assert theirs.counts == ours.counts


def test_settings_of_greedy_search_can_be_saved(tmp_path: Path) -> None:
    """Hugging Face saves no length penalty where nothing is searched."""
    greedy = DecodingConfig(beams=1, length_penalty=0.6)
    pegasus = make_pegasus(Transformer(SIZES["tiny"], 40), longest=9, decoding=greedy)
    pegasus.generation_config.save_pretrained(tmp_path)


@pytest.mark.parametrize("is_pre_norm", [True, False])
def test_converted_weights_give_the_same_probabilities(tmp_path: Path, is_pre_norm: bool) -> None:
    torch.manual_seed(0)
    model = Transformer(SIZES["tiny"], 40, norm_first=is_pre_norm).eval()
    pieces = ["<pad>", "<s>", "</s>", "<unk>", *(f"p{n}" for n in range(36))]
    convert(model, pieces, tmp_path, longest=64)
    source, target = [30, 5, 9, 2], [7, 7, 12, 2]
    batch = make_batch(Ragged.of([np.array(source)]), Ragged.of([np.array([1, *target])]), [0])
    with torch.no_grad():
        states = model.decode(batch.target, model.encode(batch.source), batch.source)
        ours = model.head(states).log_softmax(-1)[range(4), target]
    translator = ctranslate2.Translator(str(tmp_path), device="cpu", intra_threads=1)
    texts = [[[pieces[number] for number in one]] for one in (source, target[:-1])]
    (theirs,) = translator.score_batch(*texts)
    np.testing.assert_allclose(theirs.log_probs, ours.numpy(), atol=1e-4)


def test_several_translations_and_drawn_ones(toy_run: Path, lines: list[str]) -> None:
    four = Translator.from_run(toy_run, overrides=[*ENGINE, "decoding.beams=4"])
    found = four.n_best(lines, "xx", 4)
    assert [one[0].text for one in found] == four.translate(lines, "xx")
    for translations in found:
        scores = [one.score for one in translations]
        assert scores == sorted(scores, reverse=True)
        assert 1 <= len(translations) <= 4
    assert sum(len({one.text for one in translations}) > 1 for translations in found) > 20
    drawing = [*ENGINE, "decoding.beams=1", "decoding.sampling_topk=0"]
    drawn = Translator.from_run(
        toy_run, overrides=[*drawing, "decoding.sampling_temperature=3.0"]
    ).n_best(lines[:3], "xx", 8)
    assert [len(one) for one in drawn] == [8] * 3
    assert all(len({one.text for one in translations}) > 1 for translations in drawn)
    cold = Translator.from_run(toy_run, overrides=[*drawing, "decoding.sampling_temperature=1e-3"])
    greedy = Translator.from_run(toy_run, overrides=["decoding.beams=1"])
    assert cold.translate(lines[:30], "xx") == greedy.translate(lines[:30], "xx")


def test_what_the_engines_cannot_do_is_refused(
    toy_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=r"n-best: .*decoding\.engine=ctranslate2"):
        Translator.from_run(toy_run).n_best(["ba"], "xx", 2)
    two = Translator.from_run(toy_run, overrides=[*ENGINE, "decoding.beams=2"])
    with pytest.raises(ValueError, match=r"n-best: 3 .*decoding\.beams is 2"):
        two.n_best(["ba"], "xx", 3)
    for wrong, reason in (
        (["decoding.sampling_topk=5"], "engine"),
        ([*ENGINE, "decoding.beams=2", "decoding.sampling_topk=5"], "beams = 1"),
        (["decoding.sampling_temperature=2.0"], "sampling_topk"),
    ):
        with pytest.raises(ValueError, match=rf"decoding\.sampling_\w+: .*{reason}"):
            Translator.from_run(toy_run, overrides=wrong)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ValueError, match=r"decoding\.engine: .*pip install"):
        two.translate(["ba"], "xx")
