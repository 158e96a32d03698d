"""Pretraining: a tokenizer, an encoder that Hugging Face loads, and exact resume."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoModelForTokenClassification, AutoTokenizer

from gradvac.lab.recipes.tagging import PretrainConfig, PretrainRecipe, pretrain
from gradvac.lab.recipes.tagging.masking import cut_blocks, hide
from gradvac.lab.recipes.tagging.pretraining import TextData
from gradvac.lab.recipes.tagging.text import read_text
from gradvac.lab.recipes.tagging.tokenizer import TokenizerConfig, train_tokenizer
from gradvac.lab.training import checkpoint, seed_everything, train

LINES = {
    "aa": [f"the {n} stones lie in the river" for n in range(80)],
    "bb": [f"die steine {n} liegen im fluss" for n in range(60)],
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Text in every form that is read."""
    text = "".join(f"{line}\n" for line in LINES["aa"])
    (tmp_path / "text.aa.gz").write_bytes(gzip.compress(text.encode()))
    table = "".join(f"x\t{line}\n" for line in LINES["bb"])
    (tmp_path / "pairs.bb.tsv").write_text(table, encoding="utf-8")
    (tmp_path / "all.tsv").write_text("key\taa\tbb\nk1\tone more\t\nk2\t\tnoch eins\n")
    (tmp_path / "tagged.bb.tsv").write_text("Ada\tB-PER\nsingt\tO\n\nRom\tB-LOC\n")
    return tmp_path


SOURCES = ["text.{lang}.gz", "pairs.{lang}.tsv#2", "all.tsv#{lang}", "tagged.{lang}.tsv"]


def settings(root: Path, **sections: dict[str, Any]) -> PretrainConfig:
    base: dict[str, dict[str, Any]] = {
        "text": {
            "prepared": root / "prepared",
            "root": root,
            "languages": ["aa", "bb"],
            "sources": SOURCES,
        },
        "tokenizer": {"size": 150},
        "encoder": {"layers": 1, "width": 16, "heads": 2, "inner": 32, "max_tokens": 16},
        "batch": {"rows": 8, "tokens": 16},
        "optimizer": {"lr": 1e-2, "warmup_steps": 2, "schedule": "linear"},
        "align": {"rule": "none"},
        "train": {
            "max_steps": 6,
            "log_every": 2,
            "validate_every": 3,
            "checkpoint_every": 3,
            "device": "cpu",
            "writers": [],
        },
    }
    for name, section in sections.items():
        base[name] = base.get(name, {}) | section
    return PretrainConfig.model_validate(base)


def test_text_of_every_form(root: Path) -> None:
    lines, counts = read_text(SOURCES, ["aa", "bb"], root)
    assert lines["aa"] == [*LINES["aa"], "one more"]
    assert lines["bb"] == [*LINES["bb"], "noch eins", "Ada singt", "Rom"]
    assert counts["bb"] == {SOURCES[1]: 60, SOURCES[2]: 1, SOURCES[3]: 2}


def test_text_that_is_not_there(root: Path) -> None:
    with pytest.raises(ValueError, match=r"no file 'other\.\{lang\}' .*for any of aa, bb"):
        read_text([*SOURCES, "other.{lang}"], ["aa", "bb"], root)
    with pytest.raises(ValueError, match="language 'zz' is in no source"):
        read_text(SOURCES, ["aa", "bb", "zz"], root)
    with pytest.raises(ValueError, match="line 1: has no column 3"):
        read_text(["pairs.{lang}.tsv#3"], ["bb"], root)


@pytest.mark.parametrize("kind", ["wordpiece", "unigram"])
def test_a_tokenizer_that_hugging_face_loads(tmp_path: Path, kind: Any) -> None:
    made = train_tokenizer(LINES, TokenizerConfig(kind=kind, size=150), max_tokens=16, seed=0)
    made.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = "the stones liegen"
    assert loaded(text)["input_ids"] == made(text)["input_ids"]
    assert loaded.decode(loaded(text)["input_ids"], skip_special_tokens=True).strip() == text
    assert loaded.model_max_length == 16
    assert loaded.is_fast
    assert loaded.unk_token_id not in loaded(text)["input_ids"]


def test_blocks_hold_every_line(root: Path) -> None:
    made = train_tokenizer(LINES, TokenizerConfig(size=150), max_tokens=16, seed=0)
    blocks = cut_blocks(made, LINES["bb"], 16)
    assert (blocks[:, 0] == made.cls_token_id).all()
    flat = blocks[:, 1:].reshape(-1)
    expected = [
        token
        for line in LINES["bb"]
        for token in [*made(line, add_special_tokens=False)["input_ids"], made.sep_token_id]
    ]
    assert flat[: len(expected)].tolist() == expected
    assert len(flat) - len(expected) < 15


def test_what_is_hidden() -> None:
    blocks = np.arange(10, 10 + 40 * 21, dtype=np.int32).reshape(40, 21)
    batch = hide(
        blocks,
        [0] * 40,
        share=0.15,
        mask=4,
        vocabulary=10,
        generator=np.random.default_rng(0),
    )
    assert batch.places.shape == (40, 3)
    assert batch.num_tokens == 120
    assert int(batch.places.min()) >= 1
    assert all(len(set(row)) == 3 for row in batch.places.tolist())
    tokens = torch.from_numpy(blocks.astype(np.int64))
    assert torch.equal(tokens.gather(1, batch.places), batch.hidden)
    shown = batch.tokens.gather(1, batch.places)
    masked, kept = (shown == 4).float().mean(), (shown == batch.hidden).float().mean()
    assert 0.68 < float(masked) < 0.95
    assert 0.02 < float(kept) < 0.22
    elsewhere = torch.ones_like(tokens, dtype=torch.bool).scatter_(1, batch.places, value=False)
    assert torch.equal(batch.tokens[elsewhere], tokens[elsewhere])


def test_the_loss_is_hugging_faces(root: Path) -> None:
    config = settings(root, encoder={**settings(root).encoder.model_dump(), "dropout": 0.0})
    recipe = PretrainRecipe(config, TextData(config, say=lambda _: None))
    batch = next(recipe.batches())
    labels = torch.full_like(batch.tokens, -100).scatter_(1, batch.places, batch.hidden)
    theirs = recipe.model(input_ids=batch.tokens, labels=labels).loss
    ours = recipe.losses(batch).losses.sum() / batch.num_tokens
    torch.testing.assert_close(ours, theirs)


def test_a_cap_on_epochs_knows_the_rows_of_the_run(root: Path) -> None:
    config = settings(root)
    data = TextData(config, say=lambda _: None)
    for most, is_enough in ((1000.0, True), (1e-3, False)):
        recipe = PretrainRecipe(settings(root, sampling={"most_epochs": most}), data)
        if is_enough:
            assert len(next(recipe.batches()).languages) == 8
        else:
            with pytest.raises(ValueError, match=r"most_epochs = 0\.001: training draws 48 rows"):
                recipe.batches()


def test_framed_batches_hold_the_same_text(root: Path) -> None:
    config = settings(root)
    recipe = PretrainRecipe(config, TextData(config, say=lambda _: None))
    batch = next(recipe.batches())
    framed = batch.framed()
    assert framed.static_shape == (8, 16)
    assert torch.equal(framed.tokens, batch.tokens)
    assert torch.as_tensor(framed.languages).tolist() == batch.languages
    recipe.model.eval()
    torch.testing.assert_close(recipe.losses(framed).losses, recipe.losses(batch).losses)


@pytest.mark.parametrize("rule", ["none", "gradvac"])
def test_pretraining_learns_resumes_and_is_loadable(root: Path, rule: str) -> None:
    config = settings(root, align={"rule": rule, "engine": "per_task"})
    result = pretrain(config, root / "whole")
    assert result.best_score is not None
    assert result.best_score < np.log(150)
    data = TextData(config, say=lambda _: None)

    class CrashError(Exception):
        pass

    class Crashing(PretrainRecipe):
        calls = 0

        def losses(self, batch: Any) -> Any:
            self.calls += 1
            if self.calls == 5:
                raise CrashError
            return super().losses(batch)

    seed_everything(0)
    with pytest.raises(CrashError):
        train(Crashing(config, data), config, root / "parts")
    pretrain(config, root / "parts")
    whole, parts = (checkpoint.weights(root / run, "last") for run in ("whole", "parts"))
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    loaded = AutoModel.from_pretrained(root / "parts" / "encoder")
    assert torch.equal(
        loaded.embeddings.word_embeddings.weight, whole["bert.embeddings.word_embeddings.weight"]
    )
    tokens = AutoTokenizer.from_pretrained(root / "parts" / "encoder")("the stones")
    model = AutoModelForTokenClassification.from_pretrained(root / "parts" / "encoder")
    assert model(torch.tensor([tokens["input_ids"]])).logits.shape[-1] == 2


def test_too_little_text_is_told(root: Path) -> None:
    (root / "text.cc.gz").write_bytes(gzip.compress(b"one line\n"))
    text = settings(root).text.model_dump() | {"languages": ["aa", "bb", "cc"]}
    config = settings(root, text=text)
    with pytest.raises(ValueError, match=r"cc fills 1 block\(s\) of 16 tokens, too few"):
        PretrainRecipe(config, TextData(config, say=lambda _: None))
