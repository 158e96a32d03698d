"""First sub-words, windows without a lost word, and what the tokenizer makes of odd words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import ByT5Tokenizer, T5Config

from gradvac.lab.recipes.tagging import Windows
from gradvac.lab.recipes.tagging.encoder import (
    WordEncoder,
    load_model,
    load_tokenizer,
    quiet_transformers,
)


@pytest.fixture(scope="module")
def tokenizer(encoder: Path) -> Any:
    return load_tokenizer(str(encoder))


def first_sub_words(windows: Windows) -> list[int]:
    """The token that every word's label sits on."""
    numbers = range(len(windows))
    return [
        int(windows.tokens[windows.starts[n] + place])
        for n in numbers
        for place in windows.places[windows.words[n] : windows.words[n + 1]]
    ]


def test_labels_sit_on_first_sub_words(tokenizer: Any) -> None:
    words = ["treeaa", "stonebb", "sees", "unbelievable", "."]
    windows = WordEncoder(tokenizer, 32).encode([words], [[4, 3, 2, 1, 0]])
    expected = [tokenizer(word, add_special_tokens=False)["input_ids"][0] for word in words]
    assert first_sub_words(windows) == expected
    assert windows.labels.tolist() == [4, 3, 2, 1, 0]
    whole = tokenizer([words], is_split_into_words=True)["input_ids"][0]
    assert windows.tokens.tolist() == whole


@pytest.mark.parametrize("max_tokens", [3, 4, 5, 7, 12, 32])
def test_no_word_is_lost_at_any_length(tokenizer: Any, max_tokens: int) -> None:
    chance = np.random.default_rng(max_tokens)
    vocabulary = ["treeaa", "sees", "unbelievable", "x", "\u200e", "stone" * 9]
    sentences = [chance.choice(vocabulary, chance.integers(0, 20)).tolist() for _ in range(40)]
    labels = [list(range(len(words))) for words in sentences]
    encoder = WordEncoder(tokenizer, max_tokens)
    windows = encoder.encode(sentences, labels)
    assert windows.lengths.max() <= max_tokens
    back: list[list[int]] = [[] for _ in sentences]
    for number, owner in enumerate(windows.sentences):
        back[owner] += windows.labels[windows.words[number] : windows.words[number + 1]].tolist()
    assert back == labels
    tokens = windows.tokens
    assert (tokens[windows.starts[:-1]] == tokenizer.cls_token_id).all()
    assert (tokens[windows.starts[1:] - 1] == tokenizer.sep_token_id).all()


def test_what_happened_to_words_is_counted(tokenizer: Any) -> None:
    encoder = WordEncoder(tokenizer, 6)
    windows = encoder.encode([["\u200e", "stone" * 20, "sees"], [], ["sees"]])
    assert encoder.counts["words without sub-words"] == 1
    assert encoder.counts["words longer than a window"] == 1
    assert encoder.counts["sentences cut into windows"] == 1
    assert first_sub_words(windows)[0] == tokenizer.unk_token_id
    assert set(windows.sentences.tolist()) == {0, 2}


def test_no_room_beside_special_tokens(tokenizer: Any) -> None:
    with pytest.raises(ValueError, match=r"max_tokens: .*2 special"):
        WordEncoder(tokenizer, 2)


def test_windows_survive_the_disk(tokenizer: Any, tmp_path: Path) -> None:
    windows = WordEncoder(tokenizer, 8).encode([["treeaa", "sees"]], [[1, 0]])
    with (tmp_path / "a.npz").open("wb") as file:
        windows.save(file)
    again = Windows.load(tmp_path / "a.npz")
    assert again.tokens.tolist() == windows.tokens.tolist()
    assert again.labels.tolist() == [1, 0]


def test_an_encoder_without_a_fast_tokenizer_is_refused(tmp_path: Path) -> None:
    with quiet_transformers():
        ByT5Tokenizer().save_pretrained(tmp_path)
        T5Config().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="ByT5Tokenizer"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize("name", ["nobody/such-encoder", "/no/such/folder"])
def test_an_encoder_that_is_not_there(name: str) -> None:
    with pytest.raises(ValueError, match=r"model.encoder: .*Give a folder"):
        load_tokenizer(name)
    with pytest.raises(ValueError, match=r"model.encoder: .*loaded"):
        load_model(name, ["A", "B"], dropout=None)


def _renumber(tokenizer: dict[str, Any]) -> None:
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary |= {word: n + 1000 for word, n in vocabulary.items() if not word.startswith("[")}


def _forget(tokenizer: dict[str, Any]) -> None:
    words = [word for word in tokenizer["model"]["vocab"] if word.startswith("[")]
    tokenizer["model"]["vocab"] = {word: number for number, word in enumerate(words)}


def _drop_all(tokenizer: dict[str, Any]) -> None:
    tokenizer["normalizer"] = {"type": "Replace", "pattern": {"Regex": "."}, "content": ""}


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("tokenizer.json", None, "cannot be loaded"),
        ("tokenizer.json", _forget, "knows no word"),  # as transformers makes where there is none
        ("tokenizer.json", _renumber, "numbers up to .* not of one model"),
        ("tokenizer.json", _drop_all, "nothing of the letter a"),
        ("config.json", lambda config: config.update(hidden_size=64), "cannot be loaded"),
        ("config.json", lambda config: config.update(model_type="x", auto_map={}), "loaded"),
        ("model.safetensors", None, "cannot be loaded"),
    ],
)
def test_folders_that_do_not_fit_together_are_refused(
    encoder: Path, tmp_path: Path, name: str, change: Any, said: str
) -> None:
    for path in encoder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    if change is None:
        (tmp_path / name).unlink()
        if name.startswith("model"):
            torch.save({"x": Path}, tmp_path / "pytorch_model.bin")  # a pickle of something else
    else:
        content = json.loads((tmp_path / name).read_text("utf-8"))
        change(content)
        (tmp_path / name).write_text(json.dumps(content), encoding="utf-8")

    def load() -> None:
        WordEncoder(load_tokenizer(str(tmp_path)), 16)
        load_model(str(tmp_path), ["O"], dropout=None)

    with pytest.raises(ValueError, match=f"model.encoder: .*{said}"):
        load()


def test_an_encoder_without_its_weights_is_refused(encoder: Path, tmp_path: Path) -> None:
    """Loading would leave a layer random and say so in a log line."""
    import safetensors.torch

    for path in encoder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    weights = safetensors.torch.load_file(encoder / "model.safetensors")
    lost = next(name for name in weights if "layer.1" in name and "query.weight" in name)
    del weights[lost]
    safetensors.torch.save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"no weights .*query\.weight"):
        load_model(str(tmp_path), ["A", "B"], dropout=None)


def test_dropout_and_labels_reach_the_model(encoder: Path) -> None:
    model: Any = load_model(str(encoder), ["A", "B", "C"], dropout=0.25)
    assert model.config.hidden_dropout_prob == 0.25
    assert model.config.id2label == {0: "A", 1: "B", 2: "C"}
    assert model.classifier.out_features == 3
